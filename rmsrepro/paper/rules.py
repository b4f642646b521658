"""The rules by which a claim is judged. They stand before the records do.

`RULES` is the text that is shown; each function applies one of them, in the same order, to one claim and what
was found of it. docs/claims.md says them at length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rmsrepro.config.study import Relation
from rmsrepro.paper.claims import Claim, Reduction
from rmsrepro.paper.findings import NormCard, Quality, Timing

RULES = (
    (
        "A study declares beforehand which claims it addresses, each as faithful (the paper's model, size "
        "class and data; for a time also the printed hardware) or as a proxy. The verdicts follow from "
        "records alone. For a time, the first that applies:"
    ),
    "not run: nothing was measured; the command that would measure it stands beside it, if there is one.",
    "undecided: the bench does not trust its timing, whatever the interval; or the interval contains 0.",
    "not reproduced: the interval excludes 0 on the other side than the paper's.",
    (
        "reproduced: the measurement is faithful, and its interval meets the paper's value +- 2 standard "
        "deviations, propagated from the printed times."
    ),
    (
        "direction only: the interval excludes 0 on the paper's side. More a proxy cannot say; a faithful "
        "measurement that misses the printed value says no more either."
    ),
    (
        "A quality is judged as the study judges it, over paired seeds: that RMSNorm and pRMSNorm do as well "
        "as LayerNorm holds where the verdict is equivalent (two one-sided tests within the study's margin), "
        "fails where it is different, and is undecided otherwise. A norm that the paper prints as worse has "
        "to be different, and worse."
    ),
    "A property of Table 1 is judged by the norm's card, measured on a single layer, which is faithful.",
    (
        "A claim that sums up others is as good as the weakest of them; where some were not run, it is at "
        "best direction only."
    ),
)
"""The text of the rules, in the order in which they apply."""


TIME_UNIT = "% less time"
"""Of what is measured for a time."""


class ClaimOutcome(Enum):
    """What a claim comes to."""

    reproduced = "reproduced"
    direction_only = "direction only"
    not_reproduced = "not reproduced"
    undecided = "undecided"
    not_run = "not run"


@dataclass(frozen=True)
class Judgement:
    """An outcome, the reason in a sentence, and what was measured."""

    outcome: ClaimOutcome
    reason: str
    relation: Relation | None = None
    measured: float | None = None
    interval: tuple[float, float] | None = None
    unit: str = ""
    where: str = ""


def judge_time(
    claim: Claim, printed: Reduction, relation: Relation, timing: Timing | None, why: str
) -> Judgement:
    """Judge a time reduction against LayerNorm, in per cent.

    Args:
        printed: what the paper's times amount to.
        relation: as the study declares it; on other hardware than the paper's a time is a proxy all the same.
        timing: the comparison that the study names; None if there is none.
        why: what makes the measurement faithful, or a proxy.
    """
    if timing is None:
        return Judgement(ClaimOutcome.not_run, "It was not timed.", relation)
    where = ", ".join(part for part in (timing.cell, f"{timing.level} level", timing.backend) if part)
    if math.isnan(timing.reduction):
        why_not = timing.flags[0] if timing.flags else "no ratio was measured"
        return Judgement(ClaimOutcome.not_run, f"It could not be timed: {why_not}.", relation, where=where)
    if relation is Relation.faithful and not same_hardware(claim.hardware, timing.hardware):
        relation, why = Relation.proxy, f"other hardware than {claim.hardware or 'the unnamed one'}"
    low, high = timing.low, timing.high

    def found(outcome: ClaimOutcome, reason: str) -> Judgement:
        interval = None if math.isnan(low) else (low, high)
        return Judgement(outcome, reason, relation, timing.reduction, interval, TIME_UNIT, where)

    if not timing.trusted:
        flags = f": {'; '.join(timing.flags)}" if timing.flags else ""
        return found(ClaimOutcome.undecided, f"The bench does not trust this timing{flags}.")
    if math.isnan(low) or math.isnan(high):
        return found(ClaimOutcome.undecided, "There is no interval to judge by.")
    if low <= 0 <= high:
        return found(ClaimOutcome.undecided, "The interval contains 0.")
    if (low > 0) is not (printed.pct > 0):
        words = ("more", "less") if printed.pct > 0 else ("less", "more")
        return found(
            ClaimOutcome.not_reproduced,
            f"{words[0].capitalize()} time than LayerNorm, where the paper has {abs(printed.pct):.1f} % "
            f"{words[1]}.",
        )
    least, most = printed.band
    meets = high >= least and low <= most
    beside = "below" if high < least else "above"
    if relation is Relation.proxy:
        size = "meets" if meets else f"lies {beside}"
        return found(
            ClaimOutcome.direction_only,
            f"On the paper's side; the interval {size} its {least:.1f} to {most:.1f} %. "
            f"A proxy shows no more ({why.rstrip('.')}).",
        )
    if meets:
        return found(ClaimOutcome.reproduced, f"The interval meets the paper's {least:.1f} to {most:.1f} %.")
    return found(
        ClaimOutcome.direction_only,
        f"On the paper's side, but {beside} its {least:.1f} to {most:.1f} %.",
    )


def same_hardware(printed: str, measured: str) -> bool:
    """Whether a machine is the one that the paper names, as in `Tesla V100` and `Tesla V100-SXM2-16GB`."""
    name = printed.split(",")[0].strip().lower()
    return bool(name) and name in measured.lower()


class Expected(Enum):
    """What the paper says of a norm's quality beside LayerNorm's."""

    comparable = "as good as LayerNorm"
    worse = "worse than LayerNorm"
    better = "better than LayerNorm"
    fails = "failing to train"


def judge_quality(expected: Expected, relation: Relation, quality: Quality | None, why: str) -> Judgement:
    """Judge a claim on quality by the study's verdict on the same norm."""
    if quality is None:
        return Judgement(ClaimOutcome.not_run, "No pair of runs was trained.", relation)
    where = f"{quality.cell}, {quality.metric}"
    if quality.outcome == "incomplete":
        return Judgement(ClaimOutcome.not_run, f"Runs are missing: {quality.text}.", relation, where=where)
    bare = math.isnan(quality.mean) or math.isnan(quality.low)
    measured = None if math.isnan(quality.mean) else quality.mean
    interval = None if bare else (quality.low, quality.high)

    def found(outcome: ClaimOutcome, reason: str) -> Judgement:
        return Judgement(outcome, reason, relation, measured, interval, quality.metric, where)

    verdict = quality.text or quality.outcome
    shown = f"The study's verdict: {verdict}."
    if quality.outcome not in ("equivalent", "different"):
        return found(ClaimOutcome.undecided, f"{shown}{_why_open(expected, quality)}")
    lost = quality.diverged > 0
    if expected is Expected.comparable:
        holds, wholly = quality.outcome == "equivalent", True
    elif expected is Expected.better:
        holds, wholly = quality.outcome == "different" and quality.direction == "better" and not lost, True
    else:
        worse = lost or (quality.outcome == "different" and quality.direction == "worse")
        failed = lost or (quality.learned is not None and not quality.reached)
        holds, wholly = worse, failed or expected is Expected.worse
    if not holds:
        return found(ClaimOutcome.not_reproduced, f"The paper has it {expected.value}. {shown}")
    if not wholly:
        return found(ClaimOutcome.direction_only, f"Worse than LayerNorm, but not {expected.value}. {shown}")
    if relation is Relation.proxy:
        return found(ClaimOutcome.direction_only, f"{shown} A proxy shows no more ({why.rstrip('.')}).")
    return found(ClaimOutcome.reproduced, shown)


