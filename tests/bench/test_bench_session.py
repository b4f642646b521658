from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from rmsrepro.bench.cells import Contestant, Step
from rmsrepro.bench.planning import Plan, decide_plan
from rmsrepro.bench.protocol import Clock
from rmsrepro.bench.session import CellOutcome, Task, run_session
from rmsrepro.bench.statistics import PairedSamples, estimate_ratio
from rmsrepro.config.bench import BenchConfig
from rmsrepro.norms import BackendUnavailable

BASELINE = Contestant(
    "layernorm/composite", ["layernorm/composite#1", "layernorm/composite#2"], "layernorm/composite"
)


def contestant(label: str, reference: str | None = None) -> Contestant:
    return Contestant(label, [label], BASELINE.label, reference)


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


class FakeStep(Step):
    """A step that takes `cost` seconds of `time`, its first call `first` seconds more."""

    def __init__(
        self,
        time: FakeTime,
        cost: float,
        *,
        first: float = 0.0,
        loss: float | None = 5.0,
        fails: bool = False,
        wrong: str | None = None,
    ) -> None:
        self._time, self._cost, self._first, self._loss, self._fails = time, cost, first, loss, fails
        self._wrong = wrong
        self.calls = self.seeded = self.tidied = self.closed = 0

    def __call__(self) -> None:
        if self._fails:
            raise RuntimeError("out of ideas")
        self._time.seconds += self._cost + (self._first if self.calls == 0 else 0.0)
        self.calls += 1

    def seed(self) -> None:
        self.seeded += 1

    def check(self) -> str | None:
        return self._wrong

    def loss(self) -> float | None:
        return self._loss

    def tidy(self) -> None:
        self.tidied += 1

    def close(self) -> None:
        self.closed += 1


def task(time: FakeTime, steps: dict[str, FakeStep], *arms: Contestant) -> Task:
    steps = {**{name: FakeStep(time, 0.01) for name in BASELINE.twins}, **steps}

    def builder(step: FakeStep) -> Callable[[], FakeStep]:
        return lambda: step

    return Task({name: builder(step) for name, step in steps.items()}, [BASELINE, *arms], cell="c")


def piloted(
    time: FakeTime,
    steps: dict[str, FakeStep],
    *arms: Contestant,
    config: BenchConfig | None = None,
    process: int = 0,
    plan: Plan | None = None,
) -> CellOutcome:
    """The pilot where no plan is given, else the measurement."""
    return run_session(
        task(time, steps, *arms),
        config or BenchConfig(processes=2, budget_s=60, warmup_s=0.2),
        Clock(now=time.now, resolution=1e-7),
        process=process,
        plan=plan,
        now=time.now,
    )


def session(
    time: FakeTime,
    steps: dict[str, FakeStep],
    *arms: Contestant,
    config: BenchConfig | None = None,
    process: int = 0,
) -> CellOutcome:
    names = [*BASELINE.twins, *steps]
    return piloted(
        time, steps, *arms, config=config, process=process, plan=Plan(20, dict.fromkeys(names, 2), 1)
    )


def ratio_of(outcomes: list[CellOutcome], label: str) -> float:
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    return estimate_ratio(PairedSamples(samples), [label], BASELINE.twins).ratio.estimate


def test_a_first_call_that_costs_a_second_does_not_touch_the_ratio() -> None:
    time = FakeTime()
    label = "sleepy/composite"
    first = session(time, {label: FakeStep(time, 0.01, first=1.0)}, contestant(label))
    second = session(time, {label: FakeStep(time, 0.01, first=1.0)}, contestant(label), process=1)
    assert ratio_of([first, second], label) == pytest.approx(1.0, rel=1e-9)
    assert first.first_call_s[label] == pytest.approx(1.01)
    assert first.first_call_s[BASELINE.twins[0]] == pytest.approx(0.01)
    assert first.warm_up["steps"] > 0
    assert first.warm_up["seconds"][label] < 1.0


