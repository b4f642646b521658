"""`sweep tune=true`: equal trials for every norm, then each norm's best again with fresh seeds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rmsrepro.config.compose import Composer, to_train_config
from rmsrepro.config.errors import UserError
from rmsrepro.config.imports import importing
from rmsrepro.config.overrides import Override, chosen_experiment, expand, override_text
from rmsrepro.config.paths import expanded, search_path
from rmsrepro.config.tuning import PREFIX, TUNED, TuningConfig, ranges_of, read_tuning
from rmsrepro.verbs.common import composer, console, say
from rmsrepro.verbs.failures import tell_end
from rmsrepro.verbs.training import SweepVerb, last_wins, list_jobs, sweep_settings, tell_plan

if TYPE_CHECKING:
    from rmsrepro.runs.planning import Job, SweepPlan
    from rmsrepro.runs.tunings import TunedCell


def tune(
    overrides: Sequence[Override],
    options: SweepVerb,
    *,
    launcher_options: Sequence[Override],
    command: str,
) -> int:
    """Tune every norm of every cell; return the exit code.

    Args:
        overrides: the keys of the runs, and those of `tuning`.
        launcher_options: what was given as `launcher.KEY=VALUE`.
        command: what was typed, for `status` to repeat.
    """
    from rmsrepro.runs.disk import check_writable

    with importing("lightning"):
        from rmsrepro.runs.planning import plan_sweep
        from rmsrepro.runs.sweep import run_sweep
    from rmsrepro.runs.tuning_record import write_tuning

    own = [item for item in overrides if item.key.startswith(PREFIX)]
    keys = last_wins([item for item in overrides if item not in own])
    tuning = read_tuning([Override(item.key.removeprefix(PREFIX), item.value) for item in own])
    _check_keys(keys, own)
    jobs = expand(keys)
    settings = sweep_settings(options, launcher_options, command)
    with composer(keys) as opened:
        screen = console()

        def run(plan: SweepPlan) -> tuple[int, list[Job]]:
            start = time.perf_counter()
            done = run_sweep(plan, settings, base=search_path(), console=screen)
            return tell_end(done, time.perf_counter() - start), done

        cells = _cells(opened, jobs, tuning)
        trials = plan_sweep(opened, [job for cell in cells for job in _trials(cell)])
        cells = _with_trials(cells, trials)
        tell_plan(trials, "trials")
        seeds = f"seed{'s'[: len(tuning.final_seeds) - 1]} {', '.join(map(str, tuning.final_seeds))}"
        number = sum(len(cell.contestants) for cell in cells) * len(tuning.final_seeds)
        then = f"then at most {number} final runs: each norm's best point with the {seeds}"
        if options.dry_run:
            list_jobs(trials.jobs)
            say(then)
            return 0
        say(then)
        check_writable(trials.jobs[0].config.out_dir)
        out_dir = expanded(trials.jobs[0].config.out_dir)

        def keep() -> list[Path]:
            return [write_tuning(out_dir, cell.record(command)) for cell in cells]

        files = keep()  # from here on the trials are known as such, whatever becomes of this process
        code, done = run(trials)
        if code and options.on_error == "stop":
            say("on_error=stop: there are no final runs")
            return code
        _choose(cells, done)
        finals = plan_sweep(opened, [job for cell in cells for job in _finals(cell)])
        _with_finals(cells, finals)
        keep()
        if finals.jobs:
            tell_plan(finals, "final runs")
            code = max(code, run(finals)[0])
    _show(out_dir, files)
    return max(code, _tell_choice(cells))


def _check_keys(keys: Sequence[Override], own: Sequence[Override]) -> None:
    """Refuse keys of a run that a tuning decides."""
    refused = {
        "seed": "a tuning has tuning.seed for its trials, and tuning.final_seeds=[1,2,3] for what follows",
        "study": "a study fixes what would be tuned; give its model, task, data and norms as keys instead",
        "ckpt": "every trial is trained from its beginning; leave ckpt out",
    }
    for item in keys:
        if item.key in refused:
            raise UserError(f"{item.text}: with tune=true, {refused[item.key]}")
    fixed = {item.key: item for item in keys}
    for item in own:
        name = TUNED.get(item.key.removeprefix(PREFIX))
        if (both := fixed.get(f"optim.{name}")) is not None:
            raise UserError(
                f"{both.text} and {item.text}: the first fixes the value, the second tunes it; leave one out"
            )
    if all(f"optim.{name}" in fixed for name in TUNED.values()):
        raise UserError(
            f"tune=true: {', '.join(f'optim.{name}' for name in TUNED.values())} are all fixed, so nothing "
            "is left to tune; leave one of them out"
        )


def _cells(opened: Composer, jobs: Sequence[Sequence[Override]], tuning: TuningConfig) -> list[TunedCell]:
    """Sort jobs into cells, which share all but the norm, and draw the points of each."""
    from rmsrepro.runs.tunings import Contestant, TunedCell, draw_points, is_norm

    groups: dict[tuple[Override, ...], list[list[Override]]] = {}
    for job in jobs:
        groups.setdefault(tuple(item for item in job if not is_norm(item)), []).append(list(job))
    cells = []
    for shared, group in groups.items():
        config = to_train_config(opened.raw(group[0]), chosen_experiment(group[0]))
        fixed = [item.key.removeprefix("optim.") for item in shared if item.key.startswith("optim.")]
        ranges = ranges_of(tuning, fixed, config.trainer.max_steps)
        points = draw_points(tuning, ranges)
        cells.append(TunedCell(tuning, ranges, points, [Contestant(job) for job in group]))
    return cells


def _trials(cell: TunedCell) -> list[list[Override]]:
    """The jobs of a cell's trials: norm by norm, point by point."""
    return [
        [*one.overrides, *_values(point), Override("seed", str(cell.tuning.seed))]
        for one in cell.contestants
        for point in cell.points
    ]


