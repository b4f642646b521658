"""How far the runs of an output folder are, from their files alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmsrepro.config.shell import command, in_folder
from rmsrepro.runs.contention import is_contended
from rmsrepro.runs.files import number, read_json
from rmsrepro.runs.manifests import Manifest, read_manifests
from rmsrepro.runs.owners import alive
from rmsrepro.runs.tuning_record import TuningRecord, read_tunings


@dataclass
class Row:
    state: str
    run_id: str
    progress: str = ""
    note: str = ""


@dataclass
class SweepRow:
    """A sweep that is at work, or that left something undone."""

    sweep_id: str
    live: bool
    counts: str
    left: int
    command: str
    out_dir: Path

    @property
    def state(self) -> str:
        return "live" if self.live else "abandoned"

    @property
    def advice(self) -> str:
        """What to do about it: nothing while it is at work."""
        if self.live:
            return ""
        on = f"goes on with: {self.command}" if self.command else "goes on with the command that began it"
        return f"{on}; given up by: {forget_command(self.sweep_id, self.out_dir)}"


@dataclass
class TuningRow:
    """A tuning that has not come to its final runs, and that no sweep is at work on or stands for."""

    tuning_id: str
    undone: str
    command: str
    out_dir: Path

    @property
    def advice(self) -> str:
        """What to do about it."""
        return f"goes on with: {self.command}; given up by: {forget_command(self.tuning_id, self.out_dir)}"


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
    """Interrupted runs, and those that live sweeps have not begun."""
    abandoned: int = 0
    """Runs that were never begun, of sweeps whose process is gone."""
    sweeps: list[SweepRow] = field(default_factory=list)
    tunings: list[TuningRow] = field(default_factory=list)
    seconds_left: float | None = None
    contended: bool = False
    """Whether `seconds_left` comes from runs that shared the machine with others."""

    @property
    def headline(self) -> str:
        parts = [f"{self.completed} completed", f"{self.running} running", f"{self.failed} failed"]
        rare = ("diverged", "interrupted", "unreadable")
        parts += [f"{count} {word}" for word in rare if (count := getattr(self, word))]
        parts.append(f"{self.left} left")
        if self.abandoned:
            parts.append(f"{self.abandoned} of abandoned sweeps")
        text = ", ".join(parts)
        if self.seconds_left is None or not self.left:
            return text
        shared = " (by contended runs)" if self.contended else ""
        return f"{text}, about {self.seconds_left:.0f} s to go{shared}"


def read_status(out_dir: Path) -> Status:
    """Read the state of every run folder, and of what the sweeps still want.

    Nothing here raises for the content of a file.
    """
    now = Status()
    states: dict[str, str] = {}
    by_kind: dict[bool, list[float]] = {False: [], True: []}
    runs = out_dir / "runs"
    for folder in sorted(runs.iterdir()) if runs.is_dir() else []:
        if folder.is_dir():
            states[folder.name] = _look(folder, now, by_kind)
    manifests, damaged = read_manifests(out_dir)
    pending = {one.sweep_id: [run_id for run_id in one.run_ids if run_id not in states] for one in manifests}
    waiting = sorted({run_id for one in manifests if one.live for run_id in pending[one.sweep_id]})
    given_up = {run_id for one in manifests for run_id in pending[one.sweep_id]}.difference(waiting)
    now.left, now.abandoned = len(waiting) + now.interrupted, len(given_up)
    now.rows += [Row("waiting", run_id) for run_id in waiting[:20]]
    if len(waiting) > 20:
        now.rows.append(Row("waiting", f"and {len(waiting) - 20} more"))
    for path in damaged:
        note = f"a sweep's file, damaged; {forget_command(path.stem, out_dir)} removes it"
        now.rows.append(Row("unreadable", f"{path.parent.name}/{path.name}", "", note))
    tunings, broken = read_tunings(out_dir)
    for path, reason in broken.items():
        note = f"a tuning's file, damaged ({reason}); {forget_command(path.stem, out_dir)} removes it"
        now.rows.append(Row("unreadable", f"{path.parent.name}/{path.name}", "", note))
    now.sweeps = _sweeps(manifests, states, out_dir)
    now.tunings = _tunings(tunings, manifests, now.sweeps, states, out_dir)
    now.contended = not by_kind[False]
    if finished_s := by_kind[now.contended]:
        workers = max(1, now.running)
        now.seconds_left = sum(finished_s) / len(finished_s) * (now.left + now.running / 2) / workers
    return now


def _look(folder: Path, now: Status, by_kind: dict[bool, list[float]]) -> str:
    """Count one run, with a row where it is worth one; return its state.

    Args:
        by_kind: the seconds of finished runs, by whether they were contended.
    """
    running = read_json(folder / "running.json")
    owner = read_json(folder / "lock.json")
    result = read_json(folder / "result.json")
    if owner is not None and alive(owner, folder / "lock.json"):
        now.running += 1
        now.rows.append(Row("running", folder.name, _progress(running)))
        return "running"
    if result is None:
        now.interrupted += 1
        note = "the same command goes on"
        if (folder / "result.json").exists():
            note = f"result.json is damaged; {note}"
        now.rows.append(Row("interrupted", folder.name, _progress(running), note))
        return "interrupted"
    state = str(result.get("status"))
    if state == "completed":
        now.completed += 1
        if seconds := total_seconds(result):
            by_kind[is_contended(result)].append(seconds)
        return state
    if state in ("failed", "diverged", "interrupted"):
        setattr(now, state, getattr(now, state) + 1)
        note = "the same command goes on" if state == "interrupted" else _line(result.get("error"))
        now.rows.append(Row(state, folder.name, _line(result.get("steps")), note))
        return state
    now.unreadable += 1
    now.rows.append(Row("unreadable", folder.name, "", f"unknown status {state!r}"))
    return "unreadable"


def _sweeps(manifests: list[Manifest], states: dict[str, str], out_dir: Path) -> list[SweepRow]:
    """Return the sweeps that are at work, and those that left something which no sweep is at work on."""
    taken = {run_id for one in manifests if one.live for run_id in one.run_ids}
    rows = []
    for one in manifests:
        counts: dict[str, int] = {}
        for run_id in one.run_ids:
            state = states.get(run_id, "left")
            state = "left" if state in ("interrupted", "unreadable") else state
            counts[state] = counts.get(state, 0) + 1
        undone = [
            run_id
            for run_id in one.run_ids
            if states.get(run_id, "left") in ("left", "interrupted", "unreadable")
        ]
        if not one.live and (not undone or taken.issuperset(undone)):
            continue
        order = ("completed", "diverged", "failed", "running", "left")
        text = ", ".join(f"{counts[state]} {state}" for state in order if state in counts)
        study = f"study {one.study}: " if one.study else ""
        rows.append(SweepRow(one.sweep_id, one.live, study + text, len(undone), one.command, out_dir))
    return rows


def _tunings(
    tunings: list[TuningRecord],
    manifests: list[Manifest],
    sweeps: list[SweepRow],
    states: dict[str, str],
    out_dir: Path,
) -> list[TuningRow]:
    """Return the tunings that ended between their stages, of which no sweep tells that anything is left."""
    told = {one.sweep_id for one in sweeps}
    covered = {run_id for one in manifests if one.sweep_id in told for run_id in one.run_ids}
    wanted = {run_id for one in manifests for run_id in one.run_ids}.union(states)
    rows = []
    for record in tunings:
        trials = {run_id for one in record.norms for run_id in one.trials}
        finals = {run_id for one in record.norms for run_id in one.finals}
        if record.given_up or covered.intersection(trials | finals):
            continue
        undecided = any(one.undecided for one in record.norms)
        if undecided or finals - wanted:
            undone = "its best points are not chosen" if undecided else "not all its final runs are begun"
            rows.append(TuningRow(record.tuning_id, undone, _line(record.command), out_dir))
    return rows


def forget_command(sweep_id: str, out_dir: Path) -> str:
    """Return the command that gives a sweep or a tuning up."""
    return command("status", f"forget={sweep_id}", **in_folder(out_dir))


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
