"""Verdicts on claims as plain lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from rmsrepro.paper.rules import ClaimOutcome
from rmsrepro.paper.verdicts import ClaimVerdict, counts


def claims_text(verdicts: Sequence[ClaimVerdict]) -> list[str]:
    """One line for each claim that something was measured for, by table, then how many came to what."""
    lines = []
    table = ""
    for one in verdicts:
        if one.verdict is ClaimOutcome.not_run:
            continue
        if one.claim.table != table:
            table = one.claim.table
            lines.append(f"{table}:")
        lines.append(f"  {one.claim.id}: {one.verdict.value}{_figures(one)}. {one.reason}")
    found = counts(verdicts)
    untestable = sum(not one.testable for one in verdicts)
    parts = [f"{number} {outcome.value}" for outcome, number in found.items() if number]
    lines.append(
        f"{len(verdicts)} claims of the paper: {', '.join(parts)} ({untestable} cannot be tested here)"
    )
    return lines


def _figures(one: ClaimVerdict) -> str:
    """` (printed ...; measured ... [...])`, as far as there is something to say."""
    if one.measured is None:
        return ""
    ends = "" if one.interval is None else f" [{one.interval[0]:.3g}, {one.interval[1]:.3g}]"
    relation = f"{one.relation.value}; " if one.relation else ""
    return f" ({relation}paper {one.printed}; here {one.measured:.3g}{ends} {one.unit})"