def test_a_planted_difference_is_found_exactly() -> None:
    time = FakeTime()
    label = "slow/composite"
    first = session(time, {label: FakeStep(time, 0.0105)}, contestant(label))
    second = session(time, {label: FakeStep(time, 0.0105)}, contestant(label), process=1)
    assert ratio_of([first, second], label) == pytest.approx(1.05, rel=1e-9)


def test_the_pilot_says_what_a_plan_needs_and_keeps_no_times() -> None:
    time = FakeTime()
    config = BenchConfig(processes=4, budget_s=40.0, warmup_s=0.2)
    label = "slow/composite"
    found = piloted(time, {label: FakeStep(time, 0.02, first=1.0)}, contestant(label), config=config)
    assert found.samples == []
    pilot = found.pilot
    assert pilot is not None
    # Blocks of the fastest arm's 20 ms, two steps of all; one step leads in; 3 + 6 steps of 10 and 20 ms.
    assert pilot.steps_in_block == dict.fromkeys([*BASELINE.twins, label], 2)
    assert pilot.lead_in == 1
    assert pilot.round_s == pytest.approx(3 * (0.01 + 0.01 + 0.02))
    assert 1.0 < pilot.setup_s < time.seconds
    assert pilot.noise == pytest.approx({BASELINE.label: 0.0, label: 0.0}, abs=1e-12)
    plan = decide_plan({"c": pilot}, config, start_s=1.0, spent_s=2.0)
    assert (plan.processes, plan.cells["c"].rounds) == (4, 20)
    assert "enough for the precision" in plan.reason


def test_the_plan_is_kept() -> None:
    plan = Plan(rounds=3, steps_in_block=dict.fromkeys(BASELINE.twins, 2), lead_in=0)
    outcome = piloted(FakeTime(), {}, plan=plan, process=1)
    assert len(outcome.samples) == 2 * 3
    assert {sample.steps_in_block for sample in outcome.samples} == {2}
    assert {sample.cell for sample in outcome.samples} == {"c"}
    assert outcome.pilot is None


def test_an_arm_that_the_pilot_lost_is_not_measured() -> None:
    time = FakeTime()
    plan = Plan(rounds=3, steps_in_block=dict.fromkeys(BASELINE.twins, 2), lead_in=0)
    outcome = piloted(time, {"late/torch": FakeStep(time, 0.01)}, contestant("late/torch"), plan=plan)
    assert {sample.arm for sample in outcome.samples} == set(BASELINE.twins)
    assert outcome.failed == {}


def test_rounds_that_are_given_need_no_rounds_of_a_pilot() -> None:
    time = FakeTime()
    steps = {name: FakeStep(time, 0.01) for name in BASELINE.twins}
    config = BenchConfig(processes=2, rounds=5, warmup_s=0.0)
    outcome = piloted(time, steps, config=config)
    assert outcome.pilot is not None
    assert outcome.pilot.steps_in_block == dict.fromkeys(BASELINE.twins, 2)
    assert {step.calls for step in steps.values()} == {1 + outcome.warm_up["steps"] + 1}


def test_all_arms_do_the_same_number_of_steps() -> None:
    time = FakeTime()
    steps = {name: FakeStep(time, cost) for name, cost in {"a/composite": 0.01, "b/composite": 0.03}.items()}
    session(time, steps, *(contestant(name) for name in steps))
    assert steps["a/composite"].calls == steps["b/composite"].calls > 20
    assert steps["a/composite"].seeded == 1
    assert steps["a/composite"].tidied >= 20
    assert steps["a/composite"].closed == 1


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"loss": math.nan}, "the loss of its first step is nan"),
        ({"loss": math.inf}, "the loss of its first step is inf"),
        ({"fails": True}, "its first step failed: RuntimeError: out of ideas"),
        ({"wrong": "off by 5 eps", "loss": None}, "off by 5 eps"),
    ],
)
def test_a_broken_arm_is_named_and_the_others_are_measured(step: dict[str, float], reason: str) -> None:
    time = FakeTime()
    label = "broken/composite"
    steps = {label: FakeStep(time, 0.01, **step), "sound": FakeStep(time, 0.01)}  # type: ignore[arg-type]
    outcome = session(time, steps, contestant(label), contestant("sound"))
    assert outcome.failed == {label: reason}
    assert {sample.arm for sample in outcome.samples} == {*BASELINE.twins, "sound"}


