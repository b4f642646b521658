"""`scripts/throughput`: its parts, and all of it, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT
from tests.scripts import load_script


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", sys.path[:])
    return load_script("throughput")


def test_ratios_are_taken_within_pairs(script: ModuleType) -> None:
    cost = script.Cost
    # A machine that is twice as slow in one round; the middle of 1.5, 1.0 and 2.0.
    pairs = [
        (cost(3.0, 2.0), cost(2.0, 2.0)),
        (cost(4.0, 6.0), cost(4.0, 4.0)),
        (cost(2.0, 3.0), cost(1.0, 1.0)),
    ]
    assert script.ratios(pairs) == (1.5, 1.5)


def test_the_verdict_goes_by_the_clock(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.verdict("none", "first step", (1.3, 9.0))
    assert not script.verdict("jobs", "jobs", (0.51, 0.4))
    assert capsys.readouterr().out.splitlines() == [
        "first step: 1.30 (processor time 9.00); wanted: at most 1.3",
        "jobs: 0.51 (processor time 0.40); wanted: at most 0.5  MISSED",
    ]


def test_the_first_step_is_waited_for(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "told_step.py").write_text(script.PLUGIN)
    cost = script.first_step(tmp_path, "none")
    assert cost.wall > 0.5, "torch alone takes longer to import"
    assert cost.cpu > 0.5
    [record] = tmp_path.glob("outputs/runs/*/result.json")
    ended = json.loads(record.read_text())
    assert (ended["status"], ended["steps"]) == ("interrupted", 1)


@pytest.mark.slow
def test_the_script_small() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "throughput", "--rounds", "1", "--jobs", "4", "--fresh", "1"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[0].strip() for line in lines] == [
        "round 1 of 1",
        "first step / import of torch and Lightning",
        "the same with wandb",
        "4 jobs in a sweep",
        "fresh process 1",
        "sweep of tiny jobs / fresh processes one after another",
    ]
    assert done.returncode == any(line.endswith("MISSED") for line in lines)
