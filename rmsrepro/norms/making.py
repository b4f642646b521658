"""From what a user gave to a norm's parameters, and back to plain values. Imports no torch."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from rmsrepro.config.errors import nearest
from rmsrepro.norms.checks import coerce
from rmsrepro.norms.params import BUILTIN_PARAMS, PRESETS, Variant


def make_params(params_class: type[Any], name: str, given: Mapping[str, Any]) -> Any:
    """Make the parameters of norm `name` from what was given: defaults, then the preset, then `given`.

    Raises:
        TypeError: an unknown parameter, a missing one, or a value of the wrong type.
        ValueError: a value out of range.
    """
    known = [one.name for one in dataclasses.fields(params_class)]
    hints = typing.get_type_hints(params_class)
    for key in given:
        if key not in known:
            raise TypeError(_unknown_parameter(name, key, known))
    values = {key: coerce(f"{name}.{key}", value, hints[key]) for key, value in given.items()}
    # Only the variants of this package bring presets; a user's parameter of that name is the user's own.
    variant = values.get("variant")
    if isinstance(variant, Variant):
        values = {key: value for key, value in PRESETS[variant].items() if key in known} | values
    missing = [
        one.name
        for one in dataclasses.fields(params_class)
        if one.default is dataclasses.MISSING
        and one.default_factory is dataclasses.MISSING
        and one.name not in values
    ]
    if missing:
        raise TypeError(f"{name} needs {', '.join(missing)}, which {_has(missing)} no default")
    return params_class(**values)


def _has(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _unknown_parameter(name: str, key: str, known: Iterable[str]) -> str:
    known = list(known)
    hint = nearest(key, known)
    if not hint:
        owners = [
            norm
            for norm, params in BUILTIN_PARAMS.items()
            if norm != name and key in {one.name for one in dataclasses.fields(params)}
        ]
        hint = f" ({', '.join(owners)} {'has' if len(owners) == 1 else 'have'} it)" if owners else ""
    listing = f"its parameters are {', '.join(known)}" if known else "it has none"
    return f"{name} has no parameter {key!r}{hint}; {listing}"


def plain(params: Any) -> dict[str, Any]:
    """Return a parameter object as plain values: enum members become their strings."""
    values = {one.name: getattr(params, one.name) for one in dataclasses.fields(params)}
    return {key: value.value if isinstance(value, Enum) else value for key, value in values.items()}
