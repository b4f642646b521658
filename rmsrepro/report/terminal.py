"""The scorecard as a terminal table that keeps its numbers whole at 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmsrepro.report import formatting
from rmsrepro.report.reading import paper_context
from rmsrepro.report.scorecard import BaselineRow, Row, Scorecard
from rmsrepro.report.verdict import Outcome

STYLES = {
    Outcome.equivalent: "green",
    Outcome.different: "bold red",
    Outcome.undecided: "yellow",
    Outcome.incomplete: "magenta",
    Outcome.none: "",
}

NAME_WIDTH = 16
"""Most characters of a line of a norm's name, where it has a place to break."""


def print_scorecard(card: Scorecard, console: Console) -> None:
    """Print `card`: one block a cell, one line a norm, then the sentences that sum it up.

    Texts from records are printed as they are, never read as markup.
    """
    console.print(Text(card.title, style="bold"))
    if not card.rows:
        console.print(Text("No run to compare yet."))
    for cell in card.cells:
        rows = card.rows_of(cell)
        if not rows:
            continue
        console.print()
        baselines = [row for row in card.baselines if row.cell is cell]
        console.print(Text.assemble((cell.label, "bold"), f"  {_baseline_text(baselines, card)}"))
        console.print(_table(rows, card))
    if card.rows:
        console.print()
    for sentence in card.reading:
        console.print(Text(sentence))
    if card.why_not:
        console.print(Text(card.why_not.capitalize() + ".", style="dim"))
    if card.rows:
        console.print(Text(_legend(card), style="dim"))
        console.print(Text(paper_context(), style="dim"))


def _table(rows: list[Row], card: Scorecard) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    names = [formatting.folded(row.arm.label, NAME_WIDTH) for row in rows]
    pairs = [row.pairs.text for row in rows]
    table.add_column("norm", overflow="fold", min_width=_widest(names))
    table.add_column("difference (90 %)", no_wrap=True)
    if card.judged:
        table.add_column("verdict", overflow="fold")
    else:
        table.add_column("pairs", overflow="fold", min_width=_widest(pairs, ", "))
    timed = any(row.step_time is not None for row in rows)
    table.add_column("step time saved" + (" (95 %)" if timed else ""), no_wrap=True)
    for row, name in zip(rows, names, strict=True):
        verdict = row.verdict.text if card.judged else row.pairs.text
        table.add_row(
            Text(name),
            Text(row.difference_text),
            Text(verdict, style=STYLES[row.verdict.outcome]),
            _time_text(row),
        )
    return table


def _widest(texts: Sequence[str], between: str = "\n") -> int:
    return max((len(part) for text in texts for part in text.split(between)), default=0)


def _time_text(row: Row) -> Text:
    if row.step_time is None:
        return Text("-")
    mark = "" if row.step_time.comparison.trusted or not row.step_time.measured else " ?"
    saved, percent, ends = row.step_time.text.partition(" %")
    return Text(f"{saved:>5}{percent}{ends}{mark}")


def _baseline_text(baselines: list[BaselineRow], card: Scorecard) -> str:
    known = [row for row in baselines if not math.isnan(row.mean)]
    if not known:
        return f"{card.baseline}: no finished run"
    row = known[0]
    decimals = 2 if any(word in row.metric for word in ("bleu", "chrf")) else 4
    value = formatting.number(row.mean, decimals)
    return f"{card.baseline}: {row.metric} {value} ({formatting.count(row.n, 'seed')})"


def _legend(card: Scorecard) -> str:
    text = f"Difference: norm minus {card.baseline} at the last step, paired by seed."
    if any(row.step_time is not None and not row.step_time.comparison.trusted for row in card.rows):
        text += " ?: the bench does not trust this timing."
    return text
