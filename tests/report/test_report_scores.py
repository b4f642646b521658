"""Below the table of qualities: how its scores were made, and where runs of one cell made them otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.report import build_report
from rmsrepro.report.scores import score_notes

Made = Callable[..., Any]
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
OTHER = SIGNATURE.replace("2.6.0", "2.4.3")


def _run(
    made: Made, out: Path, norm: str, seed: int, *, model: str = "gru", pairs: int = 20, **notes: str
) -> None:
    scores = {"test_bleu": 20.0 + seed, "test_chrf": 40.0}
    signatures = {"test_bleu_signature": SIGNATURE, "test_chrf_signature": "chrF2|version:2.6.0"}
    folder = made(
        "run", out, norm, model, "translation", seed, metrics=scores, metric_notes=signatures | notes
    )
    counts = {"splits": {split: {"pairs": pairs} for split in ("train", "val", "test")}}
    data = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps(data | counts))


def _lines(out: Path, **given: Any) -> list[str]:
    return [note.text for note in score_notes(build_report(out, **given).scorecard)]


def test_a_way_that_all_runs_share_is_told_once(tmp_path: Path, made: Made) -> None:
    for model in ("gru", "transformer"):
        for norm in ("layernorm", "rmsnorm", "prmsnorm"):
            for seed in (1, 2):
                _run(made, tmp_path, norm, seed, model=model)
    built = build_report(tmp_path)
    page = built.page.read_text()
    assert page.count(f"test BLEU: sacreBLEU {SIGNATURE}, all 20 sentences.") == 1
    assert page.count("test chrF: sacreBLEU chrF2|version:2.6.0, all 20 sentences.") == 1
    assert [note.doubt for note in score_notes(built.scorecard)] == [False, False]
    assert "not comparable" not in page


def test_a_part_of_the_sentences_is_told(tmp_path: Path, made: Made) -> None:
    for norm in ("layernorm", "rmsnorm"):
        _run(made, tmp_path, norm, 1, test_sentences="7/20")
    assert f"test BLEU: sacreBLEU {SIGNATURE}, the first 7 of 20 sentences." in _lines(tmp_path)


def test_metrics_that_were_made_alike_share_a_line(tmp_path: Path, made: Made) -> None:
    for norm in ("layernorm", "rmsnorm"):
        notes = {"val_bleu_signature": SIGNATURE}
        scores = {"test_bleu": 20.0, "val_bleu": 21.0}
        notes |= {"test_bleu_signature": SIGNATURE}
        made("run", tmp_path, norm, "gru", "translation", metrics=scores, metric_notes=notes)
    study = made(
        "study",
        tasks=["translation"],
        seeds=[1],
        primary={"translation": "test_bleu"},
        secondary={"translation": ["val_bleu"]},
    )
    assert _lines(tmp_path, study=study) == [
        f"test BLEU and validation BLEU: sacreBLEU {SIGNATURE}, all sentences."
    ]


@pytest.mark.parametrize(
    ("notes", "way"),
    [
        ({"test_bleu_signature": OTHER}, f"sacreBLEU {OTHER}, all 20 sentences"),
        ({"test_sentences": "7/20"}, f"sacreBLEU {SIGNATURE}, the first 7 of 20 sentences"),
    ],
)
def test_runs_of_one_cell_that_differ_are_not_comparable(
    tmp_path: Path, made: Made, notes: dict[str, str], way: str
) -> None:
    for norm in ("layernorm", "rmsnorm"):
        for seed in (1, 2):
            _run(made, tmp_path, norm, seed, **notes if (norm, seed) == ("rmsnorm", 2) else {})
        _run(made, tmp_path, norm, 1, model="transformer")
    built = build_report(tmp_path)
    doubts = [note.text for note in score_notes(built.scorecard) if note.doubt]
    assert doubts[0] == (
        "gru / translation: runs made test BLEU in 2 ways, so their scores are not comparable: "
        f"sacreBLEU {SIGNATURE}, all 20 sentences (LayerNorm seed 1, LayerNorm seed 2, RMSNorm seed 1); "
        f"{way} (RMSNorm seed 2)."
    )
    assert len(doubts) == (2 if "test_sentences" in notes else 1), "chrF is of the same sentences"
    page = built.page.read_text()
    assert page.count('<strong class="doubt">not comparable</strong> gru / translation') == len(doubts)
    # The other cell's way is told, and that it is that cell's alone.
    assert f"test BLEU (transformer / translation): sacreBLEU {SIGNATURE}, all 20 sentences." in page


def test_runs_without_notes_beside_runs_with(tmp_path: Path, made: Made) -> None:
    _run(made, tmp_path, "layernorm", 1)
    made("run", tmp_path, "rmsnorm", "gru", "translation", metrics={"test_bleu": 20.0, "test_chrf": 40.0})
    assert any("no note of how (RMSNorm seed 1)" in line for line in _lines(tmp_path))


def test_losses_have_no_line(tmp_path: Path, made: Made) -> None:
    for norm in ("layernorm", "rmsnorm"):
        made("run", tmp_path, norm, metric_notes=["damaged"])
    assert _lines(tmp_path) == []
