from __future__ import annotations

import gc
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from rmsrepro.bench import protocol
from rmsrepro.bench.planning import Plan, warm_up_seconds
from rmsrepro.bench.protocol import Clock, EventClock, PairedTimer, timed_block
from rmsrepro.bench.statistics import PairedSamples, estimate_ratio
from rmsrepro.config.bench import BenchConfig


def plan(rounds: int, steps: int, lead_in: int, names: str = "ab") -> Plan:
    return Plan(rounds, dict.fromkeys(names, steps), lead_in)


class FakeTime:
    """A clock that moves only when a step says so."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.log: list[str] = []

    def clock(self, resolution: float = 1e-7) -> Clock:
        return Clock(lambda: self.log.append("sync"), self._read, resolution)

    def _read(self) -> float:
        self.log.append("read")
        return self.seconds

    def step(self, cost: float | Callable[[int], float], name: str = "step") -> Callable[[], None]:
        calls = 0

        def run() -> None:
            nonlocal calls
            self.log.append(name)
            self.seconds += cost(calls) if callable(cost) else cost
            calls += 1

        return run


def test_the_device_is_synchronised_right_before_each_reading() -> None:
    fake = FakeTime()
    timed_block(fake.step(1.0), 3, fake.clock())
    assert fake.log == ["sync", "read", "step", "step", "step", "sync", "read"]


def test_every_reading_of_a_whole_measurement_is_synchronised() -> None:
    fake = FakeTime()
    timer = PairedTimer({"a": fake.step(0.01), "b": fake.step(0.02)}, fake.clock(), seed=0)
    timer.warm_up(0.1, 0.2)
    timer.block_plan(least_block_s=0.05)
    timer.rounds(plan(4, 3, 1))
    readings = [place for place, what in enumerate(fake.log) if what == "read"]
    assert len(readings) >= 2 * 2 * 4
    assert all(fake.log[place - 1] == "sync" for place in readings)
    assert fake.log.count("sync") == len(readings)


def test_collection_is_off_inside_a_block_and_back_on_after_it() -> None:
    seen = []
    timed_block(lambda: seen.append(gc.isenabled()), 2, FakeTime().clock())
    assert seen == [False, False]
    assert gc.isenabled()


def test_collection_is_back_on_after_a_step_that_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        timed_block(lambda: 1 / 0, 1, FakeTime().clock())
    assert gc.isenabled()


def test_ratios_are_exact_on_an_exact_clock() -> None:
    fake = FakeTime()
    samples = []
    for process in range(2):
        timer = PairedTimer(
            {"a": fake.step(0.009), "b1": fake.step(0.010), "b2": fake.step(0.010)},
            fake.clock(),
            seed=process,
        )
        samples += timer.rounds(Plan(5, {"a": 2, "b1": 2, "b2": 2}, 1), process=process)
    found = estimate_ratio(PairedSamples(samples), ["a"], ["b1", "b2"])
    assert found.ratio.estimate == pytest.approx(0.9, rel=1e-12)
    assert found.ratio.low == pytest.approx(0.9, rel=1e-9)
    assert found.ratio.high == pytest.approx(0.9, rel=1e-9)


def test_each_arm_runs_once_a_round_in_an_order_that_the_seed_decides() -> None:
    def orders(seed: int) -> list[tuple[str, ...]]:
        fake = FakeTime()
        timer = PairedTimer({name: fake.step(0.01) for name in "abcd"}, fake.clock(), seed=seed)
        samples = timer.rounds(plan(40, 1, 0, "abcd"))
        found = []
        for number in range(40):
            own = sorted((s for s in samples if s.round == number), key=lambda s: s.position)
            assert [sample.position for sample in own] == [0, 1, 2, 3]
            found.append(tuple(sample.arm for sample in own))
        return found

    first = orders(1)
    assert all(Counter(order) == Counter("abcd") for order in first)
    assert orders(1) == first
    assert orders(2) != first
    assert len(set(first)) > 10
    assert {order[0] for order in first} == set("abcd")


def test_steps_are_counted_alike_and_lead_in_steps_are_not_timed() -> None:
    fake = FakeTime()
    # The first step after another arm costs 1 s more: the lead-in takes it.
    last = ""

    def arm(name: str) -> Callable[[], None]:
        def run() -> None:
            nonlocal last
            fake.seconds += 0.01 if last == name else 1.01
            last = name
            fake.log.append(name)

        return run

    timer = PairedTimer({name: arm(name) for name in "ab"}, fake.clock(), seed=0)
    samples = timer.rounds(plan(3, 4, 1))
    assert [sample.seconds_per_step for sample in samples] == pytest.approx([0.01] * 6)
    assert {sample.steps_in_block for sample in samples} == {4}
    assert fake.log.count("a") == fake.log.count("b") == 3 * 5


def test_between_rounds_the_caller_is_told() -> None:
    fake = FakeTime()
    told: list[int] = []
    timer = PairedTimer({"a": fake.step(0.01)}, fake.clock(), seed=0, on_round=told.append)
    timer.rounds(plan(3, 1, 0))
    assert told == [1, 2, 3]


@pytest.mark.parametrize(
    ("cost", "resolution", "steps", "lead_in"),
    [
        (0.001, 1e-7, 20, 1),  # 20 ms of 1 ms steps
        (0.3, 1e-7, 1, 0),  # long steps: one is enough
        (0.001, 1e-3, 1000, 1),  # a clock that ticks every ms: a second, so that a tick is 0.1 %
    ],
)
def test_blocks_are_long_enough_for_the_clock(
    cost: float, resolution: float, steps: int, lead_in: int
) -> None:
    fake = FakeTime()
    arms = {"fast": fake.step(cost), "slow": fake.step(3 * cost)}
    timer = PairedTimer(arms, fake.clock(resolution), seed=0)
    found, untimed = timer.block_plan(least_block_s=0.02)
    assert found == pytest.approx({"fast": steps, "slow": steps}, abs=1)
    assert untimed == lead_in
    assert found["fast"] * cost >= resolution / 1e-3 * (1 - 1e-9)
    found, _ = timer.block_plan(least_block_s=0.02, multiple=10)
    assert found["fast"] % 10 == 0
    assert 0 <= found["fast"] - steps < 11


def test_arms_that_need_not_keep_pace_fill_the_block_each_and_twins_alike() -> None:
    fake = FakeTime()
    timer = PairedTimer(
        {"a#1": fake.step(1e-5), "a#2": fake.step(1.25e-5), "slow": fake.step(1e-3), "long": fake.step(0.3)},
        fake.clock(),
        seed=0,
        equal_steps=False,
        twins=[["a#1", "a#2"], ["slow"], ["long"]],
    )
    steps, lead_in = timer.block_plan(least_block_s=0.02)
    assert steps == {"a#1": 2000, "a#2": 2000, "slow": 20, "long": 1}
    assert lead_in == 1
    samples = timer.rounds(Plan(1, steps, lead_in), cell="here")
    assert {sample.arm: sample.steps_in_block for sample in samples} == steps
    assert {sample.cell for sample in samples} == {"here"}


class FakeEvents:
    """Events on the time line of a device, which `work` moves."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.log: list[str] = []

    def synchronize(self) -> None:
        self.log.append("sync")

    def new(self) -> FakeEvent:
        return FakeEvent(self)

    def work(self, milliseconds: float) -> None:
        self.milliseconds += milliseconds
        self.log.append("step")


