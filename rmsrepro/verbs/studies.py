"""Study files (`conf/study/*.yaml`): read, and narrowed from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.overrides import Override, expand, unknown_choice, unquote
from rmsrepro.config.paths import group_choices, packaged_conf_dir, user_conf_dir
from rmsrepro.config.study import StudyConfig, cell_name
from rmsrepro.paper.studies import check_study

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
)
"""Overrides that change no figure of a study, so that it is still that study."""


def load_study(name: str) -> StudyConfig:
    """Read a study by name; the user's own `./conf/study` goes before the built-in ones.

    Raises:
        UserError: no such study, or a file that does not fit `StudyConfig`.
    """
    folders = [folder for folder in (user_conf_dir(), packaged_conf_dir()) if folder]
    files = [file for folder in folders if (file := folder / "study" / f"{name}.yaml").is_file()]
    if not files:
        raise UserError(unknown_choice("study", name, group_choices("study")))
    return read_study(files[0])


def read_study(file: Path) -> StudyConfig:
    """Read one study file.

    Raises:
        UserError: it does not fit `StudyConfig`, or contradicts itself.
    """
    try:
        study = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(StudyConfig), OmegaConf.load(file)))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or ""
        known = list(StudyConfig.__dataclass_fields__)
        raise UserError(f"{file.name}: {key}: {str(error).splitlines()[0]}{nearest(key, known)}") from error
    except Exception as error:
        raise UserError(f"{file.name}: cannot be read as YAML ({str(error).splitlines()[0]})") from error
    assert isinstance(study, StudyConfig)
    check_study(study)
    return study


def restricted(study: StudyConfig, overrides: Sequence[Override]) -> tuple[StudyConfig, list[Override]]:
    """Apply a command line to a study: grid keys narrow or replace its lists, the rest joins every job.

    A study whose figures the command line changes is no longer that study: it is named `NAME_modified`, so
    that its runs and page are never taken for the study's own.

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
    if "seed" in lists and not all(value.isdigit() for value in lists["seed"]):
        raise UserError(f"seed={','.join(lists['seed'])}: expected whole numbers")
    changed = bool(lists) or any(not item.key.startswith(HARMLESS) for item in rest)
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
            bench=replace(study.bench, cells=[cell for cell in study.bench.cells if cell in cells]),
        )
    if changed:
        study = replace(study, name=f"{study.name}_modified", title=f"{study.title or study.name} (modified)")
    check_study(study)
    return study, rest