def _why_open(expected: Expected, quality: Quality) -> str:
    """What leaves a quality undecided, and what a norm that should fail did; empty if nothing is to add."""
    words = []
    if (
        expected is Expected.fails
        and quality.reached
        and not quality.diverged
        and not math.isnan(quality.value)
    ):
        limit = "" if quality.learned is None else f", within the {quality.learned:g} that counts as trained"
        words.append(
            f"It trained ({quality.metric} {quality.value:.3f}{limit}), so it did not fail as in the paper; "
            "whether it is worse than LayerNorm is open."
        )
    if quality.outcome == "undecided" and quality.margin is not None and not math.isnan(quality.low):
        margin = f"the margin of +-{quality.margin:g}"
        if quality.low >= quality.margin or quality.high <= -quality.margin:
            words.append(
                f"The 90 % interval lies outside {margin}, but {quality.n} seeds are too few to reject "
                "equality after Holm's adjustment; more seeds would tell."
            )
        elif quality.low <= -quality.margin or quality.high >= quality.margin:
            words.append(f"The 90 % interval reaches beyond {margin}; more seeds would narrow it.")
    return "".join(f" {one}" for one in words)


def judge_property(claim: Claim, card: NormCard | None) -> Judgement:
    """Judge an entry of Table 1 by the norm's card."""
    name = property_key(claim.name)
    if card is None or name not in card.invariances:
        return Judgement(ClaimOutcome.not_run, "The norm has no card here.", Relation.faithful)
    held, off = card.invariances[name], card.deviations.get(name, math.nan)
    size = "" if math.isnan(off) else f" (by {off:.1g} of its size)"
    verdict = ClaimOutcome.reproduced if held is claim.value else ClaimOutcome.not_reproduced
    return Judgement(
        verdict,
        f"Measured: the output {'does not change' if held else 'changes'}{size}.",
        Relation.faithful,
        measured=None if math.isnan(off) else off,
        unit="relative change",
        where="the norm's card",
    )


def property_key(name: str) -> str:
    """The card's name of a property of Table 1: `weight_matrix_rescaling` of `weight matrix re-scaling`."""
    return name.replace("training case", "case").replace("re-", "re").replace(" ", "_")


def judge_gradients(names: Sequence[str], card: NormCard | None) -> Judgement:
    """Judge a statement on gradients by the norm's card; what it has no parameter for is left out."""
    there = {name: one for name in names if card is not None and (one := card.gradients.get(name))}
    if not there:
        return Judgement(ClaimOutcome.not_run, "The norm has no card here.", Relation.faithful)
    broken = [name for name, one in there.items() if one.get("holds") is not True]
    left_out = [name for name in names if name not in there]
    without = f" ({len(left_out)} of {len(names)} do not apply: no such parameter)" if left_out else ""
    text = f"not so: {', '.join(_words(name) for name in broken)}" if broken else "all hold"
    return Judgement(
        ClaimOutcome.not_reproduced if broken else ClaimOutcome.reproduced,
        f"Measured on the norm's card: {text}{without}.",
        Relation.faithful,
        where="the norm's card",
    )


def _words(name: str) -> str:
    return name.replace("_", " ")
