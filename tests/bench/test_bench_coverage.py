"""The whole way from a noisy clock to an interval, on machines that are made up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from rmsrepro.bench.cells import Arm, Contestant, Step
from rmsrepro.bench.planning import BenchPlan, decide_plan
from rmsrepro.bench.protocol import Clock
from rmsrepro.bench.record import ResultTables
from rmsrepro.bench.session import CellOutcome, Task, run_session
from rmsrepro.bench.statistics import BlockSample, PairedSamples, aa_control, estimate_ratio
from rmsrepro.config.bench import BenchConfig

TWINS = ["layernorm/composite#1", "layernorm/composite#2"]


@dataclass(frozen=True)
class Machine:
    """What disturbs a timing, as standard deviations of log times.

    Attributes:
        process: of an arm in a process, the same in all its rounds: memory layout.
        noise: of a block, in each arm by itself.
        memory: correlation of that noise from one round to the next.
        common: of what meets all arms of a round alike: frequency, other load; a random walk.
    """

    process: float
    noise: float
    memory: float
    common: float

    def samples(self, random: np.random.Generator, processes: int, rounds: int) -> list[BlockSample]:
        """A bench of two equal arms."""
        found = []
        for process in range(processes):
            walk = np.cumsum(random.normal(0, self.common, rounds))
            for arm in TWINS:
                own = np.empty(rounds)
                own[0] = random.normal(0, self.noise)
                fresh = random.normal(0, self.noise * math.sqrt(1 - self.memory**2), rounds)
                for number in range(1, rounds):
                    own[number] = self.memory * own[number - 1] + fresh[number]
                seconds = np.exp(walk + own + random.normal(0, self.process))
                found += [
                    BlockSample(process, number, 0, arm, float(value), 1)
                    for number, value in enumerate(seconds)
                ]
        return found


MACHINES = {
    "quiet": Machine(process=0.0, noise=0.01, memory=0.0, common=0.0),
    "autocorrelated": Machine(process=0.0, noise=0.03, memory=0.9, common=0.02),
    "layout": Machine(process=0.02, noise=0.01, memory=0.0, common=0.02),
    "both": Machine(process=0.02, noise=0.05, memory=0.9, common=0.05),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_interval_of_equal_arms_contains_1_as_often_as_it_says(name: str) -> None:
    random, benches = np.random.default_rng(1), 500
    contained = 0
    for _ in range(benches):
        samples = PairedSamples(MACHINES[name].samples(random, processes=8, rounds=20))
        contained += not estimate_ratio(samples, [TWINS[1]], [TWINS[0]]).ratio.excludes(1.0)
    assert 0.90 <= contained / benches <= 0.99, contained


def test_an_interval_over_rounds_would_not() -> None:
    """Why the process is the unit: rounds of one process share its layout, and follow each other."""
    random, benches = np.random.default_rng(2), 300
    contained = 0
    for _ in range(benches):
        by_process = PairedSamples(MACHINES["both"].samples(random, 8, 20)).log_ratios([TWINS[1]], [TWINS[0]])
        ratios = np.concatenate(list(by_process.values()))
        half = 1.98 * ratios.std(ddof=1) / math.sqrt(len(ratios))
        contained += abs(ratios.mean()) <= half
    assert contained / benches < 0.7


def test_a_sound_machine_is_trusted_and_the_test_over_many_cells_is_no_false_alarm() -> None:
    random, benches = np.random.default_rng(3), 40
    quiet = Machine(process=0.003, noise=0.01, memory=0.5, common=0.05)
    alarms = 0
    for _ in range(benches):
        # A bench of 16 cells: at .05 over 16, one false alarm in the whole bench in 20 benches.
        controls = [
            aa_control(PairedSamples(quiet.samples(random, 8, 20)), TWINS, precision=0.02, cells=16)
            for _ in range(16)
        ]
        alarms += not all(control.trusted for control in controls)
    assert alarms / benches <= 0.15


# --------------------------------------------------------- through session, plan and tables


class NoisyTime:
    """A clock on which steps take what a machine makes of their cost."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine, self.seconds = machine, 0.0
        self.random = np.random.default_rng(seed)

    def now(self) -> float:
        return self.seconds


class NoisyStep(Step):
    def __init__(self, time: NoisyTime, cost: float, first: float = 0.0) -> None:
        self._time, self._first = time, first
        self._cost = cost * math.exp(time.random.normal(0, time.machine.process))

    def __call__(self) -> None:
        spread = self._time.machine.noise
        self._time.seconds += self._cost * math.exp(self._time.random.normal(0, spread)) + self._first
        self._first = 0.0


LAYERNORM = Arm("layernorm/composite", "layernorm", {}, "composite", is_baseline=True)
SLOW = Arm("slow/composite", "slow", {}, "composite")
SLEEPY = Arm("sleepy/composite", "sleepy", {}, "composite")
COSTS = {**dict.fromkeys(TWINS, 0.010), SLOW.label: 0.0105, SLEEPY.label: 0.010}
CONFIG = BenchConfig(processes=8, budget_s=200, warmup_s=0.1)


def outcome(machine: Machine, process: int, plan: BenchPlan | None) -> tuple[CellOutcome, float]:
    time = NoisyTime(machine, seed=100 + process)
    arms = [LAYERNORM, SLOW, SLEEPY]
    task = Task(
        build={
            name: lambda name=name: NoisyStep(time, COSTS[name], first=1.0 if name == SLEEPY.label else 0.0)
            for name in COSTS
        },
        contestants=[Contestant(arm.label, arm.twins, LAYERNORM.label) for arm in arms],
        cell="c",
    )
    found = run_session(
        task,
        CONFIG,
        Clock(now=time.now, resolution=1e-7),
        process=process,
        plan=plan.cells["c"] if plan is not None else None,
        now=time.now,
    )
    return found, time.seconds


def test_a_planted_slowdown_is_found_and_a_sleep_at_the_first_call_is_not() -> None:
    machine = Machine(process=0.005, noise=0.03, memory=0.0, common=0.0)
    first, spent = outcome(machine, -1, None)
    assert first.pilot is not None
    plan = decide_plan({"c": first.pilot}, CONFIG, start_s=2.0, spent_s=spent)
    assert plan.processes == 8
    assert plan.cells["c"].rounds >= 20
    outcomes = [outcome(machine, number, plan)[0] for number in range(plan.processes)]
    tables = ResultTables(
        [LAYERNORM, SLOW, SLEEPY],
        [sample for one in outcomes for sample in one.samples],
        [{**vars(one), "process": number, "other_load": 0.0} for number, one in enumerate(outcomes)],
        CONFIG,
        {},
    )
    rows = {row["arm"]: row for row in tables.comparisons()}
    low, high = rows[SLOW.label]["ratio_ci"]
    assert 1.0 < low <= 1.05 <= high
    low, high = rows[SLEEPY.label]["ratio_ci"]
    assert low <= 1.0 <= high
    assert all(row["trusted"] for row in rows.values())
    assert "within the noise: the interval of the ratio contains 1" in rows[SLEEPY.label]["flags"]
    arms = {row["arm"]: row for row in tables.arms()}
    assert arms[SLEEPY.label]["first_call_s"] > 1.0
    assert arms[SLEEPY.label]["median_s"] == pytest.approx(0.010, rel=0.05)
