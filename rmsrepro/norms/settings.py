"""What a norm's parameters come to, so that settings written in different ways are known as one or as two."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from rmsrepro.norms.params import Variant, same_value
from rmsrepro.norms.registry import resolve_params


def resolved(norm: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """All parameters of a norm that is given these; None for a norm that is not to be had here.

    A preset is left out: it has done its work on the others.
    """
    try:
        params = resolve_params(norm, **given)
    except Exception:  # a plug-in that is gone, or whose module fails in ways of its own
        return None
    values = {one.name: getattr(params, one.name) for one in dataclasses.fields(params)}
    return {
        key: value.value if isinstance(value, Enum) else value
        for key, value in values.items()
        if not isinstance(value, Variant)
    }


def whole(norm: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """All parameters of a norm that is given these; those alone, where it is not to be had here."""
    found = resolved(norm, given)
    return given if found is None else found


def same_parameters(norm: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a norm given `one` is the norm given `other`; as given, where it is not to be had here."""
    first, second = resolved(norm, one), resolved(norm, other)
    if first is not None and second is not None:
        one, other = first, second
    return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