def _values(point: object) -> list[Override]:
    assert isinstance(point, dict)
    return [Override(f"optim.{key}", override_text(value)) for key, value in point.items()]


def _with_trials(cells: Sequence[TunedCell], plan: SweepPlan) -> list[TunedCell]:
    """Give each norm its planned jobs, and drop what the plan found to be the same twice."""
    jobs = {job.run_id: job for job in plan.jobs}
    asked = iter(plan.run_ids)
    kept: dict[frozenset[str], TunedCell] = {}
    for cell in cells:
        found: dict[tuple[str, ...], None] = {}
        apart = []
        for one in cell.contestants:
            ids = tuple(next(asked) for _ in cell.points)
            one.trials = [jobs[run_id] for run_id in ids]
            if ids not in found:
                apart.append(one)
            found[ids] = None
        cell.contestants = apart
        kept.setdefault(frozenset(run_id for ids in found for run_id in ids), cell)
    return list(kept.values())


def _choose(cells: Sequence[TunedCell], done: Sequence[Job]) -> None:
    """Find the best point of each norm by the records of its trials."""
    from rmsrepro.runs.result import runs_dir
    from rmsrepro.runs.tunings import trial_value

    ended = {job.run_id: job for job in done}
    for cell in cells:
        for one in cell.contestants:
            one.trials = [ended.get(job.run_id, job) for job in one.trials]
            values = [
                trial_value(
                    runs_dir(job.config.out_dir) / job.run_id, cell.metric, job.config.trainer.max_steps
                )
                for job in one.trials
            ]
            one.choose(values, cell.metric)


def _finals(cell: TunedCell) -> list[list[Override]]:
    """The jobs of a cell's final runs: norm by norm, seed by seed, each on the backend of the trials."""
    jobs = []
    for one in cell.contestants:
        if one.best is None:
            continue
        # Settled anew, `auto` could come to another backend once a norm is gone.
        backend = Override("backend", one.trials[one.best].config.backend.value)
        kept = [item for item in one.overrides if item.key != "backend"]
        jobs += [
            [*kept, backend, *_values(cell.points[one.best]), Override("seed", str(seed))]
            for seed in cell.tuning.final_seeds
        ]
    return jobs


def _with_finals(cells: Sequence[TunedCell], plan: SweepPlan) -> None:
    jobs = {job.run_id: job for job in plan.jobs}
    asked = iter(plan.run_ids)
    for cell in cells:
        for one in cell.contestants:
            if one.best is None:
                continue
            one.finals = [jobs[next(asked)] for _ in cell.tuning.final_seeds]
            for job in one.finals:
                job.backend_note = one.trials[one.best].backend_note


def _tell_choice(cells: Sequence[TunedCell]) -> int:
    """Say what a reader must know of the choices; return 1 if a norm has none."""
    everywhere = set.intersection(*({*one.overrides} for cell in cells for one in cell.contestants))
    code = 0
    for one in (one for cell in cells for one in cell.contestants if one.best is None):
        code = 1
        apart = [item.text for item in one.overrides if item not in everywhere and item.key != "norm"]
        name = " ".join([f"norm={one.trials[0].config.norm['name']}", *apart])
        say(
            f"{name}: no final runs: {one.why_none or 'some trials have not ended; the same command goes on'}"
        )
    return code


def _show(out_dir: Path, files: Sequence[Path]) -> None:
    """Print the table, from the records: the page shows the same."""
    from rmsrepro.report.tuning_text import print_tunings
    from rmsrepro.report.tunings import read_tunings

    tunings = read_tunings(out_dir, files)
    say("")
    print_tunings(tunings, console())
    say("curves: rmsrepro report")
