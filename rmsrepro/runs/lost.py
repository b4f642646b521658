"""Jobs whose worker process is gone: what the others came to is kept, and what was struck is tried alone.

When the kernel kills one worker (for want of memory, most often), joblib ends the whole pool and answers with
an exception instead of results. But every run writes its own record, so nothing is lost: what ended is read
from there, and the rest goes on. Which of the jobs under way brought its process down cannot be told from
outside, so each of them is tried once more by itself; one that brings it down again is recorded as failed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.files import number, read_json
from rmsrepro.runs.locks import lock
from rmsrepro.runs.owners import alive
from rmsrepro.runs.reasons import KilledAgain, WorkerLost, explain
from rmsrepro.runs.result import record_failure
from rmsrepro.runs.status import total_seconds

End = dict[str, Any]
"""How a job ended, as `run_job` tells it: run_id, status, error, seconds."""
_POLL_S = 0.2


class Task(Protocol):
    """What is known of a job here: its run, and how it ended."""

    run_id: str
    status: str
    error: str | None
    seconds: float


T = TypeVar("T", bound=Task)


def lost(error: Exception) -> WorkerLost | None:
    """Return what a launcher's exception says of a worker's end; None if it is about something else."""
    if isinstance(error, concurrent.futures.BrokenExecutor):
        ends = re.search(r"exit codes? of the workers (?:is|are) \{(.*)\}", str(error))
        return WorkerLost(re.sub(r"\(-?\d+\)", "", ends[1]) if ends else "")
    return None


class Rounds(Generic[T]):
    """Runs jobs by a launcher, whatever becomes of its workers.

    Args:
        launch: runs jobs (True: this one alone, in a process of its own) and returns their ends.
        folder: holds a folder for each run.
        record: writes the record of a job that brought its process down, at a step; returns its end.
        say: told what is waited for.
    """

    def __init__(
        self,
        launch: Callable[[Sequence[T], bool], list[End]],
        folder: Path,
        record: Callable[[T, WorkerLost, int], End],
        say: Callable[[str], None],
    ) -> None:
        self._launch, self._folder, self._record, self._say = launch, folder, record, say

    def run(self, jobs: Sequence[T], size: int = 0) -> None:
        """Run all jobs; then those that other processes were at work on and have left.

        Args:
            jobs: their `status`, `error` and `seconds` are set.
            size: look after every so many jobs, and stop if one has failed; 0: run them all.

        Raises:
            Exception: what the launcher raises that is not about a lost worker.
        """
        for first in range(0, len(jobs), size or len(jobs)):
            self._round(jobs[first : first + (size or len(jobs))])
            if size and any(job.status == "failed" for job in jobs):
                return
        for _ in range(2):
            if free := self._others([job for job in jobs if job.status == "busy"]):
                self._round(free)

    def _round(self, jobs: Sequence[T]) -> None:
        left, suspects = list(jobs), list[T]()
        while left or suspects:
            alone = not left
            part = [suspects.pop(0)] if alone else left
            before = {job.run_id: stamp(self._folder / job.run_id) for job in part}
            left = []
            try:
                for job, end in zip(part, self._launch(part, alone), strict=False):
                    close(job, end)
                continue
            except Exception as error:
                reason = lost(error)
                if reason is None:
                    raise
            for job in part:
                place = self._folder / job.run_id
                _wait_for(place)
                ended = ended_since(place, before[job.run_id])
                if ended is not None and ended["status"] != "interrupted":
                    close(job, ended)
                elif alone:
                    close(job, self._record(job, reason, steps_of(place)))
                elif was_struck(place):
                    suspects.append(job)
                else:
                    left.append(job)
            if len(left) == len(part):
                # None had begun. Workers that die before their first job would go on dying.
                left, suspects = [], left

    def _others(self, busy: Sequence[T]) -> list[T]:
        """Wait for the runs that other processes are at work on; return those that are then free."""
        free = []
        for job in busy:
            path = self._folder / job.run_id / "lock.json"
            owner = read_json(path) or {}
            if owner.get("pid") == os.getpid():
                continue  # waiting for oneself would never end
            if alive(owner, path):  # else it has ended meanwhile
                self._say(f"waiting for {job.run_id}: process {owner.get('pid')} is at work on it")
                _wait_for(self._folder / job.run_id)
            free.append(job)
        return free


def close(job: Task, end: End) -> None:
    """Note in a job how it ended."""
    job.status, job.error, job.seconds = end["status"], end["error"], end["seconds"]


class Planned(Task, Protocol):
    """A job with what its record needs."""

    config: TrainConfig
    group: str


def record_loss(folder: Path, job: Planned, reason: WorkerLost | KilledAgain, steps: int) -> End:
    """Record a job that brought its process down, at a step; return its end."""
    with lock(folder / job.run_id / "lock.json"):
        record_failure(job.config, job.run_id, reason, group=job.group, steps=steps)
        (folder / job.run_id / "running.json").unlink(missing_ok=True)
    return {"run_id": job.run_id, "status": "failed", "error": explain(reason), "seconds": 0.0}


def was_struck(folder: Path) -> bool:
    """Whether a process died at work on a run: its lock, or its sign of life, lies there still."""
    owner = read_json(folder / "lock.json")
    if owner is not None:
        return not alive(owner, folder / "lock.json")
    return (folder / "running.json").exists()


def ended_since(folder: Path, before: int | None) -> End | None:
    """Return how a run ended whose record is newer than `before`; None while it has not."""
    if stamp(folder) == before:
        return None
    result = read_json(folder / "result.json")
    if result is None:
        return None
    return end_by_record(folder.name, result)


def end_by_record(run_id: str, record: dict[str, Any]) -> End:
    """Return how a run ended, by its `result.json`."""
    error = record.get("error")
    return {
        "run_id": run_id,
        "status": str(record.get("status")),
        "error": None if error is None else str(error),
        "seconds": total_seconds(record),
    }


def _wait_for(folder: Path) -> None:
    """Wait while a living process is at work on a run."""
    path = folder / "lock.json"
    while (owner := read_json(path)) is not None and alive(owner, path):
        time.sleep(_POLL_S)


def steps_of(folder: Path) -> int:
    """Return how many updates a run under way had last told of."""
    running = read_json(folder / "running.json") or {}
    return int(number(running.get("step")))


def stamp(folder: Path) -> int | None:
    """Return a mark of when a run's record was written; None where there is none."""
    with contextlib.suppress(OSError):
        return (folder / "result.json").stat().st_mtime_ns
    return None
