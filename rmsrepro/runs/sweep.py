"""Many runs: all composed before any starts, finished ones skipped, failures named and counted."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from rmsrepro.config.compose import Composer, to_train_config
from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, chosen_experiment
from rmsrepro.config.paths import expanded
from rmsrepro.config.plain import plain
from rmsrepro.config.plugins import load_plugins
from rmsrepro.config.resolve import resolve
from rmsrepro.config.schema import Backend, Placement, Strategy, TrainConfig
from rmsrepro.data import data_fingerprint
from rmsrepro.norms import NormSpec, choose_backend
from rmsrepro.norms.given import check_norm_parameters, check_task, drop_foreign_parameters
from rmsrepro.runs.checkpoints import load_checkpoint
from rmsrepro.runs.files import read_json, to_json
from rmsrepro.runs.identity import check_norm, failed_id, identify
from rmsrepro.runs.interruption import Interrupted, handling_signals
from rmsrepro.runs.launch import launch
from rmsrepro.runs.launchers import LauncherOptions
from rmsrepro.runs.lost import End, Rounds, record_loss, was_struck
from rmsrepro.runs.manifests import release_manifest, touch_manifest, write_manifest
from rmsrepro.runs.monitor import Monitor
from rmsrepro.runs.reasons import explain
from rmsrepro.runs.result import finished_result, record_failure, runs_dir
from rmsrepro.runs.status import total_seconds
from rmsrepro.runs.submitted import Lost, Requeue
from rmsrepro.runs.train import OtherModel, check_continuation, nothing_to_do, train
from rmsrepro.runs.workers import (
    become_sweep,
    is_worker,
    stop_after_this_job,
    stop_workers,
    told_to_stop,
    watch_between_jobs,
)
from rmsrepro.tasks import norm_spec


@dataclass
class Job:
    """One run of a sweep: what was asked, and what it came to."""

    overrides: list[Override]
    config: TrainConfig
    run_id: str = ""
    group: str = ""
    backend_note: str | None = None
    """Why `auto` settled on the backend that the config now names, where there is something to say."""
    error: str | None = None
    status: str = "planned"
    """planned | completed | diverged | failed | busy"""
    skipped: bool = False
    nothing_left: str | None = None
    """Why there is no run to make: the checkpoint has all the updates already."""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return " ".join(item.text for item in self.overrides)


@dataclass
class SweepOptions:
    """How the jobs of a sweep are run."""

    launcher: LauncherOptions = field(default_factory=LauncherOptions)
    on_error: str = "continue"
    num_threads: int | None = None
    command: str = ""
    """The command line, for `status`: what to repeat."""


@dataclass
class SweepPlan:
    """All jobs of a sweep, in order, with what was noticed while planning."""

    jobs: list[Job]
    notes: list[str] = field(default_factory=list)

    @property
    def todo(self) -> list[Job]:
        return [job for job in self.jobs if not job.skipped and job.error is None]


def plan_sweep(composer: Composer, jobs: Sequence[Sequence[Override]]) -> SweepPlan:
    """Compose every job, settle the backend, find out which are finished.

    Raises:
        UserError: a wrong key, name, type or missing file in any job; a norm parameter that no selected
            norm has. A job that breaks a rule between fields is kept, with its `error`.
    """
    planned: list[Job] = []
    notes: list[str] = []
    for overrides in jobs:
        config = to_train_config(composer.raw(list(overrides)), chosen_experiment(overrides))
        planned.append(Job(list(overrides), config))
    for job in planned:
        _check_one_process(job)
    check_norm_parameters([job.config for job in planned])
    for job in planned:
        placement = job.config.placement
        if job.config.model.name == "gru" and placement not in (Placement.pre, Placement.none):
            note = f"placement={placement.value} does not apply to model=gru and was dropped there"
            if note not in notes:
                notes.append(note)
            job.config = replace(job.config, placement=Placement.pre)
            job.overrides = [item for item in job.overrides if item.key != "placement"]
        try:
            job.config = resolve(job.config)
            check_task(job.config.norm["name"], job.config.task.name)
        except UserError as error:
            job.error = str(error)
    _settle_backend(planned, notes)
    fingerprints: dict[str, str] = {}
    for job in planned:
        if job.error is not None:
            job.run_id = failed_id(job.config)
            continue
        try:
            _identify(job, fingerprints)
        except OtherModel as error:
            job.error, job.run_id = str(error), failed_id(job.config)
    merged: dict[str, Job] = {}
    for job in planned:
        merged.setdefault(job.run_id, job)
    if len(merged) < len(planned):
        notes.append(
            f"{len(planned) - len(merged)} of {len(planned)} jobs are the same as others and were merged"
        )
    for job in merged.values():
        if job.nothing_left is not None:
            notes.append(job.nothing_left)
            job.skipped, job.status = True, "completed"
            continue
        done = finished_result(runs_dir(job.config.out_dir) / job.run_id)
        if done is not None and not job.config.rerun and job.error is None:
            job.skipped, job.status = True, str(done["status"])
            job.seconds = total_seconds(done)
    return SweepPlan(list(merged.values()), notes)


def _check_one_process(job: Job) -> None:
    """Refuse a job of several processes: a launcher gives each job one.

    Raises:
        UserError: what to do instead.
    """
    strategy = job.config.trainer.strategy
    if strategy is Strategy.single:
        return
    kept = " ".join(item.text for item in job.overrides if item.key != "study_name")
    raise UserError(
        f"trainer={strategy.value}: a sweep gives each job one process, so nothing was started; train one "
        f"run after another (rmsrepro train {kept}; the report shows them together), or leave it out and "
        "spread the jobs over the devices: n_jobs=N, or launcher=submitit_slurm"
    )


def _settle_backend(jobs: Sequence[Job], notes: list[str]) -> None:
    """Replace backend=auto by the fastest backend that all norms of the sweep have."""
    open_jobs = [job for job in jobs if job.error is None and job.config.backend is Backend.auto]
    if not open_jobs:
        return
    specs: list[NormSpec] = [norm_spec(job.config) for job in open_jobs]
    try:
        choice = choose_backend(specs, "auto")
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    for job in open_jobs:
        job.config, job.backend_note = replace(job.config, backend=Backend(choice.backend)), choice.note
    some = len(open_jobs) < len(jobs)
    who = f"{len(open_jobs)} of {len(jobs)} jobs" if some else "all jobs"
    why = f" ({choice.note})" if choice.note else ""
    notes.append(f"backend=auto: {who} use {choice.backend}, the fastest that all their norms have{why}")


def _identify(job: Job, fingerprints: dict[str, str]) -> None:
    check_norm(job.config)
    key = to_json([plain(job.config.data), job.config.task.name], indent=None)
    if key not in fingerprints:
        fingerprints[key] = data_fingerprint(job.config.data, job.config.task.name)
    parent = None
    if job.config.ckpt:
        checkpoint = load_checkpoint(job.config.ckpt)
        check_continuation(job.config, checkpoint)
        parent, job.nothing_left = checkpoint.run_id, nothing_to_do(job.config, checkpoint)
    identity = identify(job.config, data_hash=fingerprints[key], parent=parent)
    job.run_id, job.group = identity.run_id, identity.group


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
    # One that brought its process down may do so again: the others come first.
    todo = sorted(plan.todo, key=lambda job: was_struck(folder / job.run_id))
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
                _told_what_goes_on(launcher, console),
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
    status, error = str(record.get("status", "failed")), record.get("error")
    if status == "interrupted" or "status" not in record:
        status, error = "failed", f"{result.error}; the same command goes on with the run"
    return {"run_id": job.run_id, "status": status, "error": error, "seconds": total_seconds(record)}


@contextlib.contextmanager
def _told_what_goes_on(launcher: LauncherOptions, console: Console) -> Iterator[None]:
    """Say, when the sweep is interrupted, what becomes of jobs that are not its own processes."""
    try:
        yield
    except Interrupted:
        if launcher.name == "submitit_slurm":
            console.print(
                "interrupted: the jobs that were submitted go on (squeue --me lists them; scancel ends one, "
                "which saves its run first); the same command leaves running and finished ones as they are",
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
        _identify(job, {})
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
