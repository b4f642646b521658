"""One training run from a resolved config to its records: skip it, resume it, or begin it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console

from rmsrepro.config.errors import UserError, contained
from rmsrepro.config.overrides import override_text
from rmsrepro.config.plain import plain
from rmsrepro.config.schema import Strategy, TrainConfig, TrainerConfig
from rmsrepro.config.screen import Screen
from rmsrepro.data import data_fingerprint
from rmsrepro.runs.checkpoints import Checkpoint, load_checkpoint, tell_changed_norm
from rmsrepro.runs.disk import check_writable, explain_full, unwritable
from rmsrepro.runs.execution import Run
from rmsrepro.runs.identity import Identity, check_norm, identify
from rmsrepro.runs.interruption import Interrupted, handling_signals
from rmsrepro.runs.locks import Locked, lock
from rmsrepro.runs.progress import speaker
from rmsrepro.runs.result import RunResult, finished_result, flags, runs_dir
from rmsrepro.tasks import norm_spec, normalisation


def plan(config: TrainConfig) -> tuple[Identity, Checkpoint | None]:
    """Return who the run of a resolved config is, and the checkpoint that it starts from, if any.

    Raises:
        UserError: missing data or checkpoint, a norm that cannot be built, or a backend it has not.
    """
    parent = load_checkpoint(config.ckpt) if config.ckpt else None
    check_norm(config)
    check_hardware(config.trainer)
    if parent is not None:
        check_continuation(config, parent)
    data_hash = data_fingerprint(config.data, config.task.name)
    return identify(config, data_hash=data_hash, parent=parent.run_id if parent else None), parent


def check_hardware(trainer: TrainerConfig) -> None:
    """Raise UserError for hardware that is not there, or not supported."""
    if trainer.strategy is Strategy.fsdp and (trainer.accelerator == "cpu" or not torch.cuda.is_available()):
        why = "trainer.accelerator=cpu" if trainer.accelerator == "cpu" else "torch sees none here"
        raise UserError(
            f"trainer=fsdp: it needs a GPU for each of its processes, and {why}; use trainer=ddp on CPUs"
        )
    if trainer.accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError(
            "trainer.accelerator=gpu: torch sees no GPU here; use trainer.accelerator=auto (or cpu), or "
            "install a build of torch for your GPU"
        )
    devices = torch.cuda.device_count() if trainer.accelerator != "cpu" else 0
    if devices and trainer.devices > devices:
        raise UserError(
            f"trainer.devices={trainer.devices}: torch sees {devices} GPU(s) here; set "
            f"trainer.devices={devices}, or trainer.accelerator=cpu"
        )


class OtherModel(UserError):
    """A checkpoint is to be trained on as another model than it is: a rule between fields of a command."""


def check_continuation(config: TrainConfig, parent: Checkpoint) -> None:
    """Refuse to train a checkpoint on as another model; another backend is the same model.

    Raises:
        OtherModel: all differences, each as it was and as it is asked for.
    """
    path, old = str(config.ckpt), parent.config
    was, wanted = [], []
    norms = normalisation(old), normalisation(config)
    advice = "to go on training it, leave the model, norm and task as they were"
    if not norms[0].same_as(norms[1]):
        was += norms[0].differences(norms[1])
        wanted += norms[1].differences(norms[0])
        advice = norms[0].advice(norms[1].name, path)
    for part in ("model", "task"):
        before, now = plain(getattr(old, part)), plain(getattr(config, part))
        if before["name"] != now["name"]:
            was.append(f"{part}={before['name']}")
            wanted.append(f"{part}={now['name']}")
            continue
        for key in before:
            if before[key] != now[key]:
                was.append(f"{part}.{key}={override_text(before[key])}")
                wanted.append(f"{part}.{key}={override_text(now[key])}")
    if was:
        # Once each: that queries and keys are normalised is told by the norm and by the model.
        said = [" ".join(dict.fromkeys(words)) for words in (was, wanted)]
        raise OtherModel(f"ckpt={path}: it was trained with {said[0]}, not {said[1]}; {advice}")


def nothing_to_do(config: TrainConfig, parent: Checkpoint) -> str | None:
    """Say that a checkpoint has all the updates that are asked for; None where some are left."""
    if parent.step < config.trainer.max_steps:
        return None
    return (
        f"ckpt={parent.path} is at step {parent.step} already: "
        f"trainer.max_steps={config.trainer.max_steps} asks for no further update. "
        f"Nothing was done; set trainer.max_steps above {parent.step}."
    )


def train(
    config: TrainConfig,
    *,
    console: Console | None = None,
    report_errors: bool = False,
    backend_notes: Mapping[str, str] | None = None,
) -> RunResult:
    """Train one run, resume it, or find it finished.

    Args:
        config: resolved (`rmsrepro.config.resolve.resolve`).
        report_errors: True in a sweep: an error is recorded and returned as status `failed`; else a
            UserError raised before training begins passes on, having left nothing behind.
        backend_notes: run id -> why a sweep settled its backend as it did, to be recorded.

    Raises:
        UserError: see `report_errors`, and `plan`; nothing can be written to `out_dir`.
        Interrupted: after the checkpoint and the record were written.
    """
    console = console or Screen()
    say = speaker(console)
    check_writable(config.out_dir)
    identity, parent = plan(config)
    folder = runs_dir(config.out_dir) / identity.run_id
    done = finished_result(folder)
    if done is not None and not config.rerun:
        say(f"{identity.run_id}: {done['status']} already, nothing to do (rerun=true trains it anew)")
        return RunResult(
            identity.run_id, folder, done["status"], skipped=True, metrics=done.get("metrics", {})
        )
    if parent is not None and (nothing_left := nothing_to_do(config, parent)) is not None:
        say(nothing_left)
        return RunResult(parent.run_id, parent.path.parent.parent, "completed", skipped=True)
    existed = folder.exists()
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if parent is not None:
        tell_changed_norm(parent)
    for flag in flags(config):
        say(f"note: {flag}")
    try:
        with lock(folder / "lock.json"), handling_signals() as interruption:
            done = finished_result(folder)
            if done is not None and not config.rerun:
                # Another process finished it between the first look and the lock.
                return RunResult(
                    identity.run_id, folder, done["status"], skipped=True, metrics=done.get("metrics", {})
                )
            if config.rerun and existed:
                _archive(folder)
            note = (backend_notes or {}).get(identity.run_id) or norm_spec(config).backend_note
            run = Run(config, identity, parent, folder, console, interruption, note)
            try:
                with contained(keyboard=True):
                    result = run.execute()
            except UserError as error:
                if not (report_errors or run.training_began):
                    run.discard()
                    raise
                result = run.fail(error)
            except Interrupted:
                run.record_interruption()
                raise
            except Exception as error:
                result = run.fail(error)
            interruption.check()  # a signal that came while the end was written
            return result
    except UserError:
        # Nothing began: of the folders that were made for it none stays, unless another run is in it by now.
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
        raise
    except OSError as error:  # of the folder or its lock: all later ones are recorded as the run's end
        full = explain_full(error, folder)
        if full is None:
            raise unwritable(folder, error) from error
        return RunResult(identity.run_id, folder, "failed", error=full)
    except Locked as busy:
        say(f"{identity.run_id}: another process (pid {busy.owner.get('pid')}) is at work on it; left to it")
        return RunResult(identity.run_id, folder, "busy", skipped=True)


def _archive(folder: Path) -> None:
    """Move the files of an earlier run of this identity aside; nothing is overwritten."""
    kept = folder.parent.parent / "archive" / f"{folder.name}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    kept.mkdir(parents=True)
    for item in folder.iterdir():
        if item.name != "lock.json":
            item.rename(kept / item.name)
