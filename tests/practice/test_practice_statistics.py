"""Faults of scores, met in practice: B47, B48."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sacrebleu.metrics import BLEU

from rmsrepro.config.schema import Tokenizer
from rmsrepro.data.tokenizers import train_tokenizer
from rmsrepro.tasks.scoring import corpus_scores
from tests.cli.running import TRANSLATION, Ran, Trained, records
from tests.cli.test_cli_use import figures

Run = Callable[..., Ran]
REFERENCES = ["The cat doesn't sit on the mat, does it?", "Hello, world."]


@pytest.mark.parametrize("tokenizer", list(Tokenizer))
def test_what_is_scored_is_plain_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """B47: marks of subwords, begin, end and padding are no words: they are gone before the score."""
    made = train_tokenizer(tokenizer, REFERENCES * 3, vocab_size=300, cache_dir=tmp_path)
    # Padding 0, begin 1, end 2 around and behind the tokens, as rows of a batch have them.
    decoded = [made.decode([1, *made.encode(line), 2, 0, 0]) for line in REFERENCES]
    assert decoded == REFERENCES
    assert corpus_scores(decoded, REFERENCES)["bleu"] == pytest.approx(100.0)


def test_the_score_of_a_run_can_be_made_again(translator: Trained) -> None:
    """B47: the number, its signature and the text that it was made of lie together, for both splits."""
    record = translator.record
    for split in ("val", "test"):
        hypotheses = (translator.path / f"hypotheses_{split}.txt").read_text().split("\n")[:-1]
        assert len(hypotheses) == 20
        parts = dict(part.split(":") for part in record["metric_notes"][f"{split}_bleu_signature"].split("|"))
        assert (parts["tok"], parts["case"], parts["smooth"], parts["nrefs"]) == ("13a", "mixed", "exp", "1")
        assert parts["version"]
        assert f"{split}_chrf_signature" in record["metric_notes"]
    from rmsrepro.config.plain import from_plain
    from rmsrepro.data import build_data

    config = from_plain(record["config"])
    data: Any = build_data(
        config.data, "translation", seed=1, accumulate=1, cache_dir=translator.path / "cache"
    )
    references = [target for _, target in data.test_texts]
    hypotheses = (translator.path / "hypotheses_test.txt").read_text().split("\n")[:-1]
    again = BLEU(tokenize="13a", lowercase=False).corpus_score(hypotheses, [references]).score
    assert record["metrics"]["test_bleu"] == pytest.approx(again, abs=1e-9)


def test_a_language_model_has_no_bleu(cli: Run, language_model: Trained) -> None:
    """B47: the word stands on no other score."""
    names = {*language_model.record["metrics"], *language_model.record["metric_notes"]}
    assert not any("bleu" in name for name in names)
    assert "bleu" not in cli("eval", f"ckpt={language_model.path}").out.lower()


@pytest.mark.parametrize("model", ["gru", "transformer"])
def test_a_part_of_the_sentences_is_labelled(cli: Run, model: str) -> None:
    """B48: a score of the first few reads like one of the split, where a run ends, is read again, or kept."""
    ran = cli("train", *TRANSLATION, f"model={model}", "norm=rmsnorm", "task.score_sentences=7")
    assert ran.code == 0, ran.out
    [(run_id, record)] = records().items()
    [line] = [line for line in ran.out.splitlines() if line.startswith("completed in")]
    for name in ("val_bleu", "test_bleu", "test_chrf"):
        assert f"{name} {record['metrics'][name]:.4g} (7/20 sentences)" in line
    assert "test_loss" in line
    assert record["metric_notes"]["test_sentences"] == record["metric_notes"]["val_sentences"] == "7/20"
    assert Path("outputs/runs", run_id, "hypotheses_test.txt").read_text().count("\n") == 7
    told = figures(cli("eval", f"ckpt=outputs/runs/{run_id}"))
    assert told["test_sentences"] == told["val_sentences"] == "7/20"
    whole = cli("eval", f"ckpt=outputs/runs/{run_id}", "task.score_sentences=null").out
    assert "_sentences" not in whole
    with Path("outputs/runs", run_id, "metrics.csv").open(newline="") as file:
        assert list(csv.DictReader(file))[-1]["test_sentences"] == "7/20"


def test_a_whole_split_has_no_label(cli: Run, translator: Trained) -> None:
    """B48: the last batch is smaller than the others, and no sentence of it is missing."""
    assert not any(name.endswith("_sentences") for name in translator.record["metric_notes"])
    counts = json.loads((translator.path / "data.json").read_text())["splits"]
    for split in ("val", "test"):
        lines = (translator.path / f"hypotheses_{split}.txt").read_text().split("\n")[:-1]
        assert len(lines) == counts[split]["pairs"] == 20


@pytest.mark.parametrize("missing", [0, 1])
def test_an_empty_hypothesis_lowers_every_score(missing: int) -> None:
    """B48: an empty line is a hypothesis; dropped with its reference, the rest would look perfect."""
    hypotheses = [line if number != missing else "" for number, line in enumerate(REFERENCES)]
    scores = corpus_scores(hypotheses, REFERENCES)
    kept, lost = (4, 11) if missing == 0 else (11, 4)
    assert scores["bleu"] == pytest.approx(100 * math.exp(1 - (kept + lost) / kept), abs=1e-9)
    assert scores["chrf"] < 90
