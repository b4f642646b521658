"""scripts/aa_calibration.py, without its benches."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rmsrepro.config.bench import check_bench_config
from rmsrepro.verbs import timing
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("aa_calibration.py")


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> list[timing.PreparedBench]:
    """Benches that are prepared and not run; of ten, the fourth misses 1."""
    prepared: list[timing.PreparedBench] = []

    def run(bench: timing.PreparedBench) -> Any:
        check_bench_config(bench.settings)
        prepared.append(bench)
        number = len(prepared)
        aa = [
            {
                "level": bench.settings.name,
                "cell": "2048x256/fwd_bwd/float32",
                "arm": f"layernorm/{backend}",
                "aa_ratio": 1.01,
                "aa_ci": [1.005, 1.015] if number == 4 else [0.99, 1.03],
            }
            for backend in ("composite", "torch")
        ]
        result = {
            "aa": aa,
            "bench_id": f"b{number}",
            "created": "now",
            "machine": {"host": "here"},
            "processes": [{"cells": {"c": {"other_load": 0.3 if number == 1 else 0.0}}}, {"error": "x"}],
        }
        return SimpleNamespace(result=result)

    monkeypatch.setattr(timing, "run_prepared_bench", run)
    return prepared


def test_it_goes_on_where_it_stopped_and_counts(
    script: ModuleType,
    benches: list[timing.PreparedBench],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--out-dir", str(tmp_path)]
    assert script.main(["--benches", "3", *where]) == 0
    assert len(benches) == 3
    file = tmp_path / "aa_calibration.jsonl"
    with file.open("a") as out:
        out.write('{"cut off')
    assert script.main(["--benches", "10", *where]) == 0
    assert len(benches) == 10
    assert [bench.settings.seed for bench in benches] == list(range(10))
    assert {bench.settings.processes for bench in benches} == {8}
    capsys.readouterr()
    assert script.main(["--show", *where]) == 0
    shown = capsys.readouterr().out
    assert len(benches) == 10
    rows = [line for line in shown.splitlines() if line.startswith("| layer")]
    assert len(rows) == 2
    # 9 of 10; half the log of 1.03/.99 is 1.98 %; the first had other load.
    assert rows[0] == (
        "| layer | 2048x256/fwd_bwd/float32 | layernorm/composite "
        "| 10 | 9 | 55 to 100 % | 1.98 % | 1.00 % | 1 |"
    )


def test_other_settings_are_another_calibration(
    script: ModuleType, benches: list[timing.PreparedBench], tmp_path: Path
) -> None:
    where = ["--out-dir", str(tmp_path), "--benches", "1"]
    script.main(where)
    script.main([*where, "bench.shapes=[80x1024]"])
    script.main([*where, "--level", "step"])
    assert [(bench.settings.name, bench.settings.shapes) for bench in benches] == [
        ("layer", ["2048x256"]),
        ("layer", ["80x1024"]),
        ("step", []),
    ]
    lines = [json.loads(line) for line in (tmp_path / "aa_calibration.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert len({tuple(line["settings"]) for line in lines}) == 3


def test_a_bench_that_keeps_failing_ends_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(prepared: Any) -> Any:
        raise timing.BenchFailed("no pilot")

    monkeypatch.setattr(timing, "run_prepared_bench", fail)
    assert script.main(["--out-dir", str(tmp_path), "--benches", "2"]) == 1


def test_the_interval_of_a_share_is_exact(script: ModuleType) -> None:
    assert script.share_interval(95, 100) == pytest.approx((0.8872, 0.9836), abs=1e-4)
