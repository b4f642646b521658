"""The core of a norm, without gain and bias: what is subtracted from a row, and what it is divided by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rmsrepro.norms.probing.affine import LARGE, TOLERANCE

Core = Callable[[Tensor], Tensor]
"""Any number of rows (R, m) -> (R, m), float64."""

SAMPLED = 512
"""Wider rows are searched for the entries that the statistic reads by so many of them, then by halving."""


@dataclass(frozen=True)
class Split:
    """y = slope * x + intercept, row by row, by least squares."""

    slope: Tensor
    """(R, 1): one over the denominator."""
    intercept: Tensor
    """(R, 1): minus what is subtracted, over the denominator."""
    residual: float
    """Largest deviation, relative to the largest |y|: near 0 for a norm."""


def split(x: Tensor, y: Tensor) -> Split:
    """Split the output y (R, m) of rows x (R, m)."""
    centre, middle = x.mean(-1, keepdim=True), y.mean(-1, keepdim=True)
    spread = x - centre
    slope = (spread * (y - middle)).sum(-1, keepdim=True) / spread.square().sum(-1, keepdim=True)
    intercept = middle - slope * centre
    rest = (y - slope * x - intercept).abs().max() / y.abs().max().clamp_min(1e-300)
    return Split(slope, intercept, float(rest))


def slopes(core: Core, x: Tensor) -> Tensor:
    """Return one over the denominator for each row, (R, 1)."""
    return split(x, core(x)).slope


def mean_share(x: Tensor, found: Split) -> float | None:
    """Return how much of its mean a row loses; None where what it loses does not go with the mean."""
    expected = found.slope * x.mean(-1, keepdim=True)
    share = -(found.intercept * expected).sum() / expected.square().sum()
    rest = (found.intercept + share * expected).abs().max() / expected.abs().max()
    return float(share) if float(rest) <= 10 * TOLERANCE else None


def entries_read(core: Core, width: int, generator: torch.Generator) -> tuple[Tensor, bool]:
    """Return which entries change the denominator, as a mask (m,), and whether those are the first ones.

    Rows wider than SAMPLED are searched at sampled entries; the end of a leading part is then found exactly,
    other patterns are filled in from the nearest sample.
    """
    row = torch.randn(width, generator=generator, dtype=torch.float64) + 1.0
    base = slopes(core, LARGE * row[None])

    def changes(places: Tensor) -> Tensor:
        rows = row.repeat(len(places), 1)
        rows[torch.arange(len(places)), places] += 10.0
        return ((slopes(core, LARGE * rows) / base - 1).abs() > 1e-5)[:, 0]

    places = torch.arange(width)
    if width > SAMPLED:
        places = torch.unique(torch.linspace(0, width - 1, SAMPLED).round().long())
    found = changes(places)
    count = int(found.sum())
    leading = bool(found[:count].all())
    if not leading or count in (0, len(places)) or width <= SAMPLED:
        nearest = torch.searchsorted(places, torch.arange(width), right=True) - 1
        return found[nearest], leading
    last, first = int(places[count - 1]), int(places[count])
    while first - last > 1:
        inner = torch.unique(torch.linspace(last, first, 64).round().long())[1:-1]
        hits = int(changes(inner).sum())
        last = int(inner[hits - 1]) if hits else last
        first = int(inner[hits]) if hits < len(inner) else first
    return torch.arange(width) <= last, True


def name_statistic(core: Core, width: int, mask: Tensor, generator: torch.Generator) -> str:
    """Return the name of what a row is divided by, from rows of many shapes."""
    rows = torch.randn(48, width, generator=generator, dtype=torch.float64)
    # Means from none to twice the spread, and rows with a few large entries: the statistics part company.
    rows += torch.linspace(-2, 2, 48, dtype=torch.float64)[:, None]
    rows[::3] *= torch.rand(16, width, generator=generator, dtype=torch.float64) ** 3
    y = core(LARGE * rows)
    found = split(LARGE * rows, y)
    numerator = (y / (LARGE * found.slope))[:, mask]
    square = (LARGE * found.slope).pow(-2)[:, 0]
    count = int(mask.sum())
    squares, total = numerator.square().sum(-1), numerator.sum(-1).square()
    coefficients = _fit(square, torch.stack([squares, total], -1), alone=count == 1)
    if coefficients is not None:
        return _of_squares(*coefficients, count, centred=bool((total <= 1e-6 * squares).all()))
    magnitudes = numerator.abs()
    for statistic, name in (
        (magnitudes.mean(-1), "mean |a|"),
        (magnitudes.sum(-1), "sum |a|"),
        (magnitudes.amax(-1), "max |a|"),
    ):
        if torch.allclose(square.sqrt(), statistic, rtol=1e-3):
            return name
    return "other"


def _fit(target: Tensor, features: Tensor, *, alone: bool) -> tuple[float, float] | None:
    """Return (A, B) with target = A sum a^2 + B (sum a)^2 for every row, or None; B = 0 where `alone`."""
    scaled = features / target[:, None]
    if float(scaled[:, 1].abs().max()) < 1e-6 * float(scaled[:, 0].abs().max()) or alone:
        scaled = torch.stack([scaled[:, 0], torch.zeros_like(scaled[:, 1])], -1)
    if not torch.isfinite(scaled).all():
        return None
    solution = torch.linalg.lstsq(scaled, torch.ones(len(target), 1, dtype=torch.float64), driver="gelsd")
    if (scaled @ solution.solution - 1).abs().max() > 1e-3:
        return None
    first, second = (float(one) for one in solution.solution[:, 0])
    return first, second


def _of_squares(first: float, second: float, count: int, *, centred: bool) -> str:
    def near(value: float, expected: float) -> bool:
        return abs(value - expected) <= 2e-4 * abs(expected)

    root = "std" if centred else "rms"
    if abs(second) * count <= 1e-3 * abs(first):
        if near(first, 1 / count):
            return root
        if count > 1 and near(first, 1 / (count - 1)):
            return f"{root} (n - 1)"
        if near(first, 1.0):
            return "l2"
        return f"{(first * count) ** 0.5:.3g} {root}"
    if near(first, 1 / (count + 1)) and near(second, 1 / (count + 1)):
        return "crms"
    if near(first, 1 / count) and near(second, -1 / count**2):
        return "std"
    return "other"
