"""What one process does with its arms: first calls, gate, warm-up, pilot, rounds. Knows no torch."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from rmsrepro.bench.load import OtherLoad
from rmsrepro.bench.planning import PILOT_ROUNDS, Plan, decide_rounds, warm_up_seconds
from rmsrepro.bench.protocol import Clock, PairedTimer, Step, timed_block
from rmsrepro.bench.statistics import BlockSample, PairedSamples
from rmsrepro.config.bench import BenchConfig


class ArmStep(Protocol):
    """A step that can be checked: what `rmsrepro.bench.arms.TrainingStep` offers."""

    def __call__(self) -> object: ...

    def seed(self) -> None:
        """Set the random streams to the state in which the first step is compared."""

    def loss(self) -> float:
        """Loss of the last step."""

    def tidy(self) -> None:
        """Free what steps pile up; called outside the clock."""


@dataclass(frozen=True)
class Contestant:
    """What a session is told of an arm: under which names it runs and what it is held against."""

    label: str
    twins: list[str]
    baseline: str
    """Label of its baseline; the baseline's own is its own label."""
    reference: str | None = None
    """Label of the arm whose first loss must be the same: the same norm on the reference backend."""


@dataclass
class SessionOutcome:
    """Everything that one process found out."""

    samples: list[BlockSample] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Label -> why it is not ranked."""
    flags: dict[str, list[str]] = field(default_factory=dict)
    """Label -> remarks that do not keep it from being ranked."""
    first_call_s: dict[str, float] = field(default_factory=dict)
    first_loss: dict[str, float] = field(default_factory=dict)
    warm_up: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    plan_reason: str = ""
    other_load: float | None = None
    """Cores busy with other programs while it measured; None: unknown."""
    clock_resolution_s: float = math.nan
    setup_s: float = math.nan
    measure_s: float = math.nan


def run_session(
    build: Mapping[str, Callable[[], ArmStep]],
    contestants: Sequence[Contestant],
    config: BenchConfig,
    clock: Clock,
    *,
    process: int = 0,
    plan: Plan | None = None,
    spent_s: Callable[[], float] = time.perf_counter,
    tolerance: float = 1e-4,
    on_event: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> SessionOutcome:
    """Build, check and time all arms in this process.

    Args:
        build: sample name -> builder of its step.
        plan: how much to measure; None: this process runs the pilot and decides.
        spent_s: wall-clock seconds since this process was started, which its share of the budget pays.
        tolerance: largest relative difference of two first losses that should agree.
        on_event: called outside the clock with a phase, the number done and the number to do.
    """
    outcome = SessionOutcome(clock_resolution_s=clock.resolution)
    seed = f"{config.seed}:{process}"
    steps = _build_and_call_once(build, contestants, clock, random.Random(f"build:{seed}"), outcome, on_event)
    _check_first_losses(contestants, outcome, tolerance)
    running = [arm for arm in contestants if arm.label not in outcome.failed]
    steps = {name: steps[name] for arm in running for name in arm.twins}
    others = [arm.label for arm in contestants if arm.label != arm.baseline]
    if not steps or (plan is None and others and all(label in outcome.failed for label in others)):
        return outcome  # baselines alone have nothing to be held against

    def between(done: int) -> None:
        for step in steps.values():
            step.tidy()
        if outcome.plan is None:
            on_event("pilot round", done, PILOT_ROUNDS)
        else:
            on_event("round", done, outcome.plan.rounds)

    timer = PairedTimer(_as_steps(steps), clock, seed=_number(f"order:{seed}"), on_round=between)
    on_event("warm-up", 0, 0)
    warm_up = timer.warm_up(*warm_up_seconds(config, num_arms=len(steps)), least_steps=config.num_batches)
    outcome.warm_up = asdict(warm_up)
    if plan is None:
        plan, outcome.plan_reason = _pilot(timer, running, config, spent_s)
    outcome.plan = plan
    outcome.setup_s = spent_s()
    other = OtherLoad()
    outcome.samples = timer.rounds(plan, process=process)
    outcome.other_load = other.stop()
    outcome.measure_s = spent_s() - outcome.setup_s
    for arm in running:
        flags = outcome.flags.setdefault(arm.label, [])
        if not warm_up.stable:
            flags.append("still drifting against the other arms when the warm-up ended")
        if any(not math.isfinite(steps[name].loss()) for name in arm.twins):
            flags.append("its loss was no longer finite at the end of the timing")
    return outcome


def _as_steps(steps: Mapping[str, ArmStep]) -> dict[str, Step]:
    return dict(steps)


def _number(text: str) -> int:
    return random.Random(text).getrandbits(63)


def _build_and_call_once(
    build: Mapping[str, Callable[[], ArmStep]],
    contestants: Sequence[Contestant],
    clock: Clock,
    order: random.Random,
    outcome: SessionOutcome,
    on_event: Callable[[str, int, int], None],
) -> dict[str, ArmStep]:
    """Build in random order, so that no arm always gets the same place in memory, then call each once."""
    places = [(arm, name) for arm in contestants for name in arm.twins]
    order.shuffle(places)
    steps: dict[str, ArmStep] = {}
    for number, (arm, name) in enumerate(places):
        on_event("building", number, len(places))
        try:
            steps[name] = build[name]()
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
    return steps


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


def _check_first_losses(contestants: Sequence[Contestant], outcome: SessionOutcome, tolerance: float) -> None:
    """The gate: an arm that computes something else is shown, and never ranked."""
    losses: dict[str, float] = {}
    for arm in contestants:
        if arm.label in outcome.failed:
            continue
        found = [outcome.first_loss[name] for name in arm.twins]
        losses[arm.label] = found[0]
        if not all(math.isfinite(loss) for loss in found):
            outcome.failed[arm.label] = f"the loss of its first step is {found[0]}"
        elif max(found) - min(found) > tolerance * abs(found[0]):
            outcome.failed[arm.label] = f"its twins disagree: first losses {found[0]:.6g} and {found[1]:.6g}"
    for arm in contestants:
        if arm.reference is None or arm.label in outcome.failed or arm.reference in outcome.failed:
            continue
        loss, expected = losses[arm.label], losses[arm.reference]
        if abs(loss - expected) > tolerance * abs(expected):
            outcome.failed[arm.label] = (
                f"the loss of its first step is {loss:.6g}, that of {arm.reference} is {expected:.6g}"
            )


def _pilot(
    timer: PairedTimer, running: Sequence[Contestant], config: BenchConfig, spent_s: Callable[[], float]
) -> tuple[Plan, str]:
    """Fix the plan for all processes. What the pilot measured is thrown away."""
    steps_in_block, lead_in = timer.block_plan(least_block_s=config.block_s)
    if config.rounds is not None:
        return Plan(config.rounds, steps_in_block, lead_in), "bench.rounds was given"
    began = spent_s()
    pilot = PairedSamples(timer.rounds(Plan(PILOT_ROUNDS, steps_in_block, lead_in)))
    spent = spent_s()
    twins = {arm.label: arm.twins for arm in running}
    ratios = {}
    for arm in running:
        baseline = twins.get(arm.baseline)
        if baseline is not None:
            # The baseline's own noise is that of one twin against the other.
            pair = ([baseline[-1]], [baseline[0]]) if arm.label == arm.baseline else (arm.twins, baseline)
            ratios[arm.label] = pilot.log_ratios(*pair)[0]
    rounds, reason = decide_rounds(
        ratios,
        precision=config.precision,
        round_s=(spent - began) / PILOT_ROUNDS,
        # The other processes do not run the pilot.
        available_s=config.budget_s / config.processes - began,
    )
    return Plan(rounds, steps_in_block, lead_in), reason
