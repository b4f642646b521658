"""What `result.json` says of a run, however it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rmsrepro.config.paths import expanded
from rmsrepro.config.plain import plain, yaml_text
from rmsrepro.config.schema import Placement, TrainConfig, TransformerConfig
from rmsrepro.runs.clocks import Clocks
from rmsrepro.runs.environment import machine
from rmsrepro.runs.files import read_json, to_json, write_atomic
from rmsrepro.runs.reasons import explain
from rmsrepro.runs.records import SCHEMA_VERSION
from rmsrepro.tasks import norm_spec

FINISHED = ("completed", "diverged")


@dataclass
class RunResult:
    """What became of a run: `status` as in result.json, or "busy" when another process is at work on it."""

    run_id: str
    path: Path
    status: str
    skipped: bool = False
    error: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def runs_dir(out_dir: str | Path) -> Path:
    """Return the folder that holds a folder for each run."""
    return expanded(out_dir) / "runs"


def finished_result(folder: Path) -> dict[str, Any] | None:
    """Return the record of a run that needs no more work, else None."""
    record = read_json(folder / "result.json")
    return record if record is not None and record.get("status") in FINISHED else None


def base_record(config: TrainConfig, run_id: str, group: str) -> dict[str, Any]:
    """Return the part of a record that follows from the config; the rest as for a run that never began."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "status": "failed",
        "config": plain(config),
        "metrics": {},
        "metric_notes": {},
        "clocks": Clocks().record(),
        "warmup_steps": 0,
        "warmup_s": 0.0,
        "steps": 0,
        "tokens": 0,
        "n_parameters": 0,
        "norm": config.norm["name"],
        "norm_params": {key: value for key, value in config.norm.items() if key != "name"},
        "backend": config.backend.value,
        "backend_used": config.backend.value,
        "backend_note": None,
        "model": config.model.name,
        "task": config.task.name,
        "data": config.data.name,
        "seed": config.seed,
        "parent": None,
        "error": None,
        "group": group,
        "study": config.study_name,
        "experiment": config.experiment,
        "placement": config.placement.value,
        "sites": [site.value for site in config.sites],
        "precision": config.precision,
        "flags": [],
        "machine": {**machine(), "threads": torch.get_num_threads()},
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def record_failure(
    config: TrainConfig, run_id: str, error: Exception, *, group: str = "", steps: int = 0
) -> RunResult:
    """Record a job of a sweep that could not even be planned, or whose process is gone.

    Args:
        group: see `Identity`; by default the run is the only one of its group.
        steps: how many updates it had made.
    """
    folder = runs_dir(config.out_dir) / run_id
    text = explain(error)
    record = {**base_record(config, run_id, group or run_id), "error": text, "steps": steps}
    write_atomic(folder / "config.yaml", yaml_text(config))
    write_atomic(folder / "result.json", to_json(record))
    return RunResult(run_id, folder, "failed", error=text)


def flags(config: TrainConfig) -> list[str]:
    """Return what a reader of the run's figures should know about its norm."""
    spec, model = norm_spec(config), config.model
    found = list(spec.flags(model.d_model or 1))
    if isinstance(model, TransformerConfig):
        if model.qk_norm and model.d_model and model.num_heads:
            found += [f"model.qk_norm: {flag}" for flag in spec.flags(model.d_model // model.num_heads)]
        if config.placement is Placement.none and not spec.is_none and spec.scope == "activation":
            but = " but those of queries and keys" if model.qk_norm else ""
            found.append(f"placement=none: the model has no norm{but}")
    return found
