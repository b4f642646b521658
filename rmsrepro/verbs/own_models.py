"""A model of the user's own on the command line of bench: model=package.module:factory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, check_single, take, unquote
from rmsrepro.config.plain import NOTHING
from rmsrepro.config.schema import DataConfig, ImportedModelConfig, TaskConfig, TrainConfig

Config = TypeVar("Config", bound=TrainConfig)
_BRINGS = ("model", "task", "data", "optim", "placement", "sites")
"""First words of the keys that mean nothing beside such a model."""


def take_target(overrides: Sequence[Override]) -> tuple[str | None, list[Override]]:
    """Return the import string that `model` holds, None where it holds none, and the other overrides.

    With one, `bench=model` is added where no level is chosen.

    Raises:
        UserError: keys or a level that do not go with a model of the user's own.
    """
    value, rest = take(overrides, "model")
    target = None if value is None else unquote(value)
    if target is None or ":" not in target:
        return None, list(overrides)
    check_single([Override("model", target)], "bench times one model at a time", "")
    for item in rest:
        if item.key.split(".")[0] in _BRINGS:
            raise UserError(
                f"{item.text}: model={target} brings its own layers and inputs; beside it go norm, norm.*, "
                "backend, precision, seed, trainer.accelerator, plugins, out_dir and bench.*"
            )
    level, _ = take(rest, "bench")
    if level is None:
        rest.append(Override("bench", "model"))
    elif unquote(level) != "model":
        raise UserError(
            f"bench={level}: model={target} has no task, so it is timed forward and backward only; "
            "write bench=model"
        )
    return target, rest


def with_target(config: Config, target: str | None) -> Config:
    """Return `config` with the user's model in place of a built-in one, its task and its data."""
    if target is None:
        return config
    return replace(
        config,
        model=ImportedModelConfig(name=target),
        task=TaskConfig(name=NOTHING),
        data=DataConfig(name=NOTHING),
    )
