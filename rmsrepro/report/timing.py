"""Times: a step against the baseline's (from paired benches), and training until the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rmsrepro.config.study import higher_is_better
from rmsrepro.norms.settings import resolved, same_parameters, whole
from rmsrepro.report import formatting
from rmsrepro.report.cells import Arm, Cell, flatten
from rmsrepro.report.parameters import key_of
from rmsrepro.report.records import BenchRecord, Comparison, RunRecord, machine_name
from rmsrepro.report.statistics import median, time_to_target

SHAPES_A_STEP = (
    *("data.name", "data.tokenizer", "data.vocab_size", "data.max_len", "data.batch_tokens"),
    *("data.batch_sentences", "trainer.accumulate", "precision", "placement"),
)
"""Besides the model's own: what decides how much work a step is."""


@dataclass(frozen=True)
class StepTime:
    """A comparison and the bench that it was measured in."""

    comparison: Comparison
    bench_id: str
    machine: str
    settings: Mapping[str, Any]
    """The flat training settings whose step was timed."""
    written: float
    study: str = ""
    """The study that the bench was made for, if any."""

    @property
    def measured(self) -> bool:
        """Whether there is a ratio at all (an unavailable backend has none)."""
        return math.isfinite(self.comparison.ratio)

    @property
    def text(self) -> str:
        """`12.3 % [10.2, 14.1]`: the time saved, with its interval."""
        timed = self.comparison
        if not self.measured:
            return "unavailable"
        if not timed.like_for_like:
            return f"ratio {formatting.number(timed.ratio, 3)}"
        ends = formatting.interval(timed.reduction_low, timed.reduction_high, 1)
        return f"{formatting.number(timed.reduction, 1)} % {ends}".rstrip()

    @property
    def words(self) -> str:
        """`12.3 % less` or `4.0 % more`."""
        if not self.measured:
            return "unavailable"
        if not self.comparison.like_for_like:
            return f"{formatting.number(self.comparison.ratio, 3)} times the baseline's, on another backend"
        reduction = self.comparison.reduction
        return f"{formatting.number(abs(reduction), 1)} % {'less' if reduction >= 0 else 'more'}"


def step_times(benches: Iterable[BenchRecord], *, across: bool = False) -> list[StepTime]:
    """All comparisons of all benches, newest first: those within a backend, or those `across` backends."""
    times = [
        StepTime(
            comparison=comparison,
            bench_id=bench.bench_id,
            machine=machine_name(bench.machine),
            settings=flatten(bench.config),
            written=bench.written,
            study=bench.study,
        )
        for bench in benches
        for comparison in (bench.across if across else bench.comparisons)
    ]
    return sorted(times, key=lambda time: -time.written)


def newest(times: Sequence[StepTime]) -> list[StepTime]:
    """Of repeated comparisons (same arms, model of the same size, task, shape, machine) the newest."""
    kept: dict[tuple[object, ...], StepTime] = {}
    for time in times:
        c = time.comparison
        norms = [
            (norm, key_of(whole(norm, given)))
            for norm, given in ((c.plain_norm, c.params), (c.plain_baseline, c.baseline_params))
        ]
        kept.setdefault((*place_key(time), *norms, c.backend, c.baseline_backend), time)
    return list(kept.values())


def place_key(time: StepTime) -> tuple[object, ...]:
    """What timings share that may stand side by side: machine, level, model with its size, shape, ..."""
    c = time.comparison
    return (
        *(time.machine, c.level, c.model, c.task, c.shape, c.mode, c.dtype, c.device, c.threads),
        key_of(shaping(time.settings)) if c.model else "",
    )


