"""What one process does in one cell: build, first calls, gate, warm-up, then a pilot or the rounds.

Knows no torch.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rmsrepro.bench.cells import ArmStep, Contestant
from rmsrepro.bench.load import OtherLoad
from rmsrepro.bench.planning import PILOT_ROUNDS, Pilot, Plan, robust_sd, warm_up_seconds
from rmsrepro.bench.protocol import Clock, PairedTimer, timed_block
from rmsrepro.bench.statistics import BlockSample, PairedSamples
from rmsrepro.config.bench import BenchConfig
from rmsrepro.norms import BackendUnavailable

OnEvent = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Task:
    """A cell as a session is given it.

    Attributes:
        build: sample name -> builder of its step.
        tolerance: largest relative difference of two first losses that should agree.
        equal_steps: see `Level.equal_steps`.
        least_steps: of warm-up, for each arm.
        steps_multiple: see `Level.steps_multiple`.
        num_cells: of the bench, which share a process's budget.
        peak_bytes: measures the memory of a step; None: it is not measured.
    """

    build: Mapping[str, Callable[[], ArmStep]]
    contestants: Sequence[Contestant]
    cell: str = ""
    tolerance: float = 1e-4
    equal_steps: bool = True
    least_steps: int = 1
    steps_multiple: int = 1
    num_cells: int = 1
    peak_bytes: Callable[[ArmStep], int | None] | None = None


@dataclass
class CellOutcome:
    """Everything that one process found out in one cell."""

    samples: list[BlockSample] = field(default_factory=list)
    pilot: Pilot | None = None
    unavailable: dict[str, str] = field(default_factory=dict)
    """Label -> why it does not exist in this cell."""
    failed: dict[str, str] = field(default_factory=dict)
    """Label -> why it is not ranked."""
    flags: dict[str, list[str]] = field(default_factory=dict)
    """Label -> remarks that do not keep it from being ranked."""
    first_call_s: dict[str, float] = field(default_factory=dict)
    first_loss: dict[str, float | None] = field(default_factory=dict)
    warm_up: dict[str, Any] = field(default_factory=dict)
    peak_bytes: dict[str, int | None] = field(default_factory=dict)
    """Label -> memory that a step takes at its peak; measured by the pilot."""
    other_load: float | None = None
    """Cores busy with other programs while it measured; None: unknown."""
    setup_s: float = math.nan
    measure_s: float = math.nan

    def out(self, label: str) -> bool:
        """Whether an arm takes no part."""
        return label in self.failed or label in self.unavailable


def run_session(
    task: Task,
    config: BenchConfig,
    clock: Clock,
    *,
    process: int = 0,
    plan: Plan | None = None,
    now: Callable[[], float] = time.perf_counter,
    on_event: OnEvent = lambda phase, done, total: None,
) -> CellOutcome:
    """Build, check and time all arms of a cell.

    Args:
        plan: how much to measure; None: this is the pilot, which finds out what a plan needs.
        now: wall clock, for what a plan has to reckon with.
        on_event: called off the clock with a phase, the number done and the number to do.
    """
    outcome = CellOutcome()
    began = now()
    seed = f"{config.seed}:{process}:{task.cell}"
    steps = _build_and_call_once(task, clock, random.Random(f"build:{seed}"), outcome, on_event)
    try:
        _check_first_losses(task, outcome)
        running = [arm for arm in task.contestants if not outcome.out(arm.label) and _is_planned(arm, plan)]
        own = {name: steps[name] for arm in running for name in arm.twins}
        others = [arm.label for arm in task.contestants if arm.baseline not in (None, arm.label)]
        # Baselines alone have nothing to be held against.
        if own and not (plan is None and others and all(map(outcome.out, others))):
            _measure(task, own, running, config, clock, outcome, process, plan, now, began, on_event)
    finally:
        for step in steps.values():
            step.close()
    return outcome


def _measure(
    task: Task,
    steps: Mapping[str, ArmStep],
    running: Sequence[Contestant],
    config: BenchConfig,
    clock: Clock,
    outcome: CellOutcome,
    process: int,
    plan: Plan | None,
    now: Callable[[], float],
    began: float,
    on_event: OnEvent,
) -> None:
    phase, total = ("pilot round", PILOT_ROUNDS) if plan is None else ("round", plan.rounds)

    def between(done: int) -> None:
        for step in steps.values():
            step.tidy()
        on_event(phase, done, total)

    timer = PairedTimer(
        dict(steps),
        clock,
        seed=random.Random(f"order:{config.seed}:{process}:{task.cell}").getrandbits(63),
        on_round=between,
        equal_steps=task.equal_steps,
        twins=[arm.twins for arm in running],
    )
    on_event("warm-up", 0, 0)
    least_s, most_s = warm_up_seconds(config, num_arms=len(steps), num_cells=task.num_cells)
    warm_up = timer.warm_up(least_s, most_s, least_steps=task.least_steps)
    outcome.warm_up = asdict(warm_up)
    outcome.setup_s = now() - began
    if plan is None:
        outcome.pilot = _pilot(task, timer, running, config, outcome, now)
        if task.peak_bytes is not None:
            outcome.peak_bytes = {arm.label: task.peak_bytes(steps[arm.twins[0]]) for arm in running}
        return
    other = OtherLoad()
    outcome.samples = timer.rounds(plan, process=process, cell=task.cell)
    outcome.other_load = other.stop()
    outcome.measure_s = now() - began - outcome.setup_s
    for arm in running:
        flags = outcome.flags.setdefault(arm.label, [])
        if not warm_up.stable:
            flags.append("still drifting against the other arms when the warm-up ended")
        if any(not _finite(steps[name].loss()) for name in arm.twins):
            flags.append("its loss was no longer finite at the end of the timing")


def _is_planned(arm: Contestant, plan: Plan | None) -> bool:
    """Whether there are blocks for an arm: not where it failed in the pilot."""
    return plan is None or all(name in plan.steps_in_block for name in arm.twins)


def _finite(loss: float | None) -> bool:
    return loss is None or math.isfinite(loss)


def _build_and_call_once(
    task: Task, clock: Clock, order: random.Random, outcome: CellOutcome, on_event: OnEvent
) -> dict[str, ArmStep]:
    """Build in random order, so that no arm always gets the same place in memory, then call each once."""
    places = [(arm, name) for arm in task.contestants for name in arm.twins]
    order.shuffle(places)
    steps: dict[str, ArmStep] = {}
    for number, (arm, name) in enumerate(places):
        on_event("building", number, len(places))
        try:
            steps[name] = task.build[name]()
        except BackendUnavailable as error:
            outcome.unavailable[arm.label] = str(error)
        except Exception as error:
            outcome.failed[arm.label] = f"could not be built: {_describe(error)}"
    for number, (arm, name) in enumerate(places):
        if name not in steps:
            continue
        on_event("first calls", number, len(places))
        try:
            steps[name].seed()
            outcome.first_call_s[name] = timed_block(steps[name], 1, clock)
            outcome.first_loss[name] = steps[name].loss()
        except Exception as error:
            outcome.failed[arm.label] = f"its first step failed: {_describe(error)}"
            continue
        try:
            wrong = steps[name].check()
        except Exception as error:
            wrong = f"it could not be checked: {_describe(error)}"
        if wrong is not None:
            outcome.failed[arm.label] = wrong
        outcome.flags[arm.label] = [str(remark) for remark in steps[name].remarks]
    return steps


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


def _check_first_losses(task: Task, outcome: CellOutcome) -> None:
    """The gate by losses: an arm that computes something else is shown, and never ranked."""
    losses: dict[str, float] = {}
    for arm in task.contestants:
        if outcome.out(arm.label):
            continue
        found = [loss for name in arm.twins if (loss := outcome.first_loss[name]) is not None]
        if not found:
            continue
        losses[arm.label] = found[0]
        if not all(math.isfinite(loss) for loss in found):
            outcome.failed[arm.label] = f"the loss of its first step is {found[0]}"
        elif max(found) - min(found) > task.tolerance * abs(found[0]):
            outcome.failed[arm.label] = f"its twins disagree: first losses {found[0]:.6g} and {found[1]:.6g}"
    for arm in task.contestants:
        if arm.reference not in losses or arm.label not in losses:
            continue
        if outcome.out(arm.label) or outcome.out(arm.reference):
            continue
        loss, expected = losses[arm.label], losses[arm.reference]
        if abs(loss - expected) > task.tolerance * abs(expected):
            outcome.failed[arm.label] = (
                f"the loss of its first step is {loss:.6g}, that of {arm.reference} is {expected:.6g}"
            )


def _pilot(
    task: Task,
    timer: PairedTimer,
    running: Sequence[Contestant],
    config: BenchConfig,
    outcome: CellOutcome,
    now: Callable[[], float],
) -> Pilot:
    """Size the blocks and look at the noise. What is measured here is thrown away."""
    steps_in_block, lead_in = timer.block_plan(least_block_s=config.block_s, multiple=task.steps_multiple)
    if config.rounds is not None:
        return Pilot(steps_in_block, lead_in, round_s=0.0, setup_s=outcome.setup_s)
    began = now()
    pilot = PairedSamples(timer.rounds(Plan(PILOT_ROUNDS, steps_in_block, lead_in)))
    round_s = (now() - began) / PILOT_ROUNDS
    twins = {arm.label: arm.twins for arm in running}
    noise = {}
    for arm in running:
        baseline = twins.get(arm.baseline or "")
        if baseline is not None:
            # The baseline's own noise is that of one twin against the other.
            pair = ([baseline[-1]], [baseline[0]]) if arm.label == arm.baseline else (arm.twins, baseline)
            noise[arm.label] = robust_sd(pilot.log_ratios(*pair)[0])
    return Pilot(steps_in_block, lead_in, round_s, outcome.setup_s, noise)
