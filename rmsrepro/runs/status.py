"""How far the runs of an output folder are, from their files alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmsrepro.runs.files import number, read_json
from rmsrepro.runs.owners import alive


@dataclass
class Row:
    state: str
    run_id: str
    progress: str = ""
    note: str = ""


@dataclass
class Status:
    """Counts and the rows worth showing: running, failed and diverged runs, and what is left."""

    completed: int = 0
    rows: list[Row] = field(default_factory=list)
    running: int = 0
    failed: int = 0
    diverged: int = 0
    interrupted: int = 0
    unreadable: int = 0
    left: int = 0
    seconds_left: float | None = None

    @property
    def headline(self) -> str:
        parts = [f"{self.completed} completed", f"{self.running} running", f"{self.failed} failed"]
        rare = ("diverged", "interrupted", "unreadable")
        parts += [f"{count} {word}" for word in rare if (count := getattr(self, word))]
        parts.append(f"{self.left} left")
        text = ", ".join(parts)
        return (
            f"{text}, about {self.seconds_left:.0f} s to go"
            if self.seconds_left is not None and self.left
            else text
        )


def read_status(out_dir: Path) -> Status:
    """Read the state of every run folder, and of what the newest sweeps still want.

    Nothing here raises for the content of a file.
    """
    now = Status()
    seen: set[str] = set()
    finished_s: list[float] = []
    for folder in sorted((out_dir / "runs").iterdir()):
        if not folder.is_dir():
            continue
        seen.add(folder.name)
        running = read_json(folder / "running.json")
        owner = read_json(folder / "lock.json")
        result = read_json(folder / "result.json")
        if owner is not None and alive(owner, folder / "lock.json"):
            now.running += 1
            now.rows.append(Row("running", folder.name, _progress(running)))
            continue
        if result is None:
            now.interrupted += 1
            now.rows.append(Row("interrupted", folder.name, _progress(running), "the same command goes on"))
            continue
        state = str(result.get("status"))
        if state == "completed":
            now.completed += 1
            if seconds := total_seconds(result):
                finished_s.append(seconds)
        elif state in ("failed", "diverged", "interrupted"):
            setattr(now, state, getattr(now, state) + 1)
            note = "the same command goes on" if state == "interrupted" else _line(result.get("error"))
            now.rows.append(Row(state, folder.name, _line(result.get("steps")), note))
        else:
            now.unreadable += 1
            now.rows.append(Row("unreadable", folder.name, "", f"unknown status {state!r}"))
    wanted = {run_id for manifest in _manifests(out_dir) for run_id in manifest}
    waiting = sorted(wanted - seen)
    now.left = len(waiting) + now.interrupted
    now.rows += [Row("waiting", run_id) for run_id in waiting[:20]]
    if len(waiting) > 20:
        now.rows.append(Row("waiting", f"and {len(waiting) - 20} more"))
    if finished_s:
        workers = max(1, now.running)
        now.seconds_left = sum(finished_s) / len(finished_s) * (now.left + now.running / 2) / workers
    return now


def _progress(running: dict[str, Any] | None) -> str:
    if running is None or "step" not in running:
        return ""
    age = time.time() - number(running.get("updated"), time.time())
    stale = f" ({age / 60:.0f} min ago)" if age > 120 else ""
    return f"{_line(running['step'])}/{_line(running.get('max_steps')) or '?'}{stale}"


def total_seconds(result: dict[str, Any]) -> float:
    """Return the seconds that a run's record says it took; 0 where it does not say."""
    clocks = result.get("clocks")
    return number(clocks.get("total_s")) if isinstance(clocks, dict) else 0.0


def _line(value: Any) -> str:
    """The first line of a record's value as a text; empty for none."""
    return "" if value is None else next(iter(str(value).splitlines()), "")


def _manifests(out_dir: Path) -> list[list[str]]:
    found = []
    for file in (out_dir / "sweeps").glob("*.json"):
        content = read_json(file)
        jobs = content.get("jobs") if content is not None else None
        if isinstance(jobs, list):
            found.append([str(job["run_id"]) for job in jobs if isinstance(job, dict) and "run_id" in job])
    return found
