"""From a norm's name and parameters to a module, and which backend runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from rmsrepro.config.errors import nearest
from rmsrepro.norms.backends import BACKENDS, BackendUnavailable, missing, not_here, refusal, unavailable
from rmsrepro.norms.making import plain
from rmsrepro.norms.params import NormParams
from rmsrepro.norms.registry import NormInfo, norm_info, resolve_params
from rmsrepro.norms.roles import mark_norm

if TYPE_CHECKING:
    from torch import nn


def build_norm(name: str, dim: int, *, backend: str = "auto", **params: Any) -> nn.Module:
    """Build the norm `name` over a last dimension of size `dim`.

    Args:
        name: a name of `list_norms()`, or an import string "pkg.module:Class".
        dim: size of the last dimension.
        backend: fused, torch, compiled, composite, or auto: the fastest that has the norm, as
            `resolve_backend` says.
        **params: the norm's parameters; see `norm_info(name).params_class`.

    Returns:
        A module whose forward maps (..., dim) to (..., dim) in the input's dtype, with its gain in `.weight`
        and its bias in `.bias` (None where absent) if it is one of the package's. It is marked as a norm, so
        that `norm_parameter_names` finds its parameters.

    Raises:
        ValueError: unknown norm or backend, a value out of range, `dim` not positive, or a norm of weights,
            which `normed_linear` builds.
        TypeError: unknown parameter, or a value of the wrong type.
        BackendUnavailable: the backend does not run this norm with these parameters, or not on this machine.
    """
    info = norm_info(name)
    resolved = resolve_params(name, **params)
    used = _choose([_Arm(info, resolved)], backend).backend
    if info.scope == "weight":
        raise ValueError(
            f"{name} normalises the weights of a linear map and is no module on activations; use "
            f'normed_linear(linear, NormSpec("{name}"))'
        )
    if info.factory is not None:
        return _build_users(info, resolved, dim)

    from rmsrepro.norms.batchnorm import BatchNorm
    from rmsrepro.norms.layers import LAYERS

    layer = BatchNorm if info.name == "batchnorm" else LAYERS[info.name]
    return layer(dim, resolved, backend=used)


def build_weight_norm(spec: NormSpec, rows: int) -> nn.Module:
    """Build the module that normalises the weights (rows, in) of a linear map.

    Raises:
        ValueError, TypeError, BackendUnavailable: as `build_norm`; also for a norm of activations.
    """
    info = norm_info(spec.name)
    resolved = resolve_params(spec.name, **spec.params)
    if info.scope != "weight":
        raise ValueError(f"{spec.name} is a norm of activations; use build_norm")
    used = _choose([_Arm(info, resolved)], spec.backend).backend
    if info.factory is not None:
        return _build_users(info, resolved, rows)

    from rmsrepro.norms.linear import WeightNorm

    return WeightNorm(rows, resolved, backend=used)


def _build_users(info: NormInfo, params: Any, dim: int) -> nn.Module:
    from rmsrepro.norms.gains import keep_apart
    from rmsrepro.norms.module import NormModule, check_dim

    assert info.factory is not None
    values = {one.name: getattr(params, one.name) for one in fields(params)}
    size = check_dim(dim)
    keyword = info.size_keyword
    module: nn.Module = (
        info.factory(size, **values) if keyword is None else info.factory(**{keyword: size}, **values)
    )
    mark_norm(module, info.name, takes_mask=info.takes_mask)
    if not isinstance(module, NormModule):
        keep_apart(module, info.name)
    return module


@dataclass(frozen=True)
class NormSpec:
    """A norm's name, parameters and wanted backend: what a model is given to build its norms from."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    """As given; `resolved_params` adds defaults and presets."""
    backend: str = "auto"

    def build(self, dim: int) -> nn.Module:
        """Build the norm for a last dimension of size `dim`; raises as `build_norm` does."""
        return build_norm(self.name, dim, backend=self.backend, **self.params)

    def check(self, dim: int) -> None:
        """Build the norm once, of whichever scope; raises as `build_norm` does."""
        if self.scope == "weight":
            build_weight_norm(self, dim)
        else:
            self.build(dim)

    @property
    def scope(self) -> str:
        """Activation or weight: see `NormInfo.scope`."""
        return norm_info(self.name).scope

    @property
    def takes_mask(self) -> bool:
        """Whether the norm looks at other positions: see `NormInfo.takes_mask`."""
        return norm_info(self.name).takes_mask

    @property
    def backend_used(self) -> str:
        """The backend that `build` will use; raises BackendUnavailable where there is none."""
        return resolve_backend([self], self.backend)

    @property
    def backend_note(self) -> str | None:
        """Why `auto` took a slower backend than the norm has: what this machine lacks; else None."""
        return choose_backend([self], self.backend).note

    @property
    def resolved_params(self) -> dict[str, Any]:
        """All parameters as plain values (bool, int, float, str)."""
        return plain(resolve_params(self.name, **self.params))

    @property
    def is_none(self) -> bool:
        """Whether this is the un-normalised baseline."""
        return self.name == "none"

    def flags(self, dim: int) -> list[str]:
        """Return what a record at width `dim` should point out, for example a very small k of pRMSNorm."""
        resolved = resolve_params(self.name, **self.params)
        return resolved.flags(dim) if isinstance(resolved, NormParams) else []


