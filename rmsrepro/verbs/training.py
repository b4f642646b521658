"""The verbs that train: train and sweep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.imports import importing
from rmsrepro.config.overrides import (
    Override,
    check_single,
    chosen_experiment,
    expand,
    take,
    truth,
    unquote,
)
from rmsrepro.config.paths import search_path
from rmsrepro.config.study import StudyConfig
from rmsrepro.verbs.common import (
    OVERLAYS,
    command_line,
    composer,
    console,
    label_study,
    say,
    take_options,
)
from rmsrepro.verbs.failures import tell_end

if TYPE_CHECKING:
    from rmsrepro.runs.planning import SweepPlan
    from rmsrepro.runs.sweep import SweepOptions


def train(overrides: list[Override]) -> int:
    """One run; `show=true` prints its config instead."""
    from rmsrepro.config.compose import to_train_config
    from rmsrepro.config.resolve import resolve
    from rmsrepro.norms.given import check_norm_parameters, check_processes, check_task

    show, overrides = take(overrides, "show")
    refuse_options_of_sweep(overrides, dry_run="rmsrepro train show=true shows what it would run")
    check_single(overrides)
    overrides = label_study(overrides)
    with composer(overrides) as opened:
        config = to_train_config(opened.raw(overrides), chosen_experiment(overrides))
        check_norm_parameters([config])
        resolved = resolve(config)
        check_task(resolved.norm["name"], resolved.task.name)
        check_processes(resolved.norm["name"], resolved.trainer)
        if show is not None and truth("show", show):
            from rmsrepro.runs.identity import check_norm
            from rmsrepro.verbs.showing import show_config

            check_norm(resolved)
            show_config(resolved, opened.files(overrides))
            return 0
    # Not before the command is known to be right: importing torch takes seconds.
    with importing("lightning"):
        from rmsrepro.runs.train import train as train_run

    result = train_run(resolved, console=console())
    if not result.skipped:
        _tell_result(result.status, result.path, result.metrics, result.error, result.seconds)
    else:
        say(f"{result.path}")
    return 0 if result.status in ("completed", "busy") else 1


def _tell_result(
    status: str, path: Path, metrics: dict[str, object], error: str | None, seconds: float
) -> None:
    shown = ("val_loss", "val_bits_per_byte", "val_bleu", "test_loss", "test_bleu", "test_chrf")
    figures = "  ".join(
        f"{name} {metrics[name]:.4g}{_share_scored(name, metrics)}"
        for name in shown
        if isinstance(metrics.get(name), float)
    )
    say(f"{status} in {seconds:.1f} s  {figures}")
    if error:
        say(f"  {error}")
        if (path / "error.txt").is_file():
            say(f"  traceback: {path / 'error.txt'}")
    say(f"records: {path}")
    if (path / "checkpoints" / "last.ckpt").is_file():
        say(f"checkpoint: {path / 'checkpoints' / 'last.ckpt'}")


def _share_scored(name: str, metrics: dict[str, object]) -> str:
    """Label a score of some of the sentences: a figure of the first few is not one of the split."""
    split, _, kind = name.partition("_")
    share = metrics.get(f"{split}_sentences")
    return f" ({share} sentences)" if share and kind in ("bleu", "chrf") else ""


@dataclass
class SweepVerb:
    dry_run: bool = False
    tune: bool = False
    launcher: str | None = None
    n_jobs: int | None = None
    on_error: str = "continue"


def refuse_options_of_sweep(overrides: Sequence[Override], **instead: str) -> None:
    """Refuse an option of `sweep` given to another verb; `instead` says, by option, what does the same."""
    options = {item.name for item in fields(SweepVerb)}
    for item in overrides:
        if item.key.startswith("launcher."):
            raise UserError(f"{item.text}: a launcher and its options belong to rmsrepro sweep")
        if item.key.startswith("tuning."):
            raise UserError(f"{item.text}: tuning belongs to rmsrepro sweep tune=true")
        if item.key in options:
            hint = f" ({instead[item.key]})" if item.key in instead else ""
            raise UserError(f"{item.text}: {item.key} belongs to rmsrepro sweep{hint}")


def sweep(overrides: list[Override]) -> int:
    """Many runs."""
    from rmsrepro.runs.launchers import LauncherOptions, check_cluster, check_launcher, check_options

    command = command_line("sweep", overrides)
    same = {"launcher.n_jobs": "n_jobs"}
    overrides = [Override(same.get(item.key, item.key), item.value) for item in overrides]
    given = [item for item in overrides if item.key.startswith("launcher.")]
    overrides = [item for item in overrides if item not in given]
    options, overrides = take_options(SweepVerb, overrides)
    own = [Override(item.key.removeprefix("launcher."), item.value) for item in given]
    if options.launcher is not None:
        check_launcher(options.launcher)
        check_options(LauncherOptions(options.launcher, options=own))
        if not options.dry_run:
            check_cluster(options.launcher)
    elif given:
        raise UserError(f"{given[0].text}: name the launcher too, as in launcher=submitit_slurm")
    if options.n_jobs is not None and options.n_jobs < 1:
        raise UserError(f"n_jobs={options.n_jobs}: expected a whole number above zero")
    if options.on_error == "stop" and options.launcher == "submitit_slurm":
        raise UserError("on_error=stop: with launcher=submitit_slurm all jobs are in the queue at once")
    if options.on_error not in ("continue", "stop"):
        hint = nearest(options.on_error, ["continue", "stop"])
        raise UserError(f"on_error={options.on_error}: expected continue or stop{hint}")
    if options.tune:
        from rmsrepro.verbs.tuning import tune

        return tune(overrides, options, launcher_options=own, command=command)
    if (key := next((item for item in overrides if item.key.startswith("tuning.")), None)) is not None:
        raise UserError(f"{key.text}: it takes effect with tune=true only; add that, or leave it out")
    name, rest = take(overrides, "study")
    if name is None:
        return sweep_jobs(rest, options, launcher_options=own, command=command)[0]
    from rmsrepro.verbs.studies import load_study, restricted

    study, rest = restricted(load_study(unquote(name)), rest)
    return sweep_jobs(rest, options, study, launcher_options=own, command=command)[0]


def sweep_jobs(
    overrides: Sequence[Override],
    options: SweepVerb,
    study: StudyConfig | None = None,
    *,
    launcher_options: Sequence[Override] = (),
    command: str = "",
) -> tuple[int, list[str]]:
    """Plan and run a sweep (also the first part of `reproduce`); return its exit code and run ids.

    Args:
        overrides: those of every job; without a study, all that is swept over.
        study: restricted to what the command line leaves of it (`restricted`).
        launcher_options: what was given as `launcher.KEY=VALUE`.
        command: what was typed, for `status` to repeat.
    """
    from rmsrepro.runs.disk import check_writable
    from rmsrepro.runs.launchers import LauncherOptions

    with importing("lightning"):
        from rmsrepro.runs.planning import plan_sweep
        from rmsrepro.runs.sweep import run_sweep

    settings = sweep_settings(options, launcher_options, command)
    if study is None:
        jobs = expand(last_wins(overrides))
    else:
        from rmsrepro.paper.studies import study_jobs
        from rmsrepro.verbs.studies import split_all

        jobs = [[*split_all(job.overrides, study.name), *overrides] for job in study_jobs(study)]
        settings.num_threads = study.jobs.num_threads
        if options.launcher is None and options.n_jobs is None and study.jobs.n_jobs > 1:
            settings.launcher = LauncherOptions("joblib", study.jobs.n_jobs)
    jobs = [last_wins(label_study(job)) for job in jobs]
    everything = [item for job in jobs for item in job]
    naming = [item for item in everything if item.key in ("norm", "plugins", *OVERLAYS)]
    with composer([*overrides, *naming]) as opened:
        screen = console()
        plan = plan_sweep(opened, jobs)
        tell_plan(plan)
        if options.dry_run:
            list_jobs(plan.jobs)
            return 0, [job.run_id for job in plan.jobs]
        if plan.jobs:
            check_writable(plan.jobs[0].config.out_dir)
        start = time.perf_counter()
        done = run_sweep(plan, settings, base=search_path(), console=screen)
    return tell_end(done, time.perf_counter() - start), [job.run_id for job in done]


def sweep_settings(options: SweepVerb, launcher_options: Sequence[Override], command: str) -> SweepOptions:
    """Return how the jobs are run, from the verb's options.

    Args:
        launcher_options: what was given as `launcher.KEY=VALUE`.
        command: what was typed, for `status` to repeat.
    """
    from rmsrepro.runs.launchers import LauncherOptions
    from rmsrepro.runs.sweep import SweepOptions

    two = 2 if options.launcher in ("joblib", "submitit_local") else None
    launcher = LauncherOptions(
        options.launcher or ("joblib" if (options.n_jobs or 1) > 1 else "basic"),
        options.n_jobs or two,
        tuple(launcher_options),
    )
    return SweepOptions(launcher, on_error=options.on_error, command=command)


def tell_plan(plan: SweepPlan, what: str = "runs") -> None:
    """Say what was noticed while planning, and how many runs are left."""
    for note in plan.notes:
        say(f"note: {note}")
    skipped = sum(job.skipped for job in plan.jobs)
    invalid = sum(job.error is not None for job in plan.jobs)
    also = f", {invalid} invalid" if invalid else ""
    say(f"{len(plan.jobs)} {what}: {skipped} done already, {len(plan.todo)} to do{also}")


def last_wins(job: Sequence[Override]) -> list[Override]:
    """Of several overrides with one key the last stays, at the first one's place."""
    merged: dict[str, Override] = {}
    for item in job:
        merged[item.key] = item
    return list(merged.values())


