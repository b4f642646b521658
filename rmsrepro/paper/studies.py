"""From a study to the jobs it stands for: overrides of `rmsrepro train` and `rmsrepro bench`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rmsrepro.config.study import StudyBench, StudyConfig, cell_name
from rmsrepro.paper.study_checks import check_study, override_key

SHAPES_THE_STEP = frozenset(
    {
        *("experiment", "debug", "plugins", "norm", "model", "task", "data", "optim"),
        *("precision", "placement", "sites"),
    }
)
"""First words of the training overrides that a timing of a model or a step has to share."""

SHAPES_BY_NAME = frozenset({"trainer.accumulate"})
"""Whole keys of which the same holds: the others of `trainer` say how long a run is and what it writes."""

SHAPES_A_LAYER = frozenset({"plugins", "norm"})
"""The same for a timing of single layers, which have neither model nor data."""


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
    """One paired timing; `overrides` is what follows `rmsrepro bench`."""

    name: str
    """The timing's name in the study, for messages."""
    level: str
    model: str
    """Empty for a layer, as is `task`."""
    task: str
    norms: tuple[str, ...]
    """As the study names them."""
    overrides: tuple[str, ...]
    variants: tuple[tuple[str, ...], ...] = ()
    """Further arms, each by the overrides of its norm and its parameters."""

    @property
    def cell(self) -> str:
        """The cell's name, `model/task`; empty for a layer."""
        return cell_name(self.model, self.task) if self.model else ""

    @property
    def label(self) -> str:
        """For messages: `step gru/lm`, `layer`."""
        return f"{self.name} {self.cell}".rstrip()


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
                f"norm={study.norm_variants[norm]['name'] if norm in study.norm_variants else norm}",
                f"model={model}",
                f"task={task}",
                f"seed={seed}",
                f"backend={study.backend}",
                f"study={study.name}",
                *_merged(
                    study.overrides,
                    study.task_overrides.get(task, []),
                    study.cell_overrides.get(cell_name(model, task), []),
                    variant_overrides(study, norm),
                    study.norm_overrides.get(norm, []),
                ),
            ),
        )
        for model in study.models
        for task in study.tasks
        for seed in study.seeds
        for norm in study.norms_of(cell_name(model, task))
    ]


def bench_jobs(study: StudyConfig) -> list[BenchJob]:
    """List the paired timings of `study`: for each of its timings one a cell, or one of layers.

    A job times all of its norms together. Overrides come in the order common, task, cell, then the timing's
    own. Of the training overrides only those that shape what is timed are passed on (model, data, task,
    optimiser, precision, placement, sites, norm parameters): how long a run trains means nothing to a timing.
    Of the overrides of single norms only norm parameters are: they apply to the norms that have them.

    Raises:
        UserError: the study contradicts itself (see `check_study`).
    """
    check_study(study)
    return [_bench_job(study, timing, cell) for timing in study.timings() for cell in timing.cells or [""]]


def _bench_job(study: StudyConfig, timing: StudyBench, cell: str) -> BenchJob:
    model, _, task = cell.partition("/")
    there = study.norms_of(cell) if cell else study.norms
    norms = [norm for norm in timing.norms or there if norm in there]
    plain = [norm for norm in norms if norm not in study.norm_variants]
    parameters = [
        override
        for norm in plain
        for override in study.norm_overrides.get(norm, [])
        if override_key(override).startswith("norm.")
    ]
    training = _merged(
        study.overrides, study.task_overrides.get(task, []), study.cell_overrides.get(cell, []), parameters
    )
    shapes = SHAPES_THE_STEP if cell else SHAPES_A_LAYER
    named = SHAPES_BY_NAME if cell else frozenset()
    shared = [
        override
        for override in training
        if (key := override_key(override)).split(".")[0] in shapes or key in named
    ]
    place = (f"model={model}", f"task={task}") if cell else ()
    return BenchJob(
        name=timing.title,
        level=timing.level,
        model=model,
        task=task,
        norms=tuple(norms),
        overrides=(
            f"norm={','.join(plain or [study.baseline])}",
            *place,
            f"backend={','.join(timing.backends or [study.backend])}",
            f"study={study.name}",
            *_merged(shared, [f"bench={timing.level}"], timing.overrides),
        ),
        variants=tuple(
            (
                f"norm={study.norm_variants[norm]['name']}",
                *_merged(variant_overrides(study, norm), study.norm_overrides.get(norm, [])),
            )
            for norm in norms
            if norm in study.norm_variants
        ),
    )


def variant_overrides(study: StudyConfig, norm: str) -> list[str]:
    """The parameters of one of `norm_variants`, as overrides; none for any other norm."""
    content = study.norm_variants.get(norm, {})
    return [f"norm.{key}={value}" for key, value in content.items() if key != "name"]


def _merged(*groups: Iterable[str]) -> tuple[str, ...]:
    """Join override lists; of several with the same key the last one stays, at the first one's place."""
    merged: dict[str, str] = {}
    for override in (override for group in groups for override in group):
        merged[override_key(override)] = override
    return tuple(merged.values())
