"""Verdicts on claims as plain lines of text, for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from rmsrepro.paper.claims import Metric
from rmsrepro.paper.rules import TIME_UNIT, ClaimOutcome
from rmsrepro.paper.verdicts import ClaimVerdict, counts

WIDTH = 79
HEADLINE = "headline"
"""With what the ids of the headline and its two halves begin: they stand first."""


def claims_text(verdicts: Sequence[ClaimVerdict]) -> list[str]:
    """Return the claims that something was measured for in lines of at most 79 characters, then the counts.

    Times come in a table for each place that was timed, qualities as a line for each norm and cell, what is
    left with its reason. The page and claims.csv have the reason of each.
    """
    there = [one for one in verdicts if one.verdict is not ClaimOutcome.not_run]
    times = [one for one in there if one.unit == TIME_UNIT and one.measured is not None]
    qualities = [one for one in there if one not in times and one.measured is not None and one.interval]
    properties = [one for one in there if one.claim.metric is Metric.property]
    rest = [one for one in there if one not in (*times, *qualities, *properties)]
    untestable = sum(not one.testable for one in verdicts)
    total = f"{len(verdicts)} claims of the paper: {_counted(verdicts)} ({untestable} cannot be tested here)"
    headline = [one for one in rest if one.claim.id.startswith(HEADLINE)]
    return [
        *_other_lines("the headline, and its halves", headline),
        *_property_lines(properties),
        *_time_lines(times),
        *_quality_lines(qualities),
        *_other_lines("in words", [one for one in rest if one not in headline]),
        *textwrap.wrap(total, WIDTH),
    ]


def _property_lines(properties: Sequence[ClaimVerdict]) -> Iterator[str]:
    if properties:
        yield "properties, on the norms' cards"
    for norm, group in groupby(properties, key=lambda one: one.claim.norm):
        yield from _wrapped(f"{norm}: {_counted(list(group))}", "  ")


def _time_lines(times: Sequence[ClaimVerdict]) -> Iterator[str]:
    if times:
        yield f"{'time, % less than LayerNorm':30}{'paper':15}{'here':20}verdict"
    for where, group in groupby(sorted(times, key=lambda one: one.where), key=lambda one: one.where):
        found = list(group)
        yield f"{where} ({_relation(found)})"
        for one in found:
            paper = one.printed.partition(" less time")[0].replace(" %", "")
            yield f"  {one.claim.id:28}{paper:15}{_figures(one, 1):20}{one.verdict.value}"
            if one.verdict in (ClaimOutcome.not_reproduced, ClaimOutcome.undecided):
                yield from _wrapped(one.reason, "    ")


def _quality_lines(qualities: Sequence[ClaimVerdict]) -> Iterator[str]:
    def alike(one: ClaimVerdict) -> tuple[str, str, str]:
        return one.claim.norm, one.verdict.value, _figures(one, 3, sign="+")

    if qualities:
        yield f"{'quality, norm minus LayerNorm':41}{'here':24}verdict"
    seen = list(dict.fromkeys(one.claim.norm for one in qualities))
    ordered = sorted(qualities, key=lambda one: (one.where, seen.index(one.claim.norm)))
    for where, group in groupby(ordered, key=lambda one: one.where):
        members = list(group)
        yield f"{where} ({_relation(members)})"
        for (norm, verdict, figures), same in groupby(members, key=alike):
            found = list(same)
            tables = ", ".join(dict.fromkeys(one.claim.table for one in found))
            scores = f"{norm}, {len(found)} scores of {tables}" if norm else found[0].claim.id
            yield f"  {scores:39}{figures:24}{verdict}"


def _other_lines(head: str, rest: Sequence[ClaimVerdict]) -> Iterator[str]:
    if rest:
        yield head
    for one in rest:
        yield from _wrapped(f"{one.claim.id}: {one.verdict.value}. {one.reason}", "  ")


def _relation(found: Sequence[ClaimVerdict]) -> str:
    return ", ".join(dict.fromkeys(one.relation.value for one in found if one.relation)) or "faithful"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _counted(verdicts: Sequence[ClaimVerdict]) -> str:
    return ", ".join(f"{number} {outcome.value}" for outcome, number in counts(verdicts).items() if number)


def _figures(one: ClaimVerdict, decimals: int, *, sign: str = "-") -> str:
    """`15.8 [14.7, 16.8]`."""
    if one.measured is None or math.isnan(one.measured):
        return ""
    ends = "" if one.interval is None else " [{:.{n}f}, {:.{n}f}]".format(*one.interval, n=decimals)
    return f"{one.measured:{sign}.{decimals}f}{ends}"
