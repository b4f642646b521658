"""Implementations of the norms. Each backend turns parameters into a kernel, a function of (x, gain, bias).

composite: primitive tensor operations, as the paper's own code has them; takes every norm.
torch: the functions that torch ships; takes layernorm, layernorm_nobias and rmsnorm with eps inside the root.
compiled: Inductor, the compiler of torch.compile, over the composite norms; takes every norm. Each kernel is
    compiled when it is first called, which takes seconds.
fused: kernels of this package, one forwards and one backwards; takes layernorm, rmsnorm, prmsnorm, l2norm and
    their relatives, but not crmsnorm.

`refusal` answers without torch whether a backend takes a set of parameters, so that a configuration can be
checked before anything heavy is imported. `missing` answers whether this machine can run a backend at all.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from rmsrepro.norms.backends.fused.rule import Rule
from rmsrepro.norms.backends.toolchain import why_no_compiler, why_no_kernels
from rmsrepro.norms.params import (
    Casting,
    LayerNormNoBiasParams,
    LayerNormParams,
    NoneParams,
    NormParams,
    RMSNormParams,
)

if TYPE_CHECKING:
    from torch import Tensor

Kernel: TypeAlias = "Callable[[Tensor, Tensor | None, Tensor | None], Tensor]"
"""(x (..., dim), gain (dim,) | None, bias (dim,) | None) -> (..., dim) in x's dtype."""
Statement: TypeAlias = "Callable[[Any, int], Callable[..., Any]]"
"""(params, dim) -> a norm in primitive operations: found under its module and name."""

BACKENDS = ("fused", "torch", "compiled", "composite")
"""Fastest first. `auto` tries all but compiled, whose first call takes seconds, in this order."""


class BackendUnavailable(ValueError):
    """The backend has no implementation of this norm with these parameters, or cannot run on this machine."""


_NO_FUSED, _NO_TORCH = "the fused kernels do not cover it", "torch has no function for it"
_FOR_ALL_PARAMETERS = (_NO_FUSED, _NO_TORCH)
"""Reasons that no other parameters would remove."""


def refusal(params: Any, backend: str) -> str | None:
    """Return why `backend` cannot run a built-in norm with these parameters, or None when it can."""
    if backend in ("composite", "compiled") or isinstance(params, NoneParams):
        return None
    if backend == "fused":
        # Whether the rule covers a norm does not depend on the width.
        return _NO_FUSED if Rule.of(params, 1) is None else None
    if isinstance(params, LayerNormParams | LayerNormNoBiasParams):
        function = "F.layer_norm"
    elif isinstance(params, RMSNormParams):
        function = "F.rms_norm"
        if params.bias:
            return f"{function} has no bias"
        if params.casting is Casting.before_gain:
            return f"{function} casts back after the product with the gain only"
    else:
        return _NO_TORCH
    if params.outside:
        return f"{function} has eps inside the root only"
    if params.eps == 0:
        return f"{function} gives NaN for a row whose denominator is zero, which eps=0 allows"
    return None


def missing(backend: str) -> str | None:
    """Return what this machine lacks to run `backend`, with what to do about it, or None."""
    if backend == "compiled":
        return why_no_compiler()
    if backend == "fused":
        return why_no_kernels()
    return None


def make_kernel(
    params: NormParams, dim: int, backend: str, statement: Statement | None = None
) -> Callable[..., Any]:
    """Return the kernel of a built-in norm.

    Args:
        params: the norm's parameters.
        dim: size of the last dimension.
        backend: one of BACKENDS.
        statement: for a norm that depends on more than x, gain and bias, what it is in primitive operations:
            returned as it is for composite, compiled for compiled. No other backend takes such norms.

    Raises:
        BackendUnavailable: the backend does not take these parameters, or cannot run on this machine.
    """
    if isinstance(params, NoneParams):
        backend = "composite"  # x itself, in each of them
    reason = refusal(params, backend)
    if reason is not None:
        raise BackendUnavailable(unavailable(params.norm, backend, reason))
    lacking = missing(backend)
    if lacking is not None:
        raise BackendUnavailable(not_here(backend, lacking))
    if statement is not None and backend == "composite":
        return statement(params, dim)
    # A module at a time, and not above: this one is read without torch.
    maker: Callable[..., Kernel] = import_module(_MAKERS[backend]).make_kernel
    return maker(params, dim) if statement is None else maker(params, dim, statement)


_MAKERS = {
    "fused": f"{__name__}.fused.kernel",
    "torch": f"{__name__}.torch_native",
    "compiled": f"{__name__}.compiled",
    "composite": f"{__name__}.composite",
}
"""The modules whose `make_kernel(params, dim)` makes a backend's kernels."""


def not_here(backend: str, reason: str) -> str:
    """The message of BackendUnavailable where the machine lacks what a backend needs."""
    return f"backend={backend} cannot run here: {reason}; or use backend=composite"


def unavailable(name: str, backend: str, reason: str, *, of_user: bool = False) -> str:
    """The message of BackendUnavailable; no parameters let another backend run a module `of_user`."""
    which = "" if of_user or reason in _FOR_ALL_PARAMETERS else " with these parameters"
    return f"backend={backend} cannot run {name}{which}: {reason}; use backend=composite or auto"
