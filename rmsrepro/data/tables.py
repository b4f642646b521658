"""Tables through Hugging Face `datasets`: local parquet and JSON lines, or a set on the Hub.

`datasets` is imported only when a table is asked for. No remote code is ever run: `datasets` 4 and later
have no way to.
"""

from __future__ import annotations

import os
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.data.files import SPLIT_NAMES, suffix_of
from rmsrepro.data.reading import bytes_digest, check_text, text_digest

_REACH_TIMEOUT_S = 6.0


@dataclass(frozen=True)
class HubSet:
    """A public set on the Hugging Face Hub."""

    repository: str
    columns: tuple[str, ...]
    subset: str | None = None
    revision: str | None = None
    """A branch other than the main one, for example the Hub's own parquet copy of a set made by a script."""

    @property
    def label(self) -> str:
        return self.repository + (f" ({self.subset})" if self.subset else "")


@contextmanager
def _quiet(*, offline: bool = False) -> Iterator[Any]:
    """Import `datasets` without progress bars and log lines; put its settings back afterwards."""
    import datasets

    bars = datasets.are_progress_bars_disabled()
    verbosity = datasets.logging.get_verbosity()
    was_offline = datasets.config.HF_HUB_OFFLINE
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.config.HF_HUB_OFFLINE = was_offline or offline
    try:
        yield datasets
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline
        datasets.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()


def table_digest(paths: Sequence[Path]) -> str:
    """Content digest of table files: JSON as text (encoding marks and line ends ignored), others as bytes."""
    return bytes_digest(paths) if suffix_of(paths[0]) == ".parquet" else text_digest(paths)


_copies: list[Path] = []
"""The Arrow copies that were begun since `taking_back`."""


@contextmanager
def taking_back() -> Iterator[None]:
    """Remove the Arrow copies of tables that prove wrong in the body, and folders that then are empty."""
    _copies.clear()
    try:
        yield
    except UserError:
        for copy in _copies:
            shutil.rmtree(copy, ignore_errors=True)
            for folder in (copy.parent, copy.parent.parent, copy.parent.parent.parent):
                with suppress(OSError):
                    folder.rmdir()
        raise
    finally:
        _copies.clear()


def load_table(paths: Sequence[Path], cache_dir: Path) -> Any:
    """Load parquet or JSON lines files (all of one kind) as one `datasets.Dataset`.

    The Arrow copy goes into a folder of `cache_dir` named by content, so a changed file is never taken
    from an old copy.

    Raises:
        UserError: empty, damaged, or not what its name says; the message names the file.
    """
    kind = "parquet" if suffix_of(paths[0]) == ".parquet" else "json"
    names = ", ".join(map(str, paths))
    if kind == "json":
        for path in paths:
            if not check_text(path):
                raise UserError(f"{path}: the file is empty")
    cache = cache_dir / "datasets" / table_digest(paths)[:24]
    if not cache.exists():
        _copies.append(cache)
    with _quiet() as datasets:
        try:
            return datasets.load_dataset(
                kind, data_files=[str(path) for path in paths], split="train", cache_dir=str(cache)
            )
        except Exception as error:  # whatever the parser of the day raises means: not such a file
            raise UserError(f"{names}: {_why(error, kind)}") from error


def _why(error: Exception, kind: str) -> str:
    reason = " ".join(str(error.__cause__ or error).split())[:300]
    if "corresponds to no data" in reason:
        return f"it holds no rows of {kind}"
    return f"cannot be read as {kind} ({reason}); the file is damaged, or of another format"


def _answers(endpoint: str) -> bool:
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=_REACH_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True  # an answer, whatever it says
    except (OSError, ValueError):
        return False


