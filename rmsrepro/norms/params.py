"""What a norm's parameters are: names, types, ranges and presets. Imports no torch.

Every norm has one frozen dataclass. Its fields are the norm's parameters, so that the configuration, the
command line's messages and `build_norm` all read the same statement. The classes check themselves when they
are made: whoever holds an instance holds valid parameters.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from rmsrepro.config.errors import nearest
from rmsrepro.norms.checks import check_eps, check_p, coerce

FEW_ENTRIES = 16
"""Below so many entries the partial RMS is a heavy-tailed estimate (at 4 entries of Gaussian input the
99.5th percentile of 1/RMS is 3.7 to 4.4, at 16 it is 1.7)."""


class EpsPosition(Enum):
    """Where eps is added to the denominator."""

    inside = "inside"
    """sqrt(m + eps)."""
    outside = "outside"
    """sqrt(m) + eps."""


class KRule(Enum):
    """How p * dim becomes a whole number of entries."""

    ceil = "ceil"
    floor = "floor"


class Variant(Enum):
    """Presets of eps, eps_position and k_rule. A value given explicitly wins over the preset."""

    paper = "paper"
    """The paper's text: eps 1e-5 inside the root, k = ceil(p * dim)."""
    authors_torch = "authors_torch"
    """The authors' PyTorch module: eps 1e-8 outside the root, k = floor(p * dim)."""
    authors_tf = "authors_tf"
    """The authors' TensorFlow function: eps 1e-8 inside the root, k = floor(p * dim)."""


PRESETS: Mapping[Variant, Mapping[str, Any]] = {
    Variant.paper: {"eps": 1e-5, "eps_position": EpsPosition.inside, "k_rule": KRule.ceil},
    Variant.authors_torch: {"eps": 1e-8, "eps_position": EpsPosition.outside, "k_rule": KRule.floor},
    Variant.authors_tf: {"eps": 1e-8, "eps_position": EpsPosition.inside, "k_rule": KRule.floor},
}


# --------------------------------------------------------------------------------- parameter classes


