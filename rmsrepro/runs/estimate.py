"""How long a run will take, by the finished runs of the same kind on this machine."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.contention import is_contended
from rmsrepro.runs.environment import machine
from rmsrepro.runs.files import number, read_json
from rmsrepro.runs.identity import slug
from rmsrepro.runs.result import runs_dir
from rmsrepro.runs.status import total_seconds


@dataclass(frozen=True)
class Estimate:
    """Seconds that a run will take."""

    seconds: float
    contended: bool
    """Whether all runs that it comes from shared the machine with others."""


def estimate_seconds(config: TrainConfig) -> Estimate | None:
    """Return the median time of this machine's completed runs of the same task, data and model (any norm).

    Scaled to this run's steps; None when there is no such run. Runs that shared the machine are looked at
    only where there are no others.
    """
    found: dict[bool, list[float]] = {False: [], True: []}
    kind = "-".join(slug(part) for part in (config.task.name, config.data.name, config.model.name))
    for folder in runs_dir(config.out_dir).glob(f"{kind}-*"):
        record = read_json(folder / "result.json")
        if record is None or record.get("status") != "completed":
            continue
        where, steps, seconds = record.get("machine"), number(record.get("steps")), total_seconds(record)
        if not isinstance(where, dict) or where.get("cpu") != machine()["cpu"] or steps <= 0 or seconds <= 0:
            continue
        found[is_contended(record)].append(seconds / steps)
    contended = not found[False]
    rates = found[contended]
    return Estimate(statistics.median(rates) * config.trainer.max_steps, contended) if rates else None
