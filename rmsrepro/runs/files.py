"""Files that are whole or absent: atomic writes, strict JSON."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one, never a part.

    What is no text in UTF-8 (a lone surrogate, as in a path of other bytes) is written as its escape.

    Args:
        durable: whether that holds for a crash of the machine too, which takes several milliseconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """Serialise with non-finite floats as the strings "nan", "inf" and "-inf": strict JSON.

    Lone surrogates are written as JSON's escapes of them, so that every result can be encoded.
    """
    text = json.dumps(_strict(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


_SURROGATE = re.compile("[\ud800-\udfff]")


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in `path`, or None where the file is absent or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def number(value: Any, otherwise: float = 0.0) -> float:
    """Return a record's value as a finite number; `otherwise` where it stands for none."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return found if math.isfinite(found) else otherwise


def is_file_name(text: str) -> bool:
    """Whether a record's text can be the name of one file or folder: an id that leads nowhere else."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= 255 and text not in (".", "..") and not any(letter in text for letter in "/\\\0")


def remove_torn(folder: Path) -> None:
    """Remove what writers that were killed left beside their files; only whoever owns `folder` may."""
    for left in folder.glob(".*.tmp"):
        left.unlink(missing_ok=True)
