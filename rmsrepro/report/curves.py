"""Learning curves: mean and band over the seeds of an arm, and the runs that are not averaged."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import reduce

import numpy as np

from rmsrepro.report.cells import Arm
from rmsrepro.report.records import FloatArray, RunRecord, State, machine_name

MEAN_POINTS = 300
"""Most points of a mean curve: more than a figure has pixels to show."""


@dataclass(frozen=True, eq=False)
class MeanCurve:
    """A metric over the finished seeds of an arm on one machine; arrays of equal length."""

    machine: str
    step: FloatArray
    seconds: FloatArray
    """Mean training seconds of the seeds at each step."""
    mean: FloatArray
    low: FloatArray
    """Smallest value over the seeds."""
    high: FloatArray
    n: int
    """Seeds at every point."""


@dataclass(frozen=True, eq=False)
class LoneCurves:
    """The runs of an arm that share an unfinished state, one after another, a NaN between two of them."""

    state: State
    step: FloatArray
    seconds: FloatArray
    value: FloatArray
    seed: FloatArray
    """The seed of the run that a point belongs to."""


def mean_curves(arm: Arm, metric: str) -> list[MeanCurve]:
    """One curve a machine, since times of different machines are never pooled.

    Only steps at which every seed has a value are drawn, so that the mean is always over the same
    seeds. Longer curves are thinned evenly to MEAN_POINTS, the two ends kept.
    """
    by_machine: dict[str, list[RunRecord]] = defaultdict(list)
    for run in arm.runs.values():
        if run.finished and metric in run.curve:
            by_machine[machine_name(run.machine)].append(run)
    curves = []
    for machine, runs in by_machine.items():
        points = [_points(run, metric) for run in runs]
        steps = reduce(np.intersect1d, [step for step, _, _ in points])
        if not steps.size:
            continue
        steps = steps[_even_places(len(steps), MEAN_POINTS)]
        places = [np.searchsorted(step, steps) for step, _, _ in points]
        seconds = np.stack([seconds[place] for (_, seconds, _), place in zip(points, places, strict=True)])
        values = np.stack([value[place] for (_, _, value), place in zip(points, places, strict=True)])
        curves.append(
            MeanCurve(
                machine=machine,
                step=steps,
                seconds=seconds.mean(axis=0),
                mean=values.mean(axis=0),
                low=values.min(axis=0),
                high=values.max(axis=0),
                n=len(runs),
            )
        )
    return curves


def lone_curves(arm: Arm, metric: str, *, points: int) -> list[LoneCurves]:
    """The curves of runs that are still running, diverged or broke off, `points` points each at most."""
    by_state: dict[State, list[FloatArray]] = defaultdict(list)
    for seed, run in arm.runs.items():
        if run.finished or metric not in run.curve:
            continue
        rows = np.stack(_points(run, metric))
        if not rows.shape[1]:
            continue
        rows = rows[:, _even_places(rows.shape[1], points)]
        seeds = np.full((1, rows.shape[1]), float(seed))
        gap = np.array([[math.nan], [math.nan], [math.nan], [float(seed)]])
        by_state[run.state].append(np.hstack([np.vstack([rows, seeds]), gap]))
    return [
        LoneCurves(state, *np.hstack(parts)[:, :-1])  # without the gap after the last run
        for state, parts in by_state.items()
    ]


def value_range(means: list[MeanCurve], lone: list[LoneCurves]) -> tuple[float, float] | None:
    """An axis range that shows the curves that finished, whatever a diverged one does; None without data."""
    pool = [array for curve in means for array in (curve.low, curve.high)] or [curve.value for curve in lone]
    finite = [array[np.isfinite(array)] for array in pool]
    finite = [array for array in finite if array.size]
    if not finite:
        return None
    low = min(float(array.min()) for array in finite)
    high = max(float(array.max()) for array in finite)
    if not means:
        high = float(np.quantile(np.concatenate(finite), 0.95))
    if not math.isfinite(high - low):
        return None
    room = 0.06 * (high - low) or 0.05 * max(abs(high), 1e-3)
    return low - room, high + room


def _points(run: RunRecord, metric: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Steps, training seconds and values of the rows that have `metric`."""
    known = ~np.isnan(run.curve[metric])
    return run.curve["step"][known], run.curve["train_seconds"][known], run.curve[metric][known]


def _even_places(length: int, points: int) -> list[int]:
    """At most `points` indices into `length` items, evenly spread, first and last among them."""
    if length <= points:
        return list(range(length))
    return sorted({round(place) for place in np.linspace(0, length - 1, points)})
