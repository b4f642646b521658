from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rmsrepro.cli import main
from rmsrepro.verbs import timing


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("incomplete", 1)])
def test_a_bench_without_a_sound_baseline_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    arms = [{"arm": "layernorm/composite", "status": "failed", "reason": "the loss is nan"}]
    result = {"status": status, "comparisons": [], "arms": arms}
    monkeypatch.setattr(timing, "prepare_bench", lambda overrides: None)
    monkeypatch.setattr(
        timing, "run_prepared_bench", lambda prepared: SimpleNamespace(path=Path("there"), result=result)
    )
    assert timing.bench([]) == code
    said = capsys.readouterr()
    assert "layernorm/composite: failed: the loss is nan" in said.out
    assert "records: there" in said.out
    assert ("incomplete: no baseline" in said.err) is (code == 1)


def test_a_bench_that_can_compare_nothing_says_so_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "norm=batchnorm", "model=gru"]) == 2
    said = capsys.readouterr()
    assert "nothing to compare" in said.err
    assert "batchnorm/composite: norm=batchnorm: its statistics would see the tokens to come" in said.err


def test_the_table_fits_80_columns_and_its_doubts_stand_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doubts = ["A/A: two equal arms differ by +9.9 %", "within the noise", "other load: unknown, it says"]
    row = {
        "baseline": "layernorm/composite",
        "time_reduction_pct": -12.3,
        "time_reduction_ci": [-110.4, 110.2],
        "aa_ratio": 1.001,
        "trusted": False,
        "flags": doubts,
    }
    arms = ["examples.huber:HuberNorm/composite", "hubernorm/composite"]
    result = {"status": "completed", "comparisons": [row | {"arm": arm} for arm in arms], "arms": []}
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(timing, "prepare_bench", lambda overrides: None)
    monkeypatch.setattr(
        timing, "run_prepared_bench", lambda prepared: SimpleNamespace(path=Path("there"), result=result)
    )
    assert timing.bench([]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].split() == ["arm", "against", "time", "saved", "(95", "%)", "A/A", "trust"]
    numbers = "layernorm/composite  -12.3 % [-110.4, 110.2]  1.001  no"
    assert lines[1].split() == ["examples.huber:", *numbers.split()]
    assert lines[2:4] == ["HuberNorm/composite", f"hubernorm/composite  {numbers}"]
    assert lines[4:] == [f"not trusted: {doubts[0]}", "records: there"]
    assert max(map(len, lines)) <= 80
