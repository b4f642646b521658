"""Runs that take their process down again and again where the sweep and its jobs are one process.

When the kernel kills that process (for want of memory, most often), nobody is left to record it. So the next
sweep finds the dead owner's traces, counts, and records a run as failed that was struck several times without
reaching a further checkpoint. A sweep outlives its workers, and records at once: see `rmsrepro.runs.lost`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rmsrepro.runs.checkpoint_files import LAST
from rmsrepro.runs.files import number, read_json, to_json, write_atomic
from rmsrepro.runs.lost import Planned, close, record_loss, steps_of, was_struck
from rmsrepro.runs.reasons import KilledAgain

MOST = 3
"""After so many deaths at one place a run is given up: one may be anything, such as a power cut."""
DEATHS = "deaths.json"
"""The file in a run's folder that counts; it goes when the run ends by itself."""

J = TypeVar("J", bound=Planned)


def give_up(folder: Path, jobs: Sequence[J]) -> Iterator[J]:
    """Count the deaths of `jobs`, and record as failed those that died too often; yield these, closed.

    Args:
        folder: holds a folder for each run.
    """
    for job in jobs:
        place = folder / job.run_id
        if was_struck(place) and (times := _count(place)) >= MOST:
            steps = steps_of(place)
            close(job, record_loss(folder, job, KilledAgain(times, steps), steps))
            yield job


def died_before(folder: Path) -> bool:
    """Whether a run's process died at work on it, now or in an earlier attempt that it has not outlived."""
    return was_struck(folder) or (folder / DEATHS).exists()


def _count(folder: Path) -> int:
    """Count a death, once only, and return how many there were in a row without a further checkpoint."""
    owner = read_json(folder / "lock.json") or read_json(folder / "running.json") or {}
    died = [owner.get(key) for key in ("host", "pid", "start", "updated")]
    try:
        reached = (folder / "checkpoints" / LAST).stat().st_mtime_ns
    except OSError:
        reached = 0
    known = read_json(folder / DEATHS) or {}
    times = int(number(known.get("times")))
    if known.get("died") != died:
        times = times + 1 if known.get("reached") == reached else 1
        write_atomic(folder / DEATHS, to_json({"times": times, "reached": reached, "died": died}))
    return times