@pytest.mark.parametrize("error", [ValueError("no such width"), BackendUnavailable("not on this device")])
def test_an_arm_that_cannot_be_built_is_named(error: Exception) -> None:
    time = FakeTime()

    def refuse() -> FakeStep:
        raise error

    build = {**task(time, {}).build, "x/composite": refuse}
    outcome = run_session(
        Task(build, [BASELINE, contestant("x/composite")]),
        BenchConfig(processes=2, warmup_s=0.1),
        Clock(now=time.now, resolution=1e-7),
        plan=Plan(3, dict.fromkeys(BASELINE.twins, 1), 0),
        now=time.now,
    )
    if isinstance(error, BackendUnavailable):
        assert (outcome.unavailable, outcome.failed) == ({"x/composite": "not on this device"}, {})
    else:
        assert outcome.failed == {"x/composite": "could not be built: ValueError: no such width"}
    assert len(outcome.samples) == 6


def test_arms_without_a_loss_are_compared_with_none() -> None:
    time = FakeTime()
    steps = {name: FakeStep(time, 0.01, loss=None) for name in [*BASELINE.twins, "x/torch"]}
    outcome = session(time, steps, contestant("x/torch", BASELINE.label))
    assert outcome.failed == {}
    assert outcome.flags == {BASELINE.label: [], "x/torch": []}


def test_the_pilot_alone_asks_for_the_memory_of_a_step() -> None:
    time = FakeTime()
    config = BenchConfig(processes=2, rounds=3, warmup_s=0.0)
    asked = replace(task(time, {}), peak_bytes=lambda step: 1000)
    clock = Clock(now=time.now, resolution=1e-7)
    assert run_session(asked, config, clock, now=time.now).peak_bytes == {BASELINE.label: 1000}
    plan = Plan(3, dict.fromkeys(BASELINE.twins, 1), 0)
    assert run_session(asked, config, clock, plan=plan, now=time.now).peak_bytes == {}


def test_the_same_norm_on_two_backends_must_give_the_same_loss() -> None:
    time = FakeTime()
    right, wrong = "rmsnorm/torch", "prmsnorm/torch"
    outcome = session(
        time,
        {
            "rmsnorm/composite": FakeStep(time, 0.01, loss=4.0),
            "prmsnorm/composite": FakeStep(time, 0.01, loss=4.0),
            right: FakeStep(time, 0.01, loss=4.0001),
            wrong: FakeStep(time, 0.01, loss=4.01),
        },
        contestant("rmsnorm/composite"),
        contestant("prmsnorm/composite"),
        contestant(right, "rmsnorm/composite"),
        contestant(wrong, "prmsnorm/composite"),
    )
    assert outcome.failed == {wrong: "the loss of its first step is 4.01, that of prmsnorm/composite is 4"}
    assert right in {sample.arm for sample in outcome.samples}


def test_twins_that_compute_different_things_are_no_baseline() -> None:
    time = FakeTime()
    outcome = session(time, {BASELINE.twins[1]: FakeStep(time, 0.01, loss=5.5)})
    assert outcome.failed == {BASELINE.label: "its twins disagree: first losses 5 and 5.5"}
    assert outcome.samples == []


def test_baselines_alone_are_not_measured_on() -> None:
    time = FakeTime()
    steps = {name: FakeStep(time, 1.0) for name in BASELINE.twins} | {"a": FakeStep(time, 1.0, fails=True)}
    found = piloted(time, steps, contestant("a"))
    assert list(found.failed) == ["a"]
    assert (found.samples, found.pilot) == ([], None)
    assert [(steps[name].calls, steps[name].closed) for name in BASELINE.twins] == [(1, 1), (1, 1)]
