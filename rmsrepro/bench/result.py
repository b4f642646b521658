"""The content of a bench's result.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import rmsrepro
from rmsrepro.bench.cells import Arm, Cell
from rmsrepro.bench.levels import Level
from rmsrepro.bench.measuring import Measured
from rmsrepro.bench.record import ResultTables
from rmsrepro.bench.settings import agreed, settings_flags
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.plain import plain
from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.environment import machine

SCHEMA_VERSION = 2
"""1: one cell a bench, the fields of a process without `cells`. Readers take both."""
TABLES = ("arms", "comparisons", "across", "extras", "aa")


def bench_result(
    level: Level,
    config: BenchConfig,
    base: TrainConfig,
    arms: Sequence[Arm],
    cells: Sequence[Cell],
    measured: Measured,
) -> dict[str, Any]:
    """Put together what the processes found; JSON's types, but for the key, the notes and the times."""
    everyone = [measured.pilot, *measured.outcomes]
    device = measured.pilot["device"]
    settings = agreed([one["settings"] for one in everyone])
    run_facts = {"device": device, "threads": measured.pilot["threads"]}
    baselines = sum(arm.is_baseline for arm in arms if arm.unavailable is None)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    flags = [f"process {number + 1} failed: {reason}" for number, reason in measured.failures.items()]
    if len({one["threads"] for one in everyone}) > 1:
        flags.append("the processes did not all use the same number of threads")
    for cell in cells:
        pilot = measured.pilot["cells"][cell.name]
        tables = ResultTables(
            arms,
            measured.samples(cell.name),
            measured.of_cell(cell.name),
            config,
            _facts(level, base, cell) | run_facts | pilot.get("facts", {}),
            pilot=pilot,
            tests=max(config.cells, len(cells) * baselines),
            costs={arm.label: level.cost(arm, cell) for arm in arms},
            settings_flags=settings_flags(settings, device),
        )
        for name in TABLES:
            rows[name] += getattr(tables, name)()
        where = f" ({cell.name})" if len(cells) > 1 else ""
        for arm in arms:
            reason = tables.why_not_ranked(arm)
            if reason is not None:
                remark = f"{arm.label}: {reason}"
                flags.append(remark if arm.unavailable is not None else f"{remark}{where}")
    return {
        "schema_version": SCHEMA_VERSION,
        "status": "completed" if rows["aa"] else "incomplete",
        "study": base.study_name,
        **_common([_facts(level, base, cell) for cell in cells]),
        **run_facts,
        "cells": [{"name": cell.name, **asdict(cell)} for cell in cells],
        **rows,
        "flags": list(dict.fromkeys(flags)),
        "pilot": _without_samples(measured.pilot),
        "processes": [
            *(_without_samples(outcome) for outcome in measured.outcomes),
            *({"process": number, "error": reason} for number, reason in measured.failures.items()),
        ],
        "plan": asdict(measured.plan) if measured.plan is not None else None,
        "plan_reason": measured.plan.reason if measured.plan is not None else "no arm ran in the pilot",
        "bench": asdict(config),
        "config": plain(base),
        "machine": machine(),
        "settings": settings,
        "rmsrepro": rmsrepro.__version__,
    }


def _facts(level: Level, base: TrainConfig, cell: Cell) -> dict[str, Any]:
    return {"level": cell.level, **level.facts(base, cell), **asdict(cell), "cell": cell.name}


def _common(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what all cells share; null for what differs."""
    first = facts[0]
    return {
        key: value if all(one[key] == value for one in facts) else None
        for key, value in first.items()
        if key != "cell"
    }


def _without_samples(outcome: dict[str, Any]) -> dict[str, Any]:
    cells = {
        name: {key: value for key, value in found.items() if key != "samples"}
        for name, found in outcome["cells"].items()
    }
    return {**outcome, "cells": cells}
