"""A verdict for each claim, from what a study declares and what was found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.config.study import Relation, StudyConfig
from rmsrepro.paper import (
    ClaimOutcome,
    ClaimVerdict,
    Findings,
    NormCard,
    Quality,
    Timing,
    claims_text,
    counts,
    judge_claims,
    ledger,
    read_cards,
)
from rmsrepro.paper.study_files import cheapest_study
from rmsrepro.paper.verdicts import printed_text
from tests.paper.made import STUDY, TIMES, entry


def timing(norm: str, low: float, high: float, **changes: Any) -> Timing:
    params = {"p": 0.25} if norm == "prmsnorm" else {}
    made = Timing(
        level="model", cell="gru/translation", norm=norm, params=params, backend="composite",
        reduction=(low + high) / 2, low=low, high=high, trusted=True, mode="fwd_bwd", hardware="CPU",
    )  # fmt: skip
    return replace(made, **changes)


def quality(norm: str, outcome: str, cell: str = "gru/translation", **changes: Any) -> Quality:
    made = Quality(
        cell=cell, norm=norm, metric="val_loss", outcome=outcome, text=outcome,
        mean=0.0, low=-0.01, high=0.01, n=3, margin=0.05,
    )  # fmt: skip
    return replace(made, **changes)


def verdicts(study: StudyConfig | None = STUDY, **found: Any) -> dict[str, ClaimVerdict]:
    return {one.claim.id: one for one in judge_claims(study, Findings(**found))}


def outcomes(found: dict[str, ClaimVerdict], *claims: str) -> list[str]:
    return [found[claim].verdict.value for claim in claims]


def test_every_claim_has_a_verdict_in_the_papers_order() -> None:
    for study in (None, STUDY):
        found = judge_claims(study, Findings())
        assert [one.claim.id for one in found] == ledger().ids
        assert {one.verdict for one in found} == {ClaimOutcome.not_run}
        assert all(one.reason.endswith(".") for one in found)
        for one in found:
            assert one.testable or (one.command == "" and one.reason.startswith("Not testable here: "))


def test_what_was_not_run_says_what_would_run_it() -> None:
    found = verdicts()
    assert found["t2-rmsnorm-time"].command == "rmsrepro reproduce study=mine"
    assert found["t2-rmsnorm-time"].relation is Relation.proxy
    assert found["headline-rmsnorm"].command == "rmsrepro reproduce study=mine"
    assert found["t1-weightnorm-dataset-re-scaling"].command == "rmsrepro check-norm weightnorm"
    assert found["words-grad-w"].command == "rmsrepro check-norm rmsnorm"
    assert found["t7-rmsnorm-cap-r1"].command == ""
    other = found["words-l2"]  # a built-in study addresses it, this one does not
    assert (other.command, other.testable) == (
        f"rmsrepro reproduce study={cheapest_study()['words-l2']}",
        True,
    )
    assert other.reason == "The study mine does not address it."
    changed = verdicts(replace(STUDY, name="mine_modified"))
    assert changed["t2-rmsnorm-time"].command == "rmsrepro reproduce study=mine"
    without = verdicts(None)
    assert (
        without["t2-rmsnorm-time"].command
        == f"rmsrepro reproduce study={cheapest_study()['t2-rmsnorm-time']}"
    )
    assert without["t2-rmsnorm-time"].reason == "No study is chosen to address it."


def test_times_are_taken_from_the_level_cell_norm_and_backend_that_are_named() -> None:
    right = timing("rmsnorm", 5.0, 9.0, bench_id="newest")
    wrong = [
        timing("rmsnorm", -9.0, -8.0, level="step"),
        timing("rmsnorm", -9.0, -8.0, level="layer", cell=""),
        timing("rmsnorm", -9.0, -8.0, cell="transformer/translation"),
        timing("rmsnorm", -9.0, -8.0, backend="torch"),
        timing("prmsnorm", -9.0, -8.0, params={"p": 0.5}),
    ]
    older = timing("rmsnorm", -9.0, -8.0)
    found = verdicts(timings=(*wrong, right, older))
    assert (
        outcomes(found, "t2-rmsnorm-time", "t3th-rmsnorm-time", "t3py-rmsnorm-time") == ["direction only"] * 3
    )
    assert found["t2-rmsnorm-time"].measured == 7.0
    assert found["t2-rmsnorm-time"].interval == (5.0, 9.0)
    assert found["t2-rmsnorm-time"].printed == "24.7 % (sd 4.1) less time"
    assert found["t2-prmsnorm-time"].verdict is ClaimOutcome.not_run  # p = 0.5 is another arm


def test_a_norm_that_is_there_twice_is_told_apart_by_its_parameters() -> None:
    both = (timing("prmsnorm(p=0.5)", -4.0, -3.0, params={"p": 0.5}), timing("prmsnorm", 3.0, 4.0))
    for order in (both, both[::-1]):
        assert verdicts(timings=order)["t2-prmsnorm-time"].measured == 3.5


def test_a_statement_that_repeats_a_figure_is_judged_by_it() -> None:
    found = verdicts(timings=(timing("none", 20.0, 30.0),))["words-ln-slower-67"]
    assert (found.verdict, found.measured) == (ClaimOutcome.direction_only, 25.0)
    assert found.printed == "40.0 % (sd 3.0) less time, by its two times"


def test_a_faithful_study_reproduces() -> None:
    faithful = replace(STUDY, claims=[replace(TIMES, relation=Relation.faithful)])
    titan = {"hardware": "NVIDIA TITAN X (Pascal)"}
    found = verdicts(faithful, timings=(timing("rmsnorm", 20.0, 26.0, **titan),))
    assert outcomes(found, "t2-rmsnorm-time", "t3th-rmsnorm-time", "t3py-rmsnorm-time") == [
        "reproduced",  # 24.7 +- 8.2
        "direction only",  # 34.0 +- 4.9
        "direction only",  # 11.0 +- 5.2
    ]
    here = verdicts(faithful, timings=(timing("rmsnorm", 20.0, 26.0),))["t2-rmsnorm-time"]
    assert (here.verdict, here.relation) == (ClaimOutcome.direction_only, Relation.proxy)


def test_the_headline_and_its_halves_sum_up_the_tables() -> None:
    found = verdicts(
        timings=(
            timing("rmsnorm", 5.0, 9.0),
            timing("rmsnorm", 1.0, 2.0, cell="transformer/translation"),
            timing("prmsnorm", -3.0, -2.0),
        )
    )
    rms, partial, whole = (found[f"headline-{name}"] for name in ("rmsnorm", "prmsnorm", "7-64"))
    assert rms.verdict is ClaimOutcome.direction_only
    assert rms.reason == (
        "Of the 7 claims that it sums up: 4 direction only, 3 not run, measured 1.5 to 7.0 %."
    )
    assert (rms.printed, partial.printed, whole.printed) == ("6.9~40.8 %", "9.3~63.9 %", "7~64 %")
    assert partial.verdict is whole.verdict is ClaimOutcome.not_reproduced
    assert outcomes(found, "words-rnn-11-34", "words-transformer-7-9", "words-oe-40-64") == [
        "direction only",
        "direction only",
        "not run",
    ]


def test_prmsnorm_is_held_against_rmsnorm_in_every_cell() -> None:
    times = (timing("rmsnorm", 1.0, 2.0), timing("prmsnorm", -2.0, -1.0))
    other = tuple(replace(one, cell="transformer/translation") for one in times)
    assert verdicts(timings=times[:1])["words-prms-not-faster"].verdict is ClaimOutcome.not_run
    found = verdicts(timings=(*times, *other))["words-prms-not-faster"]
    assert (found.verdict, found.where) == (
        ClaimOutcome.direction_only,
        "gru/translation, transformer/translation",
    )


def test_qualities_are_judged_by_the_studys_verdicts() -> None:
    failing = quality("none", "different", "transformer/translation", direction="worse", learned=1.0)
    found = verdicts(
        qualities=(
            quality("rmsnorm", "equivalent"),
            quality("none", "different", direction="better"),
            replace(failing, reached=False),
            quality("rmsnorm", "different", "transformer/translation", direction="worse"),
        )
    )
    assert outcomes(found, "t2-rmsnorm-test14", "t2-rmsnorm-test17") == ["direction only"] * 2
    assert found["t2-rmsnorm-test14"].printed == "Test14 22.4 BLEU, LayerNorm 22.6"
    assert found["t2-baseline-test14"].verdict is ClaimOutcome.not_reproduced  # the paper has it worse
    assert outcomes(found, "words-transformer-needs-norm", "t4-baseline-test14") == ["direction only"] * 2


@pytest.mark.parametrize(
    ("outcome", "direction", "margin", "verdict"),
    [
        ("different", "worse", 0.5, "reproduced"),
        ("different", "better", 0.5, "not reproduced"),
        ("equivalent", "", 0.5, "not reproduced"),
        ("equivalent", "", 1.0, "reproduced"),  # the paper's own 0.9 BLEU is no difference then
        ("different", "worse", 1.0, "not reproduced"),
        ("undecided", "", 0.5, "undecided"),
    ],
)
def test_a_norm_that_the_paper_prints_lower_has_to_be_lower(
    outcome: str, direction: str, margin: float, verdict: str
) -> None:
    study = replace(
        STUDY, primary={"translation": "test_bleu"}, margin={"test_bleu": margin},
        claims=[entry("t2-baseline-test14", relation=Relation.faithful, cell="gru/translation")],
    )  # fmt: skip
    one = quality("none", outcome, metric="test_bleu", direction=direction, margin=margin)
    assert verdicts(study, qualities=(one,))["t2-baseline-test14"].verdict.value == verdict


def test_the_sweep_over_p_is_judged_as_a_whole() -> None:
    both = (quality("prmsnorm", "equivalent"), quality("prmsnorm_p50", "equivalent"))
    assert verdicts(qualities=both)["f3-p-insensitive"].verdict is ClaimOutcome.direction_only
    assert verdicts(qualities=both[:1])["f3-p-insensitive"].verdict is ClaimOutcome.not_run
    other = (both[0], quality("prmsnorm_p50", "different", direction="worse"))
    assert verdicts(qualities=other)["f3-p-insensitive"].verdict is ClaimOutcome.not_reproduced


def test_table_1_needs_no_study() -> None:
    held = {"weight_matrix_rescaling": True, "dataset_recentering": True}
    cards = {"rmsnorm": NormCard("rmsnorm", held, {}, {})}
    for study in (None, STUDY):
        found = verdicts(study, cards=cards)
        assert outcomes(
            found,
            "t1-rmsnorm-weight-matrix-re-scaling",
            "t1-rmsnorm-dataset-re-centering",
            "t1-rmsnorm-dataset-re-scaling",
            "t1-layernorm-weight-matrix-re-scaling",
        ) == ["reproduced", "not reproduced", "not run", "not run"]
        assert found["t1-rmsnorm-dataset-re-centering"].printed == "changed"


def test_what_nothing_here_tests_says_why() -> None:
    found = verdicts()
    for claim in ("t5-rmsnorm-mean-all", "t6-rmsnorm-time", "t7-prior-sym[32]-cap-r1", "t8-rmsnorm-time",
                  "t10-rmsnorm-test-error", "f4-rmsnorm-init0.2-last", "f1-baseline-time", "words-ar",
                  "t2-layernorm-time", "t4-layernorm-test14"):  # fmt: skip
        assert not found[claim].testable, claim
        assert found[claim].verdict is ClaimOutcome.not_run
    assert "compared with" in found["t2-layernorm-time"].reason


def test_counts_and_text() -> None:
    found = judge_claims(STUDY, Findings(timings=(timing("rmsnorm", 5.0, 9.0),)))
    assert sum(counts(found).values()) == len(found) == len(ledger())
    lines = claims_text(found)
    assert lines[0] == "the headline, and its halves"
    start = lines.index("time, % less than LayerNorm   paper          here                verdict")
    assert lines[start : start + 3] == [
        "time, % less than LayerNorm   paper          here                verdict",
        "gru/translation, model level, composite (proxy)",
        "  t2-rmsnorm-time             24.7 (sd 4.1)  7.0 [5.0, 9.0]      direction only",
    ]
    untestable = sum(not one.testable for one in found)
    told = " ".join(lines)
    assert "217 claims of the paper: " in told
    assert told.endswith(f" not run ({untestable} cannot be tested here)")
    assert not any("not run" in line for line in lines if line.startswith("  t"))
    assert max(map(len, lines)) < 80


def test_scores_that_one_measurement_stands_for_share_a_line() -> None:
    scores = [entry("t2-rmsnorm-test*", "t3*-rmsnorm-test*", cell="gru/translation")]
    study = replace(STUDY, claims=scores)
    found = judge_claims(study, Findings(qualities=(quality("rmsnorm", "equivalent", mean=0.004),)))
    assert claims_text(found)[:3] == [
        "quality, norm minus LayerNorm            here                    verdict",
        "gru/translation, val_loss (proxy)",
        "  RMSNorm, 6 scores of Table 2, Table 3  +0.004 [-0.010, 0.010]  direction only",
    ]


def test_what_was_not_reproduced_says_why() -> None:
    lines = claims_text(judge_claims(STUDY, Findings(timings=(timing("rmsnorm", -9.0, -5.0),))))
    (place,) = [number for number, line in enumerate(lines) if line.startswith("  t2-rmsnorm-time")]
    assert lines[place].endswith("not reproduced")
    assert lines[place + 1].startswith("    ")
    assert max(map(len, lines)) < 80


def test_the_properties_of_a_norm_share_a_line() -> None:
    held = {"weight_matrix_rescaling": True, "dataset_recentering": True}
    cards = {name: NormCard(name, held, {}, {}) for name in ("layernorm", "rmsnorm")}
    lines = claims_text(judge_claims(None, Findings(cards=cards)))
    assert lines[:3] == [
        "properties, on the norms' cards",
        "  LayerNorm: 1 reproduced, 1 not reproduced",
        "  RMSNorm: 1 reproduced, 1 not reproduced",
    ]


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        ("t4-rmsnorm-time", "6.9 % (sd 0.5) less time"),
        ("t2-layernorm-time", "training time 665 (sd 32.5) s / 1k steps"),
        ("t4-baseline-test14", "Test14 - BLEU, LayerNorm 26.6"),
        ("t5-rmsnorm-std-all", "std at token position ALL 1.5, LayerNorm 1.51"),
        ("t1-rmsnorm-dataset-re-scaling", "unchanged"),
        ("f3-p-insensitive", "about 23.6-24.1 BLEU"),
        ("words-l2", "the Euclidean norm in place of RMS does not work"),
    ],
)
def test_what_the_paper_has_in_short(claim: str, text: str) -> None:
    assert printed_text(ledger()[claim]) == text


# ----------------------------------------------------------------------------------------- cards on disk


def test_cards_are_read_whatever_lies_beside_them(tmp_path: Path) -> None:
    assert read_cards(tmp_path) == {}
    folder = tmp_path / "cards"
    folder.mkdir()
    off = {"dataset_rescaling": [1e-16, 2e-16], "dataset_recentering": ["inf"]}
    good = {
        "name": "rmsnorm",
        "invariances": {"dataset_rescaling": True, "odd": None},
        "invariance_details": {"deviations": off},
        "gradients": {"weight_unchanged_by_input_scale": {"holds": True}, "bias_unchanged": None},
    }
    (folder / "rmsnorm.json").write_text(json.dumps(good))
    (folder / "bare.json").write_text(json.dumps({"name": "bare", "invariances": {}}))
    for name, text in (
        ("broken", "{"),
        ("list", "[]"),
        ("empty", ""),
        ("odd", '{"name": "a", "invariances": 3}'),
    ):
        (folder / f"{name}.json").write_text(text)
    cards = read_cards(tmp_path)
    assert set(cards) == {"rmsnorm", "bare"}
    assert cards["rmsnorm"].invariances == {"dataset_rescaling": True}
    assert cards["rmsnorm"].deviations == {"dataset_rescaling": 2e-16, "dataset_recentering": float("inf")}
    assert cards["rmsnorm"].gradients["bias_unchanged"] is None


def test_a_timing_that_failed_hides_none_that_was_measured() -> None:
    failed = timing("rmsnorm", math.nan, math.nan, reduction=math.nan, flags=("out of memory",))
    measured = timing("rmsnorm", 5.0, 9.0)
    assert outcomes(verdicts(timings=(failed, measured)), "t2-rmsnorm-time") == ["direction only"]
    assert outcomes(verdicts(timings=(failed,)), "t2-rmsnorm-time") == ["not run"]


def test_two_norms_are_held_against_each_other_within_one_bench_only() -> None:
    claims = [entry("words-prms-not-faster")]
    study = replace(STUDY, claims=claims)
    apart = (timing("rmsnorm", 2.0, 4.0, bench_id="b"), timing("prmsnorm", 8.0, 9.0, bench_id="a"))
    assert outcomes(verdicts(study, timings=apart), "words-prms-not-faster") == ["not run"]
    together = (*apart, timing("rmsnorm", 11.0, 12.0, bench_id="a"))
    assert outcomes(verdicts(study, timings=together), "words-prms-not-faster") == ["direction only"]


def test_other_parameters_than_the_studys_are_another_norm() -> None:
    for params in ({"p": 0.5}, {}, {"p": 0.25, "eps": 0.1}):
        found = verdicts(timings=(timing("prmsnorm", 5.0, 9.0, params=params),))
        assert outcomes(found, "t2-prmsnorm-time") == ["not run"], params
    written_out = {"p": 0.25, "eps": 1e-5, "k_rule": "ceil"}
    found = verdicts(timings=(timing("prmsnorm", 5.0, 9.0, params=written_out),))
    assert outcomes(found, "t2-prmsnorm-time") == ["direction only"]
