"""The rules: each outcome, and where it begins."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from rmsrepro.config.study import Relation
from rmsrepro.paper import ClaimOutcome, NormCard, Quality, Reduction, Timing, ledger
from rmsrepro.paper.combined import judge_every_p, judge_no_gain, judge_summary
from rmsrepro.paper.rules import (
    RULES,
    Expected,
    Judgement,
    judge_gradients,
    judge_property,
    judge_quality,
    judge_time,
    property_key,
    same_hardware,
)

CLAIM = ledger()["t3py-rmsnorm-time"]
PRINTED = Reduction(pct=10.0, sd=2.0, printed=True)  # its band: 6 to 14 %
TITAN = "NVIDIA TITAN X (Pascal)"


def timing(low: float, high: float, **changes: Any) -> Timing:
    made = Timing(
        level="step",
        cell="gru/translation",
        norm="rmsnorm",
        params={},
        backend="composite",
        reduction=(low + high) / 2,
        low=low,
        high=high,
        trusted=True,
        mode="step",
        hardware=TITAN,
    )
    return replace(made, **changes)


def judged(found: Timing | None, relation: Relation = Relation.faithful) -> Judgement:
    return judge_time(CLAIM, PRINTED, relation, found, "tiny models.")


@pytest.mark.parametrize(
    ("low", "high", "faithful", "proxy"),
    [
        (8.0, 12.0, "reproduced", "direction only"),
        (1.0, 6.0, "reproduced", "direction only"),  # it touches the lower end of the band
        (1.0, 5.99, "direction only", "direction only"),
        (14.0, 20.0, "reproduced", "direction only"),  # and the upper
        (14.01, 20.0, "direction only", "direction only"),
        (0.5, 30.0, "reproduced", "direction only"),
        (0.0, 12.0, "undecided", "undecided"),  # an end at 0 is 0 inside
        (-1.0, 0.0, "undecided", "undecided"),
        (-5.0, 20.0, "undecided", "undecided"),  # though it meets the band
        (-5.0, -0.01, "not reproduced", "not reproduced"),
        (0.01, 0.02, "direction only", "direction only"),
        (math.nan, math.nan, "undecided", "undecided"),
    ],
)
def test_a_time_by_its_interval(low: float, high: float, faithful: str, proxy: str) -> None:
    found = timing(low, high, reduction=5.0)
    assert judged(found).outcome.value == faithful
    assert judged(found, Relation.proxy).outcome.value == proxy


def test_what_is_said_of_a_time() -> None:
    found = judged(timing(8.0, 12.0))
    assert (found.measured, found.interval, found.unit) == (10.0, (8.0, 12.0), "% less time")
    assert found.where == "gru/translation, step level, composite"
    assert found.reason == "The interval meets the paper's 6.0 to 14.0 %."
    assert judged(timing(1.0, 5.0)).reason == "On the paper's side, but below its 6.0 to 14.0 %."
    assert judged(timing(15.0, 16.0)).reason == "On the paper's side, but above its 6.0 to 14.0 %."
    assert judged(timing(-3.0, -1.0)).reason == "More time than LayerNorm, where the paper has 10.0 % less."
    proxy = judged(timing(8.0, 12.0), Relation.proxy)
    said = "On the paper's side; the interval {} its 6.0 to 14.0 %. A proxy shows no more (tiny models)."
    assert proxy.reason == said.format("meets")
    assert judged(timing(1.0, 5.0), Relation.proxy).reason == said.format("lies below")
    assert judged(timing(15.0, 16.0), Relation.proxy).reason == said.format("lies above")
    assert judged(timing(-1.0, 1.0)).reason == "The interval contains 0."


def test_a_time_that_the_paper_has_longer_is_judged_on_its_own_side() -> None:
    slower = Reduction(pct=-10.0, sd=2.0, printed=False)
    for low, high, outcome in ((-12.0, -8.0, "reproduced"), (1.0, 2.0, "not reproduced")):
        found = judge_time(CLAIM, slower, Relation.faithful, timing(low, high), "")
        assert found.outcome.value == outcome
    assert found.reason == "Less time than LayerNorm, where the paper has 10.0 % more."


def test_without_a_spread_the_value_itself_has_to_be_met() -> None:
    bare = Reduction(pct=10.0, sd=math.nan, printed=False)
    assert judge_time(CLAIM, bare, Relation.faithful, timing(9.0, 10.0), "").outcome.value == "reproduced"
    assert judge_time(CLAIM, bare, Relation.faithful, timing(9.0, 9.9), "").outcome.value == "direction only"


@pytest.mark.parametrize(("low", "high"), [(8.0, 12.0), (-12.0, -8.0), (-1.0, 1.0)])
@pytest.mark.parametrize("relation", list(Relation))
def test_a_timing_without_trust_decides_nothing(low: float, high: float, relation: Relation) -> None:
    found = judged(timing(low, high, trusted=False, flags=("other load: 1.2 cores", "A/A")), relation)
    assert found.outcome is ClaimOutcome.undecided
    assert found.reason == "The bench does not trust this timing: other load: 1.2 cores; A/A."
    assert found.interval == (low, high)


def test_what_was_not_timed_is_not_run() -> None:
    assert judged(None).outcome is ClaimOutcome.not_run
    missing = judged(timing(math.nan, math.nan, flags=("prmsnorm has no torch backend",)))
    assert (missing.outcome, missing.measured) == (ClaimOutcome.not_run, None)
    assert missing.reason == "It could not be timed: prmsnorm has no torch backend."
    assert judged(timing(math.nan, math.nan)).reason == "It could not be timed: no ratio was measured."


@pytest.mark.parametrize(
    ("printed", "measured", "same"),
    [
        ("Tesla V100", "NVIDIA Tesla V100-SXM2-16GB", True),
        ("GeForce RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti", True),
        ("TITAN X (Pascal), 1 GPU", TITAN, True),
        ("TITAN X (Pascal), 1 GPU", "GeForce GTX TITAN X", False),
        ("Tesla V100", "Example CPU 9000", False),
        ("", "Example CPU 9000", False),
    ],
)
def test_hardware_is_told_by_its_name(printed: str, measured: str, same: bool) -> None:
    assert same_hardware(printed, measured) is same


def test_on_other_hardware_a_faithful_time_is_a_proxy() -> None:
    found = judged(timing(8.0, 12.0, hardware="Example CPU 9000"))
    assert (found.outcome, found.relation) == (ClaimOutcome.direction_only, Relation.proxy)
    assert "other hardware than TITAN X (Pascal), 1 GPU" in found.reason


# ------------------------------------------------------------------------------------------ quality


def quality(outcome: str, **changes: Any) -> Quality:
    made = Quality(
        cell="gru/translation",
        norm="rmsnorm",
        metric="val_loss",
        outcome=outcome,
        text=outcome,
        mean=0.01,
        low=-0.01,
        high=0.03,
        n=3,
        margin=0.05,
    )
    return replace(made, **changes)


WORSE = quality("different", text="different (worse)", direction="worse", low=0.06, high=0.2)
BETTER = quality("different", text="different (better)", direction="better", low=-0.2, high=-0.06)
LOST = quality("different", text="different (1 of 3 diverged)", mean=math.nan, low=math.nan, diverged=1)
UNTRAINED = quality("undecided", text="undecided (undertrained)")


@pytest.mark.parametrize(
    ("expected", "found", "faithful", "proxy"),
    [
        (Expected.comparable, quality("equivalent"), "reproduced", "direction only"),
        (Expected.comparable, WORSE, "not reproduced", "not reproduced"),
        (Expected.comparable, BETTER, "not reproduced", "not reproduced"),
        (Expected.comparable, LOST, "not reproduced", "not reproduced"),
        (Expected.comparable, quality("undecided"), "undecided", "undecided"),
        (Expected.comparable, UNTRAINED, "undecided", "undecided"),
        (Expected.comparable, quality("none", text=""), "undecided", "undecided"),
        (Expected.comparable, quality("incomplete"), "not run", "not run"),
        (Expected.comparable, None, "not run", "not run"),
        (Expected.worse, WORSE, "reproduced", "direction only"),
        (Expected.worse, LOST, "reproduced", "direction only"),
        (Expected.worse, BETTER, "not reproduced", "not reproduced"),
        (Expected.worse, quality("equivalent"), "not reproduced", "not reproduced"),
        (Expected.worse, quality("undecided"), "undecided", "undecided"),
        (Expected.better, BETTER, "reproduced", "direction only"),
        (Expected.better, WORSE, "not reproduced", "not reproduced"),
        (Expected.better, LOST, "not reproduced", "not reproduced"),
        (Expected.fails, LOST, "reproduced", "direction only"),
        (Expected.fails, replace(WORSE, learned=2.0, reached=False), "reproduced", "direction only"),
        (Expected.fails, replace(WORSE, learned=2.0), "direction only", "direction only"),
        (Expected.fails, quality("equivalent", learned=2.0), "not reproduced", "not reproduced"),
    ],
)
def test_a_quality_by_the_studys_verdict(
    expected: Expected, found: Quality | None, faithful: str, proxy: str
) -> None:
    assert judge_quality(expected, Relation.faithful, found, "why").outcome.value == faithful
    assert judge_quality(expected, Relation.proxy, found, "why").outcome.value == proxy


def test_what_is_said_of_a_quality() -> None:
    found = judge_quality(Expected.comparable, Relation.proxy, quality("equivalent"), "tiny models")
    assert (found.measured, found.interval, found.unit) == (0.01, (-0.01, 0.03), "val_loss")
    assert found.reason == "The study's verdict: equivalent. A proxy shows no more (tiny models)."
    worse = judge_quality(Expected.comparable, Relation.proxy, WORSE, "")
    assert worse.reason == "The paper has it as good as LayerNorm. The study's verdict: different (worse)."
    milder = judge_quality(Expected.fails, Relation.faithful, WORSE, "")
    assert milder.reason.startswith("Worse than LayerNorm, but not failing to train. ")
    lost = judge_quality(Expected.comparable, Relation.proxy, LOST, "")
    assert (lost.measured, lost.interval) == (None, None)
    missing = judge_quality(
        Expected.comparable, Relation.proxy, quality("incomplete", text="incomplete (1 of 3)"), ""
    )
    assert missing.reason == "Runs are missing: incomplete (1 of 3)."


# --------------------------------------------------------------------------------------------- cards


def card(**held: bool) -> NormCard:
    gradients = {
        "weight_unchanged_by_input_scale": {"holds": True, "deviation": 1e-15},
        "weight_inverse_to_weight_scale": {"holds": held.pop("inverse", True), "deviation": 1e-15},
        "bias_unchanged_by_input_scale": None,
    }
    return NormCard("rmsnorm", held, dict.fromkeys(held, 1e-16), gradients)


@pytest.mark.parametrize(("held", "outcome"), [(True, "reproduced"), (False, "not reproduced")])
def test_a_property_by_the_norms_card(held: bool, outcome: str) -> None:
    claim = ledger()["t1-rmsnorm-dataset-re-scaling"]
    found = judge_property(claim, card(dataset_rescaling=held))
    assert (found.outcome.value, found.relation) == (outcome, Relation.faithful)
    assert found.measured == 1e-16
    other = judge_property(ledger()["t1-rmsnorm-dataset-re-centering"], card(dataset_recentering=held))
    assert other.outcome.value == ("not reproduced" if held else "reproduced")
    assert judge_property(claim, None).outcome is ClaimOutcome.not_run
    assert judge_property(claim, card()).outcome is ClaimOutcome.not_run


def test_properties_have_the_names_of_the_cards() -> None:
    from rmsrepro.norms.card.invariance import INVARIANCES, PAPER

    printed = [claim for claim in ledger() if claim.id.startswith("t1-")]
    assert list(dict.fromkeys(property_key(claim.name) for claim in printed)) == list(INVARIANCES)
    for name, row in PAPER.items():
        assert tuple(claim.value for claim in printed if claim.ours == name) == row


def test_statements_on_gradients_by_the_norms_card() -> None:
    names = ("weight_unchanged_by_input_scale", "weight_inverse_to_weight_scale")
    assert judge_gradients(names, card()).outcome is ClaimOutcome.reproduced
    broken = judge_gradients(names, card(inverse=False))
    assert broken.outcome is ClaimOutcome.not_reproduced
    assert "not so: weight inverse to weight scale" in broken.reason
    partly = judge_gradients((*names, "bias_unchanged_by_input_scale"), card())
    assert partly.outcome is ClaimOutcome.reproduced
    assert "1 of 3 do not apply" in partly.reason
    assert judge_gradients(names, None).outcome is ClaimOutcome.not_run
    assert judge_gradients(("bias_unchanged_by_input_scale",), card()).outcome is ClaimOutcome.not_run


# ----------------------------------------------------------------------------- several measurements


def part(outcome: ClaimOutcome, measured: float | None = None) -> Judgement:
    return Judgement(outcome, "", Relation.faithful, measured)


def summed(*outcomes: ClaimOutcome) -> Judgement:
    return judge_summary({str(number): part(one) for number, one in enumerate(outcomes)})


def test_a_summary_is_as_good_as_its_weakest_part() -> None:
    good, half = ClaimOutcome.reproduced, ClaimOutcome.direction_only
    bad, open_, none = ClaimOutcome.not_reproduced, ClaimOutcome.undecided, ClaimOutcome.not_run
    assert summed(good, good).outcome is good
    assert summed(good, half).outcome is half
    assert summed(half, open_).outcome is open_
    assert summed(open_, bad, good).outcome is bad
    assert summed(good, none).outcome is half  # not all were run
    assert summed(bad, none).outcome is bad
    assert summed(open_, none).outcome is open_
    assert summed(none, none).outcome is none
    said = judge_summary({"a": part(good, 7.0), "b": part(half, 40.0), "c": part(none)})
    assert said.reason == (
        "Of the 3 claims that it sums up: 1 reproduced, 1 direction only, 1 not run, measured 7.0 to 40.0 %."
    )


def no_gain(*pairs: tuple[tuple[float, float], tuple[float, float]], **changes: Any) -> Judgement:
    made = [(timing(*rms, **changes), timing(*partial, norm="prmsnorm", **changes)) for rms, partial in pairs]
    return judge_no_gain(made, Relation.proxy, "why")


def test_no_consistent_gain_of_prmsnorm() -> None:
    apart, alike, slower = ((1.0, 2.0), (2.1, 3.0)), ((1.0, 2.0), (2.0, 3.0)), ((1.0, 2.0), (0.0, 0.9))
    assert no_gain().outcome is ClaimOutcome.not_run
    assert no_gain(apart, apart).outcome is ClaimOutcome.not_reproduced
    assert no_gain(apart, alike).outcome is ClaimOutcome.undecided
    assert no_gain(alike).outcome is ClaimOutcome.undecided
    assert no_gain(apart, slower).outcome is ClaimOutcome.direction_only
    assert no_gain(slower, trusted=False).outcome is ClaimOutcome.undecided
    made = [(timing(1.0, 2.0), timing(0.0, 0.9))]
    assert judge_no_gain(made, Relation.faithful, "").outcome is ClaimOutcome.reproduced


def test_every_p_has_to_be_as_good_as_layernorm() -> None:
    good, half = ClaimOutcome.reproduced, ClaimOutcome.direction_only

    def judged(*outcomes: ClaimOutcome, relation: Relation = Relation.proxy) -> ClaimOutcome:
        parts = {f"p{number}": part(one) for number, one in enumerate(outcomes)}
        return judge_every_p(parts, relation, "why").outcome

    assert judged(half, half) is half
    assert judged(good, good, relation=Relation.faithful) is good
    assert judged(half, ClaimOutcome.undecided) is ClaimOutcome.undecided
    assert judged(half, ClaimOutcome.undecided, ClaimOutcome.not_reproduced) is ClaimOutcome.not_reproduced
    assert judged(half, ClaimOutcome.not_run) is ClaimOutcome.not_run
    assert judged(half) is ClaimOutcome.not_run  # one p is no sweep


def test_the_rules_name_every_outcome() -> None:
    text = " ".join(RULES)
    assert all(f"{outcome.value}:" in text for outcome in ClaimOutcome)


def test_what_leaves_a_quality_undecided_is_said() -> None:
    outside = quality("undecided", mean=0.16, low=0.07, high=0.25)
    found = judge_quality(Expected.comparable, Relation.proxy, outside, "tiny")
    assert found.outcome is ClaimOutcome.undecided
    assert found.reason == (
        "The study's verdict: undecided. The 90 % interval lies outside the margin of +-0.05, but 3 seeds "
        "are too few to reject equality after Holm's adjustment; more seeds would tell."
    )
    wide = quality("undecided", mean=0.03, low=-0.02, high=0.08)
    found = judge_quality(Expected.comparable, Relation.proxy, wide, "tiny")
    assert found.reason.endswith(
        "The 90 % interval reaches beyond the margin of +-0.05; more seeds would narrow it."
    )
    found = judge_quality(Expected.comparable, Relation.proxy, UNTRAINED, "tiny")
    assert found.reason == "The study's verdict: undecided (undertrained)."
    trained = quality("undecided", mean=-0.03, low=-0.2, high=0.1, value=1.11, learned=1.4, reached=True)
    found = judge_quality(Expected.fails, Relation.proxy, trained, "tiny")
    assert found.outcome is ClaimOutcome.undecided
    assert (
        "It trained (val_loss 1.110, within the 1.4 that counts as trained), so it did not fail"
        in found.reason
    )
