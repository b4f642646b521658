"""Which norm parameters of a command line apply to which norm, and which norm to which task. No torch."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from enum import Enum
from typing import Any

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.schema import TrainConfig, TrainerConfig
from rmsrepro.norms.checks import coerce
from rmsrepro.norms.registry import norm_info


def check_norm_parameters(configs: Sequence[TrainConfig]) -> None:
    """Drop from each config the norm parameters that its norm lacks; refuse those that no norm has.

    Raises:
        UserError: a norm parameter that was given applies to none of the selected norms.
    """
    used: set[str] = set()
    given: dict[str, Any] = {}
    for config in configs:
        names = norm_parameters(config.norm["name"])
        for key, value in list(config.norm.items()):
            if key == "name":
                continue
            given[key] = value
            if key in names:
                used.add(key)
                config.norm[key] = plain_member(config.norm["name"], key, value)
            else:
                del config.norm[key]
    for key in given:
        if key not in used:
            norms = list(dict.fromkeys(config.norm["name"] for config in configs))
            have = sorted({name for norm in norms for name in norm_parameters(norm)})
            has, they = ("has", "it has") if len(norms) == 1 else ("have", "they have")
            raise UserError(
                f"norm.{key}={given[key]}: {_joined(norms)} {has} no parameter {key}"
                f"{nearest(key, have)} ({they}: {', '.join(have) or 'none'})"
            )


def plain_member(norm: str, key: str, value: Any) -> Any:
    """Return the value of the enum's member that `value` names; other values as they are.

    A member goes by its name and by its value, and records tell a setting by one of them.
    """
    kind = typing.get_type_hints(norm_info(norm).params_class)[key]
    try:
        member = coerce(key, value, kind)
    except (TypeError, ValueError):
        return value  # it is refused where the norm is built, with all there is to say
    return member.value if isinstance(member, Enum) else value


def _joined(names: list[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if names[:-1] else []), *names[-1:]])


def norm_parameters(name: str) -> list[str]:
    """Return the names of a norm's parameters.

    Raises:
        UserError: no such norm (a file of the `norm` group may name any).
    """
    try:
        return [item.name for item in dataclasses.fields(norm_info(name).params_class)]
    except (ValueError, TypeError) as error:
        raise UserError(f"norm.name={name}: {error}") from error


def drop_foreign_parameters(config: TrainConfig) -> None:
    """Drop the norm parameters that this job's norm lacks: the sweep has checked that some norm has them."""
    names = norm_parameters(config.norm["name"])
    for key in [key for key in config.norm if key != "name" and key not in names]:
        del config.norm[key]


def check_processes(name: str, trainer: TrainerConfig) -> None:
    """Refuse a norm over positions where each process would see only its part of a batch.

    Raises:
        UserError: the norm `name` takes a mask, and several processes train the run.
    """
    if trainer.devices > 1 and norm_info(name).takes_mask:
        raise UserError(
            f"norm={name}: trainer={trainer.strategy.value} gives each process a part of every batch, so its "
            "statistics would be those of a part; train it in one process (without trainer=), or use another "
            "norm"
        )


def check_task(name: str, task: str) -> None:
    """Refuse a norm over positions where a model must not see the positions to come.

    Raises:
        UserError: the norm `name` takes a mask and the task is lm.
    """
    if task == "lm" and norm_info(name).takes_mask:
        raise UserError(
            f"norm={name}: its statistics would see the tokens to come, which task=lm is to predict; use "
            "task=translation, or another norm"
        )
