"""What sweeps want: a file for each in `out_dir/sweeps`, with its jobs, its process and its command."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rmsrepro.runs.files import is_file_name, read_json, to_json, write_atomic
from rmsrepro.runs.owners import alive, owner_record


@dataclass(frozen=True)
class Manifest:
    """A sweep as its file tells it; texts are empty where the file does not say."""

    sweep_id: str
    path: Path
    study: str
    command: str
    """The command line that began it, to be pasted into a shell."""
    run_ids: tuple[str, ...]
    live: bool
    """Whether the process of the sweep still runs, as far as can be seen here."""
    started: float


def folder_of(out_dir: Path) -> Path:
    """Return the folder of an output folder's sweeps."""
    return out_dir / "sweeps"


def write_manifest(
    out_dir: Path, jobs: Sequence[tuple[str, Sequence[str]]], *, study: str | None, command: str = ""
) -> Path:
    """Remember which runs a sweep wants, in the name of this process; the same runs make the same file.

    Args:
        jobs: run id and overrides of each.
        study: the study that they belong to.
        command: the command line that began the sweep.
    """
    listed = [{"run_id": run_id, "overrides": list(overrides)} for run_id, overrides in jobs]
    ids = to_json([run_id for run_id, _ in jobs], indent=None)
    path = folder_of(out_dir) / f"{hashlib.sha256(ids.encode()).hexdigest()[:10]}.json"
    content = {
        "started": time.time(),
        "study": study,
        "command": command,
        "owner": owner_record(),
        "jobs": listed,
    }
    write_atomic(path, to_json(content))
    return path


def release_manifest(path: Path) -> None:
    """Say in a sweep's file that its process is done with it."""
    content = read_json(path)
    if content is not None:
        with contextlib.suppress(OSError):  # a full disk: the process will be seen to be gone
            write_atomic(path, to_json({**content, "owner": None}))


def touch_manifest(path: Path) -> None:
    """Give a sign of life to other machines."""
    with contextlib.suppress(OSError):
        os.utime(path)


def read_manifests(out_dir: Path) -> tuple[list[Manifest], list[Path]]:
    """Return the sweeps, oldest first, and the files that are damaged.

    Nothing here raises for the content of a file.
    """
    found, damaged = [], []
    for path in sorted(folder_of(out_dir).glob("*.json")):
        content = read_json(path)
        jobs = content.get("jobs") if content is not None else None
        if content is None or not isinstance(jobs, list):
            damaged.append(path)
            continue
        named = [str(job["run_id"]) for job in jobs if isinstance(job, dict) and job.get("run_id")]
        ids = [run_id for run_id in named if is_file_name(run_id)]
        owner, started = content.get("owner"), content.get("started")
        found.append(
            Manifest(
                path.stem,
                path,
                _text(content.get("study")),
                _text(content.get("command")),
                tuple(dict.fromkeys(ids)),
                isinstance(owner, dict) and alive(owner, path),
                float(started) if isinstance(started, int | float) and abs(started) < 1e12 else 0.0,
            )
        )
    return sorted(found, key=lambda one: (one.started, one.sweep_id)), damaged


def runs_of_study(out_dir: Path, study: str) -> frozenset[str]:
    """Return the runs that sweeps of a study wanted, though they may have been made under another name."""
    manifests, _ = read_manifests(out_dir)
    return frozenset(run_id for one in manifests if one.study == study for run_id in one.run_ids)


def _text(value: object) -> str:
    """The first line of a text; empty for anything else."""
    return next(iter(value.splitlines()), "") if isinstance(value, str) else ""