def _hub_reachable() -> bool:
    """One short request, since the Hub's own client retries for half a minute before it gives up."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    found: list[bool] = []
    # In a thread, since a name server that does not answer is not bound by the timeout of the request.
    thread = threading.Thread(target=lambda: found.append(_answers(endpoint)), daemon=True)
    thread.start()
    thread.join(_REACH_TIMEOUT_S + 2)
    return found == [True]


def _offline_asked() -> bool:
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    return any(value.upper() in {"1", "ON", "YES", "TRUE"} for value in values)


def load_hub(hub: HubSet) -> dict[str, Any]:
    """Load a set from the Hub, or from the Hub client's own cache; return the splits that it has.

    Raises:
        UserError: not reachable and not in the cache, or not such a set: names the set, its columns, and
            how to use a local copy.
    """
    reachable = not _offline_asked() and _hub_reachable()
    try:
        with _quiet(offline=not reachable) as datasets:
            loaded = datasets.load_dataset(hub.repository, hub.subset, revision=hub.revision)
    except Exception as error:
        why = "the Hub answered: " + str(error).strip()[:200]
        if not reachable:
            why = "offline mode is on" if _offline_asked() else "the Hugging Face Hub cannot be reached"
            why += " and the set is not in its local cache"
        raise UserError(
            f"{hub.label} could not be loaded: {why}. Give a local copy with data.path=FOLDER: files "
            f"train.*, validation.* and test.* with the columns {', '.join(hub.columns)} (.parquet, .jsonl "
            "or .jsonl.gz; running text also as .txt), or use a set that needs no download: "
            "data=pydoc for task=lm, data=cldr for task=translation"
        ) from error
    splits: dict[str, Any] = {}
    for split, names in SPLIT_NAMES.items():
        for name in names:
            if name in loaded:
                splits.setdefault(split, loaded[name])
    return splits


def require_columns(table: Any, columns: Sequence[str], where: str) -> None:
    """Raise UserError, naming the columns found, unless the table has all of `columns`."""
    found: list[str] = list(table.column_names)
    for column in columns:
        if column not in found:
            raise UserError(
                f"{where}: no column {column!r}; its columns are {', '.join(found)}{nearest(column, found)}"
            )


def text_column(table: Any, column: str, where: str) -> list[str]:
    """Return a column's values as strings, a missing value as the empty string.

    Raises:
        UserError: a value is no string; names the row (from 1).
    """
    return _strings(_values(table, column, where), column, where)


def _values(table: Any, column: str, where: str) -> list[Any]:
    try:
        values: list[Any] = table[column][:]
    except (ValueError, OSError) as error:  # bytes that are no UTF-8, or no Arrow, show only now
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{where}: column {column!r} cannot be read ({reason}); the file is damaged"
        ) from error
    return values


def _strings(values: Sequence[Any], column: str, where: str) -> list[str]:
    texts: list[str] = []
    for row, value in enumerate(values, start=1):
        if value is not None and not isinstance(value, str):
            raise UserError(
                f"{where}: column {column!r} holds {type(value).__name__} in row {row}, but text is needed"
            )
        texts.append(value or "")
    return texts


def translation_columns(table: Any, langs: Sequence[str], where: str) -> list[list[str]]:
    """Return languages of a ``translation`` column, whose values are ``{"de": ..., "en": ...}``.

    Raises:
        UserError: a language is missing, or a value is no string.
    """
    values = _values(table, "translation", where)
    for row, value in enumerate(values, start=1):
        if value is not None and not isinstance(value, Mapping):
            raise UserError(
                f"{where}: column 'translation' holds {type(value).__name__} in row {row}, but languages are "
                'needed there, as in {"de": "...", "en": "..."}'
            )
    first = next((value for value in values if value), None)
    for lang in langs:
        if not isinstance(first, Mapping) or lang not in first:
            found = ", ".join(first) if isinstance(first, Mapping) else type(first).__name__
            raise UserError(f"{where}: column 'translation' has no language {lang!r}; it has {found}")
    return [
        _strings([value.get(lang) if value else None for value in values], f"translation.{lang}", where)
        for lang in langs
    ]
