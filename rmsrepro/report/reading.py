"""The scorecard as sentences: what a reader takes home without reading a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmsrepro.paper import HEADLINE
from rmsrepro.report import formatting
from rmsrepro.report.verdict import Outcome

if TYPE_CHECKING:
    from rmsrepro.report.scorecard import Row, Scorecard

FOCUS = ("rmsnorm", "prmsnorm")
"""The paper's norms come first; the others follow."""


def read(card: Scorecard) -> tuple[str, ...]:
    """One sentence a norm: in how many cells it did what, and what its step cost; what waits shares one."""
    labels = list(dict.fromkeys((row.arm.norm, row.arm.label) for row in card.rows))
    labels.sort(key=lambda pair: FOCUS.index(pair[0]) if pair[0] in FOCUS else len(FOCUS))
    sentences = []
    waiting = []
    for norm, label in labels:
        rows = [row for row in card.rows if (row.arm.norm, row.arm.label) == (norm, label)]
        if not card.judged and not any(row.difference or row.step_time for row in rows):
            waiting.append(label)
            continue
        quality = _quality(rows, label, card) if card.judged else _numbers(rows, label, card)
        sentences.append(f"{quality}; {_time(rows)}.")
    if waiting:
        have, times = (
            ("has", "the time of its step was")
            if len(waiting) == 1
            else ("have", "the times of their steps were")
        )
        pair = f"no finished pair with {card.baseline} yet"
        sentences.append(f"{formatting.join(waiting)} {have} {pair}; {times} not benchmarked.")
    return tuple(sentences)


def paper_context() -> str:
    """The paper's headline, split by norm, as context: no verdict is drawn from it."""
    parts = [
        f"{formatting.norm_title(norm)} alone {low:g} to {high:g} %"
        for norm, (low, high) in HEADLINE.by_norm.items()
    ]
    parts[1:] = [part.replace(" alone", "") for part in parts[1:]]
    return (
        f"For context, the paper reports {HEADLINE.low:g} to {HEADLINE.high:g} % less time than LayerNorm "
        f"over its tasks and frameworks ({formatting.join(parts)}), with unfused code on the GPUs of 2019."
    )


def _quality(rows: list[Row], label: str, card: Scorecard) -> str:
    n = len(rows)
    equal = [row for row in rows if row.verdict.outcome is Outcome.equivalent]
    rest = []
    for words, outcome in (
        ("differed", Outcome.different),
        ("undecided", Outcome.undecided),
        ("incomplete", Outcome.incomplete),
    ):
        number = sum(row.verdict.outcome is outcome for row in rows)
        if number:
            rest.append(f"{number} {words}")
    others = f" ({formatting.join(rest)})" if rest else ""
    cells = "cell" if n == 1 else "cells"
    subject = "a model without a norm" if label == formatting.norm_title("none") else label
    return f"In {len(equal)} of {n} {cells} {subject} trained equivalently to {card.baseline}{others}"


def _numbers(rows: list[Row], label: str, card: Scorecard) -> str:
    """Without verdicts: the differences themselves, each named by its metric where they are of several."""
    whole = [row for row in rows if row.difference is not None]
    if not whole:
        return f"{label} has no finished pair with {card.baseline} yet"
    metrics = list(dict.fromkeys(formatting.metric_title(row.metric) for row in whole))
    parts = []
    for row in whole[:4]:
        change = formatting.signed(row.difference.mean if row.difference else None, row.decimals)
        unit = f" {formatting.metric_title(row.metric)}" if len(metrics) > 1 else ""
        parts.append(f"{change}{unit} in {row.cell.label}")
    if len(whole) > 4:
        parts.append(f"{len(whole) - 4} more")
    subject = "No norm" if label == formatting.norm_title("none") else label
    what = f", {metrics[0]}" if len(metrics) == 1 else ""
    seeds = "" if any(row.pairs.n > 1 for row in rows) else ", one seed, no verdict"
    return f"{subject} minus {card.baseline}{what}: {formatting.join(parts)}{seeds}"


def _time(rows: list[Row]) -> str:
    timed = [row.step_time for row in rows if row.step_time is not None and row.step_time.measured]
    if not timed:
        return "the time of its step was not benchmarked"
    ordered = sorted(timed, key=lambda time: time.comparison.reduction)
    low, high = ordered[0], ordered[-1]
    if low.words == high.words:
        span = low.words
    elif low.words.split()[-1] == high.words.split()[-1]:
        first, last = sorted((low, high), key=lambda time: abs(time.comparison.reduction))
        span = f"{first.words.rsplit(' ', 1)[0]} to {last.words}".replace(" % to ", " to ")
    else:
        span = f"from {low.words} to {high.words}"
    backends = formatting.join(list(dict.fromkeys(time.comparison.backend for time in timed)))
    notes = [f"{backends} backend"]
    spanning = sum(time.comparison.reduction_low <= 0 <= time.comparison.reduction_high for time in timed)
    if spanning:
        notes.append(f"the interval includes no change{_some(spanning, len(timed))}")
    untrusted = sum(not time.comparison.trusted for time in timed)
    if untrusted:
        notes.append(f"the bench does not trust its timing{_some(untrusted, len(timed))}")
    return f"a step took {span} time ({'; '.join(notes)})"


def _some(number: int, total: int) -> str:
    """` in 2 of 4`, or nothing when it is all of them."""
    return "" if number == total else f" in {number} of {total}"
