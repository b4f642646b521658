"""Records of benches that had one cell each (schema 1) are still read and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rmsrepro.bench.identity import find_reusable
from rmsrepro.report.load_bench import load_bench
from rmsrepro.report.records import Problem
from rmsrepro.verbs.bench_text import print_bench

FACTS: dict[str, Any] = {
    "level": "step", "model": "gru", "size": "tiny", "task": "lm", "data": "pydoc", "placement": "pre",
    "shape": "16x64", "mode": "step", "dtype": "float32", "device": "cpu", "threads": 1,
}  # fmt: skip


def arm(label: str, **others: Any) -> dict[str, Any]:
    norm, _, backend = label.partition("/")
    return {
        **FACTS,
        "arm": label,
        "norm": norm,
        "norm_params": {},
        "backend": backend,
        "is_baseline": norm == "layernorm",
        "status": "measured",
        "reason": None,
        "median_s": 0.02,
        "iqr_s": 0.001,
        "rounds": 80,
        "first_call_s": 0.1,
        "flags": [],
        **others,
    }


OLD = {
    "schema_version": 1,
    "key": "0123456789abcdef",
    "status": "completed",
    "study": "quick",
    **FACTS,
    "arms": [
        arm("layernorm/composite"),
        arm("rmsnorm/composite", median_s=0.018),
        arm("prmsnorm/torch", status="unavailable", reason="torch has no function for it", median_s=None),
    ],
    "comparisons": [
        {
            **FACTS,
            "arm": "rmsnorm/composite",
            "baseline": "layernorm/composite",
            "ratio": 0.9,
            "ratio_ci": [0.88, 0.92],
            "time_reduction_pct": 10.0,
            "time_reduction_ci": [8.0, 12.0],
            "aa_ratio": 1.001,
            "aa_ci": [0.99, 1.012],
            "n_rounds": 80,
            "n_processes": 4,
            "process_ratios": {"0": 0.9},
            "trusted": True,
            "flags": [],
        }
    ],
    "aa": [
        {
            **FACTS,
            "arm": "layernorm/composite",
            "aa_ratio": 1.001,
            "aa_ci": [0.99, 1.012],
            "trusted": True,
            "flags": [],
        }
    ],
    "flags": [],
    "notes": [],
    "processes": [{"process": 0, "failed": {}, "first_call_s": {"layernorm/composite#1": 0.1}}],
    "plan": {"rounds": 20, "steps_in_block": 1, "lead_in": 1},
    "plan_reason": "enough for the precision (noise of a round 1.2 %)",
    "bench": {"name": "step", "processes": 4},
    "config": {"study_name": "quick"},
    "machine": {"host": "there"},
    "rmsrepro": "0.1.0",
    "created": "2025-01-01T00:00:00+0000",
    "wall_s": 24.0,
    "bench_id": "old",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bench" / "old"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(OLD))
    (folder / "samples.csv").write_text("process,round,position,arm,seconds_per_step,steps_in_block\n")
    return folder


def test_the_report_reads_an_old_record(folder: Path) -> None:
    problems: list[Problem] = []
    found = load_bench(folder, problems)
    assert problems == []
    assert found is not None
    measured, unavailable = found.comparisons
    assert (measured.level, measured.norm, measured.ratio) == ("step", "rmsnorm", 0.9)
    assert (measured.aa_ratio, measured.trusted, measured.n_processes) == (1.001, True, 4)
    assert (unavailable.norm, unavailable.backend) == ("prmsnorm", "torch")


def test_an_old_record_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_bench(json.loads((folder / "result.json").read_text()), Console(width=80))
    shown = capsys.readouterr().out
    assert "step gru lm 16x64 float32: cpu, 1 thread, 4 processes, 80 rounds" in shown
    assert "10.0 % [8.0, 12.0]" in shown
    assert "prmsnorm/torch: unavailable: torch has no function for it" in shown
    assert "GB/s" not in shown


def test_an_old_record_is_found_by_its_key(folder: Path) -> None:
    assert find_reusable(folder.parent.parent, OLD["key"]) == folder
