"""How scores such as BLEU were made: sacreBLEU's signature, and how many sentences of how many.

Two scores that were made in different ways are different quantities. So the page names the way once where all
runs agree, and says it where they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rmsrepro.report import formatting
from rmsrepro.report.cells import Arm, Cell
from rmsrepro.report.records import RunRecord
from rmsrepro.report.scorecard import Scorecard

MOST_NAMED = 3
"""Runs that are named one by one; of more than these only the number is told."""


@dataclass(frozen=True)
class ScoreNote:
    """A line below the table of qualities."""

    text: str
    doubt: bool = False
    """Whether runs of one cell made their scores in different ways, so that these are not comparable."""


def score_notes(card: Scorecard) -> list[ScoreNote]:
    """Return a line for each way in which a metric of the table was made, then those for cells with several.

    Metrics whose runs note nothing of it, such as losses, have no line.
    """
    ways: dict[tuple[str, str], list[Cell]] = {}
    doubts = []
    having: dict[str, int] = {}
    for cell in card.cells:
        for metric in _metrics(card, cell):
            made = _ways(cell, metric)
            having[metric] = having.get(metric, 0) + bool(made)
            if len(made) > 1:
                doubts.append(ScoreNote(_doubt(cell, metric, made), doubt=True))
            elif made:
                ways.setdefault((metric, next(iter(made))), []).append(cell)
    lines: dict[str, list[str]] = {}
    for (metric, way), cells in ways.items():
        where = (
            "" if len(cells) == having[metric] else f" ({formatting.join([cell.label for cell in cells])})"
        )
        lines.setdefault(way, []).append(f"{formatting.metric_title(metric)}{where}")
    return [*(ScoreNote(f"{formatting.join(names)}: {way}.") for way, names in lines.items()), *doubts]


def _metrics(card: Scorecard, cell: Cell) -> list[str]:
    """The metrics that the table shows of a cell."""
    rows = card.rows_of(cell)
    shown = [row.metric for row in card.baselines if row.cell is cell]
    shown += [metric for row in rows for metric in (row.metric, *(name for name, _ in row.secondary))]
    return list(dict.fromkeys(shown))


def _ways(cell: Cell, metric: str) -> dict[str, list[tuple[Arm, int]]]:
    """The ways in which the runs of a cell made a metric -> the arm and seed of those runs."""
    found: dict[str, list[tuple[Arm, int]]] = {}
    for arm in cell.arms:
        for seed, run in arm.runs.items():
            if run.value(metric) is not None:
                found.setdefault(_way(run, metric), []).append((arm, seed))
    return found if set(found) != {""} else {}


def _way(run: RunRecord, metric: str) -> str:
    """How a run made a metric; empty where it notes nothing of it."""
    signature = run.notes.get(f"{metric}_signature", "")
    split = metric.split("_", 1)[0]
    if not signature:
        return ""
    scored, slash, there = run.notes.get(f"{split}_sentences", "").partition("/")
    if slash:
        return f"sacreBLEU {signature}, the first {scored} of {there} sentences"
    whole = run.num_pairs.get(split)
    return f"sacreBLEU {signature}, all {f'{whole} ' if whole is not None else ''}sentences"


def _doubt(cell: Cell, metric: str, made: dict[str, list[tuple[Arm, int]]]) -> str:
    parts = [f"{way or 'no note of how'} ({_named(runs)})" for way, runs in made.items()]
    return (
        f"{cell.label}: runs made {formatting.metric_title(metric)} in {len(made)} ways, "
        f"so their scores are not comparable: {'; '.join(parts)}."
    )


def _named(runs: Sequence[tuple[Arm, int]]) -> str:
    if len(runs) > MOST_NAMED:
        return formatting.count(len(runs), "run")
    return ", ".join(f"{arm.label} seed {seed}" for arm, seed in runs)
