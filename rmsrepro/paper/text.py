"""Verdicts on claims as plain lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rmsrepro.paper.claims import Metric
from rmsrepro.paper.rules import ClaimOutcome
from rmsrepro.paper.verdicts import ClaimVerdict, counts


def claims_text(verdicts: Sequence[ClaimVerdict]) -> list[str]:
    """One line for each claim that something was measured for, by table, then how many came to what.

    The properties of a norm share a line: `RMSNorm: 6 reproduced`.
    """
    lines = []
    there = [one for one in verdicts if one.verdict is not ClaimOutcome.not_run]
    for table, of_table in groupby(there, key=lambda one: one.claim.table):
        lines.append(f"{table}:")
        for head, group in groupby(of_table, key=_head):
            found = list(group)
            if found[0].claim.metric is Metric.property:
                lines.append(f"  {head}: {_counted(found)}")
            else:
                lines += [f"  {head}: {one.verdict.value}{_figures(one)}. {one.reason}" for one in found]
    untestable = sum(not one.testable for one in verdicts)
    lines.append(
        f"{len(verdicts)} claims of the paper: {_counted(verdicts)} ({untestable} cannot be tested here)"
    )
    return lines


def _head(one: ClaimVerdict) -> str:
    return one.claim.norm if one.claim.metric is Metric.property else one.claim.id


def _counted(verdicts: Sequence[ClaimVerdict]) -> str:
    return ", ".join(f"{number} {outcome.value}" for outcome, number in counts(verdicts).items() if number)


def _figures(one: ClaimVerdict) -> str:
    """` (proxy; paper ...; here ... [...])`, as far as there is something to say."""
    if one.measured is None:
        return ""
    ends = "" if one.interval is None else f" [{one.interval[0]:.3g}, {one.interval[1]:.3g}]"
    relation = f"{one.relation.value}; " if one.relation else ""
    return f" ({relation}paper {one.printed}; here {one.measured:.3g}{ends} {one.unit})"
