"""Small made corpora, and the real sets where they are at hand."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


@pytest.fixture
def shared_data() -> Callable[[str], str]:
    """Return the folder of a real set, or skip: it is not part of the project."""
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    root = Path(os.environ.get("RMSREPRO_SHARED_DATA", default))

    def folder(name: str) -> str:
        path = root / name
        if not path.is_dir():
            pytest.skip(f"the real set {name} is not in {root} (set RMSREPRO_SHARED_DATA)")
        return str(path)

    return folder


ENGLISH = [f"the {a} {b} sleeps" for a in ("old", "small", "red") for b in ("cat", "dog", "bird", "horse")]
GERMAN = [f"es schläft {a} {b}" for a in ("alt", "klein", "rot") for b in ("Katze", "Hund", "Vogel", "Pferd")]


@pytest.fixture
def pairs() -> list[tuple[str, str]]:
    return list(zip(ENGLISH, GERMAN, strict=True))


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    raw = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


@pytest.fixture
def multi30k(tmp_path: Path, pairs: list[tuple[str, str]]) -> Path:
    """A folder with the columns and file names of Multi30k."""
    folder = tmp_path / "multi30k"
    folder.mkdir()
    rows = [{"en": en, "de": de} for en, de in pairs]
    write_jsonl(folder / "train.jsonl.gz", rows)
    write_jsonl(folder / "val.jsonl", rows[:3])
    write_jsonl(folder / "test_2016_flickr.jsonl.gz", rows[3:5])
    return folder


@pytest.fixture
def jsonl() -> Callable[[Path, Sequence[object]], Path]:
    return write_jsonl