_TOLD_BY_ID = ("task", "data", "model", "norm", "seed")


def list_jobs(jobs: Sequence[object]) -> None:
    """List the runs of a plan, what is left of them, and the time it takes by earlier runs."""
    from rmsrepro.runs.estimate import estimate_seconds
    from rmsrepro.runs.planning import Job

    total, unknown, contended = 0.0, 0, False
    known = [
        {
            item.key: item.text
            for item in job.overrides
            if item.key not in _TOLD_BY_ID
            # What its norm lacks was dropped from the job.
            and (not item.key.startswith("norm.") or item.key.removeprefix("norm.") in job.config.norm)
        }
        for job in jobs
        if isinstance(job, Job)
    ]
    for job, own in zip(jobs, known, strict=True):
        assert isinstance(job, Job)
        # The id tells all other settings by a hash only.
        apart = [text for key, text in own.items() if any(other.get(key) != text for other in known)]
        state = "invalid" if job.error else f"skip ({job.status})" if job.skipped else "run"
        say(f"  {state:<16} {job.run_id}  {' '.join(apart)}".rstrip())
        if job.error:
            say(f"    {job.error}")
        elif not job.skipped:
            estimate = estimate_seconds(job.config)
            if estimate is None:
                unknown += 1
            else:
                total += estimate.seconds
                contended |= estimate.contended
    if total:
        say(
            f"about {total:.0f} s of training, by the finished runs of the same kind"
            + (" (contended: they shared the machine)" if contended else "")
            + (f"; {unknown} unknown" if unknown else "")
        )
    elif unknown:
        say("estimated time: unknown until a run of the same kind has finished on this machine")
