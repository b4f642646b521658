"""The verdicts on the paper's claims as a page and a table show them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import pandas as pd

from rmsrepro.paper import ClaimOutcome, ClaimVerdict, Metric, ledger
from rmsrepro.paper.rules import TIME_UNIT
from rmsrepro.paper.statements import counterpart
from rmsrepro.paper.text import HEADLINE
from rmsrepro.report import formatting

COLUMNS = [
    *("id", "table", "task", "framework", "model", "norm", "metric", "printed", "paper_pct", "paper_sd"),
    *("relation", "verdict", "measured", "low", "high", "confidence", "unit", "where", "reason", "command"),
]


@dataclass(frozen=True)
class ClaimLine:
    """A line of the scorecard of claims: a claim, or several of a norm that came to the same."""

    table: str
    head: str
    """The claims' ids, or how many properties of which norm."""
    about: str
    """Norm and metric, and where the paper has them."""
    printed: str
    measured: str
    """`17.1 [14.9, 19.2] % less time`; empty for what has no number."""
    relation: str
    outcome: ClaimOutcome
    reason: str
    where: str


@dataclass(frozen=True)
class ClaimLines:
    """All claims: those with a verdict, line by line, and those without, by what would run them."""

    judged: tuple[ClaimLine, ...]
    waiting: tuple[tuple[str, tuple[str, ...]], ...]
    """(command, ids) of what was not run."""
    untestable: tuple[tuple[str, tuple[str, ...]], ...]
    """(reason, ids) of what nothing in the package tests."""
    counts: tuple[tuple[str, str, int], ...]
    """(class, words, number), as the badges have it."""
    total: int


def claim_lines(verdicts: Sequence[ClaimVerdict]) -> ClaimLines:
    """Sort the verdicts into what a page shows."""
    there = [one for one in verdicts if one.verdict is not ClaimOutcome.not_run]
    tables = list(dict.fromkeys(one.claim.table for one in there))
    there.sort(key=lambda one: (not one.claim.id.startswith(HEADLINE), tables.index(one.claim.table)))
    judged = []
    for _, group in groupby(there, key=_together):
        members = list(group)
        judged.append(_together_line(members))
    waiting: dict[str, list[str]] = defaultdict(list)
    untestable: dict[str, list[str]] = defaultdict(list)
    for one in verdicts:
        if one.verdict is ClaimOutcome.not_run:
            if one.testable:
                waiting[one.command].append(one.claim.id)
            else:
                untestable[one.reason.removeprefix("Not testable here: ").rstrip(".")].append(one.claim.id)
    numbers = [
        (outcome.name, outcome.value, sum(one.verdict is outcome and one.testable for one in verdicts))
        for outcome in ClaimOutcome
    ]
    numbers.append(("not_run", "cannot be tested here", sum(not one.testable for one in verdicts)))
    return ClaimLines(
        judged=tuple(judged),
        waiting=tuple((command, tuple(ids)) for command, ids in waiting.items()),
        untestable=tuple((reason, tuple(ids)) for reason, ids in untestable.items()),
        counts=tuple(one for one in numbers if one[-1]),
        total=len(verdicts),
    )


def _together(one: ClaimVerdict) -> tuple[object, ...]:
    """Properties of a norm that came to the same share a line, as do scores that one measurement judges."""
    claim = one.claim
    if claim.metric is Metric.property:
        return claim.norm, one.verdict
    if claim.metric is Metric.quality:
        return claim.table, claim.framework, claim.norm, one.where, one.measured, one.verdict, one.reason
    return (claim.id,)


def _together_line(members: Sequence[ClaimVerdict]) -> ClaimLine:
    first = _line(members[0])
    if len(members) == 1:
        return first
    if members[0].claim.metric is Metric.property:
        return _properties(members)
    return replace(
        first,
        head=", ".join(one.claim.id for one in members),
        about=_about(members[0], " and ".join(one.claim.name for one in members)),
        printed="; ".join(one.printed for one in members),
    )


def _properties(members: Sequence[ClaimVerdict]) -> ClaimLine:
    first = members[0]
    printed = [f"{one.claim.name}: {one.printed}" for one in members]
    return ClaimLine(
        table=first.claim.table,
        head=f"{first.claim.norm}, {len(members)} properties",
        about="; ".join(printed),
        printed="",
        measured="",
        relation=first.relation.value if first.relation else "",
        outcome=first.verdict,
        reason="On the norm's card each is as the paper has it."
        if first.verdict is ClaimOutcome.reproduced
        else " ".join(dict.fromkeys(one.reason for one in members)),
        where=first.where,
    )


def _line(one: ClaimVerdict) -> ClaimLine:
    claim = one.claim
    return ClaimLine(
        table="The headline, and its halves" if claim.id.startswith(HEADLINE) else claim.table,
        head=claim.id,
        about=_about(one, claim.name),
        printed=one.printed,
        measured=_measured(one),
        relation=one.relation.value if one.relation else "",
        outcome=one.verdict,
        reason=one.reason,
        where=one.where,
    )


def _about(one: ClaimVerdict, names: str) -> str:
    claim = one.claim
    if claim.metric is Metric.statement:
        return "" if one.printed == claim.value else str(claim.value)
    about = " ".join(filter(None, (claim.norm, names)))
    place = ", ".join(part for part in (claim.model, claim.framework) if part not in ("", "all"))
    return f"{about}; {place}" if place else about


def _measured(one: ClaimVerdict) -> str:
    if one.measured is None or math.isnan(one.measured):
        return ""
    decimals = 1 if "%" in one.unit else 4
    ends = "" if one.interval is None else formatting.interval(*one.interval, decimals)
    unit = formatting.metric_title(one.unit)
    if decimals == 1:
        return " ".join(filter(None, (formatting.number(one.measured, decimals), ends, unit)))
    return " ".join(filter(None, (formatting.signed(one.measured, decimals), ends, unit)))


def claims_table(verdicts: Sequence[ClaimVerdict]) -> pd.DataFrame:
    """Return one row a claim, in the paper's order: COLUMNS."""
    rows = []
    for one in verdicts:
        reduction = ledger().reduction(counterpart(one.claim))
        low, high = one.interval or (None, None)
        confidence = "" if one.interval is None else "95 %" if one.unit == TIME_UNIT else "90 %"
        rows.append(
            {
                "id": one.claim.id,
                "table": one.claim.table,
                "task": one.claim.task,
                "framework": one.claim.framework,
                "model": one.claim.model,
                "norm": one.claim.norm,
                "metric": one.claim.name,
                "printed": one.printed,
                "paper_pct": None if reduction is None else reduction.pct,
                "paper_sd": None if reduction is None else reduction.sd,
                "relation": one.relation.value if one.relation else "",
                "verdict": one.verdict.value,
                "measured": one.measured,
                "low": low,
                "high": high,
                "confidence": confidence,
                "unit": one.unit,
                "where": one.where,
                "reason": one.reason,
                "command": one.command,
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)
