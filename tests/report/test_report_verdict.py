"""Each outcome of the rules, on made records."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.config.study import StudyConfig
from rmsrepro.report.cells import build_cells
from rmsrepro.report.load import load_records
from rmsrepro.report.scorecard import Row, Scorecard, build_scorecard
from rmsrepro.report.timing import step_times
from rmsrepro.report.verdict import Outcome

Made = Callable[..., Any]
BASE = [2.00, 2.05, 1.95]


@pytest.fixture
def judge(tmp_path: Path, made: Made) -> Callable[..., Row]:
    """Write a LayerNorm and an RMSNorm arm and return the RMSNorm row of the scorecard."""

    def run(losses: list[float | None], base: list[float | None] | None = None, **study: Any) -> Row:
        made("arm", tmp_path, "layernorm", base if base is not None else BASE)
        made("arm", tmp_path, "rmsnorm", losses)
        return _row(_card(tmp_path, made("study", **({"norms": ["layernorm", "rmsnorm"]} | study))))

    return run


def _card(out_dir: Path, study: StudyConfig | None) -> Scorecard:
    """The scorecard as the report makes it, without the page."""
    records = load_records(out_dir)
    return build_scorecard(build_cells(records.runs, study)[0], step_times(records.benches), study)


def _row(card: Scorecard, norm: str = "rmsnorm") -> Row:
    return next(row for row in card.rows if row.arm.norm == norm)


def test_equivalent(judge: Callable[..., Row]) -> None:
    row = judge([2.01, 2.05, 1.96])
    # Differences .01 0 .01: mean .0066667, sd .0057735, t(.95, 2) = 2.919986: half width .0097332.
    assert row.difference is not None
    assert (row.difference.low, row.difference.high) == pytest.approx((-0.0030666, 0.0163999), abs=1e-6)
    assert row.verdict.text == "equivalent"
    assert row.verdict.outcome is Outcome.equivalent
    assert row.direction == "worse"
    assert row.difference_text == "+0.007 [-0.003, 0.016]"


def test_different_and_worse(judge: Callable[..., Row]) -> None:
    row = judge([2.20, 2.26, 2.15])
    assert row.verdict.text == "different (worse)"
    assert row.adjusted_p < 0.05


def test_different_and_better(judge: Callable[..., Row]) -> None:
    row = judge([1.80, 1.86, 1.75])
    assert row.verdict.text == "different (better)"
    assert row.direction == "better"


def test_a_found_difference_inside_the_margin_stays_equivalent(judge: Callable[..., Row]) -> None:
    row = judge([2.010, 2.0601, 1.960])
    assert row.adjusted_p < 0.05
    assert row.verdict.text == "equivalent"
    assert "inside the margin" in row.verdict.reason


def test_undecided(judge: Callable[..., Row]) -> None:
    row = judge([2.20, 2.00, 2.05])
    assert row.verdict.text == "undecided"


def test_an_interval_that_touches_the_margin_is_not_inside(judge: Callable[..., Row]) -> None:
    assert judge([2.25, 2.30, 2.20], margin={"val_loss": 0.25}).verdict.text == "different (worse)"


def test_one_seed(judge: Callable[..., Row]) -> None:
    row = judge([2.0], base=[2.0], seeds=[1])
    assert row.verdict.text == "undecided (one seed)"


def test_undertrained(judge: Callable[..., Row]) -> None:
    row = judge([2.01, 2.05, 1.96], learned={"gru/lm": 1.99})
    assert row.verdict.text == "undecided (undertrained)"
    assert "threshold 1.99" in row.verdict.reason


def test_undertrained_by_a_metric_that_should_be_high(tmp_path: Path, made: Made) -> None:
    for norm, score in (("layernorm", 18.0), ("rmsnorm", 18.1)):
        for seed in (1, 2, 3):
            made(
                "run",
                tmp_path,
                norm,
                task="translation",
                seed=seed,
                metrics={"test_bleu": score + 0.01 * seed},
            )
    study = made(
        "study",
        norms=["layernorm", "rmsnorm"],
        tasks=["translation"],
        primary={"translation": "test_bleu"},
        margin={"test_bleu": 1.0},
        learned={"gru/translation": 20.0},
        target={},
    )
    assert _row(_card(tmp_path, study)).verdict.text == "undecided (undertrained)"
    study.learned = {"gru/translation": 15.0}
    row = _row(_card(tmp_path, study))
    assert row.verdict.text == "equivalent"
    assert row.direction == "better"


def test_incomplete_while_a_run_is_missing_and_never_averaged(judge: Callable[..., Row]) -> None:
    row = judge([2.01, None, 1.96])
    assert row.verdict.text == "incomplete (2 of 3)"
    assert row.verdict.reason == "runs missing: 1 not run"
    assert row.difference is None
    assert row.difference_text == "-"


@pytest.mark.parametrize("status", ["failed", "interrupted", "running"])
def test_incomplete_by_a_run_that_did_not_end(tmp_path: Path, made: Made, status: str) -> None:
    made("arm", tmp_path, "layernorm", BASE)
    made("arm", tmp_path, "rmsnorm", BASE[:2])
    made("run", tmp_path, "rmsnorm", seed=3, status=status, metrics={"val_loss": 0.1})
    row = _row(_card(tmp_path, made("study")))
    assert row.verdict.text == "incomplete (2 of 3)"
    assert row.verdict.reason == f"runs missing: 1 {status}"
    assert row.difference is None


def test_incomplete_when_the_baseline_never_ran(tmp_path: Path, made: Made) -> None:
    made("arm", tmp_path, "rmsnorm", BASE)
    assert _row(_card(tmp_path, made("study"))).verdict.text == "incomplete (0 of 3)"


def test_a_completed_run_without_the_metric_or_short_of_its_steps_does_not_count(
    tmp_path: Path, made: Made
) -> None:
    made("arm", tmp_path, "layernorm", BASE)
    made("run", tmp_path, "rmsnorm", seed=1, val_loss=2.0)
    made("run", tmp_path, "rmsnorm", seed=2, val_loss=None)
    made("run", tmp_path, "rmsnorm", seed=3, val_loss=2.0)
    made("run", tmp_path, "prmsnorm", seed=1, val_loss=2.0)
    result = made("run", tmp_path, "prmsnorm", seed=2, val_loss=2.0, run_id="short") / "result.json"
    result.write_text(result.read_text().replace('"steps": 300', '"steps": 290'))
    card = _card(tmp_path, made("study"))
    assert _row(card).verdict.text == "incomplete (2 of 3)"
    assert "without val_loss" in _row(card).verdict.reason
    assert "ended early" in _row(card, "prmsnorm").verdict.reason


def test_a_diverged_seed_is_not_dropped(tmp_path: Path, made: Made) -> None:
    made("arm", tmp_path, "layernorm", BASE)
    made("arm", tmp_path, "rmsnorm", BASE[:2])
    made("run", tmp_path, "rmsnorm", seed=3, status="diverged")
    row = _row(_card(tmp_path, made("study")))
    assert row.verdict.text == "different (1 of 3 diverged)"
    assert row.verdict.outcome is Outcome.different
    assert row.difference is None


def test_a_seed_that_diverged_in_the_baseline_alone_is_said(tmp_path: Path, made: Made) -> None:
    made("arm", tmp_path, "layernorm", BASE[:2])
    made("run", tmp_path, "layernorm", seed=3, status="diverged")
    made("arm", tmp_path, "rmsnorm", BASE)
    row = _row(_card(tmp_path, made("study")))
    assert row.verdict.text == "different (LayerNorm: 1 of 3 diverged)"


def test_divergence_in_both_arms_is_said(tmp_path: Path, made: Made) -> None:
    for norm, diverged in (("layernorm", (3,)), ("rmsnorm", (2, 3)), ("prmsnorm", (3,))):
        for seed in (1, 2, 3):
            made("run", tmp_path, norm, seed=seed, status="diverged" if seed in diverged else "completed")
    card = _card(tmp_path, made("study"))
    assert _row(card).verdict.text == "different (2 of 3 diverged; LayerNorm: 1 of 3 diverged)"
    assert _row(card, "prmsnorm").verdict.text == "undecided (1 of 3 diverged in both arms)"


@pytest.mark.parametrize("value", ["nan", "inf", None])
def test_a_completed_run_with_a_metric_that_is_not_finite_counts_as_diverged(
    tmp_path: Path, made: Made, value: str | None
) -> None:
    made("arm", tmp_path, "layernorm", BASE)
    made("arm", tmp_path, "rmsnorm", BASE[:2])
    made("run", tmp_path, "rmsnorm", seed=3, val_loss=None, metrics={"val_loss": value})
    assert _row(_card(tmp_path, made("study"))).verdict.text == "different (1 of 3 diverged)"


def test_holm_runs_over_all_planned_comparisons(tmp_path: Path, made: Made) -> None:
    """A p-value of .029 decides alone, and no longer among three planned comparisons."""
    made("arm", tmp_path, "layernorm", BASE)
    made("arm", tmp_path, "rmsnorm", [2.20, 2.19, 2.21])
    narrow = {"margin": {"val_loss": 0.001}}
    alone = _row(_card(tmp_path, made("study", norms=["layernorm", "rmsnorm"], **narrow)))
    assert alone.difference is not None
    # Differences .2 .14 .26: t = .2 / (.06 / sqrt 3) = 5.7735, p = 1 - t / sqrt(2 + t^2).
    assert alone.difference.p_different == pytest.approx(1 - 5.773503 / math.sqrt(2 + 33.33333), abs=1e-6)
    assert alone.verdict.text == "different (worse)"
    norms = ["layernorm", "rmsnorm", "prmsnorm", "none"]
    among = _row(_card(tmp_path, made("study", norms=norms, **narrow)))
    assert among.adjusted_p == pytest.approx(3 * alone.difference.p_different)
    assert among.verdict.text == "undecided"


def test_no_verdict_without_a_study_or_when_it_gives_none(tmp_path: Path, made: Made) -> None:
    made("arm", tmp_path, "layernorm", BASE)
    made("arm", tmp_path, "rmsnorm", BASE)
    for study in (None, made("study", verdict=False)):
        card = _card(tmp_path, study)
        row = _row(card)
        assert not card.judged
        assert row.verdict.outcome is Outcome.none
        assert row.verdict.text == ""
        assert row.difference is not None
        assert row.difference.mean == 0.0
        assert math.isnan(row.adjusted_p)
        assert "equivalent" not in " ".join(card.reading)


def test_the_margin_is_the_studys_alone(judge: Callable[..., Row]) -> None:
    assert judge([2.01, 2.05, 1.96], margin={}).verdict.text == "undecided (no margin)"


def test_without_verdicts_the_reading_gives_numbers_and_metrics(tmp_path: Path, made: Made) -> None:
    for norm, extra in (("layernorm", 0.0), ("rmsnorm", 0.5)):
        made("run", tmp_path, norm, val_loss=2.0 + extra / 10)
        made("run", tmp_path, norm, task="translation", val_loss=1.0, metrics={"test_bleu": 20.0 + extra})
    study = made(
        "study",
        norms=["layernorm", "rmsnorm"],
        tasks=["lm", "translation"],
        seeds=[1],
        primary={"lm": "val_loss", "translation": "test_bleu"},
        margin={},
        verdict=False,
    )
    (sentence,) = _card(tmp_path, study).reading
    assert sentence == (
        "RMSNorm minus LayerNorm: +0.0500 validation loss in gru / lm and +0.50 test BLEU in "
        "gru / translation, one seed, no verdict; the time of its step was not benchmarked."
    )


def test_with_verdicts_the_reading_counts_cells(
    judge: Callable[..., Row], tmp_path: Path, made: Made
) -> None:
    judge([2.01, 2.05, 1.96])
    (sentence,) = _card(tmp_path, made("study", norms=["layernorm", "rmsnorm"])).reading
    assert sentence.startswith("In 1 of 1 cell RMSNorm trained equivalently to LayerNorm; ")
    wider = made("study", norms=["layernorm", "rmsnorm"], tasks=["lm", "translation"])
    (sentence,) = _card(tmp_path, wider).reading
    assert sentence.startswith("In 1 of 2 cells RMSNorm trained equivalently to LayerNorm (1 incomplete); ")
