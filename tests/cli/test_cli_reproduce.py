"""`rmsrepro reproduce` from nothing to a page, and a second time from its records."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from rmsrepro.cli import main

COMMAND = [
    "reproduce",
    "study=smoke",
    "trainer.max_steps=4",
    "trainer.val_every=2",
    "data.max_len=16",
    "data.batch_tokens=64",
    "model.d_model=16",
    "tracker=none",
    "bench.processes=2",
    "bench.rounds=2",
    "bench.budget_s=2",
    "bench.warmup_s=0",
]


@pytest.mark.slow
def test_reproduce_ends_with_a_page_and_reuses_everything(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    said = capfd.readouterr().out
    assert "4 runs: 0 done already, 4 to do" in said
    assert "RMSNorm" in said
    page = Path("outputs/reports/smoke_modified/index.html")
    assert str(page.resolve()) in said.replace("\n", "")
    text = page.read_text()
    assert "http://" not in text.split("<script", 1)[0]
    with (page.parent / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted((row["model"], row["norm"]) for row in rows) == [
        ("gru", "layernorm"), ("gru", "rmsnorm"), ("transformer", "layernorm"), ("transformer", "rmsnorm"),
    ]  # fmt: skip
    assert all(row["status"] == "completed" for row in rows)
    benches = sorted(Path("outputs/bench").glob("*/result.json"))
    assert len(benches) == 2
    for file in benches:
        for comparison in json.loads(file.read_text())["comparisons"]:
            assert comparison["baseline"] == "layernorm/composite"
            assert comparison["time_reduction_pct"] == pytest.approx(
                100 * (1 - comparison["ratio"]), abs=1e-9
            )
    stamps = {file: file.stat().st_mtime_ns for file in Path("outputs/runs").glob("*/result.json")}
    assert len(stamps) == 4

    assert main(COMMAND) == 0
    said = capfd.readouterr()
    assert "4 runs: 4 done already, 0 to do" in said.out
    assert "timing reused" in said.out + said.err
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps
    assert len(list(Path("outputs/bench").glob("*/result.json"))) == 2