class FakeEvent:
    def __init__(self, device: FakeEvents) -> None:
        self._device = device
        self._at = 0.0

    def record(self) -> None:
        self._at = self._device.milliseconds
        self._device.log.append("record")

    def synchronize(self) -> None:
        self._device.log.append("wait")

    def elapsed_time(self, end: FakeEvent) -> float:
        return end._at - self._at


def test_events_time_the_device_which_is_waited_for_at_the_edges_of_a_block_only() -> None:
    device = FakeEvents()
    clock = EventClock(device.synchronize, device.new)
    assert timed_block(lambda: device.work(2.5), 4, clock) == pytest.approx(0.01)
    assert device.log == ["sync", "record", *["step"] * 4, "record", "wait"]
    assert clock.resolution == pytest.approx(1e-6)


def test_a_step_that_repeats_itself_is_called_once_a_block() -> None:
    class Loop:
        def __init__(self) -> None:
            self.counts: list[int] = []

        def __call__(self) -> None:
            self.repeat(1)

        def repeat(self, count: int) -> None:
            self.counts.append(count)

    loop = Loop()
    timed_block(loop, 5, FakeTime().clock())
    assert loop.counts == [5]


def test_warm_up_lasts_as_long_as_asked_and_is_reported() -> None:
    fake = FakeTime()
    timer = PairedTimer({"a": fake.step(0.01, "a"), "b": fake.step(0.02, "b")}, fake.clock(), seed=0)
    found = timer.warm_up(3.0, 12.0)
    assert found.stable
    assert found.steps == fake.log.count("a") == fake.log.count("b")
    assert found.seconds["a"] == pytest.approx(found.steps * 0.01)
    assert found.seconds["b"] == pytest.approx(found.steps * 0.02)
    assert 3.0 <= sum(found.seconds.values()) < 4.0


