"""How long a run will take, by the finished runs of the same kind on this machine."""

from __future__ import annotations

import statistics

from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.environment import machine
from rmsrepro.runs.files import read_json
from rmsrepro.runs.result import runs_dir


def estimate_seconds(config: TrainConfig, group: str) -> float | None:
    """Return the median time of completed runs of `group`, scaled to this run's steps; None: no such run."""
    found = []
    for folder in runs_dir(config.out_dir).glob(f"{group}-s*"):
        record = read_json(folder / "result.json")
        if record is None or record.get("status") != "completed" or not record.get("steps"):
            continue
        if record.get("machine", {}).get("cpu") != machine()["cpu"]:
            continue
        found.append(record["clocks"]["total_s"] / record["steps"])
    return statistics.median(found) * config.trainer.max_steps if found else None
