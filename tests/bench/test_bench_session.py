from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from rmsrepro.bench.planning import Plan
from rmsrepro.bench.protocol import Clock
from rmsrepro.bench.session import Contestant, SessionOutcome, run_session
from rmsrepro.bench.statistics import PairedSamples, estimate_ratio
from rmsrepro.config.bench import BenchConfig

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


class FakeStep:
    """A step that takes `cost` seconds of `time`, its first call `first` seconds more."""

    def __init__(
        self, time: FakeTime, cost: float, *, first: float = 0.0, loss: float = 5.0, fails: bool = False
    ) -> None:
        self._time, self._cost, self._first, self._loss, self._fails = time, cost, first, loss, fails
        self.calls = self.seeded = self.tidied = 0

    def __call__(self) -> None:
        if self._fails:
            raise RuntimeError("out of ideas")
        self._time.seconds += self._cost + (self._first if self.calls == 0 else 0.0)
        self.calls += 1

    def seed(self) -> None:
        self.seeded += 1

    def loss(self) -> float:
        return self._loss

    def tidy(self) -> None:
        self.tidied += 1


def session(
    time: FakeTime,
    steps: dict[str, FakeStep],
    *arms: Contestant,
    config: BenchConfig | None = None,
    process: int = 0,
    plan: Plan | None = None,
) -> SessionOutcome:
    steps = {
        **{name: FakeStep(time, 0.01) for name in BASELINE.twins},
        **steps,
    }

    def builder(step: FakeStep) -> Callable[[], FakeStep]:
        return lambda: step

    return run_session(
        {name: builder(step) for name, step in steps.items()},
        [BASELINE, *arms],
        config or BenchConfig(processes=2, budget_s=60, warmup_s=0.2),
        Clock(now=time.now, resolution=1e-7),
        process=process,
        plan=plan,
        spent_s=time.now,
    )


def ratio_of(outcomes: list[SessionOutcome], label: str) -> float:
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    return estimate_ratio(PairedSamples(samples), [label], BASELINE.twins).ratio.estimate


def test_a_first_call_that_costs_a_second_does_not_touch_the_ratio() -> None:
    time = FakeTime()
    label = "sleepy/composite"
    first = session(time, {label: FakeStep(time, 0.01, first=1.0)}, contestant(label))
    second = session(
        time, {label: FakeStep(time, 0.01, first=1.0)}, contestant(label), process=1, plan=first.plan
    )
    assert ratio_of([first, second], label) == pytest.approx(1.0, rel=1e-9)
    assert first.first_call_s[label] == pytest.approx(1.01)
    assert first.first_call_s[BASELINE.twins[0]] == pytest.approx(0.01)
    assert first.warm_up["steps"] > 0
    assert first.warm_up["seconds"][label] < 1.0


def test_a_planted_difference_is_found_exactly() -> None:
    time = FakeTime()
    label = "slow/composite"
    first = session(time, {label: FakeStep(time, 0.0105)}, contestant(label))
    second = session(time, {label: FakeStep(time, 0.0105)}, contestant(label), process=1, plan=first.plan)
    assert ratio_of([first, second], label) == pytest.approx(1.05, rel=1e-9)


def test_the_plan_of_the_first_process_is_kept_by_the_next_and_fits_the_budget() -> None:
    time = FakeTime()
    config = BenchConfig(processes=4, budget_s=20.0, warmup_s=0.2)
    first = session(time, {}, config=config)
    assert first.plan is not None
    assert "enough for the precision" in first.plan_reason
    assert first.plan.rounds == 20
    assert len(first.samples) == 2 * first.plan.rounds
    other = session(time, {}, config=config, plan=Plan(rounds=3, steps_in_block=2, lead_in=0), process=1)
    assert len(other.samples) == 2 * 3
    assert {sample.steps_in_block for sample in other.samples} == {2}


def test_rounds_that_are_given_need_no_pilot() -> None:
    outcome = session(FakeTime(), {}, config=BenchConfig(processes=2, rounds=5, warmup_s=0.1))
    assert outcome.plan is not None
    assert outcome.plan.rounds == 5
    assert outcome.plan_reason == "bench.rounds was given"
    assert {sample.round for sample in outcome.samples} == set(range(5))


def test_all_arms_do_the_same_number_of_steps() -> None:
    time = FakeTime()
    steps = {name: FakeStep(time, cost) for name, cost in {"a/composite": 0.01, "b/composite": 0.03}.items()}
    session(time, steps, *(contestant(name) for name in steps))
    assert steps["a/composite"].calls == steps["b/composite"].calls > 20
    assert steps["a/composite"].seeded == 1
    assert steps["a/composite"].tidied >= 20


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"loss": math.nan}, "the loss of its first step is nan"),
        ({"loss": math.inf}, "the loss of its first step is inf"),
        ({"fails": True}, "its first step failed: RuntimeError: out of ideas"),
    ],
)
def test_a_broken_arm_is_named_and_the_others_are_measured(step: dict[str, float], reason: str) -> None:
    time = FakeTime()
    label = "broken/composite"
    steps = {label: FakeStep(time, 0.01, **step), "sound": FakeStep(time, 0.01)}  # type: ignore[arg-type]
    outcome = session(time, steps, contestant(label), contestant("sound"))
    assert outcome.failed == {label: reason}
    assert {sample.arm for sample in outcome.samples} == {*BASELINE.twins, "sound"}


def test_an_arm_that_cannot_be_built_is_named() -> None:
    time = FakeTime()

    def refuse() -> FakeStep:
        raise ValueError("no such width")

    outcome = run_session(
        {**{name: (lambda: FakeStep(time, 0.01)) for name in BASELINE.twins}, "x/composite": refuse},
        [BASELINE, contestant("x/composite")],
        BenchConfig(processes=2, rounds=3, warmup_s=0.1),
        Clock(now=time.now, resolution=1e-7),
        spent_s=time.now,
    )
    assert outcome.failed == {"x/composite": "could not be built: ValueError: no such width"}


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
    found = session(time, steps, contestant("a"))
    assert list(found.failed) == ["a"]
    assert (found.samples, found.plan) == ([], None)
    assert [steps[name].calls for name in BASELINE.twins] == [1, 1]
