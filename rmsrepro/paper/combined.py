"""The rules for claims that rest on several measurements at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rmsrepro.config.study import Relation
from rmsrepro.paper.findings import Timing
from rmsrepro.paper.rules import ClaimOutcome, Judgement

ORDER = (
    ClaimOutcome.not_reproduced,
    ClaimOutcome.undecided,
    ClaimOutcome.direction_only,
    ClaimOutcome.reproduced,
)
"""From the weakest to the best."""


def judge_summary(parts: Mapping[str, Judgement]) -> Judgement:
    """Judge a claim that sums up others: the weakest of those that were run, not all: a direction at best."""
    run = {name: one for name, one in parts.items() if one.outcome is not ClaimOutcome.not_run}
    if not run:
        return Judgement(ClaimOutcome.not_run, "None of the claims that it sums up was run.")
    outcome = min((one.outcome for one in run.values()), key=ORDER.index)
    counts = [
        f"{number} {one.value}"
        for one in reversed(ORDER)
        if (number := sum(part.outcome is one for part in run.values()))
    ]
    if len(run) < len(parts):
        outcome = min(outcome, ClaimOutcome.direction_only, key=ORDER.index)
        counts.append(f"{len(parts) - len(run)} not run")
    values = [one.measured for one in run.values() if one.measured is not None]
    proxy = any(one.relation is Relation.proxy for one in run.values())
    span = f", measured {min(values):.1f} to {max(values):.1f} %" if values else ""
    return Judgement(
        outcome,
        f"Of the {len(parts)} claims that it sums up: {', '.join(counts)}{span}.",
        Relation.proxy if proxy else Relation.faithful,
    )


def judge_no_gain(pairs: Sequence[tuple[Timing, Timing]], relation: Relation, why: str) -> Judgement:
    """Judge "pRMSNorm is sometimes slower than RMSNorm, no consistent gain" by the two in each cell.

    The two share a LayerNorm, so their intervals stand against each other: one is faster where its interval
    lies wholly beyond the other's.
    """
    sound = [pair for pair in pairs if all(one.trusted and not math.isnan(one.low) for one in pair)]
    if not pairs:
        return Judgement(ClaimOutcome.not_run, "The two were not timed together.", relation)
    where = ", ".join(rms.cell for rms, _ in pairs)
    if not sound:
        return Judgement(
            ClaimOutcome.undecided, "The bench trusts none of these timings.", relation, where=where
        )
    faster = [partial.cell for rms, partial in sound if partial.low > rms.high]
    slower = [partial.cell for rms, partial in sound if partial.high < rms.low]
    if slower:
        mixed = f" and faster in {', '.join(faster)}" if faster else ""
        text = f"pRMSNorm was slower in {', '.join(slower)}{mixed}."
        if relation is Relation.faithful:
            return Judgement(ClaimOutcome.reproduced, text, relation, where=where)
        text += f" A proxy shows no more ({why.rstrip('.')})."
        return Judgement(ClaimOutcome.direction_only, text, relation, where=where)
    if len(faster) == len(pairs):
        return Judgement(
            ClaimOutcome.not_reproduced,
            f"pRMSNorm was faster in every cell that was timed ({len(pairs)}).",
            relation,
            where=where,
        )
    return Judgement(
        ClaimOutcome.undecided,
        f"pRMSNorm was faster in {len(faster)} of {len(pairs)} cells, not to be told apart in the others.",
        relation,
        where=where,
    )


def judge_every_p(parts: Mapping[str, Judgement], relation: Relation, why: str) -> Judgement:
    """Judge "quality hardly depends on p" by each pRMSNorm's verdict: all have to be as good as LayerNorm."""
    missing = [name for name, one in parts.items() if one.outcome is ClaimOutcome.not_run]
    if len(parts) < 2 or missing:
        what = f"missing: {', '.join(missing)}" if missing else "it takes two values of p"
        return Judgement(ClaimOutcome.not_run, f"The sweep over p is not whole ({what}).", relation)
    where = next(iter(parts.values())).where
    other = {name: one for name, one in parts.items() if one.outcome is ClaimOutcome.not_reproduced}
    open_ = [name for name, one in parts.items() if one.outcome is ClaimOutcome.undecided]
    if other:
        text = f"Not as good as LayerNorm, or not alike: {', '.join(other)}."
        return Judgement(ClaimOutcome.not_reproduced, text, relation, where=where)
    if open_:
        return Judgement(ClaimOutcome.undecided, f"Undecided for {', '.join(open_)}.", relation, where=where)
    text = f"All {len(parts)} values of p are equivalent to LayerNorm."
    if relation is Relation.faithful:
        return Judgement(ClaimOutcome.reproduced, text, relation, where=where)
    text += f" A proxy shows no more ({why.rstrip('.')})."
    return Judgement(ClaimOutcome.direction_only, text, relation, where=where)