@dataclass(frozen=True)
class _Arm:
    info: NormInfo
    params: Any

    def refusal(self, backend: str) -> str | None:
        if self.info.factory is not None:
            return None if backend == "composite" else "it is a user's module, which counts as composite"
        return refusal(self.params, backend)

    @property
    def is_none(self) -> bool:
        return self.info.name == "none"


@dataclass(frozen=True)
class Choice:
    """What `choose_backend` settled on."""

    backend: str
    note: str | None = None
    """Why `auto` passed over a faster backend that has all the norms: what this machine lacks."""


def resolve_backend(specs: Sequence[NormSpec], wanted: str) -> str:
    """Return the one backend in which all `specs` are run, so that like is compared with like.

    auto takes fused where every arm has it and its kernels can be had on this machine (they are built then,
    which takes seconds the first time). Otherwise it takes torch when every arm has that and a layernorm is
    among them, for F.layer_norm is several times faster than primitive operations, while on a CPU F.rms_norm
    is itself a chain of elementwise operations, no faster than composite and accurate over a narrower range.
    Otherwise composite: a user's norm has nothing else. auto never takes compiled, which would spend seconds
    on each norm and kind of input at its first call. `none` runs in any backend.

    Raises:
        ValueError: unknown backend.
        BackendUnavailable: the wanted backend does not run one of the arms, or not on this machine.
    """
    return choose_backend(specs, wanted).backend


def choose_backend(specs: Sequence[NormSpec], wanted: str) -> Choice:
    """Return the backend as `resolve_backend` does, and what to note about the choice."""
    return _choose(
        [_Arm(norm_info(one.name), resolve_params(one.name, **one.params)) for one in specs], wanted
    )


def _choose(arms: Sequence[_Arm], wanted: str) -> Choice:
    if wanted not in (*BACKENDS, "auto"):
        choices = ("auto", *BACKENDS)
        raise ValueError(
            f"there is no backend {wanted!r}{nearest(wanted, choices)}; backends are {', '.join(choices)}"
        )
    if wanted == "auto":
        return _fastest(arms)
    for arm in arms:
        reason = arm.refusal(wanted)
        if reason is not None:
            raise BackendUnavailable(
                unavailable(arm.info.name, wanted, reason, of_user=arm.info.factory is not None)
            )
    lacking = None if all(arm.is_none for arm in arms) else missing(wanted)
    if lacking is not None:
        raise BackendUnavailable(not_here(wanted, lacking))
    return Choice(wanted)


def _fastest(arms: Sequence[_Arm]) -> Choice:
    note = None
    # Arms without a norm alone are no reason to build kernels.
    if not all(arm.is_none for arm in arms) and all(arm.refusal("fused") is None for arm in arms):
        lacking = missing("fused")
        if lacking is None:
            return Choice("fused")
        note = f"not the fused kernels: {lacking}"
    worth_it = any(arm.info.name in _FASTER_IN_TORCH for arm in arms)
    use_torch = worth_it and all(arm.refusal("torch") is None for arm in arms)
    return Choice("torch" if use_torch else "composite", note)


_FASTER_IN_TORCH = frozenset({"layernorm", "layernorm_nobias"})
