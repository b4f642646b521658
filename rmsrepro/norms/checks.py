"""Checks and conversions of parameter values from Python, YAML or a command line. Imports no torch."""

from __future__ import annotations

import math
import types
import typing
from enum import Enum
from typing import Any

from rmsrepro.config.errors import nearest


def check_eps(name: str, value: float) -> None:
    """Raise ValueError for a negative eps. Zero is legal: a denominator of zero then gives 0."""
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, got {value:g}")


def check_p(name: str, value: float) -> None:
    """Raise ValueError for a fraction outside (0, 1]."""
    if not 0 < value <= 1:
        hint = f"; did you mean {value / 100:g}?" if 1 < value <= 100 else ""
        raise ValueError(f"{name} is a fraction in (0, 1], got {value:g}{hint}")


def check_alpha(name: str, value: float) -> None:
    """Raise ValueError for a slope that is not positive."""
    if value <= 0:
        raise ValueError(f"{name} must be above 0, got {value:g}")


def check_momentum(name: str, value: float) -> None:
    """Raise ValueError for a weight outside (0, 1]."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} is the weight of the newest batch, in (0, 1], got {value:g}")


def coerce(name: str, value: Any, kind: Any) -> Any:
    """Return `value` as the type `kind`, or raise.

    Accepted beyond the type itself: whole numbers for float, and an enum member's value as a string. A bool
    is no number.

    Raises:
        TypeError: the value has another type.
        ValueError: a number that is not finite, or a string that names no member of the enum.
    """
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) or _is_union(kind) else (kind,)
    if value is None and type(None) in options:
        return None
    kinds = [option for option in options if option is not type(None)]
    for one in kinds[:-1]:
        try:
            return _coerce_one(name, value, one)
        except (TypeError, ValueError):
            continue
    return _coerce_one(name, value, kinds[-1])


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Union


def _coerce_one(name: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _coerce_enum(name, value, kind)
    if kind is float:
        if isinstance(value, bool) or not _is_real(value):
            raise TypeError(f"{name} must be a number, got {value!r}{_quoted_number(value)}")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value!r}")
        return float(value)
    if kind is int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be a whole number, got {value!r}{_quoted_number(value)}")
        return int(value)
    if kind is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be true or false, got {value!r}")
        return value
    if kind is str:
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a string, got {value!r}")
        return value
    raise TypeError(
        f"{name} has the type {kind!r}; a norm's parameter must be bool, int, float, str, an Enum "
        "or one of them or None"
    )


def _is_real(value: Any) -> bool:
    """Python's and numpy's whole and floating numbers, but no string."""
    return isinstance(value, int | float) or (hasattr(value, "__float__") and hasattr(value, "is_integer"))


def _quoted_number(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return " (a string; in YAML write it without quotes and with a dot, as 1.0e-5)"


def _coerce_enum(name: str, value: Any, kind: type[Enum]) -> Enum:
    if isinstance(value, kind):
        return value
    if isinstance(value, Enum):
        value = value.value
    for member in kind:
        same = type(value) is type(member.value) and value == member.value
        if same or (isinstance(value, str) and value in (str(member.value), member.name)):
            return member
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {_members(kind)}, got {value!r}")
    choices = [str(member.value) for member in kind]
    raise ValueError(f"{name} must be one of {_members(kind)}, got {value!r}{nearest(value, choices)}")


def _members(kind: type[Enum]) -> str:
    return ", ".join(str(member.value) for member in kind)