@dataclass(frozen=True, kw_only=True)
class NormParams:
    """Base of all parameter classes: checks and converts its fields when made.

    A field's metadata may hold `check`, called as `check("norm.field", value)`, and `help`.
    """

    norm: ClassVar[str] = "norm"
    """Name for messages."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for one in dataclasses.fields(self):
            where = f"{self.norm}.{one.name}"
            value = coerce(where, getattr(self, one.name), hints[one.name])
            check: Callable[[str, Any], None] | None = one.metadata.get("check")
            if check is not None and value is not None:
                check(where, value)
            object.__setattr__(self, one.name, value)

    def flags(self, dim: int) -> list[str]:
        """What a reader of a record should know about these parameters at width `dim`."""
        return []


def eps_field() -> Any:
    """Return the field `eps` that all norms but none share."""
    return field(default=1e-5, metadata={"check": check_eps, "help": "added to the denominator"})


@dataclass(frozen=True, kw_only=True)
class NoneParams(NormParams):
    """No normalisation: no parameters."""

    norm: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class LayerNormParams(NormParams):
    norm: ClassVar[str] = "layernorm"
    eps: float = eps_field()
    eps_position: EpsPosition = EpsPosition.inside
    gain: bool = True
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class LayerNormNoBiasParams(NormParams):
    norm: ClassVar[str] = "layernorm_nobias"
    eps: float = eps_field()
    eps_position: EpsPosition = EpsPosition.inside
    gain: bool = True


@dataclass(frozen=True, kw_only=True)
class RMSNormParams(NormParams):
    norm: ClassVar[str] = "rmsnorm"
    eps: float = eps_field()
    eps_position: EpsPosition = EpsPosition.inside
    gain: bool = True
    bias: bool = False
    variant: Variant = field(default=Variant.paper, metadata={"help": "preset of eps and eps_position"})


@dataclass(frozen=True, kw_only=True)
class PRMSNormParams(NormParams):
    norm: ClassVar[str] = "prmsnorm"
    eps: float = eps_field()
    eps_position: EpsPosition = EpsPosition.inside
    gain: bool = True
    bias: bool = False
    p: float = field(default=0.0625, metadata={"check": check_p, "help": "fraction of entries, in (0, 1]"})
    k_rule: KRule = KRule.ceil
    variant: Variant = field(
        default=Variant.paper, metadata={"help": "preset of eps, eps_position and k_rule"}
    )

    def entries(self, dim: int) -> int:
        """How many leading entries of `dim` the statistic reads: see `count_entries`."""
        return count_entries(self.p, dim, self.k_rule)

    def flags(self, dim: int) -> list[str]:
        k = self.entries(dim)
        if k < FEW_ENTRIES and k < dim:
            return [f"{self.norm}: k={k} of {dim} entries; below {FEW_ENTRIES} the estimate is heavy-tailed"]
        return []


@dataclass(frozen=True, kw_only=True)
class L2NormParams(NormParams):
    norm: ClassVar[str] = "l2norm"
    eps: float = eps_field()
    eps_position: EpsPosition = EpsPosition.inside
    gain: bool = True
    bias: bool = False


def count_entries(p: float, dim: int, k_rule: KRule = KRule.ceil) -> int:
    """Return k = max(1, ceil(p * dim)), or floor, on the product as a person reads it.

    In binary, 100 * 0.07 is a little above 7 and 100 * 0.29 a little below 29; rounding to nine decimals
    first gives 7 and 29 under both rules.
    """
    product = round(p * dim, 9)
    return max(1, math.ceil(product) if k_rule is KRule.ceil else math.floor(product))


BUILTIN_PARAMS: Mapping[str, type[NormParams]] = {
    params.norm: params
    for params in (
        NoneParams,
        LayerNormParams,
        LayerNormNoBiasParams,
        RMSNormParams,
        PRMSNormParams,
        L2NormParams,
    )
}


# ------------------------------------------------------------------------------------- making them


def make_params(params_class: type[Any], name: str, given: Mapping[str, Any]) -> Any:
    """Make the parameters of norm `name` from what was given: defaults, then the preset, then `given`.

    Raises:
        TypeError: an unknown parameter, a missing one, or a value of the wrong type.
        ValueError: a value out of range.
    """
    known = [one.name for one in dataclasses.fields(params_class)]
    hints = typing.get_type_hints(params_class)
    for key in given:
        if key not in known:
            raise TypeError(_unknown_parameter(name, key, known))
    values = {key: coerce(f"{name}.{key}", value, hints[key]) for key, value in given.items()}
    # Only the variants of this package bring presets; a user's parameter of that name is the user's own.
    variant = values.get("variant")
    if isinstance(variant, Variant):
        values = {key: value for key, value in PRESETS[variant].items() if key in known} | values
    missing = [
        one.name
        for one in dataclasses.fields(params_class)
        if one.default is dataclasses.MISSING
        and one.default_factory is dataclasses.MISSING
        and one.name not in values
    ]
    if missing:
        raise TypeError(f"{name} needs {', '.join(missing)}, which {_has(missing)} no default")
    return params_class(**values)


def _has(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _unknown_parameter(name: str, key: str, known: Iterable[str]) -> str:
    known = list(known)
    hint = nearest(key, known)
    if not hint:
        owners = [
            norm
            for norm, params in BUILTIN_PARAMS.items()
            if norm != name and key in {one.name for one in dataclasses.fields(params)}
        ]
        hint = f" ({', '.join(owners)} {'has' if len(owners) == 1 else 'have'} it)" if owners else ""
    listing = f"its parameters are {', '.join(known)}" if known else "it has none"
    return f"{name} has no parameter {key!r}{hint}; {listing}"


def plain(params: Any) -> dict[str, Any]:
    """Return a parameter object as plain values: enum members become their strings."""
    values = {one.name: getattr(params, one.name) for one in dataclasses.fields(params)}
    return {key: value.value if isinstance(value, Enum) else value for key, value in values.items()}
