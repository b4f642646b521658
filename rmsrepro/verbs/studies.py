"""Study files (`conf/study/*.yaml`): read, and narrowed from the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from omegaconf import OmegaConf

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import (
    Override,
    check_single,
    expand,
    split_override,
    take,
    unknown_choice,
    unquote,
)
from rmsrepro.config.paths import group_choices, own_files, packaged_conf_dir, user_conf_dir
from rmsrepro.config.schema import DataConfig
from rmsrepro.config.study import StudyBench, StudyConfig, cell_name
from rmsrepro.data.parallel import PARALLEL_SOURCES
from rmsrepro.data.text import TEXT_SOURCES
from rmsrepro.paper.declared import still_declared
from rmsrepro.paper.study_checks import check_study, override_key
from rmsrepro.paper.study_files import read_study
from rmsrepro.verbs.common import read_keys

HARMLESS = (
    "out_dir",
    "tracker",
    "tracker.",
    "trainer.progress",
    "trainer.num_threads",
    "plugins",
    "rerun",
    "data.path",
    "data.cache_dir",
    "bench.",
)
"""Overrides that change no run of a study, so that it is still that study."""


def load_study(name: str) -> StudyConfig:
    """Read a study by name; the user's own `./conf/study` goes before the built-in ones.

    Raises:
        UserError: no such study, or a file that does not fit `StudyConfig`.
    """
    folders = [folder for folder in (user_conf_dir(), packaged_conf_dir()) if folder]
    files = [file for folder in folders if (file := folder / "study" / f"{name}.yaml").is_file()]
    if not files:
        raise UserError(unknown_choice("study", name, group_choices("study")))
    return _with_norm_files(read_study(files[0]))


def _with_norm_files(study: StudyConfig) -> StudyConfig:
    """Note what the norms that are files of the user's conf/norm stand for."""
    files = {file.stem: file for file in own_files("norm") if file.stem in study.norms}
    contents = {norm: OmegaConf.to_container(read_keys(file)) for norm, file in files.items()}
    return replace(study, norm_files=contents)


def split_all(texts: Iterable[str], name: str) -> list[Override]:
    """Split the overrides that a study file holds.

    Raises:
        UserError: one that is no override.
    """
    try:
        return [split_override(text) for text in texts]
    except UserError as error:
        raise UserError(f"study {name!r}: {error}") from error


def restricted(study: StudyConfig, overrides: Sequence[Override]) -> tuple[StudyConfig, list[Override]]:
    """Apply a command line to a study: grid keys narrow or replace its lists, the rest joins every job.

    A study whose figures the command line changes is no longer that study: it is named `NAME_modified`, so
    that its runs and page are never taken for the study's own. With other data it keeps the tasks that the
    data fit, and loses what belongs to its own data (see `_with_other_data`).

    Raises:
        UserError: a grid value that leaves nothing, or a contradiction (see `check_study`).
    """
    lists: dict[str, list[str]] = {}
    rest: list[Override] = []
    for item in overrides:
        if item.key in ("norm", "model", "task", "seed"):
            lists[item.key] = [unquote(job[0].value) for job in expand([item])]
        else:
            rest.append(item)
    check_single(rest, "a study takes one value of it", "; only norm, model, task and seed may hold several")
    if "seed" in lists and not all(value.isdigit() for value in lists["seed"]):
        raise UserError(f"seed={','.join(lists['seed'])}: expected whole numbers")
    other_values = any(not item.key.startswith(HARMLESS) for item in rest)
    changed = bool(lists) or other_values
    before = study
    data, _ = take(rest, "data")
    if data is not None:
        lists.setdefault("task", _fitting_tasks(study, unquote(data)))
        study = _with_other_data(study, unquote(data), lists["task"])
    if lists:
        norms = lists.get("norm", study.norms)
        if study.baseline not in norms:
            norms = [study.baseline, *norms]
        models, tasks = lists.get("model", study.models), lists.get("task", study.tasks)
        cells = [cell_name(model, task) for model in models for task in tasks]
        study = replace(
            study,
            norms=norms,
            models=models,
            tasks=tasks,
            seeds=[int(value) for value in lists["seed"]] if "seed" in lists else study.seeds,
            primary={key: value for key, value in study.primary.items() if key in tasks},
            secondary={key: value for key, value in study.secondary.items() if key in tasks},
            task_overrides={key: value for key, value in study.task_overrides.items() if key in tasks},
            learned={key: value for key, value in study.learned.items() if key in cells},
            target={key: value for key, value in study.target.items() if key in cells},
            cell_overrides={key: value for key, value in study.cell_overrides.items() if key in cells},
            norm_overrides={key: value for key, value in study.norm_overrides.items() if key in norms},
            norm_variants={key: value for key, value in study.norm_variants.items() if key in norms},
            norm_cells={
                key: [cell for cell in places if cell in cells]
                for key, places in study.norm_cells.items()
                if key in norms
            },
            bench=_narrowed(study.bench, cells, norms),
            benches=[
                narrowed
                for timing in study.benches
                if (narrowed := _narrowed(timing, cells, norms)).cells or not timing.cells
            ],
            claims=[],
        )
    if changed:
        study = replace(
            study,
            name=f"{study.name}_modified",
            title=f"{study.title or study.name} (modified)",
            claims=still_declared(study, before, other_values=other_values),
        )
    check_study(study)
    return _with_norm_files(study), rest


def _narrowed(timing: StudyBench, cells: Sequence[str], norms: Sequence[str]) -> StudyBench:
    """Return what is left of a timing in a smaller grid."""
    return replace(
        timing,
        cells=[cell for cell in timing.cells if cell in cells],
        norms=[norm for norm in timing.norms if norm in norms],
    )


def _fitting_tasks(study: StudyConfig, data: str) -> list[str]:
    """Return the study's tasks that `data` can be used for (all of them for a file of the user's own).

    Raises:
        UserError: none of them.
    """
    unfit = {"lm": PARALLEL_SOURCES, "translation": TEXT_SOURCES}
    tasks = [task for task in study.tasks if data not in unfit.get(task, ())]
    if not tasks:
        raise UserError(
            f"data={data}: it fits none of the tasks of study={study.name} ({', '.join(study.tasks)})"
        )
    return tasks


def _with_other_data(study: StudyConfig, data: str, tasks: Sequence[str]) -> StudyConfig:
    """Return `study` without what only means something for the data that it was written for.

    That is: keys that not every source has (`data.num_val`), and the thresholds `learned` and `target`,
    which are losses on the study's own text. Without `learned` two models that have learned nothing would
    pass for equivalent, so no verdict is given.
    """
    groups = [study.overrides, *(study.task_overrides.get(task, []) for task in tasks)]
    groups += [texts for cell, texts in study.cell_overrides.items() if cell.split("/")[-1] in tasks]
    texts = [text for group in groups for text in group]
    if {unquote(text.partition("=")[2]) for text in texts if override_key(text) == "data"} == {data}:
        return study
    common = {f"data.{item.name}" for item in fields(DataConfig)}

    def kept(overrides: Sequence[str]) -> list[str]:
        keys = ((text, override_key(text)) for text in overrides)
        return [text for text, key in keys if not key.startswith("data.") or key in common]

    return replace(
        study,
        description=f"{study.description} Run on data={data}, for which this study fixes no threshold of "
        "having learned, so it gives no verdict: a study file of your own does.".strip(),
        overrides=kept(study.overrides),
        task_overrides={task: kept(texts) for task, texts in study.task_overrides.items()},
        cell_overrides={cell: kept(texts) for cell, texts in study.cell_overrides.items()},
        learned={},
        target={},
        verdict=False,
    )
