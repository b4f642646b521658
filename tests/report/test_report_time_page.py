"""The page on time and on claims: what its figures and tables hold, from made records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rmsrepro.config.study import ClaimTest, StudyBench, StudyClaims, StudyConfig
from rmsrepro.paper import ClaimOutcome, ledger
from rmsrepro.report.build import build_report
from rmsrepro.report.claim_lines import claim_lines
from tests.report.test_report_page import EVIL, Page
from tests.report.test_report_savings import arm, layer_bench, model_level

Made = Callable[..., Any]
GRU = "gru/translation"


@pytest.fixture
def study(made: Made) -> StudyConfig:
    claims = ["t2-rmsnorm-time", "t3py-rmsnorm-time", "t2-baseline-time"]
    declared: StudyConfig = made(
        "study",
        norms=["none", "layernorm", "rmsnorm", "prmsnorm"],
        tasks=["translation"],
        primary={"translation": "val_loss"},
        learned={GRU: 2.5},
        target={},
        benches=[StudyBench(level="model", cells=[GRU], backends=["composite", "torch"])],
        claims=[StudyClaims(claims=claims, by=ClaimTest(cell=GRU), why="small")],
    )
    return declared


@pytest.fixture
def timed(tmp_path: Path, made: Made) -> Path:
    """Models, layers, steps and runs of one cell."""
    rows = [
        model_level(made, "rmsnorm", 0.83),
        model_level(made, "none", 0.7),
        model_level(made, "rmsnorm", 1.32, "torch", trusted=False),
    ]
    made("bench", tmp_path, rows, "models")
    layer_bench(made, tmp_path)
    facts = {"level": "step", "mode": "step"}
    steps = [model_level(made, "rmsnorm", 0.9, **facts), model_level(made, "none", 0.8, **facts)]
    made("bench", tmp_path, steps, "steps", arms=[arm("layernorm", **facts, median_s=0.2)])
    for norm in ("layernorm", "rmsnorm", "prmsnorm", "none"):
        bare = {"config": {"norm": {"name": "none"}}, "norm_params": {}} if norm == "none" else {}
        for seed in (1, 2, 3):
            made("run", tmp_path, norm, "gru", "translation", seed, val_loss=2 + 0.001 * seed, **bare)
    return tmp_path


def traces(figure: Mapping[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [
        trace
        for trace in figure["data"]
        if all(trace.get(key) == value for key, value in wanted.items()) and trace["x"] != [None]
    ]


def decoded(values: Any) -> list[float]:
    """Plotly writes arrays of numbers as base64."""
    import base64

    import numpy as np

    if isinstance(values, dict):
        return list(np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"]))
    return list(values)


def test_the_page_has_the_sections_on_time_and_claims(timed: Path, study: StudyConfig) -> None:
    page = Page(build_report(timed, study=study).page)
    identifiers = {attrs.get("id") for tag, attrs in page.elements if tag == "section"}
    assert {"claims", "time", "layers"} <= identifiers
    assert {"time-forest", "norm-share", "layer-copy"} <= set(page.figures)
    drawn = {attrs["data-figure"] for _, attrs in page.elements if "data-figure" in attrs}
    assert drawn == set(page.figures)
    assert "What the paper could not ask" in page.text
    assert "RMSNorm takes 17.0 % less time" in page.text


def test_the_forest_shows_reductions_the_control_and_the_paper(timed: Path, study: StudyConfig) -> None:
    figure = Page(build_report(timed, study=study).page).figures["time-forest"]
    marks = [trace for trace in traces(figure) if "error_x" in trace]
    ours = [
        (trace["hovertemplate"].split("</b>")[0][3:], trace["x"][0], trace["marker"]["symbol"])
        for trace in marks
        if "Table" not in trace["hovertemplate"]
    ]
    assert ours == [
        ("RMSNorm, composite", pytest.approx(10.0), "square"),  # the step, then the model
        ("no norm, composite", pytest.approx(20.0), "x"),
        ("RMSNorm, composite", pytest.approx(17.0), "square"),
        ("no norm, composite", pytest.approx(30.0), "x"),
        ("RMSNorm, torch", pytest.approx(-32.0), "square-open"),  # not trusted
    ]
    bands = [trace["x"] for trace in traces(figure, mode="lines")]
    assert bands
    assert all(band == [pytest.approx(-0.8), pytest.approx(0.4)] for band in bands)
    printed = [trace for trace in marks if "Table" in trace["hovertemplate"]]
    where = {round(trace["x"][0], 1): trace["hovertemplate"].split("</b>")[0][3:] for trace in printed}
    assert where == {24.7: "Table 2", 11.0: "Table 3", 40.0: "Table 2"}
    sd = ledger().reduction(ledger()["t2-rmsnorm-time"])
    assert sd is not None
    (mark,) = [trace for trace in printed if trace["x"] == [24.7]]
    assert mark["error_x"]["array"] == [pytest.approx(2 * sd.sd)]
    assert sorted(trace["text"][0] for trace in printed) == ["PyTorch", "TF", "TF"]
    rms = next(trace for trace in marks if trace["x"] == [pytest.approx(17.0)])
    assert 0 < mark["y"][0] - rms["y"][0] < 0.5  # in the row of its timing


def test_the_page_says_what_the_timed_backends_are(tmp_path: Path, made: Made) -> None:
    rows = [
        model_level(made, "rmsnorm", ratio, name) for name, ratio in (("composite", 0.83), ("fused", 0.96))
    ]
    made("bench", tmp_path, rows)
    page = Page(build_report(tmp_path).page)
    assert "runs on another backend. fused is kernels made alike for all norms" in page.text
    assert "nn.RMSNorm run" not in page.text
    assert "with both on this package's fused kernels" in page.text
    assert [name for name in ("compiled is", "torch is") if name in page.text] == []


def test_over_p_places_have_a_colour_and_backends_a_dash(tmp_path: Path, made: Made) -> None:
    """More lines than colours, and no two lines alike."""
    shapes = [f"{rows}x256" for rows in (1, 2, 3, 4, 5)]
    backends = {"composite": "solid", "fused": "dashdot"}
    rows, arms = [], []
    for shape in shapes:
        for backend in backends:
            for p in (0.0625, 0.5):
                facts = {"level": "layer", "model": "", "task": "", "shape": shape}
                own = {"arm": f"prmsnorm(p={p})/{backend}", "norm_params": {"p": p}}
                rows.append(model_level(made, "prmsnorm", 0.9, backend, **facts, **own))
                arms.append(arm("prmsnorm", backend, **facts, **own))
    made("bench", tmp_path, rows, arms=arms)
    figure = Page(build_report(tmp_path).page).figures["time-over-p"]
    lines = {trace["name"]: trace["line"] for trace in traces(figure, mode="lines+markers")}
    assert len(lines) == len(shapes) * len(backends)
    for shape in shapes:
        own = {name.split(", ")[-1]: line for name, line in lines.items() if f" {shape}," in name}
        assert {backend: line["dash"] for backend, line in own.items()} == backends
        assert len({line["color"] for line in own.values()}) == 1
    assert len({(line["color"], line["dash"]) for line in lines.values()}) == len(lines)


def test_the_loss_stands_against_the_benchs_seconds(timed: Path, study: StudyConfig) -> None:
    page = Page(build_report(timed, study=study).page)
    steps = page.figures["loss-step-0"]["data"]
    seconds = page.figures["loss-seconds-0"]["data"]

    def line(found: Any, name: str) -> list[float]:
        return next(
            decoded(trace["x"])
            for trace in found
            if trace.get("name") == name
            and trace["meta"]["metric"] == "val_loss"
            and "hovertemplate" in trace
        )

    for name, a_step in (("LayerNorm", 0.2), ("RMSNorm", 0.18), ("no norm", 0.16)):
        assert line(seconds, name) == pytest.approx([a_step * step for step in line(steps, name)], rel=1e-6)
    assert "pRMSNorm" not in {trace.get("name") for trace in seconds}  # was not timed
    assert "each step as the bench timed it; not timed: pRMSNorm" in page.text


def test_a_timing_without_trust_does_not_set_the_scale(tmp_path: Path, made: Made) -> None:
    wild = model_level(made, "prmsnorm", 1.3, trusted=False, time_reduction_ci=[-351.0, 60.0])
    made("bench", tmp_path, [model_level(made, "rmsnorm", 0.83), wild])
    figure = Page(build_report(tmp_path).page).figures["time-forest"]
    low, high = figure["layout"]["xaxis"]["range"]
    assert -5 < low < 0
    assert 19 < high < 25


def test_without_a_bench_the_seconds_are_the_runs_own(tmp_path: Path, made: Made) -> None:
    for seed in (1, 2):
        made("run", tmp_path, seed=seed)
    assert "against training seconds, unpaired" in Page(build_report(tmp_path).page).text


def test_claims_stand_on_the_page_and_in_a_table(timed: Path, study: StudyConfig) -> None:
    built = build_report(timed, study=study)
    page = Page(built.page)
    for text in (
        "t2-rmsnorm-time",
        "24.7 % (sd 4.1) less time",
        "17.0 [15.0, 19.0] % less time",
        "direction only",
    ):
        assert text in page.text, text
    table = pd.read_csv(built.page.parent / "claims.csv").set_index("id")
    assert len(table) == len(ledger())
    row = table.loc["t2-rmsnorm-time"]
    assert (row["paper_pct"], row["paper_sd"]) == (24.7, pytest.approx(4.09, abs=0.01))
    assert row["confidence"] == "95 %"
    assert (row["verdict"], row["relation"], row["measured"]) == (
        "direction only",
        "proxy",
        pytest.approx(17.0),
    )
    assert (row["low"], row["high"]) == (pytest.approx(15.0), pytest.approx(19.0))
    assert table.loc["t4-rmsnorm-time", "verdict"] == "not run"
    assert table.loc["t4-rmsnorm-time", "command"].startswith("rmsrepro reproduce study=")


def test_every_claim_is_somewhere_on_the_page(timed: Path, study: StudyConfig) -> None:
    built = build_report(timed, study=study)
    lines = claim_lines(built.claims)
    named = [claim for line in lines.judged for claim in line.head.split(", ")]
    named += [claim for _, ids in (*lines.waiting, *lines.untestable) for claim in ids]
    assert sorted(named) == sorted(ledger().ids)  # there is no card, so no properties share a line
    numbers = {words: number for _, words, number in lines.counts}
    assert sum(numbers.values()) == lines.total == len(ledger())
    assert numbers["cannot be tested here"] == sum(len(ids) for _, ids in lines.untestable)
    assert numbers["direction only"] == sum(
        line.outcome is ClaimOutcome.direction_only for line in lines.judged
    )
    assert dict(lines.waiting)[""] == (
        "t2-baseline-test17",
        "t3th-baseline-test17",
        "t3py-baseline-test17",
        "a1-weightnorm-test17",
    )
    assert "no study addresses them" in Page(built.page).text
    text = Page(built.page).text
    assert [claim for claim in ledger().ids if claim not in text] == []


def test_scores_that_one_measurement_judges_share_a_line(timed: Path, study: StudyConfig) -> None:
    scores = [StudyClaims(claims=["t2-rmsnorm-test*"], by=ClaimTest(cell=GRU), why="small")]
    built = build_report(timed, study=replace(study, claims=scores))
    (line,) = [line for line in claim_lines(built.claims).judged if line.table == "Table 2"]
    assert line.head == "t2-rmsnorm-test14, t2-rmsnorm-test17"
    assert line.about == "RMSNorm Test14 and Test17; RNNSearch GRU, TensorFlow (Nematus v0.3)"
    assert line.printed == "Test14 22.4 BLEU, LayerNorm 22.6; Test17 23.7 BLEU, LayerNorm 23.6"
    assert line.measured.endswith("validation loss")


def test_what_the_paper_prints_goes_with_the_timing_it_is_held_against(
    tmp_path: Path, made: Made, study: StudyConfig
) -> None:
    """Not with another mode, another machine or another bench of the same arm."""
    forward = model_level(made, "rmsnorm", 0.5, mode="fwd")
    made("bench", tmp_path, [model_level(made, "rmsnorm", 0.83), forward], "used", created="2026-02-02")
    made(
        "bench",
        tmp_path,
        [model_level(made, "rmsnorm", 0.9)],
        "old",
        created="2026-01-01",
        machine={"cpu": "B"},
    )
    figure = Page(build_report(tmp_path, study=study).page).figures["time-forest"]
    ours = {
        trace["x"][0]: trace["y"][0]
        for trace in traces(figure)
        if "error_x" in trace and "Table" not in trace["hovertemplate"]
    }
    printed = [trace["y"][0] for trace in traces(figure) if "Table" in trace.get("hovertemplate", "")]
    assert len(ours) == 3
    (used,) = [y for x, y in ours.items() if x == pytest.approx(17.0)]
    assert len(printed) == 2
    assert all(0 < y - used < 0.5 for y in printed)


def test_texts_of_arms_stay_texts(tmp_path: Path, made: Made, study: StudyConfig) -> None:
    facts = {"level": "layer", "model": EVIL, "task": EVIL, "shape": EVIL}
    rows = [
        model_level(made, EVIL, 0.9, backend, **facts | {"arm": f"{EVIL}/{backend}"})
        for backend in ("composite", "torch")
    ]
    arms = [
        arm(EVIL, backend, **facts, copy_share=0.5, gb_per_s=1.0, reason=EVIL)
        for backend in ("composite", "torch")
    ]
    models = [row | {"level": "model"} for row in rows]
    made("bench", tmp_path, [*rows, *models], arms=arms)
    page = Page(build_report(tmp_path, study=study).page)
    assert len(page.scripts) == 3
    assert {tag for tag, _ in page.elements} & {"img", "iframe", "object"} == set()
    assert {"time-forest", "layer-copy"} <= set(page.figures)
    assert "<script" not in str(page.figures)
