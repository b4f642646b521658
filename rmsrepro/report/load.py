"""Reads what runs and benches left behind, without trust: a damaged file is listed, never fatal."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rmsrepro.report import fields
from rmsrepro.report.load_bench import load_bench
from rmsrepro.report.records import FloatArray, Problem, Records, RunRecord, State
from rmsrepro.runs.owners import alive

SCHEMA_VERSION = 1
FINAL_STATES = ("completed", "failed", "diverged", "interrupted")


def load_records(out_dir: Path, *, run_ids: Collection[str] | None = None) -> Records:
    """Read all runs and benches under `out_dir` (or the runs of `run_ids` alone).

    Missing folders mean no records. Nothing here raises for the content of a file.
    """
    problems: list[Problem] = []
    runs = [
        _load_run(folder, problems)
        for folder in fields.folders(Path(out_dir) / "runs")
        if run_ids is None or folder.name in run_ids
    ]
    benches = [
        bench
        for folder in fields.folders(Path(out_dir) / "bench")
        if (bench := load_bench(folder, problems)) is not None
    ]
    return Records(runs=tuple(runs), benches=tuple(benches), problems=tuple(problems))


def _load_run(folder: Path, problems: list[Problem]) -> RunRecord:
    """Read one run's folder; the state of a run without a (whole) result is worked out from the rest."""
    result = fields.read_mapping(folder / "result.json", problems)
    owner = fields.read_mapping(folder / "lock.json", [])
    running = fields.read_mapping(folder / "running.json", problems)
    env = fields.read_mapping(folder / "env.json", problems) or {}
    data = fields.read_mapping(folder / "data.json", problems) or {}
    config = fields.mapping(result, "config") if result else {}
    if not config:
        config = fields.read_mapping(folder / "config.yaml", problems) or {}
    state, error = _state(folder, result, {"lock.json": owner, "running.json": running}, problems)
    source: Mapping[str, Any] = result or {}
    norm = fields.text(source, "norm") or fields.named(config, "norm")
    curve, skipped = load_curve(folder / "metrics.jsonl")
    problems.extend(Problem(folder / "metrics.jsonl", reason) for reason in skipped)
    steps = fields.number(source.get("steps"))
    if math.isnan(steps) and running:
        steps = fields.number(running.get("step"))
    if math.isnan(steps) and curve["step"].size:
        steps = float(curve["step"][-1])
    return RunRecord(
        run_id=fields.text(source, "run_id") or folder.name,
        folder=folder,
        state=state,
        norm=norm,
        norm_params=fields.norm_params(config["norm"])
        if isinstance(config.get("norm"), Mapping)
        else fields.mapping(source, "norm_params"),
        norm_recorded=fields.mapping(source, "norm_params"),
        model=fields.text(source, "model") or fields.named(config, "model"),
        task=fields.text(source, "task") or fields.named(config, "task"),
        data=fields.text(source, "data") or fields.named(config, "data"),
        backend_note=fields.text(source, "backend_note"),
        backend=fields.text(source, "backend_used")
        or fields.text(source, "backend")
        or fields.text(config, "backend"),
        placement=fields.text(source, "placement") or fields.text(config, "placement"),
        precision=fields.text(source, "precision") or fields.text(config, "precision"),
        seed=fields.integer(source.get("seed", config.get("seed"))),
        study=fields.text(source, "study") or fields.text(config, "study_name"),
        steps=fields.integer(steps),
        max_steps=fields.integer(
            fields.mapping(config, "trainer").get("max_steps", (running or {}).get("max_steps"))
        ),
        n_parameters=fields.integer(source.get("n_parameters")),
        metrics=_numbers(fields.mapping(source, "metrics")),
        clocks=_numbers(fields.mapping(source, "clocks")),
        error=error,
        flags=fields.texts(source.get("flags")),
        parent=fields.text(source, "parent"),
        machine=fields.mapping(source, "machine") or fields.mapping(env, "machine"),
        env=env,
        fingerprint=fields.text(source, "data_hash") or fields.text(data, "fingerprint"),
        config=config,
        curve=curve,
        written=fields.modified(folder / "result.json") or fields.modified(folder),
        notes={name: str(note) for name, note in fields.mapping(source, "metric_notes").items()},
        num_pairs=_num_pairs(data),
    )


