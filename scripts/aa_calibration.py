#!/usr/bin/env python
"""How often does a 95 % interval of the bench contain the truth? Times LayerNorm against itself, many times.

    python scripts/aa_calibration.py                     100 benches, about 40 minutes on two idle cores
    python scripts/aa_calibration.py --benches 10        a first look
    python scripts/aa_calibration.py --level step        of a training step instead of a layer
    python scripts/aa_calibration.py --show              what there is so far

Each bench times two independent LayerNorms of each backend in 8 fresh processes; the truth is a ratio of 1.
What it finds is appended to outputs/aa_calibration.jsonl, one line a bench and backend, so that the script
may be stopped and started again: it goes on until there are as many benches of these settings as asked for.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

COMMON = ["norm=layernorm", "backend=composite,torch", "bench.processes=8", "bench.rounds=20"]
LEVELS = {
    "layer": ["bench=layer", "bench.shapes=[2048x256]", "bench.modes=[fwd_bwd]", "bench.budget_s=20"],
    "step": ["bench=step", "model=gru", "model.d_model=64", "bench.budget_s=40", "bench.num_threads=1"],
}
WANTED = (0.90, 0.99)
"""Between these shares of intervals are to contain 1."""


def settings_of(level: str, extra: Sequence[str]) -> list[str]:
    """Return the overrides of `rmsrepro bench` that all benches of a calibration share."""
    merged = {text.partition("=")[0]: text for text in [*COMMON, *LEVELS[level], *extra]}
    return list(merged.values())


def read(file: Path, settings: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the lines of the file, of these settings only if given; damaged lines are left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and settings in (None, row.get("settings")):
            found.append(row)
    return found


def rows_of(result: Mapping[str, Any], settings: Sequence[str]) -> list[dict[str, Any]]:
    """Return a line for each A/A control of a bench."""
    loads = [
        found["other_load"]
        for process in result["processes"]
        for found in process.get("cells", {}).values()
        if isinstance(found.get("other_load"), float)
    ]
    return [
        {
            "settings": list(settings),
            "machine": result["machine"],
            "bench": result["bench_id"],
            "created": result["created"],
            "level": row["level"],
            "cell": row["cell"],
            "arm": row["arm"],
            "aa_ratio": row["aa_ratio"],
            "aa_ci": row["aa_ci"],
            "other_load": max(loads, default=None),
        }
        for row in result["aa"]
    ]


def append(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to the file; one that was cut off before stays a line of its own."""
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    cut = before != "" and not before.endswith("\n")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" + text if cut else text)


def contains(row: Mapping[str, Any]) -> bool:
    """Whether the interval of a line contains 1."""
    low, high = row["aa_ci"]
    return bool(low <= 1 <= high)


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the result as a Markdown table: a line for each cell and arm."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["level"], row["cell"], row["arm"]].append(row)
    lines = [
        "| level | cell | A/A of | benches | intervals with 1 | 95 % interval of the share "
        "| median half-width | largest deviation | with other load |",
        "|" + " --- |" * 9,
    ]
    for (level, cell, arm), own in groups.items():
        hits = sum(map(contains, own))
        low, high = share_interval(hits, len(own))
        widths = [math.log(row["aa_ci"][1] / row["aa_ci"][0]) / 2 for row in own]
        farthest = max(abs(row["aa_ratio"] - 1) for row in own)
        loud = sum((row["other_load"] or 0) > 0.15 for row in own)
        lines.append(
            f"| {level} | {cell} | {arm} | {len(own)} | {hits} | {100 * low:.0f} to {100 * high:.0f} % | "
            f"{100 * median(widths):.2f} % | {100 * farthest:.2f} % | {loud} |"
        )
    return lines


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """Return Clopper and Pearson's 95 % interval of a share of `hits` in `count`."""
    from scipy import stats

    found = stats.binomtest(hits, count).proportion_ci(0.95, method="exact")
    return float(found.low), float(found.high)


def run(file: Path, settings: Sequence[str], benches: int, out_dir: str) -> int:
    """Run benches until there are `benches` of these settings; return the exit code."""
    from rmsrepro.config.overrides import split_override
    from rmsrepro.verbs.timing import BenchFailed, prepare_bench, run_prepared_bench

    file.parent.mkdir(parents=True, exist_ok=True)
    failures = 0
    while (done := len({row["bench"] for row in read(file, settings)})) < benches:
        began = time.monotonic()
        overrides = [*settings, f"bench.seed={done}", f"out_dir={out_dir}"]
        try:
            result = run_prepared_bench(prepare_bench([split_override(text) for text in overrides])).result
        except BenchFailed as error:
            print(f"bench {done + 1} failed: {error}", file=sys.stderr)
            failures += 1
            if failures == 3:
                return 1
            continue
        append(file, rows_of(result, settings))
        left = (benches - done - 1) * (time.monotonic() - began) / 60
        print(f"bench {done + 1} of {benches} done, about {left:.0f} min to go", file=sys.stderr)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--benches", type=int, default=100, help="how many (100)")
    parser.add_argument("--level", choices=sorted(LEVELS), default="layer")
    parser.add_argument("--out-dir", default="outputs", help="where the records go (outputs)")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("overrides", nargs="*", help="further overrides of rmsrepro bench")
    options = parser.parse_args(arguments)
    settings = settings_of(options.level, options.overrides)
    file = Path(options.out_dir) / "aa_calibration.jsonl"
    code = 0 if options.show else run(file, settings, options.benches, options.out_dir)
    rows = read(file, settings)
    if not rows:
        print("no bench of these settings so far")
        return code
    print("\n".join(table(rows)))
    low, high = (round(100 * share) for share in WANTED)
    print(f"\nAn interval that keeps its word contains 1 in {low} to {high} of 100.")
    return code


if __name__ == "__main__":
    sys.exit(main())
