"""What `rmsrepro bench` prints: a table for each cell, in 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rmsrepro.verbs.framework_text import FRAMEWORK, framework_table

Row = Mapping[str, Any]

MOST_IN_A_LINE = 32
"""Characters of a line of an arm's name: with the numbers beside it, it is 80 at most."""
MOST_OF_A_PAIR = 23
"""The same where two arms stand in a line."""
MOST_BESIDE_COUNTS = 18
"""The same in a table that counts bytes."""


def print_bench(result: Row, screen: Console) -> None:
    """Print the tables of a bench, and what is to be known of them."""
    for cell in cells_of(result):
        screen.print(Text(_heading(result, cell), style="bold"))
        screen.print(cell_table(result, cell))
    for line in remarks(result):
        screen.print(Text(line), soft_wrap=True)


def cells_of(result: Row) -> list[str]:
    """Return the names of the cells; one without a name for a record of a single cell."""
    return list(dict.fromkeys(str(row.get("cell", "")) for row in result.get("arms", [])))


def _of(result: Row, table: str, cell: str) -> list[Row]:
    return [row for row in result.get(table, []) if str(row.get("cell", "")) == cell]


def _heading(result: Row, cell: str) -> str:
    row = next(iter(_of(result, "arms", cell)), {})
    keys = ("level", "model", "task", "shape", "mode", "dtype")
    what = dict.fromkeys(str(row[key]) for key in keys if row.get(key))
    counts = next(iter(_of(result, "comparisons", cell)), None)
    seen = f", {counts['n_processes']} processes, {counts['n_rounds']} rounds" if counts else ""
    threads = row.get("threads")
    return f"{' '.join(what)}: {row.get('device', '?')}, {threads} thread{'s' if threads != 1 else ''}{seen}"


def cell_table(result: Row, cell: str) -> RenderableType:
    """One line a measured arm: its time, what it saves of its baseline's, and how near it is to a copy."""
    arms = [row for row in _of(result, "arms", cell) if row.get("status", "measured") == "measured"]
    compared = {row["arm"]: row for row in _of(result, "comparisons", cell)}
    controls = {row["arm"]: row for row in _of(result, "aa", cell)}
    counted = any(row.get("gb_per_s") is not None for row in arms)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("arm", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("time saved (95 %)", justify="right", no_wrap=True)
    if counted:
        table.add_column("GB/s", justify="right", no_wrap=True)
        table.add_column("of copy", justify="right", no_wrap=True)
    for arm in arms:
        row = compared.get(arm["arm"])
        cells: list[str | Text] = [Text(_name(arm["arm"], counted)), _seconds(arm.get("median_s"))]
        if row is not None:
            low, high = row["time_reduction_ci"]
            saved = f"{row['time_reduction_pct']:.1f} % [{low:.1f}, {high:.1f}]"
            cells += [f"{row['ratio']:.3f}", Text(f"{saved} {' ' if row['trusted'] else '?'}")]
        elif arm["arm"] in controls:
            control = controls[arm["arm"]]
            low, high = control["aa_ci"]
            mark = " " if control["trusted"] else "?"
            cells += ["A/A", Text(f"{control['aa_ratio']:.3f} [{low:.3f}, {high:.3f}] {mark}")]
        else:
            cells += ["", ""]
        if counted:
            cells += [_number(arm.get("gb_per_s"), "{:.1f}"), _percent(arm.get("copy_share"))]
        table.add_row(*cells)
    across = _of(result, "across", cell)
    extras = _of(result, "extras", cell)
    shares = [row for row in extras if row["role"] == FRAMEWORK]
    parts: list[RenderableType] = [Text(_extra(row)) for row in extras if row["role"] != FRAMEWORK]
    if across:
        parts.append(_across_table(across))
    if shares:
        parts.append(framework_table(shares))
    return Group(table, *parts) if parts else table


def _across_table(rows: Sequence[Row]) -> RenderableType:
    """One line a pair of backends; the arms that are set against the same one stand together."""
    # Imported here: the report brings its plotting library along.
    from rmsrepro.report.formatting import folded

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("across backends", overflow="fold")
    table.add_column("set against", overflow="fold")
    table.add_column("time over its (95 %)", justify="right", no_wrap=True)
    for row in rows:
        low, high = row["ratio_ci"]
        mark = " " if row["trusted"] else "?"
        ratio = f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}] {mark}"
        table.add_row(*(Text(folded(row[name], MOST_OF_A_PAIR)) for name in ("arm", "baseline")), Text(ratio))
    return table


def _extra(row: Row) -> str:
    low, high = (1000 * value for value in row["difference_ci"])
    return (
        f"{row['arm']}: {row['ratio']:.3f} times {row['baseline']}, "
        f"{1000 * row['difference_s']:+.3f} ms a step [{low:.3f}, {high:.3f}]"
    )


def _name(arm: str, counted: bool) -> str:
    # Imported here: the report brings its plotting library along.
    from rmsrepro.report.formatting import folded

    return folded(arm, MOST_BESIDE_COUNTS if counted else MOST_IN_A_LINE)


def _seconds(value: float | None) -> str:
    # Imported here: the report brings its plotting library along.
    from rmsrepro.report import formatting

    return "-" if value is None else formatting.seconds(value)


def _number(value: float | None, pattern: str) -> str:
    return "" if value is None else pattern.format(value)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def remarks(result: Row) -> list[str]:
    """What stands under the tables: arms without a number, why times are not trusted, what is not known."""
    return [*_absent(result.get("arms", [])), *_distrust(result), *result.get("notes", [])]


def _absent(arms: Iterable[Row]) -> list[str]:
    """Each arm that was not measured once for each reason, with the cells where that is not all of them."""
    where: dict[str, list[str]] = {}
    cells = set()
    for row in arms:
        cells.add(row.get("cell", ""))
        if row.get("status", "measured") != "measured":
            line = f"{row['arm']}: {row['status']}: {row.get('reason', '')}"
            where.setdefault(line, []).append(str(row.get("cell", "")))
    return [
        line if len(found) == len(cells) else f"{line} ({', '.join(found)})" for line, found in where.items()
    ]


def _distrust(result: Row) -> list[str]:
    rows: Sequence[Row] = [*result.get("comparisons", []), *result.get("across", [])]
    doubted = [row for row in rows if not row["trusted"]]
    lines = []
    if doubted:
        kinds = Counter(kind for row in doubted for kind in dict.fromkeys(map(_kind, row["flags"])) if kind)
        why = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
        lines.append(f"? {len(doubted)} of {len(rows)} comparisons are not trusted: {why}")
    unknown = [flag.partition(":")[0] for row in rows for flag in row["flags"] if ": unknown" in flag]
    if unknown:
        lines.append(f"unknown, the system does not tell: {', '.join(dict.fromkeys(unknown))}")
    return lines


def _kind(flag: str) -> str:
    """`A/A` or `other load`: the flags that cost a comparison its trust."""
    kind = flag.partition(":")[0]
    return kind if kind in ("A/A", "other load") and ": unknown" not in flag else ""
