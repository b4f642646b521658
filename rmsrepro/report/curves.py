"""Learning curves: mean and band over the seeds of an arm, and the runs that are not averaged."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmsrepro.report.cells import Arm
from rmsrepro.report.records import RunRecord, machine_name

FloatArray = NDArray[np.float64]

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
class LoneCurve:
    """One run that did not finish, drawn by itself."""

    run: RunRecord
    step: FloatArray
    seconds: FloatArray
    value: FloatArray


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
        tables = [
            run.curve.set_index("step")[["train_seconds", metric]].dropna(subset=[metric]) for run in runs
        ]
        steps = sorted(set.intersection(*(set(table.index) for table in tables)))
        if not steps:
            continue
        steps = [steps[place] for place in _even_places(len(steps), MEAN_POINTS)]
        values = np.stack([table.loc[steps, metric].to_numpy(dtype=float) for table in tables])
        seconds = np.stack([table.loc[steps, "train_seconds"].to_numpy(dtype=float) for table in tables])
        curves.append(
            MeanCurve(
                machine=machine,
                step=np.asarray(steps, dtype=float),
                seconds=seconds.mean(axis=0),
                mean=values.mean(axis=0),
                low=values.min(axis=0),
                high=values.max(axis=0),
                n=len(runs),
            )
        )
    return curves


def lone_curves(arm: Arm, metric: str, *, points: int) -> list[LoneCurve]:
    """The curves of runs that are still running, diverged or broke off, `points` points each at most."""
    curves = []
    for run in arm.runs.values():
        if run.finished or metric not in run.curve:
            continue
        table = run.curve[["step", "train_seconds", metric]].dropna(subset=[metric])
        if table.empty:
            continue
        places = _even_places(len(table), points)
        step, seconds, value = (
            table[column].to_numpy(dtype=float)[places] for column in ("step", "train_seconds", metric)
        )
        curves.append(LoneCurve(run=run, step=step, seconds=seconds, value=value))
    return curves


def value_range(means: list[MeanCurve], lone: list[LoneCurve]) -> tuple[float, float] | None:
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


def _even_places(length: int, points: int) -> list[int]:
    """At most `points` indices into `length` items, evenly spread, first and last among them."""
    if length <= points:
        return list(range(length))
    return sorted({round(place) for place in np.linspace(0, length - 1, points)})
