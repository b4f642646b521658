from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rmsrepro.bench import doctor
from tests.cli.running import Ran


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_doctor_says_what_the_machine_can_measure(cli: Callable[..., Ran]) -> None:
    ran = cli("doctor", "trial_s=0.2")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    words = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert [word for word in words if word != "meanwhile"] == [
        "processor", "cores", "load", "frequency", "memory", "compiler", "kernels", "triton", "torch",
        "threads", "gpu", "backends", "clock", "A/A", "outlook",
    ]  # fmt: skip
    assert ran.err == "trial: LayerNorm against itself for 0.2 s\n"
    assert list(Path().iterdir()) == []


def test_the_trial_can_be_left_out(cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(doctor, "trial")
    monkeypatch.setattr(doctor, "trial", None, raising=False)
    ran = cli("doctor", "trial=false")
    assert (ran.code, ran.err) == (0, "")
    assert "A/A" not in ran.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trial_s=0"], "trial_s=0.0: expected seconds above zero"),
        (["trial_s=inf"], "trial_s=inf: expected seconds above zero"),
        (["trial_s=long"], "trial_s=long: expected a number"),
        (["norm=rmsnorm"], "norm=rmsnorm: doctor has no option norm"),
        (["trail=false"], "trail=false: doctor has no option trail; did you mean trial"),
    ],
)
def test_wrong_options_are_refused(cli: Callable[..., Ran], words: list[str], told: str) -> None:
    assert cli("doctor", *words).error.startswith(told)
