"""Small files that are cheap to keep and safe to lose, named by the content that they were made from."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path


def read_cached(cache_dir: Path | None, name: str) -> str | None:
    """Return the JSON text kept under `name`, or None when there is none or it is damaged."""
    if cache_dir is None:
        return None
    try:
        digest, _, text = (cache_dir / name).read_text(encoding="utf-8").partition("\n")
        json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    # JSON with a flipped letter is JSON still.
    return text if digest == _digest(text) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def write_cached(cache_dir: Path | None, name: str, text: str) -> None:
    """Keep JSON text under `name`; several processes may write the same name at once.

    A cache folder that cannot be written is no error: the content is made again next time.
    """
    if cache_dir is None:
        return
    temporary: str | None = None
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cache_dir, prefix=name + ".", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(f"{_digest(text)}\n{text}")
        os.replace(temporary, cache_dir / name)
    except OSError:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
