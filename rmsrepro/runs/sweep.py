"""The runs of a plan through a launcher: failures named and counted, the rest goes on."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from rmsrepro.config.compose import to_train_config
from rmsrepro.config.errors import UserError
from rmsrepro.config.paths import expanded
from rmsrepro.config.plugins import load_plugins
from rmsrepro.config.resolve import resolve
from rmsrepro.config.schema import TrainConfig
from rmsrepro.norms.given import drop_foreign_parameters
from rmsrepro.runs.deaths import died_before, give_up
from rmsrepro.runs.files import read_json
from rmsrepro.runs.identity import failed_id
from rmsrepro.runs.interruption import Interrupted, handling_signals
from rmsrepro.runs.launch import launch
from rmsrepro.runs.launchers import LauncherOptions
from rmsrepro.runs.lost import End, Rounds, end_by_record, record_loss
from rmsrepro.runs.manifests import release_manifest, touch_manifest, write_manifest
from rmsrepro.runs.monitor import Monitor
from rmsrepro.runs.planning import Job, SweepPlan, identify_job
from rmsrepro.runs.reasons import explain
from rmsrepro.runs.result import finished_result, record_failure, runs_dir
from rmsrepro.runs.submitted import Lost, Requeue
from rmsrepro.runs.train import train
from rmsrepro.runs.workers import (
    become_sweep,
    is_worker,
    stop_after_this_job,
    stop_workers,
    told_to_stop,
    watch_between_jobs,
    working,
)


@dataclass
class SweepOptions:
    """How the jobs of a sweep are run."""

    launcher: LauncherOptions = field(default_factory=LauncherOptions)
    on_error: str = "continue"
    num_threads: int | None = None
    command: str = ""
    """The command line, for `status`: what to repeat."""


def run_sweep(plan: SweepPlan, options: SweepOptions, *, base: Sequence[str], console: Console) -> list[Job]:
    """Run what is left of a plan; return all its jobs with their ends. Call it inside `Composer`.

    Raises:
        Interrupted: on Ctrl-C or SIGTERM, after the workers were stopped.
    """
    if not plan.jobs:
        return []
    out_dir = expanded(plan.jobs[0].config.out_dir)
    for job in plan.jobs:
        if job.error is not None:
            record_failure(job.config, job.run_id, UserError(job.error))
            job.status = "failed"
            # The reason stands in the summary, where all that failed is named.
            console.print(f"failed: {job.text}", highlight=False, markup=False, soft_wrap=True)
            if options.on_error == "stop":
                return plan.jobs
    folder, launcher = runs_dir(out_dir), options.launcher
    if launcher.name == "basic":
        for job in give_up(folder, [job for job in plan.todo if not job.config.rerun]):
            console.print(f"failed: {job.text}", highlight=False, markup=False, soft_wrap=True)
            if options.on_error == "stop":
                return plan.jobs
    # One that brought its process down may do so again: the others come first.
    todo = sorted(plan.todo, key=lambda job: died_before(folder / job.run_id))
    manifest = write_manifest(
        out_dir,
        [
            (job.run_id, [item.text for item in job.overrides])
            for job in plan.jobs
            if job.nothing_left is None
        ],
        study=plan.jobs[0].config.study_name,
        command=options.command,
    )
    try:
        if todo:
            folder.mkdir(parents=True, exist_ok=True)
            jobs = [(job.run_id, job.text) for job in todo]
            with (
                _told_what_goes_on(launcher, console, plan),
                Monitor(console, jobs, folder, partial(touch_manifest, manifest)) as monitor,
            ):
                # A launcher takes its whole list at once; to stop at a failure needs a look after each round.
                size = launcher.here if options.on_error == "stop" else 0
                run = _launching(todo, options, base, out_dir)
                rounds = Rounds(run, folder, partial(record_loss, folder), monitor.say)
                _interruptible(partial(rounds.run, todo, size), launcher.here)
    finally:
        release_manifest(manifest)
    return plan.jobs


def _launching(
    todo: Sequence[Job], options: SweepOptions, base: Sequence[str], out_dir: Path
) -> Callable[[Sequence[Job], bool], list[End]]:
    """Return the function that runs some of the jobs (True: one by itself) and returns their ends."""
    notes = {job.run_id: job.backend_note for job in todo if job.backend_note}
    task = partial(run_job, backend_notes=notes)
    files = out_dir / "sweeps" / f"submitit-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    launches = itertools.count()

    def run(part: Sequence[Job], alone: bool) -> list[End]:
        launcher = options.launcher
        if launcher.n_jobs is not None:
            n_jobs = min(launcher.n_jobs, len(part))
            if launcher.name == "joblib" and (alone or launcher.n_jobs > 1):
                # With one worker joblib runs a job in this very process, which must outlive it.
                n_jobs = max(2, n_jobs)
            launcher = replace(launcher, n_jobs=n_jobs)
        texts = [_job_overrides(job, options) for job in part]
        place = files / str(next(launches))
        results = launch(task, texts, base=base, launcher=launcher, folder=place)
        return [_end(job, result) for job, result in zip(part, results, strict=False)]

    return run


def _end(job: Job, result: End | Lost) -> End:
    """Return how a job ended; one that gave no result by its record, without which it has failed."""
    if not isinstance(result, Lost):
        return result
    record = read_json(runs_dir(job.config.out_dir) / job.run_id / "result.json") or {}
    ended = end_by_record(job.run_id, record)
    if record.get("status", "interrupted") == "interrupted":
        error = f"{result.error}; the same command goes on with the run"
        return {**ended, "status": "failed", "error": error}
    return ended


@contextlib.contextmanager
def _told_what_goes_on(launcher: LauncherOptions, console: Console, plan: SweepPlan) -> Iterator[None]:
    """Say, when the sweep is interrupted, how far it is and what becomes of the rest."""
    try:
        yield
    except Interrupted:
        if launcher.name == "submitit_slurm":
            console.print(
                "interrupted: the jobs that were submitted go on (squeue --me lists them; scancel ends one, "
                "which saves its run first); the same command leaves running and finished ones as they are",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip
        else:
            folders = [runs_dir(job.config.out_dir) / job.run_id for job in plan.jobs]
            done = sum(finished_result(folder) is not None for folder in folders)
            console.print(
                f"interrupted: {done} of {len(folders)} finished; the same command goes on",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip
        raise


def _interruptible(run: Callable[[], None], jobs_here: int) -> None:
    """Run jobs; a signal to this process ends its workers, which save their runs first."""
    become_sweep(jobs_here)
    # The workers are stopped before the exception: joblib kills them outright when it sees one.
    with handling_signals(before=stop_workers):
        run()


def run_job(config: DictConfig, backend_notes: Mapping[str, str]) -> dict[str, Any]:
    """What a launcher runs for each job, here or in a worker: train, and tell how it ended.

    Args:
        backend_notes: see `train`.
    """
    with working():
        return _run_job(config, backend_notes)


def _run_job(config: DictConfig, backend_notes: Mapping[str, str]) -> dict[str, Any]:
    run_id, start = "", time.perf_counter()
    typed: TrainConfig | None = None
    watch_between_jobs()
    if told_to_stop():
        return {"run_id": run_id, "status": "planned", "error": None, "seconds": 0.0}
    requeue = Requeue()
    try:
        load_plugins(list(config.plugins))
        typed = to_train_config(config)
        drop_foreign_parameters(typed)
        typed = resolve(typed)
        quiet = Console(quiet=True)
        # A worker that is told to stop before its run watches for that does not begin it.
        with handling_signals() if is_worker() else contextlib.nullcontext():
            if is_worker() and told_to_stop():  # since the first look
                raise Interrupted(signal.SIGTERM)
            result = train(typed, console=quiet, report_errors=True, backend_notes=backend_notes)
        run_id, status, error = result.run_id, result.status, result.error
    except Interrupted as interrupted:
        if not is_worker():
            raise
        stop_after_this_job()
        requeue.leave(interrupted.exit_code)
        status, error = "interrupted", None
    except Exception as problem:
        status, error = "failed", explain(problem)
        if typed is not None:
            run_id = _record_early_failure(typed, problem)
    finally:
        requeue.close()
    return {"run_id": run_id, "status": status, "error": error, "seconds": time.perf_counter() - start}


def _record_early_failure(config: TrainConfig, problem: Exception) -> str:
    """Record a job that failed before its run began; return the id that its record has.

    That is the id that the sweep planned, which `status` and the monitor wait for, unless that folder
    holds more than such a record.
    """
    job = Job([], config)
    with contextlib.suppress(Exception):  # whatever is wrong with the job, `problem` tells it
        identify_job(job, {})
    folder = runs_dir(config.out_dir) / job.run_id
    if not job.run_id or (folder.exists() and (read_json(folder / "result.json") or {}).get("steps") != 0):
        job.run_id = failed_id(config)
    with contextlib.suppress(OSError):
        record_failure(config, job.run_id, problem)
    return job.run_id


def _job_overrides(job: Job, options: SweepOptions) -> list[str]:
    fixed: dict[str, str] = {"backend": job.config.backend.value, "trainer.progress": "false"}
    if options.num_threads is not None and job.config.trainer.num_threads is None:
        fixed["trainer.num_threads"] = str(options.num_threads)
    kept = [item.text for item in job.overrides if item.key not in fixed]
    return [*kept, *(f"{key}={value}" for key, value in fixed.items())]
