"""results.csv: one row a run, with settings, metrics and clocks. across.csv: one row a pair of arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from rmsrepro.report.cells import flatten
from rmsrepro.report.records import RunRecord
from rmsrepro.report.timing import StepTime

LEADING = [
    "run_id",
    "status",
    "norm",
    "model",
    "task",
    "data",
    "seed",
    "backend",
    "placement",
    "precision",
    "study",
    "steps",
    "n_parameters",
    "error",
    "flags",
    "backend_note",
    "role",
]

ACROSS = [
    *("level", "model", "task", "shape", "mode", "dtype", "device", "threads", "machine"),
    *("arm", "baseline", "ratio", "low", "high", "n_processes", "n_rounds", "trusted", "bench"),
]


def results_table(runs: Sequence[RunRecord], roles: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Return one row a run: LEADING, then `metrics.*`, `clocks.*` and `config.*` columns, each sorted.

    Args:
        roles: run id -> what it is to a tuning; runs that it does not name are of none.
    """
    rows = [{**_row(run), "role": (roles or {}).get(run.run_id, "")} for run in runs]
    seen = {key for row in rows for key in row}
    groups = [
        sorted(key for key in seen if key.startswith(prefix)) for prefix in ("metrics.", "clocks.", "config.")
    ]
    columns = [*LEADING, *(key for group in groups for key in group)]
    return pd.DataFrame(rows, columns=columns, dtype=object)


def _row(run: RunRecord) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run_id": run.run_id,
        "status": run.state.value,
        "norm": run.norm,
        "model": run.model,
        "task": run.task,
        "data": run.data,
        "seed": run.seed,
        "backend": run.backend,
        "placement": run.placement,
        "precision": run.precision,
        "study": run.study,
        "steps": run.steps,
        "n_parameters": run.n_parameters,
        "error": " ".join(run.error.split()),
        "flags": " ".join(run.flags),
        "backend_note": " ".join(run.backend_note.split()),
    }
    row |= {f"metrics.{key}": value for key, value in run.metrics.items()}
    if not run.contended:  # as everywhere, times that mean little are not quoted
        row |= {f"clocks.{key}": value for key, value in run.clocks.items()}
    row |= {f"config.{key}": value for key, value in flatten(run.config).items()}
    return row


def across_table(times: Sequence[StepTime]) -> pd.DataFrame:
    """Return one row a pair of arms on two backends: ACROSS. `low` to `high` is the ratio's 95 % interval."""
    rows = []
    for time in times:
        c = time.comparison
        row = {key: getattr(c, key) for key in ACROSS if hasattr(c, key)}
        row |= {"arm": f"{c.norm}/{c.backend}", "baseline": f"{c.baseline_norm}/{c.baseline_backend}"}
        row |= {"low": c.ratio_low, "high": c.ratio_high, "machine": time.machine, "bench": time.bench_id}
        rows.append(row)
    return pd.DataFrame(rows, columns=ACROSS)
