"""Find the files of a set in a folder, and say what is there instead when they are missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.paths import expanded

SPLITS = ("train", "val", "test")
"""The names by which the package knows the parts of a set."""

SPLIT_NAMES: Mapping[str, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
"""What the files and the Hub call them; the first is the Hub's own."""

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TABLE_SUFFIXES = (*JSON_SUFFIXES, ".parquet")
TEXT_SUFFIXES = (".txt", ".text", ".tokens", ".raw")

_SHARD = re.compile(r"[-_.]\d+-of-\d+$")


def _listing(folder: Path) -> str:
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
    if not names:
        return f"{folder} is empty"
    more = f", ... ({len(names)} entries)" if len(names) > 12 else ""
    return f"{folder} has {', '.join(names[:12])}{more}"


def missing_path(path: Path, key: str) -> UserError:
    """The error for a path that does not exist: the nearest names that do."""
    parent = path.parent
    if not parent.is_dir():
        while not parent.is_dir() and parent != parent.parent:
            parent = parent.parent
        step = path.relative_to(parent).parts[0] if path.is_relative_to(parent) else path.name
    else:
        step = path.name
    names = [entry.name for entry in parent.iterdir()]
    hint = nearest(step, names)
    return UserError(f"{key}={path}: no such file or folder{hint or '; ' + _listing(parent)}")


def existing_file(value: str, key: str) -> Path:
    """Return `value` as the path of an existing file.

    Raises:
        UserError: nothing there, or a folder; names `key` (``data.train``) and the nearest names.
    """
    if value == "???":
        raise UserError(f"{key} is not set; give {key}=FILE")
    path = expanded(value)
    if path.is_dir():
        raise UserError(f"{key}={path} is a folder; give a file: {_listing(path)}")
    if not path.exists():
        raise missing_path(path, key)
    return path


def existing_path(value: str, key: str) -> Path:
    """Return `value` as the path of an existing file or folder, or raise as `existing_file` does."""
    path = expanded(value)
    if not path.exists():
        raise missing_path(path, key)
    return path


def suffix_of(path: Path) -> str:
    """The suffix below an optional ``.gz``: ``train.jsonl.gz`` -> ``.jsonl``."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _stem(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).stem


def split_files(folder: Path, suffixes: Sequence[str], key: str = "data.path") -> dict[str, list[Path]]:
    """Find the files of each split in a folder by their names.

    ``train.txt``, ``validation.jsonl.gz``, ``test_2016_flickr.jsonl`` and the shards
    ``train-00000-of-00002.parquet`` are all understood. A split without a file is left out.

    Raises:
        UserError: two different files could be the same split.
    """
    known = [entry for entry in sorted(folder.iterdir()) if entry.is_file() and suffix_of(entry) in suffixes]
    found: dict[str, list[Path]] = {}
    for split, names in SPLIT_NAMES.items():
        exact = [path for path in known if _stem(path).lower() in names]
        named = re.compile(rf"(?:{'|'.join(names)})(?:[-_.].*)?$", re.IGNORECASE)
        candidates = exact or [path for path in known if named.match(_stem(path))]
        whole = {(_SHARD.sub("", _stem(path)), suffix_of(path), path.suffix == ".gz") for path in candidates}
        if len(whole) > 1:
            listed = ", ".join(path.name for path in candidates[:6])
            raise UserError(
                f"{key}={folder}: several files could be the {split} split ({listed}); "
                f"keep one of them, or name the one you mean {names[0]}{suffix_of(candidates[0])}"
            )
        if candidates:
            found[split] = candidates
    return found


def no_split_files(folder: Path, wanted: Sequence[str], suffixes: Sequence[str], key: str) -> UserError:
    """The error for a folder without the files of a split."""
    names = ", ".join(f"{SPLIT_NAMES[split][0]}.*" for split in wanted)
    return UserError(
        f"{key}={folder}: no {names} there (looked for {', '.join(suffixes)}, also with .gz); "
        f"{_listing(folder)}"
    )
