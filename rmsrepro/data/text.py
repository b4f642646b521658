"""Sources of running text for language modelling."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.schema import (
    DataConfig,
    PathDataConfig,
    PydocConfig,
    TextFilesConfig,
    TinyShakespeareConfig,
    WikitextConfig,
)
from rmsrepro.data.corpus import TextCorpus, complete_splits
from rmsrepro.data.files import (
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    existing_file,
    existing_path,
    no_split_files,
    split_files,
    suffix_of,
)
from rmsrepro.data.pydoc import pydoc_text, pydoc_versions
from rmsrepro.data.reading import read_text
from rmsrepro.data.tables import HubSet, load_hub, load_table, require_columns, text_column

TEXT_SOURCES = ("pydoc", "tinyshakespeare", "wikitext", "text_files")

WIKITEXT_SUBSETS = ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-raw-v1", "wikitext-2-v1")

_COLUMN = "text"


def hub_set(config: PathDataConfig) -> HubSet:
    """Return where on the Hub the set is."""
    if isinstance(config, WikitextConfig):
        if config.subset not in WIKITEXT_SUBSETS:
            raise UserError(
                f"data.subset={config.subset}: expected one of {', '.join(WIKITEXT_SUBSETS)}"
                f"{nearest(config.subset, WIKITEXT_SUBSETS)}"
            )
        return HubSet("Salesforce/wikitext", (_COLUMN,), subset=config.subset)
    # The set itself is a script, which is never run; the Hub keeps a parquet copy of it.
    return HubSet("karpathy/tiny_shakespeare", (_COLUMN,), revision="refs/convert/parquet")


def text_paths(config: DataConfig) -> dict[str, list[Path]] | None:
    """Find the local files of each split; None when the source has none (generated, or on the Hub).

    A single file that is to be divided is the split ``all``.

    Raises:
        UserError: a path does not exist, or a folder has no files for a split.
    """
    if isinstance(config, TextFilesConfig):
        named = {"train": config.train, "val": config.val, "test": config.test}
        return {
            split: [existing_file(value, f"data.{split}")]
            for split, value in named.items()
            if value is not None
        }
    if not isinstance(config, PathDataConfig) or config.path is None:
        return None
    path = existing_path(config.path, "data.path")
    if path.is_file():
        return {"all": [path]}
    for suffixes in (TEXT_SUFFIXES, TABLE_SUFFIXES):
        found = split_files(path, suffixes)
        if "train" in found or "val" in found:
            return found
    whole = [entry for entry in sorted(path.iterdir()) if suffix_of(entry) in TEXT_SUFFIXES]
    if len(whole) == 1:
        return {"all": whole}
    raise no_split_files(path, ("train", "val", "test"), (*TEXT_SUFFIXES, *TABLE_SUFFIXES), "data.path")


def load_text(config: DataConfig, cache_dir: Path) -> TextCorpus:
    """Read a source of text.

    Raises:
        UserError: wrong path, damaged or wrongly encoded file, missing column, unreachable Hub, no text.
    """
    versions: dict[str, str] = {}
    places: dict[str, str] = {}
    if isinstance(config, PydocConfig):
        found = {"all": pydoc_text()}
        versions = pydoc_versions()
        where = "data=pydoc"
    else:
        paths = text_paths(config)
        if paths is not None:
            found = {split: _read(files, cache_dir) for split, files in paths.items()}
            where = ", ".join(str(file) for files in paths.values() for file in files)
            places = {split: ", ".join(map(str, files)) for split, files in paths.items()}
        elif isinstance(config, (TinyShakespeareConfig, WikitextConfig)):
            hub = hub_set(config)
            where = hub.label
            tables = load_hub(hub)
            for table in tables.values():
                require_columns(table, hub.columns, where)
            found = {split: _join(text_column(table, _COLUMN, where)) for split, table in tables.items()}
        else:
            raise UserError(f"data={config.name} is no text; for task=lm use {', '.join(TEXT_SOURCES)}")
    if "all" in found:
        splits = _divide(found["all"])
        notes = ["one text, divided 90/5/5 in its own order"]
    else:
        splits, notes = complete_splits(found, where, "characters")
    for split, text in splits.items():
        if not text.strip():
            raise UserError(f"{places.get(split, where)}: the {split} text is empty")
    return TextCorpus(config.name, splits, notes, versions)


def _read(files: list[Path], cache_dir: Path) -> str:
    if suffix_of(files[0]) not in TABLE_SUFFIXES:
        return "".join(read_text(file) for file in files)
    table = load_table(files, cache_dir)
    where = str(files[0])
    require_columns(table, (_COLUMN,), where)
    return _join(text_column(table, _COLUMN, where))


def _join(rows: Iterable[str]) -> str:
    """One text from rows that are lines, with or without the newline at their end."""
    return "".join(row if row.endswith("\n") else row + "\n" for row in rows).replace("\r\n", "\n")


def _divide(text: str) -> dict[str, str]:
    first, second = int(len(text) * 0.9), int(len(text) * 0.95)
    return {"train": text[:first], "val": text[first:second], "test": text[second:]}
