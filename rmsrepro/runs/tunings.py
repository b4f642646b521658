"""Fair tuning: every norm of a cell is tried at the same points, and its best runs again with fresh seeds.

The rule for the best stands here, before any trial runs: the metric at the fixed last step, of the trials
that finished with a finite value; of equals the earlier point. A trial that diverged or failed is worse than
any number and is not replaced, so that every norm has the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scipy.stats import qmc

from rmsrepro.config.overrides import Override
from rmsrepro.config.study import StudyConfig, higher_is_better
from rmsrepro.config.tuning import TUNED, Range, TuningConfig
from rmsrepro.runs.files import number, read_json
from rmsrepro.runs.planning import Job
from rmsrepro.runs.tuning_fields import Point
from rmsrepro.runs.tuning_record import TunedNorm, TuningRecord, tuning_id

ENDED = ("completed", "diverged", "failed")


def draw_points(tuning: TuningConfig, ranges: Mapping[str, Range]) -> list[Point]:
    """Draw the points of a cell, the same for all its norms: a scrambled Halton sequence in three dimensions.

    The first n of more points are the same points, and each parameter keeps its dimension, so that one that
    is fixed leaves the values of the others as they are.
    """
    sequence = qmc.Halton(d=len(TUNED), scramble=True, rng=tuning.seed).random(tuning.points)
    return [
        {
            key: ranges[key].at(float(share))
            for key, share in zip(TUNED.values(), shares, strict=True)
            if key in ranges
        }
        for shares in sequence
    ]


@dataclass
class Contestant:
    """One norm of a cell: how it is chosen on the command line, and its jobs."""

    overrides: list[Override]
    """Everything of a job but the point and the seed."""
    trials: list[Job] = field(default_factory=list)
    finals: list[Job] = field(default_factory=list)
    best: int | None = None
    why_none: str = ""

    def choose(self, values: Sequence[float], metric: str) -> None:
        """Choose the best of the trials by `values`, one a trial; infinitely bad for one that was lost."""
        waiting = sum(job.status not in ENDED for job in self.trials)
        sign = -1.0 if higher_is_better(metric) else 1.0
        self.best, self.why_none = None, ""
        if waiting:
            return
        if all(math.isinf(value) for value in values):
            self.why_none = f"all {len(values)} trials diverged or failed"
            return
        self.best = min(range(len(values)), key=lambda place: (sign * values[place], place))


@dataclass
class TunedCell:
    """What the norms of one comparison share, and the norms."""

    tuning: TuningConfig
    ranges: Mapping[str, Range]
    points: list[Point]
    contestants: list[Contestant]

    @property
    def metric(self) -> str:
        """The metric that decides: the one of a report without a study."""
        return StudyConfig().primary_metric(self.contestants[0].trials[0].config.task.name)

    def record(self, command: str) -> TuningRecord:
        """What is kept of the tuning in its present state."""
        config = self.contestants[0].trials[0].config
        place = (config.model.name, config.task.name, config.data.name)
        return TuningRecord(
            tuning_id(*place, [one.trials[0].run_id for one in self.contestants]),
            *place,
            metric=self.metric,
            margin=self.tuning.margin,
            seed=self.tuning.seed,
            final_seeds=tuple(self.tuning.final_seeds),
            ranges={key: (one.low, one.high) for key, one in self.ranges.items()},
            points=tuple(self.points),
            norms=tuple(
                TunedNorm(
                    norm=str(one.trials[0].config.norm["name"]),
                    overrides=tuple(item.text for item in one.overrides if is_norm(item)),
                    trials=tuple(job.run_id for job in one.trials),
                    best=one.best,
                    why_none=one.why_none,
                    finals=tuple(job.run_id for job in one.finals),
                )
                for one in self.contestants
            ),
            command=command,
        )


def is_norm(item: Override) -> bool:
    """Whether an override says which norm it is, and not what all norms share."""
    return item.key == "norm" or item.key.startswith("norm.")


def trial_value(folder: Path, metric: str, max_steps: int) -> float:
    """Return a run's metric at its last step; infinitely bad where it has none there."""
    worst = -math.inf if higher_is_better(metric) else math.inf
    record = read_json(folder / "result.json") or {}
    metrics, steps = record.get("metrics"), record.get("steps")
    value = metrics.get(metric) if isinstance(metrics, dict) else None
    whole = record.get("status") == "completed" and isinstance(steps, int) and steps >= max_steps
    if not whole or isinstance(value, bool) or not isinstance(value, int | float):
        return worst
    return number(value, worst)
