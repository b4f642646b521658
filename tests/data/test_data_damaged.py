"""Damaged files of every format: the right data, or one message that names the file, and nothing left behind.

`RMSREPRO_FUZZ=5000` in the environment makes that many examples, at random.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import (
    DataConfig,
    Multi30kConfig,
    ParallelFilesConfig,
    TextFilesConfig,
    TinyShakespeareConfig,
    Tokenizer,
    WikitextConfig,
    Wmt14Config,
)
from rmsrepro.data import build_data, data_fingerprint

EXAMPLES = int(os.environ.get("RMSREPRO_FUZZ", "0"))
LINES = [f"the {word} sat on mat {number}" for number in range(20) for word in ("cat", "dog", "größte")]
GERMAN = [line.replace("the", "die").replace("sat on", "sitzt auf") for line in LINES]
PAIRS = list(zip(LINES, GERMAN, strict=True))
SPLITS = {"train": PAIRS[:40], "validation": PAIRS[40:50], "test": PAIRS[50:]}


def _text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _rows(kind: str, pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    if kind == "text":
        return [{"text": one} for one, _ in pairs]
    if kind == "nested":
        return [{"translation": {"en": one, "de": other}} for one, other in pairs]
    return [{"en": one, "de": other} for one, other in pairs]


def _jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def _tables(kind: str, suffix: str) -> dict[str, bytes]:
    write: Callable[[list[dict[str, Any]]], bytes] = _parquet if suffix == ".parquet" else _jsonl
    made = {f"{name}{suffix}": write(_rows(kind, pairs)) for name, pairs in SPLITS.items()}
    return {name: gzip.compress(raw) if name.endswith(".gz") else raw for name, raw in made.items()}


def _parallel(suffix: str) -> dict[str, bytes]:
    made = {}
    for name, pairs in SPLITS.items():
        for side, lang in enumerate(("en", "de")):
            raw = _text([pair[side] for pair in pairs])
            made[f"{name}.{lang}{suffix}"] = gzip.compress(raw) if suffix == ".gz" else raw
    return made


SIZES: dict[str, Any] = {"max_len": 64, "batch_tokens": 128, "tokenizer": Tokenizer.char}


def _of_parallel(suffix: str) -> Callable[[Path], DataConfig]:
    def make(folder: Path) -> DataConfig:
        names = {"train": "train", "val": "validation", "test": "test"}
        files = {
            f"{split}_{side}": str(folder / f"{name}.{lang}{suffix}")
            for split, name in names.items()
            for side, lang in (("src", "en"), ("tgt", "de"))
        }
        return ParallelFilesConfig(name="parallel_files", **files, **SIZES)

    return make


LONG = _text(LINES * 8)
FORMATS: dict[str, tuple[dict[str, bytes], Callable[[Path], DataConfig], str]] = {
    "text": (
        {"train.txt": LONG},
        lambda folder: TextFilesConfig(name="text_files", train=str(folder / "train.txt"), **SIZES),
        "lm",
    ),
    "text, three files": (
        {"train.txt": LONG, "val.txt": LONG, "test.txt.gz": gzip.compress(LONG)},
        lambda folder: TextFilesConfig(
            name="text_files", train=str(folder / "train.txt"), val=str(folder / "val.txt"),
            test=str(folder / "test.txt.gz"), **SIZES,
        ),
        "lm",
    ),
    "shakespeare": (
        {"input.txt": LONG},
        lambda folder: TinyShakespeareConfig(name="tinyshakespeare", path=str(folder), **SIZES),
        "lm",
    ),
    **{
        f"wikitext{suffix}": (
            _tables("text", suffix) if suffix != ".txt" else {f"{name}.txt": LONG for name in SPLITS},
            lambda folder: WikitextConfig(name="wikitext", path=str(folder), **SIZES),
            "lm",
        )
        for suffix in (".txt", ".jsonl", ".parquet")
    },
    "parallel": (_parallel(""), _of_parallel(""), "translation"),
    "parallel.gz": (_parallel(".gz"), _of_parallel(".gz"), "translation"),
    **{
        f"multi30k{suffix}": (
            _tables("flat", suffix),
            lambda folder: Multi30kConfig(name="multi30k", path=str(folder), **SIZES),
            "translation",
        )
        for suffix in (".jsonl", ".jsonl.gz", ".json", ".parquet")
    },
    **{
        f"wmt14{suffix}": (
            _tables("nested", suffix),
            lambda folder: Wmt14Config(name="wmt14", path=str(folder), **SIZES),
            "translation",
        )
        for suffix in (".jsonl", ".parquet")
    },
}  # fmt: skip


def _flip(raw: bytes, places: list[tuple[int, int]]) -> bytes:
    changed = bytearray(raw)
    for place, value in places:
        if changed:
            changed[place % len(changed)] = value
    return bytes(changed)


def _utf16(raw: bytes) -> bytes:
    return codecs.BOM_UTF16_LE + raw.decode("utf-8", "replace").encode("utf-16-le")


def _inserted(piece: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw[: len(raw) // 2] + piece + raw[len(raw) // 2 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "one newline": lambda raw: b"\n",
    "blank": lambda raw: b" \n" * 30,
    "garbage": lambda raw: bytes(range(256)) * 4,
    "half": lambda raw: raw[: len(raw) // 2],
    "first byte gone": lambda raw: raw[1:],
    "last byte gone": lambda raw: raw[:-1],
    "twice": lambda raw: raw + raw,
    "mark": lambda raw: codecs.BOM_UTF8 + raw,
    "UTF-16": _utf16,
    "Latin-1": lambda raw: raw.decode("utf-8", "replace").encode("latin-1", "replace"),
    "CR LF": lambda raw: raw.replace(b"\n", b"\r\n"),
    "CR": lambda raw: raw.replace(b"\n", b"\r"),
    "NUL": _inserted(b"\0"),
    "NUL only": lambda raw: b"\0" * 200,
    "line separator": _inserted("\u2028".encode()),
    "next line": _inserted("\x85".encode()),
    "lone surrogate": _inserted(b"\xed\xa0\x80"),
    "escaped surrogate": lambda raw: raw.replace(b"cat", b"\\ud800", 1),
    "more lines": lambda raw: raw + b"one more\n",
    "fewer lines": lambda raw: raw.rpartition(b"\n")[0].rpartition(b"\n")[0],
    "one line": lambda raw: raw.replace(b"\n", b" "),
    "huge line": lambda raw: b"x" * 2_000_000 + b"\n" + raw,
    "gzip": gzip.compress,
    "gzip begun": lambda raw: b"\x1f\x8b" + raw,
    "other columns": lambda raw: raw.replace(b'"', b"'"),
    "renamed columns": lambda raw: raw.replace(b'"en"', b'"xx"').replace(b'"text"', b'"txt"'),
    "numbers": lambda raw: b'{"en": 1, "de": 2, "text": 3, "translation": 4}\n' * 30,
    "nulls": lambda raw: b'{"en": null, "de": null, "text": null, "translation": null}\n' * 30,
    "lists": lambda raw: b"[1, 2]\n" * 30,
    "array": lambda raw: b'[{"en": "a cat", "de": "eine", "text": "a b"}]',
    "objects": lambda raw: b'{"en": {"a": "b"}, "de": ["c"], "text": {}, "translation": {"en": [1]}}\n' * 30,
    "mixed types": lambda raw: raw + b'{"en": 1, "de": {}, "text": [2], "translation": "x"}\n',
    "a word": lambda raw: b"word",
}
damages = st.one_of(
    st.sampled_from(list(DAMAGE.values())),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=5).map(
        lambda places: lambda raw: _flip(raw, places)
    ),
    st.integers(0, 10**6).map(lambda end: lambda raw: raw[: end % (len(raw) + 1)]),
    st.binary(max_size=60).map(lambda piece: lambda raw: piece),
    st.tuples(st.binary(min_size=1, max_size=8), st.integers(0, 10**6)).map(
        lambda one: lambda raw: raw[: one[1] % (len(raw) + 1)] + one[0] + raw[one[1] % (len(raw) + 1) :]
    ),
)


def read(name: str, damage: dict[str, Callable[[bytes], bytes]]) -> str | None:
    """Read a set with damaged files; return the message, None where it was read."""
    files, make, task = FORMATS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary, "files"), Path(temporary, "outputs", "cache")
        folder.mkdir()
        for file, raw in files.items():
            (folder / file).write_bytes(damage.get(file, bytes)(raw))
        config = make(folder)
        try:
            data_fingerprint(config, task)
            data = build_data(config, task, seed=1, accumulate=1, cache_dir=cache)
            data.setup("fit")
            batches = [next(iter(data.train_dataloader())), next(iter(data.val_dataloader()))]
        except UserError as error:
            message = str(error)
            # A split that is too short for a window is named by its set: nothing is wrong with its file.
            assert str(folder) in message or message.startswith(f"data={config.name}: the "), message
            assert message.splitlines()[0].strip()
            assert not list(Path(temporary).rglob("*.lock"))
            assert not cache.exists() or not damage, sorted(map(str, cache.rglob("*")))
            return message.replace(str(folder), "")
        assert all(batch is not None for batch in batches)
        return None


@pytest.mark.parametrize("name", FORMATS)
def test_whole_files_are_read(name: str) -> None:
    assert read(name, {}) is None


def _first_file(name: str) -> str:
    return next(iter(FORMATS[name][0]))


@settings(
    max_examples=EXAMPLES or 60, derandomize=not EXAMPLES, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(st.sampled_from(list(FORMATS)), damages, st.integers(0, 9))
def test_any_damage(name: str, damage: Callable[[bytes], bytes], which: int) -> None:
    files = list(FORMATS[name][0])
    read(name, {files[which % len(files)]: damage})
