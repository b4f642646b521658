"""Values in a tuning's file, each checked: none is trusted to be what `sweep tune=true` wrote.

All raise ValueError, with what is wrong in one line; `key` is where the value stands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rmsrepro.config.tuning import TUNED
from rmsrepro.runs.files import is_file_name

Point = Mapping[str, float]
"""Key of `optim` -> its value."""


def listed(node: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list at `key`."""
    value = node.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{key} is no list")
    return value


def text(node: Mapping[str, Any], key: str) -> str:
    """The text at `key`."""
    value = node.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is no text")
    return value


def texts(node: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The list of texts at `key`."""
    if not all(isinstance(value, str) for value in listed(node, key)):
        raise ValueError(f"{key} holds what is no text")
    return tuple(listed(node, key))


def run_ids(node: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The list of runs' ids at `key`."""
    return tuple(run_id(value, key) for value in texts(node, key))


def run_id(value: Any, key: str) -> str:
    """A run's id, which is the name of its folder."""
    if not isinstance(value, str) or not is_file_name(value):
        raise ValueError(f"{key}: {shown(value)} is no run's id")
    return value


def finite(value: Any, key: str) -> float:
    """A number that is finite as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ValueError(f"{key}: {shown(value)} is no finite number")
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that is larger than any float
        return False


def whole(value: Any, key: str) -> int:
    """A whole number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{key}: {shown(value)} is no whole number")
    return value


def ranges(node: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Ranges as `sweep tune=true` takes them: of what it tunes, ascending, above zero for a logarithm."""
    found = {}
    for key, ends in node.items():
        if key not in TUNED.values():
            raise ValueError(f"ranges: {shown(key)} is none of {', '.join(TUNED.values())}")
        if not isinstance(ends, list) or len(ends) != 2:
            raise ValueError(f"ranges: {shown(ends)} is no pair of numbers")
        low, high = (finite(end, "ranges") for end in ends)
        if low > high or low < 0 or (low == 0 and key != "warmup_steps"):
            raise ValueError(f"ranges: {key} cannot be from {shown(low)} to {shown(high)}")
        found[key] = (low, high)
    return found


def point(value: Any, key: str) -> Point:
    """A mapping of finite numbers."""
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{key}: {shown(value)} is no point")
    return {str(name): finite(one, key) for name, one in value.items()}


def shown(value: Any) -> str:
    """A value for a message of one line, however long it is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
