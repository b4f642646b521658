from __future__ import annotations

import math

import pytest

from rmsrepro.config.errors import UserError
from rmsrepro.tasks.scoring import corpus_scores

REFERENCES = ["The cat doesn't sit on the mat, does it?", "Hello, world."]


@pytest.mark.parametrize(
    ("hypotheses", "bleu"),
    [
        (REFERENCES, 100.0),
        (["The cat does n't sit on the mat , does it ?", "Hello , world ."], 72.4158),
        ([line.lower() for line in REFERENCES], 82.6517),
    ],
    ids=["identical", "tokenised", "lower-case"],
)
def test_bleu_is_of_detokenised_mixed_case_text(hypotheses: list[str], bleu: float) -> None:
    assert corpus_scores(hypotheses, REFERENCES)["bleu"] == pytest.approx(bleu, abs=5e-5)


def test_signatures_say_how_the_scores_were_made() -> None:
    scores = corpus_scores(REFERENCES, REFERENCES)
    assert scores["chrf"] == pytest.approx(100.0)
    bleu, chrf = scores["bleu_signature"].split("|"), scores["chrf_signature"].split("|")
    assert {"nrefs:1", "case:mixed", "tok:13a", "smooth:exp"} <= set(bleu)
    assert {"nrefs:1", "case:mixed", "nc:6", "nw:0"} <= set(chrf)
    assert bleu[-1].startswith("version:2.")
    assert chrf[-1] == bleu[-1]


def test_unequal_counts_are_refused_with_both_counts() -> None:
    with pytest.raises(UserError, match=r"1 hypotheses against 2 references"):
        corpus_scores(REFERENCES[:1], REFERENCES)
    with pytest.raises(UserError, match=r"2 hypotheses against 1 references"):
        corpus_scores(REFERENCES, REFERENCES[:1])


def test_nothing_is_no_perfect_score() -> None:
    with pytest.raises(UserError, match="nothing to score"):
        corpus_scores([], [])


def test_an_empty_hypothesis_counts() -> None:
    with_gap = corpus_scores([REFERENCES[0], ""], REFERENCES)
    # 13a makes 11 and 4 tokens of the references; all 11 match, so only brevity costs: exp(1 - 15/11).
    assert with_gap["bleu"] == pytest.approx(100 * math.exp(1 - 15 / 11), abs=1e-9)
    assert with_gap["chrf"] < 90
