"""The mirror of a run for Weights & Biases, made from the run's records: one folder a run, however often."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.plain import from_plain, plain
from rmsrepro.config.shell import command, in_folder
from rmsrepro.runs.files import read_json
from rmsrepro.runs.locks import Locked, lock
from rmsrepro.runs.records import read_metrics
from rmsrepro.runs.result import FINISHED, runs_dir
from rmsrepro.runs.trackers import Tracker, WandbTracker, flatten, trouble


class MirrorFailed(RuntimeError):
    """No mirror could be made of a run; the one that there was stays."""


def mirrors(out_dir: Path, run_id: str) -> list[Path]:
    """Return wandb's offline folders of a run, the oldest first."""
    # Names have but seconds in them: the second folder of a run within one ends in -1.
    name = re.compile(rf"offline-run-(\d{{8}}_\d{{6}})-{re.escape(run_id)}(?:-(\d+))?")
    found = [(name.fullmatch(path.name), path) for path in (out_dir / "wandb").glob("offline-run-*")]
    ordered = sorted((match[1], int(match[2] or 0), path) for match, path in found if match)
    return [path for _, _, path in ordered]


def rebuild(folder: Path, out_dir: Path) -> Path:
    """Make the mirror of the run in `folder` from its records; it takes the place of all earlier ones.

    Rows are those of `metrics.jsonl`, so that steps which an interrupted run made twice are there once.

    Returns:
        wandb's folder, for `wandb sync`.

    Raises:
        MirrorFailed: damaged records, or wandb is not installed or refuses.
    """
    record = _record(folder)
    run_id, staging = folder.name, (out_dir / "wandb" / f".{folder.name}.{os.getpid()}").absolute()
    problems: list[str] = []
    try:
        config = from_plain(record["config"])
        tracker = WandbTracker(
            config,
            flatten(plain(config)),
            run_id=run_id,
            backend=str(record.get("backend_used") or config.backend.value),
            say=problems.append,
            mode="offline",
            folder=staging,
        )
        for row in read_metrics(folder / "metrics.jsonl"):
            tracker.log(row["step"], {name: value for name, value in row.items() if name != "step"})
        metrics = record.get("metrics")
        tracker.finish(str(record["status"]), numbers(metrics) if isinstance(metrics, dict) else {})
        made = [*(staging / "wandb").glob("offline-run-*")]
        if problems or len(made) != 1:
            raise MirrorFailed(f"{run_id}: {problems[0] if problems else 'wandb has written nothing'}")
        return _replace(mirrors(out_dir, run_id), made[0], out_dir / "wandb", staging)
    except MirrorFailed:
        raise
    except ImportError as error:
        raise MirrorFailed("wandb is not installed (pip install wandb)") from error
    except Exception as error:  # damaged records, a full disk, whatever wandb raises
        raise MirrorFailed(f"{run_id}: {type(error).__name__}: {trouble(error)}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return those metrics that a summary of wandb's shows."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _record(folder: Path) -> dict[str, Any]:
    """Return what result.json says, or of a run that has none its config."""
    record = read_json(folder / "result.json")
    if record is not None and isinstance(record.get("config"), dict) and "status" in record:
        return record
    try:
        config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    except (OSError, OmegaConfBaseException, YAMLError, UnicodeError):
        config = None
    if not isinstance(config, dict):
        raise MirrorFailed(f"{folder.name}: neither result.json nor config.yaml can be read")
    return {"config": config, "status": "interrupted"}


def _replace(old: Sequence[Path], made: Path, parent: Path, staging: Path) -> Path:
    """Put `made` where the others were; they are moved away first, since names have but seconds in them."""
    for number, path in enumerate(old):
        path.rename(staging / f"old{number}")
    target = parent / made.name
    made.rename(target)
    links = {"latest-run": "", "debug.log": "logs/debug.log", "debug-internal.log": "logs/debug-internal.log"}
    for name, inside in links.items():
        link = parent / name
        if link.is_symlink() and not link.exists():
            with contextlib.suppress(OSError):
                link.unlink()
                link.symlink_to(Path(target.name) / inside)
    return target


def unify(tracker: Tracker, folder: Path, out_dir: Path, say: Callable[[str], None]) -> None:
    """After the end of a run that was interrupted: of the folders that each session left make one."""
    if isinstance(tracker, WandbTracker) and tracker.offline and len(mirrors(out_dir, folder.name)) > 1:
        try:
            rebuild(folder, out_dir)
        except MirrorFailed as error:  # a view must never cost a run
            again = command("export", "wandb", folder.name, **in_folder(out_dir))
            say(f"note: wandb: {error}; {again} makes its mirror anew")


def export(out_dir: Path, wanted: Sequence[str], say: Callable[[str], None]) -> bool:
    """Make the mirrors of the runs `wanted` (all, if none are named), and say what became of each.

    Returns:
        whether all could be made. A run that another process is at is left to it.

    Raises:
        UserError: no runs there, or none of a name.
    """
    there = sorted(path.name for path in runs_dir(out_dir).glob("*") if path.is_dir())
    if not there:
        raise UserError(f"out_dir={out_dir}: no runs there; name the folder that holds runs/ by out_dir=DIR")
    chosen = [Path(name).name for name in wanted]
    for name in chosen:
        if name not in there:
            raise UserError(f"{name}: no such run in {runs_dir(out_dir)}{nearest(name, there)}")
    good = True
    for name in dict.fromkeys(chosen or there):
        folder = runs_dir(out_dir) / name
        try:
            with lock(folder / "lock.json"):
                made = rebuild(folder, out_dir)
        except Locked as busy:
            say(f"{name}: running (pid {busy.owner.get('pid')}); left out")
        except MirrorFailed as error:
            good = False
            say(f"failed: {error}")
        else:
            state = str((read_json(folder / "result.json") or {}).get("status", "interrupted"))
            also = "" if state in FINISHED else f" ({state})"
            say(f"{name}{also}: {made}")
    return good
