"""What a run's identity knows of its data: cheap, and without torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from enum import Enum
from typing import Any

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import (
    CldrConfig,
    DataConfig,
    Multi30kConfig,
    PathDataConfig,
    PydocConfig,
    TranslationDataConfig,
    Wmt14Config,
)
from rmsrepro.data import parallel, text
from rmsrepro.data.cldr import cldr_versions
from rmsrepro.data.pydoc import pydoc_text
from rmsrepro.data.tables import table_digest

BATCHES_VERSION = 1
"""Raise it when the same corpus and configuration give other tokens or other batches."""

TASKS = ("lm", "translation")

_NOT_CONTENT = {
    "path", "cache_dir", "train", "val", "test",
    "train_src", "train_tgt", "val_src", "val_tgt", "test_src", "test_tgt",
}  # fmt: skip


def check_task(config: DataConfig, task: str) -> None:
    """Raise UserError unless the data can be used for the task."""
    if task not in TASKS:
        raise UserError(f"task={task}: expected {' or '.join(TASKS)}")
    if (task == "translation") != isinstance(config, TranslationDataConfig):
        good = parallel.PARALLEL_SOURCES if task == "translation" else text.TEXT_SOURCES
        raise UserError(f"data={config.name} does not fit task={task}; use data={', '.join(good)}")


def data_fingerprint(config: DataConfig, task: str) -> str:
    """Return a hash (32 hexadecimal digits) of everything that decides the batches, but the run's seed.

    It covers the text of local files (not their names, encoding marks, line ends or compression), the
    versions and settings of generated sets, the name and branch of a set on the Hub, and the fields of
    `config` that change tokens or batches.

    Raises:
        UserError: the data do not fit the task, or a file is missing or cannot be read.
    """
    check_task(config, task)
    fields = {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in _NOT_CONTENT
    }
    recipe = {"version": BATCHES_VERSION, "task": task, "config": fields, "content": _content(config)}
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _content(config: DataConfig) -> Any:
    if isinstance(config, TranslationDataConfig):
        parallel.check_languages(config)
    if isinstance(config, PydocConfig):
        return hashlib.sha256(pydoc_text().encode("utf-8")).hexdigest()
    if isinstance(config, CldrConfig):
        return cldr_versions()
    translation = isinstance(config, TranslationDataConfig)
    paths = parallel.parallel_paths(config) if translation else text.text_paths(config)
    if paths is not None:
        return {split: table_digest(files) for split, files in paths.items()}
    if isinstance(config, (Multi30kConfig, Wmt14Config)):
        return dataclasses.asdict(parallel.hub_set(config))
    if isinstance(config, PathDataConfig):
        return dataclasses.asdict(text.hub_set(config))
    raise UserError(f"data={config.name}: unknown source")
