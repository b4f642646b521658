"""Corpus scores of translations: BLEU (Papineni et al. 2002) and chrF (Popović 2015) by sacreBLEU.

The scores are those of Post 2018: on detokenised text, with the 13a tokeniser, mixed case and
exponential smoothing, as Zhang & Sennrich 2019, appendix A.1, state. The signatures go beside the
numbers into the records, so that nobody has to guess how they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from rmsrepro.config.errors import UserError


class CorpusScores(TypedDict):
    """BLEU and chrF, both from 0 to 100, and what sacreBLEU calls their signatures."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def corpus_scores(hypotheses: Sequence[str], references: Sequence[str]) -> CorpusScores:
    """Score plain-text hypotheses against one reference each; line i answers line i.

    An empty hypothesis counts like any other, and lowers the score.

    Raises:
        UserError: the two have different lengths (never cut to the shorter one), or are empty.
    """
    if len(hypotheses) != len(references):
        raise UserError(
            f"cannot score {len(hypotheses)} hypotheses against {len(references)} references: "
            "line i of one must answer line i of the other, so look for a line that is missing or split"
        )
    if not references:
        raise UserError("there is nothing to score: 0 hypotheses and 0 references")
    # Not before there is something to score: a language model never needs it.
    from sacrebleu.metrics import BLEU, CHRF

    bleu, chrf = BLEU(tokenize="13a", lowercase=False, smooth_method="exp"), CHRF()
    wrapped = [list(references)]
    return CorpusScores(
        bleu=float(bleu.corpus_score(hypotheses, wrapped).score),
        chrf=float(chrf.corpus_score(hypotheses, wrapped).score),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )
