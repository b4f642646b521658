from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rmsrepro.verbs import timing


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("incomplete", 1)])
def test_a_bench_without_a_sound_baseline_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    arms = [{"arm": "layernorm/composite", "status": "failed", "reason": "the loss is nan"}]
    result = {"status": status, "comparisons": [], "arms": arms}
    prepared = SimpleNamespace(settings=SimpleNamespace(name="step"))
    monkeypatch.setattr(timing, "prepare_bench", lambda overrides: prepared)
    monkeypatch.setattr(
        timing, "run_prepared_bench", lambda prepared: SimpleNamespace(path=Path("there"), result=result)
    )
    assert timing.bench([]) == code
    said = capsys.readouterr()
    assert "layernorm/composite: failed: the loss is nan" in said.out
    assert "records: there" in said.out
    assert ("incomplete: no baseline" in said.err) is (code == 1)
