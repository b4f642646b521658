"""What a probe finds out about one module. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """What sort of map a module is."""

    norm = "norm"
    """Its output does not change with the scale of the input, and is the input times one number a row."""
    bounded = "bounded"
    """Entry by entry and bounded, with a gain of its own, as DyT: it stands where a norm would."""


class Over(Enum):
    """What shares one statistic."""

    row = "row"
    """Each row has its own."""
    groups = "groups"
    """Each row has one for each of several equal parts, as in GroupNorm."""
    positions = "positions"
    """Each entry has one over the other rows, as in BatchNorm and InstanceNorm."""


class Gain(Enum):
    """What multiplies the normalised row."""

    none = "none"
    scalar = "scalar"
    entries = "entries"
    other = "other"
    """A parameter that is no gain by itself: its exponential, say, or a tensor that holds the bias too."""


class EpsPosition(Enum):
    """Where eps stands. m is the mean (or sum) of squares."""

    inside = "inside"
    """sqrt(m + eps)."""
    outside = "outside"
    """sqrt(m) + eps."""
    floor = "floor"
    """max(sqrt(m), eps): a clamped denominator."""
    none = "none"
    """No eps was met, down to rows of 1e-18."""
    other = "other"
    """Small rows are damped, by none of these rules."""


@dataclass(frozen=True)
class Eps:
    """Where a norm's eps stands and how large it is, from its response to rows of many scales."""

    position: EpsPosition
    value: float
    """In the denominator of the norm with a gain of one; 0 for none."""
    residual: float
    """Largest |ln(denominator / fitted denominator)| over the grid of scales."""
    float64_value: float | None = None
    """eps in float64 where it is another one, as in torch.nn.RMSNorm without eps; `value` is float32's."""

    def __str__(self) -> str:
        if self.position is EpsPosition.none:
            return "none"
        text = f"{self.value:.3g}"
        return f"{text} {self.position.value}" if self.position is not EpsPosition.other else "unclear"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one norm-like module does, as measured on a copy of it."""

    kind: Kind
    width: int
    """Entries of a row, n."""
    over: Over = Over.row
    groups: int = 1
    and_positions: bool = False
    """With channels first, a row's or group's statistic is taken over the positions too, as in GroupNorm."""
    dimensions: tuple[int, ...] = ()
    """Dimensions of the input that share a statistic, where that is not the last one alone; from 0."""
    input_shape: tuple[int, ...] = ()
    """Of the input on which those were sought; () where the module took none."""
    mean_share: float | None = 0.0
    """How much of the row's mean is subtracted: 0, 1, or a part. None: something else is subtracted."""
    gain: Gain = Gain.none
    gain_names: tuple[str, ...] = ()
    gain_offset: float | None = None
    """The gain is offset + parameter: 0 for a plain gain, 1 for one stored as the difference from one."""
    bias_names: tuple[str, ...] = ()
    """Parameters that are added to the output, zero now or not."""
    adds_constant: bool = False
    """Something is added that is no parameter or buffer."""
    fixed_gain: bool = False
    """The entries are multiplied by different numbers that are no parameter or buffer."""
    statistic: str = "none"
    """What a row is divided by: rms, l2, std, std (n - 1), crms, mean |a|, sum |a|, max |a|, or other."""
    entries: int = 0
    """How many entries of a row (or part) the statistic reads."""
    leading: bool = True
    """Those are the first ones."""
    output_length: float = 0.0
    """Length of a normalised row at unit gain, divided by sqrt(n): 1 for rms, 1/sqrt(n) for l2."""
    eps: Eps = field(default_factory=lambda: Eps(EpsPosition.none, 0.0, 0.0))
    dtype: str = "float64"
    """What the probe computed in."""
    device: str = "cpu"
    in_place: bool = False
    """It overwrites its input."""
    differs_in_training: bool = False
    """It computes something else in training than in evaluation (positions: always so, and not said)."""
    in_training: Finding | None = None
    """What it is in training, where that differs and is a norm too."""
    zero_row: str = "finite"
    """A row of zeros: finite, nan (in the output), or nan gradient."""
    half_statistics: bool | None = None
    """Whether an fp16 row of 300 goes wrong, since squares are added in half precision; None: it does not run
    in fp16."""
    gain_gradient: float | None = None
    """The bf16 gain's gradient over its true value, for 1024 equal rows (1 is right); None: not measured."""
    output_dtypes: dict[str, str] = field(default_factory=dict)
    """Output dtype by "input/parameters"."""

    @property
    def subtracts_mean(self) -> bool:
        return self.mean_share is None or abs(self.mean_share) > MEAN_TOLERANCE

    @property
    def has_bias(self) -> bool:
        return bool(self.bias_names) or self.adds_constant

    @property
    def divisor(self) -> str:
        """What a row is divided by, in words."""
        if self.kind is Kind.bounded:
            return "nothing: bounded"
        partial = self.entries < self.width // self.groups
        some = f" of {'first ' if self.leading else ''}{self.entries}" if partial else ""
        where = {Over.row: "", Over.groups: f", {self.groups} groups", Over.positions: " over positions"}
        too = " and positions" if self.and_positions else ""
        other = f" over {self.over_dimensions.partition(' of ')[0]}" if self.dimensions else ""
        return f"{self.statistic}{some}{where[self.over]}{too}{other}"

    @property
    def over_dimensions(self) -> str:
        """The dimensions that share a statistic, in words."""
        return dimension_words(self.dimensions, len(self.input_shape))


def dimension_words(dimensions: Sequence[int], count: int) -> str:
    """Return "dimension 1 of 3", "dimensions 1 and 2 of 3", or "the last dimension"."""
    if tuple(dimensions) in ((), (count - 1,)):
        return "the last dimension"
    *first, last = map(str, dimensions)
    named = f"dimensions {', '.join(first)} and {last}" if first else f"dimension {last}"
    return f"{named} of {count}"


@dataclass(frozen=True)
class NotANorm:
    """Why a module is no norm."""

    reason: str
    ran: bool = True
    """False: it could not be called on rows at all."""


MEAN_TOLERANCE = 0.01
"""A smaller share of the mean counts as none: rounding in fp32 stays far below."""
