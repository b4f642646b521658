"""Which runs a sweep consists of: all composed before any starts, and which of them are left to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rmsrepro.config.compose import Composer, to_train_config
from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, chosen_experiment
from rmsrepro.config.plain import plain
from rmsrepro.config.resolve import resolve
from rmsrepro.config.schema import Backend, Placement, Strategy, TrainConfig
from rmsrepro.config.shell import words
from rmsrepro.data import data_fingerprint
from rmsrepro.norms import NormSpec, choose_backend
from rmsrepro.norms.given import check_norm_parameters, check_task
from rmsrepro.runs.checkpoints import load_checkpoint
from rmsrepro.runs.files import to_json
from rmsrepro.runs.identity import check_norm, failed_id, identify
from rmsrepro.runs.result import finished_result, runs_dir
from rmsrepro.runs.status import total_seconds
from rmsrepro.runs.train import OtherModel, check_continuation, nothing_to_do
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
        """The overrides, as they can be pasted behind a verb."""
        return words(self.overrides)


@dataclass
class SweepPlan:
    """All jobs of a sweep, in order, with what was noticed while planning."""

    jobs: list[Job]
    notes: list[str] = field(default_factory=list)
    run_ids: list[str] = field(default_factory=list)
    """The run of each job that was asked for, in order: of equal jobs the same."""

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
            identify_job(job, fingerprints)
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
    return SweepPlan(list(merged.values()), notes, [job.run_id for job in planned])


def _check_one_process(job: Job) -> None:
    """Refuse a job of several processes: a launcher gives each job one.

    Raises:
        UserError: what to do instead.
    """
    strategy = job.config.trainer.strategy
    if strategy is Strategy.single:
        return
    kept = words(item for item in job.overrides if item.key != "study_name")
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


def identify_job(job: Job, fingerprints: dict[str, str]) -> None:
    """Find out which run a job is; `fingerprints` keeps those of data already read.

    Raises:
        UserError: missing data or checkpoint, or a norm that cannot be built.
        OtherModel: a checkpoint of another model.
    """
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
