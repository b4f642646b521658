"""Tunings as their records and runs tell them: what each norm's trials came to, and its final runs against
the baseline's.

A record only says which runs belong together. What a run is, and what came of it, its own record says: one
that is not the run that the tuning planned is left out and named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rmsrepro.config.study import StudyConfig, higher_is_better
from rmsrepro.config.tuning import TUNED
from rmsrepro.report import fields
from rmsrepro.report.cells import BASELINE, Arm, Cell, label_apart, settings_shared
from rmsrepro.report.formatting import join
from rmsrepro.report.load import load_records
from rmsrepro.report.parameters import Names, names_of, settings_of
from rmsrepro.report.records import Problem, RunRecord, State
from rmsrepro.report.scorecard import Row, Scorecard, build_scorecard
from rmsrepro.runs.tuning_fields import Point
from rmsrepro.runs.tuning_record import PlannedRun, TunedNorm, TuningRecord, tunings_dir
from rmsrepro.runs.tuning_record import read_tunings as all_tunings

TRIAL, FINAL, EARLIER = "trial of a tuning", "final run of a tuning", "of an earlier choice of a tuning"
"""What a run is to a tuning."""
PARAMETERS = {"lr": "learning rate", "warmup_steps": "warm-up", "weight_decay": "weight decay"}
"""The parameters that are tuned, in the order of tables."""


@dataclass(frozen=True)
class Trial:
    """One point of one norm."""

    point: Point
    run: RunRecord | None
    value: float | None
    """The metric at the last step; infinitely bad if it diverged or failed; None if it has not ended."""

    @property
    def lost(self) -> bool:
        """Whether it diverged or failed."""
        return self.value is not None and math.isinf(self.value)


@dataclass(frozen=True)
class TunedArm:
    """One norm of a tuning: its trials, and its final runs as an arm like any other."""

    arm: Arm
    trials: tuple[Trial, ...]
    best: Trial | None
    note: str
    """Why there is no best point; empty where there is one."""

    @property
    def values(self) -> list[float]:
        """The values of the trials that have ended."""
        return [trial.value for trial in self.trials if trial.value is not None]

    @property
    def lost_text(self) -> str:
        """`1 of 8 diverged`; empty if every trial has ended with a number."""
        total, parts = len(self.trials), []
        lost = [trial.run.state if trial.run else None for trial in self.trials if trial.lost]
        diverged = len(lost) - lost.count(State.failed)
        waiting = total - len(self.values)
        for number, word in ((diverged, "diverged"), (len(lost) - diverged, "failed"), (waiting, "missing")):
            if number:
                parts.append(f"{number} {word}")
        return f"{join(parts)} of {total}" if parts else ""

    def final_values(self, metric: str) -> list[float]:
        """The metric of the final runs that have finished."""
        return [value for run in self.arm.runs.values() if (value := run.value(metric)) is not None]


@dataclass(frozen=True)
class Tuning:
    """A tuning of some norms in one cell."""

    record: TuningRecord
    cell: Cell
    """The final runs, an arm a norm."""
    arms: tuple[TunedArm, ...]
    card: Scorecard
    """The final runs compared, by the rules of any study."""

    @property
    def tuned(self) -> list[str]:
        """The parameters that were tuned, in the order of tables."""
        return [key for key in PARAMETERS if key in self.record.ranges]

    @property
    def compared(self) -> bool:
        """Whether the baseline is among the norms."""
        return any(arm.norm == self.cell.baseline for arm in self.cell.arms)

    def row_of(self, arm: TunedArm) -> Row | None:
        """The comparison of a norm's final runs with the baseline's; None for the baseline."""
        return next((row for row in self.card.rows if row.arm is arm.arm and self.compared), None)

    @property
    def warnings(self) -> list[str]:
        """A sentence for each best point that is to be doubted."""
        found = []
        higher = higher_is_better(self.record.metric)
        for arm in self.arms:
            if arm.best and arm.best.value != (max if higher else min)(arm.values, default=None):
                found.append(
                    f"{arm.arm.label}: its trials are no longer those that its best was chosen from; the "
                    "same command chooses anew"
                )
            ends = [key for key in self.tuned if arm.best and self._at_end(key, arm.best)]
            if ends:
                names = join([f"{PARAMETERS[key]} {arm.best.point[key]:g}" for key in ends if arm.best])
                ranges = join([f"tuning.{given}" for given, key in TUNED.items() if key in ends])
                found.append(
                    f"{arm.arm.label}: the best {names} lies at the edge of its range; widen {ranges}"
                )
        return found

    def _at_end(self, key: str, best: Trial) -> bool:
        max_steps = best.run.max_steps if best.run else None
        return at_edge(key, best.point[key], self.record.ranges[key], max_steps)


EDGE = 0.05
"""A best point in so small an outer part of a range, at either end, says that the range may be too narrow."""


def at_edge(key: str, value: float, ends: tuple[float, float], max_steps: int | None) -> bool:
    """Whether a value lies at an end of its range that could be widened."""
    low, high = ends
    if key == "warmup_steps":
        share = (value - low) / (high - low) if high > low else 0.5
        # A warm-up can be no shorter than none, and no longer than the run.
        return (share < EDGE and low > 0) or (share > 1 - EDGE and high < (max_steps or math.inf))
    if not 0 < low < high or value <= 0:
        return False
    share = math.log(value / low) / math.log(high / low)
    return share < EDGE or share > 1 - EDGE


@dataclass(frozen=True)
class Tunings:
    """All tunings of an output folder."""

    tunings: tuple[Tuning, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    """Run id -> what it is to a tuning."""
    problems: tuple[Problem, ...] = ()


def read_tunings(out_dir: Path, files: Sequence[Path]) -> list[Tuning]:
    """Read some tunings with their runs; what is damaged is left out."""
    records = {record.tuning_id: record for record in all_tunings(out_dir)[0]}
    read = [(file, records[file.stem]) for file in files if file.stem in records]
    wanted = {run.run_id for _, record in read for run in (*record.trial_runs(), *record.final_runs())}
    return list(_tunings(read, load_records(out_dir, run_ids=wanted).runs).tunings)


def find_tunings(out_dir: Path, runs: Sequence[RunRecord]) -> Tunings:
    """Read all tunings of an output folder.

    Nothing here raises for the content of a file.

    Args:
        runs: all runs of the folder.
    """
    records, damaged = all_tunings(out_dir)
    problems = [Problem(file, f"damaged: {reason}") for file, reason in damaged.items()]
    read = [(tunings_dir(out_dir) / f"{record.tuning_id}.json", record) for record in records]
    found = _tunings(read, runs)
    return replace(found, problems=(*problems, *found.problems))


def _tunings(read: Sequence[tuple[Path, TuningRecord]], runs: Sequence[RunRecord]) -> Tunings:
    by_id = {run.run_id: run for run in runs}
    roles: dict[str, str] = {}
    problems: list[Problem] = []
    names = names_of(runs)
    built = []
    for file, record in read:
        known: dict[str, RunRecord] = {}
        for role, planned in (
            (EARLIER, record.superseded),
            (TRIAL, record.trial_runs()),
            (FINAL, record.final_runs()),
        ):
            for one in planned:
                run = by_id.get(one.run_id)
                if run is None:
                    continue
                if not _is(run, one, record):
                    reason = f"{one.run_id} is not the run that this tuning planned, and is left out"
                    problems.append(Problem(file, reason))
                    continue
                known[one.run_id] = run
                if role != EARLIER or one.run_id not in roles:
                    roles[one.run_id] = role
        built.append(_tuning(record, known, names))
    labelled = label_apart([tuning.cell for tuning in built])
    return Tunings(
        tuple(_judged(tuning, cell) for tuning, cell in zip(built, labelled, strict=True)),
        roles,
        tuple(dict.fromkeys(problems)),
    )


def _is(run: RunRecord, planned: PlannedRun, record: TuningRecord) -> bool:
    """Whether a run is the one that a tuning planned, by what its own records say."""
    optim = fields.mapping(run.config, "optim")
    same = all(
        math.isclose(fields.number(optim.get(key)), value, rel_tol=1e-9)
        for key, value in planned.point.items()
    )
    place = (run.norm, run.seed, run.model, run.task)
    return same and place == (planned.norm, planned.seed, record.model, record.task)


def _tuning(record: TuningRecord, known: Mapping[str, RunRecord], names: Names) -> Tuning:
    arms = tuple(_arm(one, record, known, names) for one in record.norms)
    first = next((run for run in known.values() if run.norm != "none"), next(iter(known.values()), None))
    loose = [f"optim.{key}" for key in record.ranges]
    cell = Cell(
        model=record.model,
        task=record.task,
        label=f"{record.model} / {record.task} on {record.data}",
        backend=first.backend if first else "",
        settings=settings_shared(first, loose) if first else {},
        arms=tuple(arm.arm for arm in arms),
        baseline=BASELINE,
        seeds=record.final_seeds,
    )
    return Tuning(record, cell, arms, build_scorecard([], [], None))


def _arm(one: TunedNorm, record: TuningRecord, known: Mapping[str, RunRecord], names: Names) -> TunedArm:
    trials = tuple(
        Trial(point, run, _value(run, record.metric))
        for run_id, point in zip(one.trials, record.points, strict=True)
        for run in [known.get(run_id)]
    )
    finals = {
        seed: known[run_id]
        for run_id, seed in zip(one.finals, record.final_seeds, strict=False)
        if run_id in known
    }
    runs = [trial.run for trial in trials if trial.run is not None]
    params = settings_of(runs[0]) if runs else {}
    best = trials[one.best] if one.best is not None else None
    note = "" if best else one.why_none or ("given up" if record.given_up else "not chosen yet")
    return TunedArm(Arm(one.norm, names.title(one.norm, params), params, finals), trials, best, note)


def _value(run: RunRecord | None, metric: str) -> float | None:
    if run is None:
        return None
    value = run.value(metric)
    if value is not None:
        return value
    if run.state in (State.diverged, State.failed, State.completed):
        return -math.inf if higher_is_better(metric) else math.inf
    return None


def _judged(tuning: Tuning, cell: Cell) -> Tuning:
    """Compare the final runs as those of a study that has these norms, seeds and this margin."""
    record = tuning.record
    study = StudyConfig(
        name=record.tuning_id,
        norms=[one.norm for one in record.norms],
        models=[record.model],
        tasks=[record.task],
        seeds=list(record.final_seeds),
        primary={record.task: record.metric},
        margin={} if record.margin is None else {record.metric: record.margin},
        verdict=record.margin is not None,
    )
    return replace(tuning, cell=cell, card=build_scorecard([cell], [], study))


def without_tunings(runs: Iterable[RunRecord], found: Tunings) -> list[RunRecord]:
    """The runs that no tuning planned: those of the ordinary tables."""
    return [run for run in runs if run.run_id not in found.roles]
