"""Tunings as terminal tables of at most 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmsrepro.report import formatting
from rmsrepro.report.terminal import NAME_WIDTH, STYLES
from rmsrepro.report.tunings import TunedArm, Tuning

HEADS = {"lr": "best lr", "warmup_steps": "warm-up", "weight_decay": "decay"}


def print_tunings(tunings: Sequence[Tuning], console: Console) -> None:
    """Print each tuning: the best point of each norm, its final runs, and these against the baseline's.

    Texts from records are printed as they are, never read as markup.
    """
    for tuning in tunings:
        console.print(Text(f"Tuning: {tuning.cell.label}, {tuning.record.metric}", style="bold"))
        console.print(_table(tuning))
        for arm in tuning.arms:
            if arm.lost_text:
                console.print(Text(f"{arm.arm.label}: {arm.lost_text} trials"))
        for arm in tuning.arms:
            row = tuning.row_of(arm)
            if row is None:
                continue
            line = Text(f"{arm.arm.label} - {tuning.card.baseline}: {row.difference_text}")
            if tuning.card.judged:
                line.append("  ").append(row.verdict.text, style=STYLES[row.verdict.outcome])
            else:
                line.append(f"  {row.pairs.text}")
            console.print(line)
        for warning in tuning.warnings:
            console.print(Text(f"warning: {warning}"))
        console.print()


def _table(tuning: Tuning) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column("norm", overflow="fold")
    for key in tuning.tuned:
        table.add_column(HEADS[key], justify="right", no_wrap=True)
    table.add_column("best trial", justify="right", no_wrap=True)
    table.add_column("final runs", justify="right", no_wrap=True)
    table.add_column("lost", justify="right", no_wrap=True)
    for arm in tuning.arms:
        best = arm.best
        table.add_row(
            Text(formatting.folded(arm.arm.label, NAME_WIDTH)),
            *(f"{best.point[key]:.4g}" if best else "-" for key in tuning.tuned),
            formatting.number(best.value if best else None, 4),
            final_text(tuning, arm),
            f"{lost} of {len(arm.trials)}" if (lost := sum(trial.lost for trial in arm.trials)) else "-",
        )
    return table


def final_text(tuning: Tuning, arm: TunedArm) -> str:
    """`2.0131 (3)`: the mean over the final runs that finished, and how many; of those that were to be."""
    values, planned = arm.final_values(tuning.record.metric), len(tuning.record.final_seeds)
    if arm.best is None or not values:
        return "-"
    share = f"{len(values)}" if len(values) == planned else f"{len(values)} of {planned}"
    return f"{formatting.number(math.fsum(values) / len(values), 4)} ({share})"
