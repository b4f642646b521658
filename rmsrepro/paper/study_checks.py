"""What a study may not say: checks of its file against itself and against the ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.study import StudyBench, StudyConfig
from rmsrepro.paper.declared import declared

LEVELS = ("layer", "model", "step")
"""What a study's timings may time: the choices of `bench`."""


def check_study(study: StudyConfig) -> None:
    """Refuse a study that contradicts itself.

    Raises:
        UserError: an empty list of the grid, a repeated entry, a baseline that is not among the
            norms, a setting for a cell, task, norm or metric that the study does not have, a
            margin that is not a positive number, (for a study that gives verdicts) a primary
            metric without a margin, a timing of no level, or a claim that it cannot address.
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
    _known(where, "norm_overrides", study.norm_overrides, study.norms)
    _check_norms(where, study)
    for key, timing in _named_timings(study):
        _check_timing(f"{where}: {key}", timing)
        _known(where, f"{key}.cells", timing.cells, cells)
        _known(where, f"{key}.norms", timing.norms, study.norms)
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
    declared(study)


def _check_norms(where: str, study: StudyConfig) -> None:
    """Refuse what `norm_variants` and `norm_cells` cannot mean."""
    _known(where, "norm_variants", study.norm_variants, study.norms)
    _known(where, "norm_cells", study.norm_cells, study.norms)
    for norm, content in study.norm_variants.items():
        if not isinstance(content, Mapping) or not isinstance(content.get("name"), str):
            raise UserError(
                f"{where}: norm_variants.{norm} needs a name and parameters, as in "
                "{name: prmsnorm, p: 0.5}."
            )
    for norm, places in study.norm_cells.items():
        _known(where, f"norm_cells.{norm}", places, study.cells())
    for key, chosen in (("norm_variants", study.norm_variants), ("norm_cells", study.norm_cells)):
        if study.baseline in chosen:
            raise UserError(f"{where}: {key} names the baseline {study.baseline!r}, which every cell shares.")


def _check_timing(where: str, timing: StudyBench) -> None:
    """Refuse a timing of no level, or one whose level and cells do not go together."""
    if timing.level not in LEVELS:
        hint = nearest(timing.level, LEVELS)
        raise UserError(f"{where}.level is {timing.level!r}; it is one of {', '.join(LEVELS)}{hint}.")
    if (timing.level == "layer") is bool(timing.cells):
        told = "has no cells" if timing.cells else "needs at least one"
        raise UserError(f"{where}.cells: a timing at the level {timing.level} {told}.")
    other = [
        one for one in timing.overrides if override_key(one) == "bench" and one != f"bench={timing.level}"
    ]
    if other:
        raise UserError(f"{where}.overrides has {other[0]}, but its level is {timing.level}.")


def _named_timings(study: StudyConfig) -> list[tuple[str, StudyBench]]:
    own = [("bench", study.bench)] if study.bench.cells else []
    return [*own, *((f"benches[{number}]", timing) for number, timing in enumerate(study.benches))]


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
