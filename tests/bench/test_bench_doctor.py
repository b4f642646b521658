from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from rmsrepro.bench import doctor
from rmsrepro.bench.cells import Step
from rmsrepro.bench.planning import MIN_ROUNDS
from rmsrepro.bench.protocol import Clock
from rmsrepro.bench.settings import UNKNOWN
from rmsrepro.bench.statistics import Interval
from rmsrepro.bench.trial import PAIRS, Trial, TrialStep, aa_trial


class Machine:
    """Simulated time, and steps that take some of it."""

    def __init__(self, cost: float, *, noise: float = 0.0, build_noise: float = 0.0) -> None:
        self.seconds = 0.0
        self._cost, self._noise, self._build_noise = cost, noise, build_noise
        self._random = random.Random(1)
        self.built = 0

    def now(self) -> float:
        return self.seconds

    def build(self) -> Step:
        machine, self.built = self, self.built + 1
        cost = self._cost * self._random.lognormvariate(0, self._build_noise)

        class Timed(Step):
            def __call__(self) -> None:
                machine.seconds += cost * machine._random.lognormvariate(0, machine._noise)

        return Timed()

    def trial(self, seconds: float, on_progress: Callable[[int, int], None] | None = None) -> Trial:
        clock = Clock(now=self.now, resolution=1e-7)
        tell = on_progress or (lambda done, total: None)
        return aa_trial(seconds, clock, self.build, on_progress=tell, now=self.now)


def test_equal_steps_on_a_quiet_machine_are_equal() -> None:
    machine, told = Machine(0.01), list[tuple[int, int]]()
    found = machine.trial(10, lambda done, total: told.append((done, total)))
    assert (found.ratio.estimate, found.ratio.low, found.ratio.high) == pytest.approx((1, 1, 1))
    assert (found.round_sd, found.pair_sd, found.step_s) == pytest.approx((0, 0, 0.01), abs=1e-9)
    assert machine.built == 2 * PAIRS
    assert told == [(number, PAIRS) for number in range(PAIRS + 1)]
    assert machine.seconds == pytest.approx(10, rel=0.1)
    assert found.num_rounds > 100


def test_noise_is_told_apart() -> None:
    rounds = Machine(0.01, noise=0.05).trial(20)
    assert rounds.round_sd == pytest.approx(0.05 * 2**0.5, rel=0.3)
    assert rounds.pair_sd < 0.02
    pairs = Machine(0.01, build_noise=0.1).trial(20)
    assert pairs.round_sd == pytest.approx(0, abs=1e-9)
    assert pairs.pair_sd > 0.03
    assert pairs.ratio.low < 1 < pairs.ratio.high
    assert pairs.half_width(8) > rounds.half_width(8) > Machine(0.01).trial(5).half_width(8) > 0.005
    assert rounds.half_width(16) < rounds.half_width(8)


def test_slow_steps_make_a_longer_trial_with_the_fewest_rounds() -> None:
    machine = Machine(3.0)
    assert machine.trial(1).num_rounds == PAIRS * MIN_ROUNDS


def test_the_step_is_a_layernorm_forward_and_backward() -> None:
    step = TrialStep(torch.device("cpu"))
    for _ in range(5):
        step()
    assert all(one.grad is None for one in (*step._inputs, *step._norm.parameters()))


# --------------------------------------------------------------------------------------- the words


def test_every_fact_has_words() -> None:
    facts = dict([*doctor.machine_facts(look_s=0.0), *doctor.torch_facts()])
    assert list(facts) == [
        "processor", "cores", "load", "frequency", "memory", "compiler",
        "kernels", "triton", "torch", "threads", "gpu", "backends", "clock",
    ]  # fmt: skip
    assert all(facts.values())
    assert facts["torch"].startswith(torch.__version__)
    assert facts["backends"].startswith("composite (all norms); ")


@pytest.mark.usefixtures("fused_kernels")
def test_the_backends_are_told_with_their_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmsrepro.norms.backends.why_no_compiler", lambda: None)
    assert dict(doctor.torch_facts())["backends"] == (
        "composite (all norms); compiled (all norms); torch (layernorm, layernorm_nobias, rmsnorm); "
        "fused (all norms but batchnorm, weightnorm, crmsnorm, dyt)"
    )


@pytest.mark.usefixtures("no_fused_kernels")
def test_what_a_backend_lacks_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmsrepro.norms.backends.why_no_compiler", lambda: "no compiler in this test")
    told = dict(doctor.torch_facts())["backends"]
    assert "composite (all norms); compiled (all norms; not here: no compiler in this test); " in told
    assert told.endswith("dyt; not here: no kernels in this test)")


def test_what_cannot_be_read_is_said_to_be_unknown() -> None:
    assert doctor.frequency_words(UNKNOWN, UNKNOWN).startswith("governor and frequency unknown")
    assert doctor.frequency_words("performance", [3000.0, 3100.0]) == (
        "governor performance, frequency 3000 to 3100 MHz now"
    )
    assert doctor.frequency_words("powersave", UNKNOWN) == (
        "governor powersave, frequency unknown; it may move with the load"
    )
    assert "page faults" in doctor.memory_words("glibc 2.36")
    assert doctor.memory_words(UNKNOWN).startswith("C library unknown: it cannot keep large blocks")
    assert doctor.threads_words(1, "1") == "torch uses 1 (OMP_NUM_THREADS=1); bench.num_threads sets them"
    assert "they wait for each other" in doctor.threads_words(10**6, None)


@pytest.mark.parametrize(
    ("percent", "told"),
    [
        (1.0, "within bench.precision=0.02"),
        (3.0, "it takes more processes, or less noise"),
        (20.0, "too noisy for a comparison to be trusted"),
    ],
)
def test_the_outlook_goes_by_the_interval_to_hope_for(percent: float, told: str) -> None:
    words = doctor.outlook_words(percent)
    assert f"a bench of 8 processes can hope for intervals of {percent:.1f} % to either side" in words
    assert told in words


def test_a_trial_is_told() -> None:
    trial = Trial(Interval(1.002, 0.997, 1.007), 0.013, 0.004, 500, 0.0032, other_load=0.4)
    facts = dict(doctor.trial_facts(trial))
    assert list(facts) == ["A/A", "meanwhile", "outlook"]
    assert facts["A/A"] == (
        "LayerNorm against itself: 1.002 [0.997, 1.007] in 500 rounds of 3.2 ms a step; noise 1.3 % from "
        "round to round, 0.4 % between pairs of twins"
    )
    assert facts["meanwhile"] == "other programs kept 0.40 cores busy (above 0.15 no comparison is trusted)"
    quiet = Trial(Interval(1.002, 0.997, 1.007), 0.013, 0.004, 500, 0.0032, other_load=None)
    assert list(dict(doctor.trial_facts(quiet))) == ["A/A", "outlook"]


@pytest.mark.parametrize(
    ("value", "text"), [(41e-9, "41 ns"), (1.5e-6, "1.5 us"), (0.0321, "32.1 ms"), (2.0, "2 s")]
)
def test_short_times(value: float, text: str) -> None:
    assert doctor.seconds_words(value) == text


def test_the_first_facts_need_no_torch() -> None:
    code = (
        "import sys, rmsrepro.bench.doctor as doctor; list(doctor.machine_facts(0.0)); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
