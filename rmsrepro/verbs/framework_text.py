"""What `rmsrepro bench bench.framework=true` prints of the framework's own share of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

FRAMEWORK = "framework"
_WORDS = {"trainer": "Trainer alone", "records": "with records and clocks"}


def framework_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a difference: what is added to a step, in milliseconds, and what it makes of the time.

    Args:
        rows: of the table `extras`, those of the role `framework`.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("the framework's share", no_wrap=True)
    table.add_column("against", no_wrap=True)
    table.add_column("added to a step (95 %)", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    for row in rows:
        low, high = (1000 * value for value in row["difference_ci"])
        added = f"{1000 * row['difference_s']:+.3f} ms [{low:.3f}, {high:.3f}]"
        table.add_row(
            _words(row["arm"]), Text(_words(row["baseline"])), Text(added), Text(f"{row['ratio']:.3f}")
        )
    return table


def _words(label: str) -> str:
    """`layernorm+trainer/composite` is the Trainer alone, an arm without a plus the bare loop."""
    kind = label.rpartition("/")[0].rpartition("+")[2] if "+" in label else ""
    return _WORDS.get(kind, "bare loop")
