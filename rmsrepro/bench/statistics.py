"""From raw samples to a ratio with its interval.

A ratio is formed within a round, where both arms met the same state of the machine. Rounds of one
process share its memory layout and are not independent; so each process gives one number, the
median of its log ratios, and the interval is a t interval over the processes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

import numpy as np

AA_WIDTH = 2.5
"""Half-width that the 95 % A/A interval may have on the log scale, as a multiple of the precision."""


@dataclass(frozen=True)
class BlockSample:
    """The time of one block of equal steps. The fields are the columns of samples.csv."""

    process: int
    round: int
    position: int
    """Place of the arm within its round, from 0."""
    arm: str
    seconds_per_step: float
    steps_in_block: int
    cell: str = ""
    """Name of the cell; empty in records of benches that had one cell only."""


@dataclass(frozen=True)
class Interval:
    """An estimate, and its confidence interval (both in the same unit)."""

    estimate: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        return value < self.low or value > self.high

    def bounds(self) -> list[float]:
        return [self.low, self.high]


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's distribution with `freedom` degrees of freedom."""
    # Imported here: measuring processes need no quantiles, and scipy takes half a second.
    from scipy import stats

    return float(stats.t.ppf(probability, df=freedom))


def t_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Student's interval of the mean of independent `values`, at least two of them."""
    if len(values) < 2:
        raise ValueError(f"an interval needs at least 2 values, got {len(values)}")
    mean = fmean(values)
    half = t_quantile((1 + level) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


class PairedSamples:
    """Samples of one cell, looked up by process and round."""

    def __init__(self, samples: Iterable[BlockSample]) -> None:
        self._seconds: dict[int, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        for sample in samples:
            arms = self._seconds[sample.process][sample.round]
            if sample.arm in arms:
                raise ValueError(
                    f"process {sample.process}, round {sample.round} has {sample.arm!r} more than once"
                )
            arms[sample.arm] = sample.seconds_per_step

    def times(self, arm: Sequence[str]) -> list[float]:
        """Seconds per step of `arm` in every round, of all processes.

        An arm measured as several twins counts once a round, as their geometric mean.
        """
        rounds = (arms for process in self._seconds.values() for arms in process.values())
        return [math.exp(_mean_log(arms, arm)) for arms in rounds if all(name in arms for name in arm)]

    def log_ratios(self, arm: Sequence[str], baseline: Sequence[str]) -> dict[int, list[float]]:
        """log(t_arm / t_baseline) of every round that has both, by process."""
        found: dict[int, list[float]] = {}
        for process, rounds in self._seconds.items():
            ratios = [
                _mean_log(arms, arm) - _mean_log(arms, baseline)
                for arms in rounds.values()
                if all(name in arms for name in (*arm, *baseline))
            ]
            if ratios:
                found[process] = ratios
        return found

    def differences(self, arm: Sequence[str], baseline: Sequence[str]) -> dict[int, list[float]]:
        """t_arm - t_baseline in seconds of every round that has both, by process."""
        found: dict[int, list[float]] = {}
        for process, rounds in self._seconds.items():
            differences = [
                math.exp(_mean_log(arms, arm)) - math.exp(_mean_log(arms, baseline))
                for arms in rounds.values()
                if all(name in arms for name in (*arm, *baseline))
            ]
            if differences:
                found[process] = differences
        return found


def _mean_log(seconds: Mapping[str, float], names: Sequence[str]) -> float:
    return fmean(math.log(seconds[name]) for name in names)


def _exp(value: float) -> float:
    # Two processes and a strict level make intervals that no float holds.
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class RatioEstimate:
    """t_arm / t_baseline with its interval at `level`, over `num_processes` processes."""

    ratio: Interval
    num_rounds: int
    """Paired rounds, all processes together."""
    num_processes: int
    process_ratios: dict[int, float]
    """The median ratio of each process."""


def estimate_ratio(
    samples: PairedSamples, arm: Sequence[str], baseline: Sequence[str], *, level: float = 0.95
) -> RatioEstimate:
    """Estimate t_arm / t_baseline.

    Args:
        arm, baseline: names of the twins; the time of several is their geometric mean in the round.

    Raises:
        ValueError: fewer than two processes measured both.
    """
    by_process = samples.log_ratios(arm, baseline)
    medians = {process: median(ratios) for process, ratios in sorted(by_process.items())}
    logs = t_interval(list(medians.values()), level=level)
    return RatioEstimate(
        ratio=Interval(_exp(logs.estimate), _exp(logs.low), _exp(logs.high)),
        num_rounds=sum(len(ratios) for ratios in by_process.values()),
        num_processes=len(medians),
        process_ratios={process: math.exp(value) for process, value in medians.items()},
    )


def estimate_difference(samples: PairedSamples, arm: Sequence[str], baseline: Sequence[str]) -> Interval:
    """Estimate t_arm - t_baseline in seconds, at 95 %, from the processes' median differences.

    Raises:
        ValueError: fewer than two processes measured both.
    """
    return t_interval([median(found) for found in samples.differences(arm, baseline).values()])


@dataclass(frozen=True)
class AAControl:
    """The same arm against itself: what this machine shows where there is no difference."""

    ratio: Interval
    """Second twin over first, at 95 %."""
    trusted: bool
    flags: list[str]


def aa_control(
    samples: PairedSamples, twins: Sequence[str], *, precision: float, cells: int = 1
) -> AAControl:
    """Judge the two `twins`. They are trusted when all of these hold:

    - Their ratio is within `precision` of 1.
    - Its interval at 1 - 0.05 / `cells` contains 1 (so that the chance of one false alarm in the report
      is 5 %).
    - The control is conclusive: the half-width of its 95 % interval on the log scale,
      log(high / low) / 2, is at most 2.5 `precision` (0.05 by default). A wide interval contains 1
      whatever the machine does. This bound does not depend on `cells`.
    """
    first, second = twins
    ratio = estimate_ratio(samples, [second], [first]).ratio
    flags = []
    if abs(ratio.estimate - 1) > precision:
        flags.append(
            f"A/A: two equal arms differ by {100 * (ratio.estimate - 1):+.1f} %, more than the "
            f"precision of {100 * precision:g} %"
        )
    strict = estimate_ratio(samples, [second], [first], level=1 - 0.05 / cells).ratio
    if strict.excludes(1.0):
        flags.append(
            f"A/A: the interval of two equal arms [{strict.low:.4f}, {strict.high:.4f}] excludes 1 "
            f"at .05 over {cells} cell{'s' if cells > 1 else ''}"
        )
    half_width, bound = math.log(ratio.high / ratio.low) / 2, AA_WIDTH * precision
    if half_width > bound:
        flags.append(
            f"A/A: the control is too wide to tell: [{ratio.low:.4g}, {ratio.high:.4g}], a half-width of "
            f"{half_width:.3g} on the log scale, more than {bound:g} ({AA_WIDTH:g} times the precision)"
        )
    return AAControl(ratio=ratio, trusted=not flags, flags=flags)


def time_reduction(ratio: Interval) -> Interval:
    """100 * (1 - ratio) in per cent, as the paper computes it (Zhang & Sennrich 2019, Section 6)."""
    return Interval(100 * (1 - ratio.estimate), 100 * (1 - ratio.high), 100 * (1 - ratio.low))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and interquartile range."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float(middle), float(high - low)