def test_warm_up_goes_on_while_an_arm_still_gets_faster() -> None:
    fake = FakeTime()
    timer = PairedTimer(
        {"a": fake.step(0.01), "b": fake.step(lambda call: 0.02 if call < 60 else 0.01)},
        fake.clock(),
        seed=0,
    )
    found = timer.warm_up(2.0, 8.0)
    assert found.stable
    assert found.steps > 100


def test_warm_up_ends_and_says_so_when_an_arm_never_settles() -> None:
    fake = FakeTime()
    timer = PairedTimer(
        {"a": fake.step(0.01), "b": fake.step(lambda call: 0.01 * 1.005**call)}, fake.clock(), seed=0
    )
    found = timer.warm_up(1.0, 4.0)
    assert not found.stable
    assert 4.0 <= sum(found.seconds.values()) < 6.0


@pytest.mark.parametrize(
    ("noise", "slower_at_first", "share"), [(0.1, 1.0, 0.85), (0.1, 2.0, 0.05), (0.0, 1.1, 0.0)]
)
def test_noise_is_no_drift_and_a_drift_is_seen_through_noise(
    noise: float, slower_at_first: float, share: float
) -> None:
    """Of many warm-ups of eight windows, at most or at least this share counts as stable."""
    draw = random.Random(1)

    def window(early: bool) -> dict[str, float]:
        times = {name: draw.gauss(0, noise) for name in "abcde"}
        times["a"] += math.log(slower_at_first) if early else 0.0
        centre = sum(times.values()) / 5
        return {name: time - centre for name, time in times.items()}

    trials = 300
    stable = sum(protocol._is_stable([window(place < 4) for place in range(8)]) for _ in range(trials))
    assert stable / trials >= share if slower_at_first == 1.0 else stable / trials <= share


def test_warm_up_meets_every_batch() -> None:
    fake = FakeTime()
    timer = PairedTimer({"a": fake.step(1.0)}, fake.clock(), seed=0)
    assert timer.warm_up(0.5, 2.0, least_steps=12).steps >= 12


def test_the_real_clock_has_a_resolution_far_below_a_millisecond() -> None:
    assert 0 < Clock().resolution < 1e-3


def test_no_arm_is_refused() -> None:
    with pytest.raises(ValueError, match="no arm"):
        PairedTimer({}, FakeTime().clock(), seed=0)


@pytest.mark.parametrize(
    ("warmup_s", "budget_s", "expected"),
    [
        (0.5, 400.0, (2.0, 8.0)),  # 4 arms, half a second each, four times that at most
        (0.5, 40.0, (2.0, 2.5)),  # a process has 10 s: a quarter is 2.5 s
        (0.5, 16.0, (1.0, 1.0)),
        (0.0, 16.0, (0.0, 0.0)),
    ],
)
def test_warm_up_keeps_to_its_part_of_the_budget(
    warmup_s: float, budget_s: float, expected: tuple[float, float]
) -> None:
    config = BenchConfig(processes=4, warmup_s=warmup_s, budget_s=budget_s)
    assert warm_up_seconds(config, num_arms=4) == pytest.approx(expected)
