"""A corpus as read: its splits, and what has to be said about it in data.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rmsrepro.config.errors import UserError

Pair = tuple[str, str]
"""(source sentence, target sentence)"""

S = TypeVar("S", bound=Sequence[object])

_HELD_OUT_FRACTION = 0.05


@dataclass
class TextCorpus:
    """Running text for language modelling."""

    source: str
    splits: dict[str, str]
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class ParallelCorpus:
    """Sentence pairs for translation. Pairs with a blank side are already gone, and counted."""

    source: str
    splits: dict[str, list[Pair]]
    num_read: dict[str, int]
    """Pairs before any was dropped."""
    num_blank: dict[str, int]
    """Pairs dropped because one side (or both) had no visible character."""
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def complete_splits(found: Mapping[str, S], where: str, unit: str) -> tuple[dict[str, S], list[str]]:
    """Make up the splits that a corpus lacks from those that it has, and say so.

    Without a training split the validation split takes its place. Without a test split the last 5 % of
    the training split are cut off for it; without a validation split, the last 5 % before those.

    Args:
        unit: what a split is counted in, for the notes ("characters").

    Raises:
        UserError: there is neither a training nor a validation split, or too little to cut.
    """
    splits, notes = dict(found), []
    if "train" not in splits:
        if "val" not in splits:
            raise UserError(f"{where}: neither a training nor a validation split")
        splits["train"] = splits.pop("val")
        notes.append("no training split was found: the validation split was used to train")
    whole = splits["train"]
    size = max(1, int(len(whole) * _HELD_OUT_FRACTION))
    missing = [split for split in ("test", "val") if split not in splits]
    if missing and len(whole) < 3:
        raise UserError(f"{where}: {len(whole)} {unit} are too few to cut {' and '.join(missing)} from")
    end = len(whole)
    for split in missing:
        splits[split] = whole[end - size : end]  # type: ignore[assignment]  # a slice of S is an S
        end -= size
        place = "last 5 %" if end + size == len(whole) else "5 % before the test part"
        notes.append(
            f"no {split} split was found: the {place} of the training split ({size} {unit}) were cut off"
        )
    splits["train"] = whole[:end]  # type: ignore[assignment]
    return splits, notes
