"""What a norm's parameters are: names, types, ranges and presets. Imports no torch.

Every norm has one frozen dataclass. Its fields are the norm's parameters, so that the configuration, the
command line's messages and `build_norm` all read the same statement. The classes check themselves when they
are made: whoever holds an instance holds valid parameters.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from rmsrepro.norms.checks import check_alpha, check_eps, check_momentum, check_p, coerce

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


class Casting(Enum):
    """Where a half-precision input's dtype comes back; the statistic is in fp32 or wider in any case."""

    after_gain = "after_gain"
    """The product with the gain is in fp32 too and rounded once (Gemma's spelling)."""
    before_gain = "before_gain"
    """The normalised input is rounded, then multiplied by the gain and rounded again (LLaMA's and T5's)."""


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


# ------------------------------------------------------------------------------------------- bases


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


def eps_field(default: float = 1e-5) -> Any:
    """Return the field `eps`, which all norms but none and dyt have."""
    return field(default=default, metadata={"check": check_eps, "help": "added to the denominator"})


@dataclass(frozen=True, kw_only=True)
class DividingParams(NormParams):
    """Base of the norms that divide: what is added to the denominator, and where."""

    eps: float = eps_field()
    eps_position: EpsPosition = EpsPosition.inside

    @property
    def outside(self) -> bool:
        """Whether eps is added to the root instead of under it."""
        return self.eps_position is EpsPosition.outside


# ------------------------------------------------------------------------------- the paper's norms


@dataclass(frozen=True, kw_only=True)
class NoneParams(NormParams):
    """No normalisation: no parameters."""

    norm: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class LayerNormParams(DividingParams):
    norm: ClassVar[str] = "layernorm"
    gain: bool = True
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class LayerNormNoBiasParams(DividingParams):
    norm: ClassVar[str] = "layernorm_nobias"
    gain: bool = True


@dataclass(frozen=True, kw_only=True)
class RMSNormParams(DividingParams):
    norm: ClassVar[str] = "rmsnorm"
    gain: bool = True
    bias: bool = False
    casting: Casting = Casting.after_gain
    variant: Variant = field(default=Variant.paper, metadata={"help": "preset of eps and eps_position"})


@dataclass(frozen=True, kw_only=True)
class PRMSNormParams(DividingParams):
    norm: ClassVar[str] = "prmsnorm"
    gain: bool = True
    bias: bool = False
    p: float = field(default=0.0625, metadata={"check": check_p, "help": "fraction of entries, in (0, 1]"})
    k_rule: KRule = KRule.ceil
    casting: Casting = Casting.after_gain
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
class L2NormParams(DividingParams):
    norm: ClassVar[str] = "l2norm"
    gain: bool = True
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchNormParams(DividingParams):
    norm: ClassVar[str] = "batchnorm"
    gain: bool = True
    bias: bool = True
    momentum: float = field(
        default=0.1,
        metadata={"check": check_momentum, "help": "weight of a batch in the running statistics"},
    )


@dataclass(frozen=True, kw_only=True)
class WeightNormParams(DividingParams):
    norm: ClassVar[str] = "weightnorm"


# ------------------------------------------------------------------------- relatives and spellings


@dataclass(frozen=True, kw_only=True)
class ScaleNormParams(DividingParams):
    norm: ClassVar[str] = "scalenorm"


@dataclass(frozen=True, kw_only=True)
class CRMSNormParams(DividingParams):
    norm: ClassVar[str] = "crmsnorm"
    gain: bool = True
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class DyTParams(NormParams):
    norm: ClassVar[str] = "dyt"
    alpha: float = field(default=0.5, metadata={"check": check_alpha, "help": "the slope at the start"})
    gain: bool = True
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class LlamaRMSNormParams(DividingParams):
    norm: ClassVar[str] = "llama_rmsnorm"
    eps: float = eps_field(1e-6)
    gain: bool = True
    bias: bool = False
    casting: Casting = Casting.before_gain


@dataclass(frozen=True, kw_only=True)
class MistralRMSNormParams(LlamaRMSNormParams):
    """LLaMA's norm with the eps of Mistral 7B."""

    norm: ClassVar[str] = "mistral_rmsnorm"
    eps: float = eps_field(1e-5)


@dataclass(frozen=True, kw_only=True)
class QwenRMSNormParams(LlamaRMSNormParams):
    """LLaMA's norm with the eps of Qwen 2 and 3."""

    norm: ClassVar[str] = "qwen_rmsnorm"
    eps: float = eps_field(1e-6)


@dataclass(frozen=True, kw_only=True)
class T5RMSNormParams(DividingParams):
    norm: ClassVar[str] = "t5_rmsnorm"
    eps: float = eps_field(1e-6)
    gain: bool = True
    casting: Casting = Casting.before_gain


@dataclass(frozen=True, kw_only=True)
class GemmaRMSNormParams(DividingParams):
    norm: ClassVar[str] = "gemma_rmsnorm"
    eps: float = eps_field(1e-6)
    gain: bool = True
    casting: Casting = Casting.after_gain


RMSFamilyParams = RMSNormParams | LlamaRMSNormParams | T5RMSNormParams | GemmaRMSNormParams
"""The norms that are a / RMS(a) up to conventions."""


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
        BatchNormParams,
        WeightNormParams,
        ScaleNormParams,
        CRMSNormParams,
        DyTParams,
        LlamaRMSNormParams,
        MistralRMSNormParams,
        QwenRMSNormParams,
        T5RMSNormParams,
        GemmaRMSNormParams,
    )
}


def same_value(one: Any, other: Any) -> bool:
    """Whether two values of a norm's parameter mean the same, as written in a record or on a command line."""
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return str(one).lower() == str(other).lower()
