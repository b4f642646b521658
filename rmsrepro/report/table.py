"""results.csv: one row a run, with its flat settings, metrics and clocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from rmsrepro.report.cells import flatten
from rmsrepro.report.records import RunRecord

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
]


def results_table(runs: Sequence[RunRecord]) -> pd.DataFrame:
    """Return one row a run: LEADING, then `metrics.*`, `clocks.*` and `config.*` columns, each sorted."""
    rows = [_row(run) for run in runs]
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
    }
    row |= {f"metrics.{key}": value for key, value in run.metrics.items()}
    row |= {f"clocks.{key}": value for key, value in run.clocks.items()}
    row |= {f"config.{key}": value for key, value in flatten(run.config).items()}
    return row
