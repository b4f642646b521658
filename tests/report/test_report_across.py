"""Backends on the page and in its tables: arms of one against another, and why a run took a slower one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rmsrepro.report.build import build_report
from rmsrepro.report.load import load_records
from rmsrepro.report.savings import places_of
from rmsrepro.report.timing import newest, step_times
from tests.report.test_report_page import EVIL, Page
from tests.report.test_report_savings import arm, model_level

Made = Callable[..., Any]
NOTE = "not the fused kernels: no C++ compiler (c++, g++, clang++); install one"


def across(made: Made, own: str, other: str, ratio: float, **changes: Any) -> dict[str, Any]:
    """A row of `across`, as a bench writes it: without a percentage and without a control."""
    row = model_level(made, "any", ratio, **{"arm": own, "baseline": other} | changes)
    return {key: value for key, value in row.items() if not key.startswith(("time_", "aa_"))}


@pytest.fixture
def timed(tmp_path: Path, made: Made) -> Path:
    """Two norms on two backends."""
    within = [model_level(made, "rmsnorm", 0.9, backend) for backend in ("composite", "fused")]
    between = [
        across(made, "layernorm/fused", "layernorm/composite", 0.4),
        across(made, "rmsnorm/fused", "layernorm/composite", 0.3, trusted=False),
        across(made, "rmsnorm/fused", "rmsnorm/composite", 1.25),
    ]
    made("bench", tmp_path, within, "new", across=between, created="2026-02-02")
    old = [across(made, "rmsnorm/fused", "layernorm/composite", 0.7)]
    made("bench", tmp_path, within, "old", across=old, created="2026-01-01")
    return tmp_path


def test_the_page_has_the_newest_ratios_across_backends(timed: Path) -> None:
    text = " ".join(Page(build_report(timed).page).text.split())
    section = text.partition("Across backends")[2].partition("All paired timings")[0]
    assert "All pairs (3); also in across.csv" in section
    assert "forward and backward: gru / translation" in section
    for row in (
        "LayerNorm, fused LayerNorm, composite 0.400 [0.380, 0.420]",
        "RMSNorm, fused LayerNorm, composite 0.300 [0.280, 0.320]not trusted",
        "RMSNorm, fused RMSNorm, composite 1.250 [1.230, 1.270]",
    ):
        assert row in section, row
    assert section.count("not trusted") == 1
    assert "%" not in section.partition("time over its, 95 % interval")[2]


def test_ratios_across_backends_are_no_savings(timed: Path) -> None:
    """They stand in no figure, no sentence and no list of the timings within a backend."""
    page = Page(build_report(timed).page)
    assert "All paired timings (2)" in page.text
    traces = page.figures["time-forest"]["data"]
    assert [trace["x"][0] for trace in traces if "error_x" in trace] == [pytest.approx(10.0)] * 2
    (place,) = places_of(newest(step_times(load_records(timed).benches, across=True)), across=True)
    assert [time.comparison.ratio for time in place.times] == [0.4, 0.3, 1.25]
    assert places_of(newest(step_times(load_records(timed).benches, across=True))) == []


def test_the_table_of_ratios_across_backends(timed: Path) -> None:
    table = pd.read_csv(build_report(timed).page.parent / "across.csv")
    assert list(table.columns) == [
        *("level", "model", "task", "shape", "mode", "dtype", "device", "threads", "machine"),
        *("arm", "baseline", "ratio", "low", "high", "n_processes", "n_rounds", "trusted", "bench"),
    ]
    row = table.set_index(["arm", "baseline"]).loc[("rmsnorm/fused", "layernorm/composite")]
    assert (row["model"], row["mode"], row["threads"], row["bench"]) == ("gru", "fwd_bwd", 1, "new")
    assert [row["ratio"], row["low"], row["high"]] == pytest.approx([0.3, 0.28, 0.32])
    assert not row["trusted"]


def test_a_bench_of_layernorm_alone_has_its_ratios_on_the_page(tmp_path: Path, made: Made) -> None:
    made("bench", tmp_path, [], across=[across(made, "layernorm/fused", "layernorm/torch", 0.5)])
    page = Page(build_report(tmp_path).page)
    assert "time" in {attrs.get("id") for tag, attrs in page.elements if tag == "section"}
    assert "#time" in {attrs.get("href") for tag, attrs in page.elements if tag == "a"}
    assert "All paired timings" not in page.text


def test_without_ratios_across_backends_the_page_says_nothing(tmp_path: Path, made: Made) -> None:
    made("bench", tmp_path, [model_level(made, "rmsnorm", 0.9)])
    built = build_report(tmp_path)
    assert "Across backends" not in Page(built.page).text
    assert len(pd.read_csv(built.page.parent / "across.csv")) == 0


def test_settings_of_a_norm_are_told_apart_across_backends(tmp_path: Path, made: Made) -> None:
    arms, rows = [], []
    for p in (0.25, 0.5):
        own, other = (f"prmsnorm(p={p})/{backend}" for backend in ("fused", "composite"))
        arms += [
            arm("prmsnorm", name.rpartition("/")[2], arm=name, norm_params={"p": p}) for name in (own, other)
        ]
        rows.append(across(made, own, other, p))
    made("bench", tmp_path, [], arms=arms, across=rows)
    text = " ".join(Page(build_report(tmp_path).page).text.split())
    assert "pRMSNorm (p=0.25), fused pRMSNorm (p=0.25), composite 0.250" in text


def test_damaged_rows_across_backends_are_listed(tmp_path: Path, made: Made) -> None:
    made("bench", tmp_path, [], across=[{}, 3, across(made, f"{EVIL}/fused", f"{EVIL}/torch", 0.5)])
    records = load_records(tmp_path)
    assert [problem.reason for problem in records.problems] == [
        "row of across 0 names no arm", "row of across 1 names no arm",
    ]  # fmt: skip
    page = Page(build_report(tmp_path).page)
    assert {tag for tag, _ in page.elements} & {"img", "iframe", "object"} == set()


def test_why_a_run_took_a_slower_backend_is_shown(tmp_path: Path, made: Made) -> None:
    made("run", tmp_path, seed=1, backend_note=NOTE)
    made("run", tmp_path, seed=2, backend_note=None)
    built = build_report(tmp_path)
    assert Page(built.page).text.count(NOTE) == 1
    table = pd.read_csv(built.results, keep_default_na=False).set_index("seed")
    assert list(table["backend_note"]) == [NOTE, ""]
