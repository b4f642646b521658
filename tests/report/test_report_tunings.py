"""Tunings on the page: the right numbers from planted records, and nothing from damaged ones."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rmsrepro.report import build_report
from rmsrepro.report.drawing import log_ticks
from rmsrepro.report.load import load_records
from rmsrepro.report.statistics import paired_difference
from rmsrepro.report.tuning_curves import expected_best
from rmsrepro.report.tuning_text import print_tunings
from rmsrepro.report.tunings import EARLIER, FINAL, TRIAL, at_edge, find_tunings
from rmsrepro.report.verdict import Outcome
from rmsrepro.runs.tuning_record import PlannedRun, TunedNorm, TuningRecord, write_tuning
from tests.report.test_report_page import Page

Made = Callable[..., Any]
POINTS = (
    {"lr": 2e-3, "warmup_steps": 24, "weight_decay": 0.01},
    {"lr": 8e-3, "warmup_steps": 40, "weight_decay": 0.02},
    {"lr": 2.9e-2, "warmup_steps": 60, "weight_decay": 0.03},
)
TRIALS: dict[str, list[float]] = {
    "layernorm": [2.3, 2.1, math.inf],
    "rmsnorm": [2.4, 2.2, 2.0],
    "prmsnorm": [2.2, 2.2, math.inf],
}
BEST = {"layernorm": 1, "rmsnorm": 2, "prmsnorm": 0}
FINALS = {"layernorm": [2.10, 2.12, 2.11], "rmsnorm": [2.11, 2.12, 2.12], "prmsnorm": [2.52, 2.51, 2.53]}
RECORD = TuningRecord(
    "lm-pydoc-gru-0", "gru", "lm", "pydoc", metric="val_loss", margin=0.05, seed=0, final_seeds=(1, 2, 3),
    ranges={"lr": (1e-3, 3e-2), "warmup_steps": (15, 150), "weight_decay": (1e-3, 1e-1)}, points=POINTS,
    norms=tuple(
        TunedNorm(
            norm, (f"norm={norm}",), tuple(f"{norm}-t{place}" for place in range(3)), best=BEST[norm],
            finals=tuple(f"{norm}-f{seed}" for seed in (1, 2, 3)),
        )
        for norm in TRIALS
    ),
)  # fmt: skip


@pytest.fixture
def tuned(tmp_path: Path, made: Made) -> Path:
    """Three norms at three points, two trials diverged, and three final runs each."""
    for norm, losses in TRIALS.items():
        for place, loss in enumerate(losses):
            lost = math.isinf(loss)
            made("run", tmp_path, norm, seed=0, run_id=f"{norm}-t{place}", val_loss=None if lost else loss,
                 status="diverged" if lost else "completed", config={"optim": dict(POINTS[place])},
                 study=None)  # fmt: skip
        for seed, loss in enumerate(FINALS[norm], start=1):
            made("run", tmp_path, norm, seed=seed, run_id=f"{norm}-f{seed}", val_loss=loss,
                 config={"optim": dict(POINTS[BEST[norm]])}, study=None)  # fmt: skip
    write_tuning(tmp_path, RECORD)
    return tmp_path


def brute_force(values: Sequence[float], *, higher: bool) -> list[float]:
    """The mean over all orders of the trials of the best so far."""
    best = max if higher else min
    orders = list(itertools.permutations(values))
    return [math.fsum(best(order[:n]) for order in orders) / len(orders) for n in range(1, len(values) + 1)]


@pytest.mark.parametrize("higher", [False, True])
@pytest.mark.parametrize(
    "values",
    [[1.5], [2.0, 1.0], [3.0, 1.0, 2.0, 1.0], [0.3, 0.1, 0.7, 0.2, 0.9, 0.4], [5.0] * 4],
)
def test_the_expected_best_is_the_mean_over_all_orders(values: list[float], higher: bool) -> None:
    assert expected_best(values, higher=higher) == pytest.approx(
        brute_force(values, higher=higher), rel=1e-13
    )


def test_subsets_that_may_be_lost_whole_have_no_expected_best() -> None:
    values = [2.0, math.inf, 1.0, math.inf]
    curve = expected_best(values, higher=False)
    assert curve[:2] == [math.inf, math.inf]
    assert curve == pytest.approx(brute_force(values, higher=False))
    assert expected_best([-math.inf, 1.0], higher=True) == [-math.inf, 1.0]
    assert expected_best([math.inf] * 3, higher=False) == [math.inf] * 3
    assert expected_best([], higher=False) == []


def test_a_thousand_trials_are_no_trouble() -> None:
    curve = expected_best([float(value) for value in range(1, 1001)], higher=False)
    # The expected smallest of n numbers of 1 to B is (B + 1) / (n + 1).
    assert curve == pytest.approx([1001 / (n + 1) for n in range(1, 1001)], rel=1e-10)


def test_the_final_runs_are_compared_by_the_rules_of_any_study(tuned: Path) -> None:
    (tuning,) = build_report(tuned).tunings
    assert tuning.cell.label == "gru / lm on pydoc"
    rows = {row.arm.norm: row for row in tuning.card.rows}
    assert set(rows) == {"rmsnorm", "prmsnorm"}
    for norm, row in rows.items():
        expected = paired_difference(FINALS[norm], FINALS["layernorm"])
        assert row.difference == expected
        assert row.margin == 0.05
    assert rows["rmsnorm"].verdict.outcome is Outcome.equivalent
    assert rows["prmsnorm"].verdict.text == "different (worse)"
    # Holm's over the two norms.
    smaller, larger = sorted(row.difference.p_different for row in rows.values() if row.difference)
    adjusted = sorted(row.adjusted_p for row in rows.values())
    assert adjusted == pytest.approx([2 * smaller, max(2 * smaller, larger)])
    assert {arm.arm.norm: arm.best.value for arm in tuning.arms if arm.best} == {
        "layernorm": 2.1, "rmsnorm": 2.0, "prmsnorm": 2.2,
    }  # fmt: skip
    assert [arm.lost_text for arm in tuning.arms] == ["1 diverged of 3", "", "1 diverged of 3"]
    (warning,) = tuning.warnings
    assert warning == "RMSNorm: the best learning rate 0.029 lies at the edge of its range; widen tuning.lr"


def test_the_page_has_the_section_with_its_curves(tuned: Path) -> None:
    page = Page(build_report(tuned).page)
    assert ("section", {"id": "tuning"}) in page.elements
    words = " ".join(page.text.split())
    assert "18 runs of tunings are left out here" in words
    assert "2.1100 (3)" in words
    assert "3 points, seed 0: learning rate 0.001 to 0.03, warm-up 15 to 150" in words
    assert words.count("trial of a tuning") == 9
    assert words.count("final run of a tuning") == 9
    keys = [key for key in page.figures if key.startswith("tuning-")]
    assert keys == ["tuning-0-curves", "tuning-0-lr", "tuning-0-warmup-steps", "tuning-0-weight-decay"]
    curves = {trace["name"]: trace for trace in page.figures["tuning-0-curves"]["data"]}
    assert curves["RMSNorm"]["x"] == [1, 2, 3]
    assert curves["RMSNorm"]["y"] == pytest.approx([2.2, (2.2 + 2.0 + 2.0) / 3, 2.0])
    # One of three is lost, so the best of one trial may be none.
    assert curves["LayerNorm"]["x"] == [2, 3]
    assert curves["LayerNorm"]["y"] == pytest.approx([(2.1 + 2.1 + 2.3) / 3, 2.1])
    crosses = [
        trace for trace in page.figures["tuning-0-lr"]["data"] if trace["marker"]["symbol"] == "x-thin"
    ]
    assert [trace["x"] for trace in crosses] == [[0.029], [0.029]]
    assert all(trace["y"][0] > 2.4 for trace in crosses)
    # The ordinary tables have none of it.
    assert not any(key.startswith("loss-") for key in page.figures)


def test_other_runs_keep_their_tables(tuned: Path, made: Made) -> None:
    for norm in ("layernorm", "rmsnorm"):
        made("arm", tuned, norm, [2.0, 2.1], study=None)
    built = build_report(tuned)
    (cell,) = built.scorecard.cells
    assert {len(arm.runs) for arm in cell.arms} == {2}
    # A study's page is about its own runs, whatever else they belong to.
    study = build_report(tuned, study=made("study"))
    assert study.tunings == ()
    assert "Tuning" not in Page(study.page).text


def test_the_terminal_has_the_same_numbers_in_80_columns(tuned: Path) -> None:
    out = StringIO()
    print_tunings(build_report(tuned).tunings, Console(file=out, width=80))
    text = out.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    lines = [line.split() for line in text.splitlines()]
    assert ["LayerNorm", "0.008", "40", "0.02", "2.1000", "2.1100", "(3)", "1", "of", "3"] in lines
    assert ["RMSNorm", "0.029", "60", "0.03", "2.0000", "2.1167", "(3)", "-"] in lines
    assert "pRMSNorm: 1 diverged of 3 trials" in text
    assert "pRMSNorm - LayerNorm: +0.410 [0.381, 0.439]  different (worse)" in text


def test_a_norm_without_a_best_and_a_tuning_without_a_baseline(tuned: Path) -> None:
    norms = {one.norm: one for one in RECORD.norms}
    lost = replace(norms["prmsnorm"], best=None, why_none="all 3 trials diverged or failed", finals=())
    write_tuning(tuned, replace(RECORD, norms=(norms["rmsnorm"], lost)))
    built = build_report(tuned)
    (tuning,) = built.tunings
    assert not tuning.compared
    assert [tuning.row_of(arm) for arm in tuning.arms] == [None, None]
    words = " ".join(Page(built.page).text.split())
    assert "all 3 trials diverged or failed" in words
    assert "Without LayerNorm among the norms there is nothing to compare" in words
    assert "9 runs of an earlier choice left out." in words
    roles = find_tunings(tuned, load_records(tuned).runs).roles
    assert roles["layernorm-f1"] == roles["prmsnorm-f1"] == EARLIER
    assert (roles["rmsnorm-t0"], roles["rmsnorm-f1"]) == (TRIAL, FINAL)


def test_without_a_margin_there_is_no_verdict(tuned: Path) -> None:
    write_tuning(tuned, replace(RECORD, margin=None))
    built = build_report(tuned)
    (tuning,) = built.tunings
    assert not tuning.card.judged
    assert "no margin, so no verdicts" in " ".join(Page(built.page).text.split())


def test_a_choice_that_its_trials_no_longer_support_is_said(tuned: Path) -> None:
    one = replace(RECORD.norms[1], best=0, finals=RECORD.norms[1].finals)
    write_tuning(tuned, replace(RECORD, norms=(RECORD.norms[0], one)))
    (tuning,) = build_report(tuned).tunings
    assert any(text.startswith("RMSNorm: its trials are no longer") for text in tuning.warnings)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"schema_version": 9}), "[" * 100_000])
def test_a_damaged_record_is_one_line_on_the_page(tuned: Path, content: str) -> None:
    (tuned / "tunings" / "bad.json").write_text(content)
    built = build_report(tuned)
    assert len(built.tunings) == 1
    words = " ".join(Page(built.page).text.split())
    assert "1 file could not be read, wholly or in part" in words
    assert "tunings/bad.json : damaged:" in words or "tunings/bad.json: damaged:" in words


def test_a_record_that_names_other_runs_is_not_trusted(tuned: Path, made: Made) -> None:
    for norm in ("layernorm", "rmsnorm"):
        made("arm", tuned, norm, [2.0, 2.1], study=None)
    foreign = ("gru-lm-layernorm-s1", "layernorm-t1", "layernorm-t2")
    norms = (replace(RECORD.norms[0], trials=foreign), *RECORD.norms[1:])
    extra = PlannedRun("gru-lm-rmsnorm-s2", "rmsnorm", 2, POINTS[0])
    path = write_tuning(tuned, replace(RECORD, norms=norms))
    record = json.loads(path.read_text())
    record["superseded"].append(json.loads(json.dumps(vars(extra))))
    path.write_text(json.dumps(record))
    built = build_report(tuned)
    (cell,) = built.scorecard.cells
    assert {(arm.norm, len(arm.runs)) for arm in cell.arms} == {("layernorm", 2), ("rmsnorm", 2)}
    words = Page(built.page).text
    assert "gru-lm-layernorm-s1 is not the run that this tuning planned" in words
    assert "gru-lm-rmsnorm-s2 is not the run that this tuning planned" in words
    assert built.tunings[0].arms[0].trials[0].run is None


def test_a_tuning_before_its_first_run_has_a_page(tmp_path: Path) -> None:
    planned = replace(RECORD, norms=tuple(replace(one, best=None, finals=()) for one in RECORD.norms))
    write_tuning(tmp_path, planned)
    built = build_report(tmp_path)
    assert [arm.note for arm in built.tunings[0].arms] == ["not chosen yet"] * 3
    assert "3 missing of 3" in " ".join(Page(built.page).text.split())


@pytest.mark.parametrize(
    ("key", "value", "ends", "expected"),
    [
        ("lr", 1.05e-3, (1e-3, 1e-1), True),
        ("lr", 9.9e-2, (1e-3, 1e-1), True),
        ("lr", 5e-2, (1e-3, 1e-1), False),
        ("warmup_steps", 10, (10, 110), True),
        ("warmup_steps", 16, (10, 110), False),
        ("warmup_steps", 0, (0, 100), False),  # no shorter one is left
        ("warmup_steps", 300, (0, 300), False),  # nor a longer one
        ("warmup_steps", 100, (0, 100), True),
        ("lr", 1.0, (0, 0), False),
    ],
)
def test_the_edge_of_a_range(key: str, value: float, ends: tuple[float, float], expected: bool) -> None:
    assert at_edge(key, value, ends, 300) is expected


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1e-3, 1e-2, [0.001, 0.002, 0.005, 0.01, 0.02, 0.05]),
        (3e-4, 3e-4, [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005]),
        (1e-6, 0.1, [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1]),
        (1e-20, 1.0, [1e-20, 1e-17, 1e-14, 1e-11, 1e-8, 1e-5, 1e-2]),
        (0.0, 1.0, []),
        (2.0, 1.0, []),
        (1.0, math.inf, []),
    ],
)
def test_the_ticks_of_a_logarithmic_axis(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high) == ticks
