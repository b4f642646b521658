"""Words that tell groups of runs with different settings apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rmsrepro.report.parameters import value_text

_TELLING = (
    "model.size",
    "model",
    "precision",
    "placement",
    "sites",
    "backend",
    "task",
    "data",
    "optim",
    "trainer",
)
"""What tells a reader most of a cell comes first; hashes come last of all."""
MOST_SHOWN = 4


def differences(own: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]]) -> str:
    """The flat settings `own` (one of `rivals`) in which the rivals differ: all it takes to tell them apart.

    Nothing where they do not differ. What they all share is never shown.
    """
    apart = _differing(rivals)
    kept = set(apart[:MOST_SHOWN]) | set(_enough(rivals, apart))
    shown = ", ".join(f"{key}={_text(key, own, rivals)}" for key in apart if key in kept)
    return shown + (f" and {len(apart) - len(kept)} more" if len(apart) > len(kept) else "")


def telling(own: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]]) -> str:
    """As `differences`, with no more settings than it takes to tell the rivals apart."""
    return ", ".join(
        f"{key.removeprefix('model.')}={_text(key, own, rivals)}"
        for key in _enough(rivals, _differing(rivals))
    )


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same in all, most telling first."""

    def place(key: str) -> tuple[int, str]:
        if "hash" in key or key == "data content":
            return len(_TELLING) + 1, key
        names = (key, key.split(".", 1)[0])
        return next((n for n, name in enumerate(_TELLING) if name in names), len(_TELLING)), key

    keys = {key for one in settings for key in one}
    return sorted((key for key in keys if len({_plain(one.get(key)) for one in settings}) > 1), key=place)


def _enough(settings: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """Those of `keys`, from the first on, that leave no two settings the same which `keys` tell apart."""
    kept: list[str] = []
    classes = 1
    for key in keys:
        found = len({tuple(_plain(one.get(name)) for name in (*kept, key)) for one in settings})
        if found > classes:
            kept.append(key)
            classes = found
    return kept


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _text(key: str, own: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]]) -> str:
    """A value, cut where it can be cut and still be told from the others."""
    limit = 8 if "hash" in key or key == "data content" else 24
    whole = {value_text(one.get(key)) for one in rivals}
    text = value_text(own.get(key))
    if len(text) <= limit or text == "not set" or len({one[:limit] for one in whole}) < len(whole):
        return text
    return text[:limit] if limit == 8 else text[:limit] + "..."