def shaping(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of flat training settings those that shape a step."""
    return {key: value for key, value in settings.items() if key.startswith("model.") or key in SHAPES_A_STEP}


def step_time_of(cell: Cell, arm: Arm, times: Sequence[StepTime]) -> StepTime | None:
    """The newest comparison of a whole step of `arm` with the cell's baseline, on the cell's backend.

    Both must have been timed with the parameters that they were trained with, and the step must be of the
    cell's model, batch and precision as far as the bench says.
    """
    baseline = cell.baseline_of(arm)
    machines = {machine_name(run.machine) for one in cell.arms for run in one.runs.values()}

    def is_meant(time: StepTime) -> bool:
        c = time.comparison
        return (
            c.level == "step"
            and c.model == cell.model
            and c.task in ("", cell.task)
            and c.plain_norm == arm.norm
            and (not time.measured or (c.plain_baseline == cell.baseline and c.like_for_like))
            and cell.backend in ("", c.backend)
            # Before anything was trained nobody knows a cell's size, but for the timings of its own study.
            and (bool(cell.settings) or bool(time.study))
            # Of another machine than the runs' a page shows it among all timings, and nowhere as theirs.
            and (not machines or time.machine in machines)
            and same_step(time.settings, cell.settings)
            and _same_norm(arm, c.params)
            and (not time.measured or baseline is None or _same_norm(baseline, c.baseline_params))
        )

    return next(filter(is_meant, times), None)  # the newest come first


def _same_norm(arm: Arm, given: Mapping[str, Any]) -> bool:
    """Whether an arm's norm is the one that is given these parameters."""
    if resolved(arm.norm, given) is not None or not arm.runs:
        return same_parameters(arm.norm, arm.params, given)
    # A norm that is not to be had here: what was given decides.
    return any(same_parameters(arm.norm, run.norm_params, given) for run in arm.runs.values())


def same_step(timed: Mapping[str, Any], trained: Mapping[str, Any]) -> bool:
    """Whether two flat settings describe the same step; what either leaves open does not matter."""
    timed, trained = shaping(timed), shaping(trained)
    return not any(
        timed[key] != trained[key]
        for key in timed.keys() & trained.keys()
        if None not in (timed[key], trained[key])
    )


@dataclass(frozen=True)
class StepSeconds:
    """How long a step of a cell's arms takes, by one bench of a whole step."""

    by_arm: Mapping[str, float]
    """Label of the arm -> seconds: the baseline's median, and for the others that times their ratio to it."""
    trusted: bool
    """Whether the bench trusts all of them."""


def step_seconds(cell: Cell, times: Sequence[StepTime]) -> StepSeconds | None:
    """What a bench has to say of the time of the cell's steps; None without one.

    All arms are taken from the newest bench that timed one of them: two benches are not paired.
    """
    found = [
        (arm, time)
        for arm in cell.arms
        if arm.norm != cell.baseline
        and (time := step_time_of(cell, arm, times)) is not None
        and time.measured
        and math.isfinite(time.comparison.baseline_s)
    ]
    if not found:
        return None
    bench_id = max(found, key=lambda one: one[1].written)[1].bench_id
    own = [(arm, time.comparison) for arm, time in found if time.bench_id == bench_id]
    seconds = {arm.label: timed.ratio * timed.baseline_s for arm, timed in own}
    for arm, timed in own:
        baseline = cell.baseline_of(arm)
        if baseline is not None:
            seconds[baseline.label] = timed.baseline_s
    return StepSeconds(seconds, all(timed.trusted for _, timed in own))


@dataclass(frozen=True)
class Reaching:
    """When the runs of an arm reached the target. Infinity: not within the run."""

    seconds: tuple[float, ...]
    """Training seconds, one a seed; of runs that shared the machine they are not to be quoted."""
    steps: tuple[float, ...]
    machines: tuple[str, ...]
    contended: bool

    @property
    def n(self) -> int:
        """Number of runs."""
        return len(self.seconds)

    @property
    def unreached(self) -> int:
        """Runs that never reached the target."""
        return sum(math.isinf(value) for value in self.steps)

    @property
    def steps_text(self) -> str:
        """The median number of steps, or `not reached (k of n)`."""
        return self._text(self.steps, lambda value: f"{value:.0f}")

    @property
    def seconds_text(self) -> str:
        """The median training time; no number where times are contended or of several machines."""
        if self.contended:
            return "contended"
        if len(self.machines) > 1:
            return "several machines"
        return self._text(self.seconds, formatting.seconds)

    def _text(self, values: Sequence[float], show: Callable[[float], str]) -> str:
        middle = median(values)
        if not values or math.isnan(middle):
            return "-"
        if math.isinf(middle):
            return f"not reached ({self.unreached} of {self.n})"
        return (
            f"{show(middle)} ({self.unreached} of {self.n} not reached)" if self.unreached else show(middle)
        )


def reaching(arm: Arm, metric: str, target: float) -> Reaching | None:
    """When the finished and the diverged runs of `arm` first had `metric` at `target`; None without runs."""
    runs = [run for run in arm.runs.values() if run.finished or run.diverged(metric)]
    if not runs:
        return None
    higher = higher_is_better(metric)

    def first(run: RunRecord, clock: str) -> float:
        if metric not in run.curve:
            return math.inf
        return time_to_target(run.curve[clock], run.curve[metric], target, higher=higher)

    return Reaching(
        seconds=tuple(first(run, "train_seconds") for run in runs),
        steps=tuple(first(run, "step") for run in runs),
        machines=tuple(sorted({machine_name(run.machine) for run in runs})),
        contended=any(run.contended for run in runs),
    )


def unpaired_step(arm: Arm) -> str:
    """Training time a step with its unit: the median over finished runs. Unpaired, so never a percentage."""
    runs = [run for run in arm.runs.values() if run.finished and run.steps]
    if not runs:
        return "-"
    if any(run.contended for run in runs):
        return "contended"
    if len({machine_name(run.machine) for run in runs}) > 1:
        return "several machines"
    return formatting.seconds(
        median([run.clocks.get("train_s", math.nan) / (run.steps or 1) for run in runs])
    )
