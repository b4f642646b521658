"""The statistics of a comparison over paired seeds: interval, equivalence, difference, multiplicity.

Everything works on plain floats and survives NaN and infinity: a value that is not finite makes
the quantities that depend on it NaN, it never disappears from a mean in silence.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

ALPHA = 0.05
"""Level of both tests: equivalence (TOST) and difference (after Holm's adjustment)."""

SAME = 1e-12
"""Differences that spread less than this, relative to their size, count as all equal (rounding)."""


@dataclass(frozen=True)
class PairedDifference:
    """The differences arm - baseline of a metric over paired seeds, in the metric's unit."""

    values: tuple[float, ...]
    mean: float
    sd: float
    """Sample standard deviation (n - 1); NaN for a single pair."""
    low: float
    """Lower end of the (1 - 2 * ALPHA) t interval of the mean: 90 %. NaN for a single pair."""
    high: float
    p_different: float
    """Two-sided paired t test of "the mean difference is 0"; NaN for a single pair."""

    @property
    def n(self) -> int:
        """Number of pairs."""
        return len(self.values)

    def within(self, margin: float) -> bool:
        """Whether the interval lies strictly within +-margin: TOST rejects at ALPHA."""
        return -margin < self.low and self.high < margin

    def p_equivalent(self, margin: float) -> float:
        """The larger p-value of the two one-sided t tests against -margin and +margin (TOST).

        It is below ALPHA exactly when `within(margin)`. Without spread it is 0 or 1.
        """
        if self.n < 2 or not math.isfinite(self.sd):
            return math.nan
        if self.sd == 0:
            return 0.0 if abs(self.mean) < margin else 1.0
        error = self.sd / math.sqrt(self.n)
        degrees = self.n - 1
        above_lower = float(stats.t.sf((self.mean + margin) / error, degrees))
        below_upper = float(stats.t.cdf((self.mean - margin) / error, degrees))
        return max(above_lower, below_upper)


def paired_difference(arm: Sequence[float], baseline: Sequence[float]) -> PairedDifference:
    """Compare two arms over paired seeds; `arm[i]` and `baseline[i]` share seed i.

    Without any spread the interval is the mean itself and the p-value is 1 for a mean of 0, else 0.

    Raises:
        ValueError: the sequences are empty or differ in length.
    """
    if len(arm) != len(baseline) or not arm:
        raise ValueError(f"pairs needed, got {len(arm)} and {len(baseline)} values")
    values = tuple(float(a) - float(b) for a, b in zip(arm, baseline, strict=True))
    if not all(math.isfinite(value) for value in values):
        return PairedDifference(values, math.nan, math.nan, math.nan, math.nan, math.nan)
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return PairedDifference(values, mean, math.nan, math.nan, math.nan, math.nan)
    scale = max(abs(float(value)) for value in (*arm, *baseline))
    if max(values) - min(values) <= SAME * scale:
        settled = 0.0 if abs(mean) <= SAME * scale else mean
        return PairedDifference(values, settled, 0.0, settled, settled, 1.0 if settled == 0 else 0.0)
    sd = statistics.stdev(values)
    error = sd / math.sqrt(len(values))
    half = float(stats.t.ppf(1 - ALPHA, len(values) - 1)) * error
    p_different = float(2 * stats.t.sf(abs(mean) / error, len(values) - 1))
    return PairedDifference(values, mean, sd, mean - half, mean + half, p_different)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiplicity by Holm's step-down rule; the order is kept.

    The i-th smallest of m values (i from 0) is multiplied by m - i, made monotone and cut at 1. A
    NaN stands for a planned comparison that has no test yet: it counts in m, as a p-value of 1
    would, and stays NaN.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    total = len(p_values)
    adjusted = [math.nan] * total
    known = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (total - rank) * p))
        adjusted[index] = largest
    return adjusted


def median(values: Sequence[float]) -> float:
    """The median, where infinity ("never") is the largest value; NaN for no values or with a NaN."""
    if not values or any(math.isnan(value) for value in values):
        return math.nan
    return float(statistics.median(values))


def time_to_target(times: ArrayLike, values: ArrayLike, target: float, *, higher: bool) -> float:
    """The first time at which `values` reaches `target`; infinity if it never does.

    `times` and `values` are one run's rows in order; rows with a NaN value are passed over. No
    interpolation: a run has reached a target when a validation says so.
    """
    time = np.asarray(times, dtype=float)
    value = np.asarray(values, dtype=float)
    reached = (value >= target) if higher else (value <= target)
    hits = np.flatnonzero(reached & ~np.isnan(time))
    return float(time[hits[0]]) if hits.size else math.inf
