"""From a study to the jobs it stands for: overrides of `rmsrepro train` and `rmsrepro bench`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.study import StudyConfig, cell_name

SHAPES_THE_STEP = frozenset(
    {
        *("experiment", "debug", "plugins", "norm", "model", "task", "data", "optim"),
        *("precision", "placement", "sites"),
    }
)
"""First words of the training overrides that a timing of the step has to share."""


@dataclass(frozen=True)
class StudyJob:
    """One training run of a study; `overrides` is what follows `rmsrepro train`."""

    model: str
    task: str
    norm: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def cell(self) -> str:
        """The cell's name, `model/task`."""
        return cell_name(self.model, self.task)


@dataclass(frozen=True)
class BenchJob:
    """The paired timing of one cell; `overrides` is what follows `rmsrepro bench`."""

    model: str
    task: str
    norms: tuple[str, ...]
    overrides: tuple[str, ...]

    @property
    def cell(self) -> str:
        """The cell's name, `model/task`."""
        return cell_name(self.model, self.task)


def study_jobs(study: StudyConfig) -> list[StudyJob]:
    """List all training runs of `study`: model, then task, then seed, then norm.

    Seeds stand outside norms, so that a study that is stopped early holds whole pairs. Where the
    same key is overridden twice the later wins: common, task, cell, norm.

    Raises:
        UserError: the study contradicts itself (see `check_study`).
    """
    check_study(study)
    return [
        StudyJob(
            model=model,
            task=task,
            norm=norm,
            seed=seed,
            overrides=(
                f"norm={norm}",
                f"model={model}",
                f"task={task}",
                f"seed={seed}",
                f"backend={study.backend}",
                f"study={study.name}",
                *_merged(
                    study.overrides,
                    study.task_overrides.get(task, []),
                    study.cell_overrides.get(cell_name(model, task), []),
                    study.norm_overrides.get(norm, []),
                ),
            ),
        )
        for model in study.models
        for task in study.tasks
        for seed in study.seeds
        for norm in study.norms
    ]


def bench_jobs(study: StudyConfig) -> list[BenchJob]:
    """List the paired timings of `study`, one for each cell of `study.bench.cells`.

    A job times all of the study's norms together on the study's backend. Overrides come in the
    order common, task, cell, then the bench's own. Of the training overrides only those that shape
    the step are passed on (model, data, task, optimiser, precision, placement, sites, norm
    parameters): how long a run trains means nothing to a timing. Of the overrides of single norms
    only norm parameters are: they apply to the norms that have them.

    Raises:
        UserError: the study contradicts itself (see `check_study`).
    """
    check_study(study)
    parameters = [
        override
        for norm in study.norms
        for override in study.norm_overrides.get(norm, [])
        if override_key(override).startswith("norm.")
    ]
    jobs = []
    for cell in study.bench.cells:
        model, task = cell.split("/", 1)
        training = _merged(
            study.overrides,
            study.task_overrides.get(task, []),
            study.cell_overrides.get(cell, []),
            parameters,
        )
        step = [override for override in training if override_key(override).split(".")[0] in SHAPES_THE_STEP]
        common = _merged(step, study.bench.overrides)
        fixed = (
            f"norm={','.join(study.norms)}",
            f"model={model}",
            f"task={task}",
            f"backend={study.backend}",
            f"study={study.name}",
        )
        jobs.append(BenchJob(model=model, task=task, norms=tuple(study.norms), overrides=(*fixed, *common)))
    return jobs


def check_study(study: StudyConfig) -> None:
    """Refuse a study that contradicts itself.

    Raises:
        UserError: an empty list of the grid, a repeated entry, a baseline that is not among the
            norms, a setting for a cell, task, norm or metric that the study does not have, a
            margin that is not a positive number, or (for a study that gives verdicts) a primary
            metric without a margin.
    """
    where = f"study {study.name!r}"
    lists: Mapping[str, list[str] | list[int]] = {
        "norms": study.norms,
        "models": study.models,
        "tasks": study.tasks,
        "seeds": study.seeds,
    }
    for key, values in lists.items():
        if not values:
            raise UserError(f"{where}: {key} is empty; name at least one.")
        repeated = [value for value in dict.fromkeys(values) if values.count(value) > 1]  # type: ignore[arg-type]
        if repeated:
            raise UserError(f"{where}: {key} names {repeated[0]!r} more than once.")
    if study.baseline not in study.norms:
        raise UserError(
            f"{where}: the baseline {study.baseline!r} is not among its norms {study.norms}; add it to norms."
        )
    cells = study.cells()
    _known(where, "primary", study.primary, study.tasks)
    _known(where, "secondary", study.secondary, study.tasks)
    _known(where, "task_overrides", study.task_overrides, study.tasks)
    _known(where, "learned", study.learned, cells)
    _known(where, "target", study.target, cells)
    _known(where, "cell_overrides", study.cell_overrides, cells)
    _known(where, "bench.cells", study.bench.cells, cells)
    _known(where, "norm_overrides", study.norm_overrides, study.norms)
    for metric, margin in study.margin.items():
        if not (math.isfinite(margin) and margin > 0):
            raise UserError(f"{where}: margin.{metric} is {margin}; it must be a positive number.")
    if study.verdict:
        for task in study.tasks:
            metric = study.primary_metric(task)
            if metric not in study.margin:
                raise UserError(
                    f"{where}: its primary metric {metric!r} of task {task!r} has no margin; "
                    f"set margin.{metric}, or verdict=false."
                )
    if study.jobs.n_jobs < 1:
        raise UserError(f"{where}: jobs.n_jobs is {study.jobs.n_jobs}; it must be at least 1.")


def override_key(override: str) -> str:
    """Return the key of an override: `optim.lr` of `optim.lr=0.1`."""
    return override.split("=", 1)[0].lstrip("+~")


def _known(where: str, key: str, names: Iterable[str], valid: list[str]) -> None:
    for name in names:
        if name not in valid:
            raise UserError(
                f"{where}: {key} names {name!r}, which the study does not have{nearest(name, valid)} "
                f"(it has {', '.join(valid)})."
            )


def _merged(*groups: Iterable[str]) -> tuple[str, ...]:
    """Join override lists; of several with the same key the last one stays, at the first one's place."""
    merged: dict[str, str] = {}
    for override in (override for group in groups for override in group):
        merged[override_key(override)] = override
    return tuple(merged.values())