def _num_pairs(data: Mapping[str, Any]) -> dict[str, int]:
    """Split -> how many pairs of sentences `data.json` counts in it."""
    splits = fields.mapping(data, "splits")
    counts = {split: fields.integer(fields.mapping(splits, split).get("pairs")) for split in splits}
    return {split: number for split, number in counts.items() if number is not None}


def _state(
    folder: Path,
    result: dict[str, Any] | None,
    owners: Mapping[str, dict[str, Any] | None],
    problems: list[Problem],
) -> tuple[State, str]:
    """Return a run's state and its error text.

    A living owner (of lock.json or running.json) wins: the run is being resumed or repeated. Then
    result.json; a folder with neither was killed before it could write one.
    """
    if any(owner and alive(owner, folder / name) for name, owner in owners.items()):
        return State.running, ""
    if result is not None:
        status = fields.text(result, "status")
        version = result.get("schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            reason = f"schema_version {version!r}; this report reads {SCHEMA_VERSION}"
        elif status not in FINAL_STATES:
            reason = f"unknown status {status!r}"
        else:
            return State(status), fields.text(result, "error")
        problems.append(Problem(folder / "result.json", reason))
        return State.unreadable, reason
    if (folder / "result.json").exists():
        return State.unreadable, "result.json is damaged"
    if any(owners.values()) or (folder / "running.json").exists():
        return State.interrupted, "ended without a result (its process is gone)"
    if (folder / "config.yaml").exists() or (folder / "metrics.jsonl").exists():
        return State.interrupted, "ended without a result"
    problems.append(Problem(folder, "neither result.json nor config.yaml"))
    return State.unreadable, "neither result.json nor config.yaml"


def load_curve(path: Path) -> tuple[Mapping[str, FloatArray], list[str]]:
    """Read metrics.jsonl by column, and say what had to be skipped.

    The columns `step` (rising) and `train_seconds` are always there; a value that a row does not
    have is NaN. A last line without its line end is being written at this moment and is left out
    silently. Of two rows of the same step (a resumed run) the later counts.
    """
    try:
        status = path.stat()
    except OSError:
        return _columns([]), []
    return _cached_curve(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2048)
def _cached_curve(path: Path, _modified_ns: int, _size: int) -> tuple[Mapping[str, FloatArray], list[str]]:
    try:
        content = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        return _columns([]), [f"cannot be read: {error.strerror}"]
    rows: dict[float, dict[str, Any]] = {}
    broken: list[int] = []
    lines = content.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            step = fields.number(row["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            if number < len(lines):
                broken.append(number)
            continue
        if math.isfinite(step):
            rows[step] = row
        else:
            broken.append(number)
    curve = _columns([rows[step] for step in sorted(rows)])
    if not broken:
        return curve, []
    shown = ", ".join(str(number) for number in broken[:5]) + (", ..." if len(broken) > 5 else "")
    return curve, [f"{len(broken)} unreadable line(s) skipped: {shown}"]


def _columns(rows: list[dict[str, Any]]) -> dict[str, FloatArray]:
    """Turn rows into columns of floats; a key that never holds a number makes no column."""
    keys = {"step": None, "train_seconds": None} | {str(key): None for row in rows for key in row}
    columns = {}
    for key in keys:
        values = [row.get(key) for row in rows]
        if key in ("step", "train_seconds") or any(
            value is not None and fields.is_numeric(value) for value in values
        ):
            columns[key] = np.array([fields.number(value) for value in values], dtype=np.float64)
    return columns


def _numbers(node: Mapping[str, Any]) -> dict[str, float]:
    """The entries of a mapping that stand for numbers."""
    return {str(key): fields.number(value) for key, value in node.items() if fields.is_numeric(value)}
