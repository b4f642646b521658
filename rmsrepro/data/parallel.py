"""Sources of sentence pairs for translation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import (
    CldrConfig,
    DataConfig,
    Multi30kConfig,
    ParallelFilesConfig,
    TranslationDataConfig,
    Wmt14Config,
)
from rmsrepro.data.cldr import LANGUAGES as CLDR_LANGUAGES
from rmsrepro.data.cldr import cldr_pairs, cldr_versions
from rmsrepro.data.corpus import Pair, ParallelCorpus, complete_splits
from rmsrepro.data.files import (
    SPLITS,
    TABLE_SUFFIXES,
    existing_file,
    existing_path,
    no_split_files,
    split_files,
)
from rmsrepro.data.reading import read_lines
from rmsrepro.data.tables import (
    HubSet,
    load_hub,
    load_table,
    require_columns,
    text_column,
    translation_columns,
)

PARALLEL_SOURCES = ("cldr", "multi30k", "wmt14", "parallel_files")

_NESTED = "translation"


def check_languages(config: TranslationDataConfig) -> None:
    """Raise UserError when the set is known not to have the languages asked for."""
    source, target = config.source_lang, config.target_lang
    if source == target:
        raise UserError(f"data.source_lang and data.target_lang are both {source}")
    known: tuple[str, ...]
    if isinstance(config, CldrConfig):
        known, needs_english = CLDR_LANGUAGES, False
    elif isinstance(config, Multi30kConfig) and config.path is None:
        known, needs_english = ("en", "de"), False
    elif isinstance(config, Wmt14Config) and config.path is None:
        known, needs_english = ("en", "cs", "de", "fr", "hi", "ru"), True
    else:
        return  # the columns of the user's own files decide
    for key, lang in (("source_lang", source), ("target_lang", target)):
        if lang not in known:
            raise UserError(f"data.{key}={lang}: data={config.name} has {', '.join(known)}")
    if needs_english and "en" not in (source, target):
        raise UserError(f"data={config.name} has no {source}-{target}: one of the two languages must be en")


def columns_of(config: Multi30kConfig | Wmt14Config) -> tuple[str, ...]:
    """Return the columns that the set's tables must have."""
    return (_NESTED,) if isinstance(config, Wmt14Config) else (config.source_lang, config.target_lang)


def hub_set(config: Multi30kConfig | Wmt14Config) -> HubSet:
    """Return where on the Hub the set is."""
    if isinstance(config, Wmt14Config):
        other = config.target_lang if config.source_lang == "en" else config.source_lang
        return HubSet("wmt/wmt14", columns_of(config), subset=f"{other}-en")
    return HubSet("bentrevett/multi30k", columns_of(config))


def parallel_paths(config: DataConfig) -> dict[str, list[Path]] | None:
    """Find the local files; None when the source has none (generated, or on the Hub).

    For plain text each split has two files, source and target; for tables, one or more shards.

    Raises:
        UserError: a path does not exist, only one side of a split is given, or a folder lacks a split.
    """
    if isinstance(config, ParallelFilesConfig):
        found: dict[str, list[Path]] = {}
        for split in SPLITS:
            sides = [f"{split}_src", f"{split}_tgt"]
            values: list[str | None] = [getattr(config, side) for side in sides]
            given = [
                existing_file(value, f"data.{side}")
                for side, value in zip(sides, values, strict=True)
                if value is not None
            ]
            if len(given) == 1:
                lacking = sides[0] if values[0] is None else sides[1]
                raise UserError(f"data.{lacking} is not set, though the other side of {split} is: {given[0]}")
            if given:
                found[split] = given
        return found
    if not isinstance(config, (Multi30kConfig, Wmt14Config)) or config.path is None:
        return None
    path = existing_path(config.path, "data.path")
    if path.is_file():
        raise UserError(
            f"data.path={path} is a file; data={config.name} needs the folder that has train.*, "
            "validation.* and test.* (for plain text files use data=parallel_files)"
        )
    found = split_files(path, TABLE_SUFFIXES)
    lacking_splits = [split for split in SPLITS if split not in found]
    if lacking_splits:
        raise no_split_files(path, lacking_splits, TABLE_SUFFIXES, "data.path")
    return found


def load_parallel(config: DataConfig, cache_dir: Path) -> ParallelCorpus:
    """Read a source of sentence pairs; pairs with a blank side are dropped in every split, and counted.

    Raises:
        UserError: wrong path, damaged or wrongly encoded file, missing column, files of unequal length,
            unreachable Hub, nothing left in a split.
    """
    if not isinstance(config, TranslationDataConfig):
        raise UserError(
            f"data={config.name} has no sentence pairs; "
            f"for task=translation use {', '.join(PARALLEL_SOURCES)}"
        )
    limit = config.max_train_pairs
    if limit is not None and limit < 1:
        raise UserError(f"data.max_train_pairs={limit}: at least one pair is needed")
    check_languages(config)
    notes: list[str] = []
    versions: dict[str, str] = {}
    places: dict[str, str] = {}
    if isinstance(config, CldrConfig):
        read = cldr_pairs(config, cache_dir)
        versions = cldr_versions()
    elif isinstance(config, ParallelFilesConfig):
        paths = parallel_paths(config) or {}
        # A split that is cut off the training split has that one's place.
        places = dict.fromkeys(SPLITS, str(paths["train"][0]))
        places |= {split: str(files[0]) for split, files in paths.items()}
        read, notes = complete_splits(
            {split: _aligned(*files) for split, files in paths.items()}, places["train"], "pairs"
        )
    elif isinstance(config, (Multi30kConfig, Wmt14Config)):
        tables, places = _tables(config, cache_dir)
        read = {split: _pairs(table, config, places[split]) for split, table in tables.items()}
    else:
        raise UserError(f"data={config.name}: unknown source; use {', '.join(PARALLEL_SOURCES)}")
    if limit is not None:
        read["train"] = read["train"][:limit]
        notes.append(f"only the first {len(read['train'])} training pairs were read (data.max_train_pairs)")
    splits: dict[str, list[Pair]] = {}
    for split, pairs in read.items():
        splits[split] = [pair for pair in pairs if pair[0].strip() and pair[1].strip()]
        if not splits[split]:
            where = places.get(split, f"data={config.name}")
            reason = f"{len(pairs)} read, all with a blank side" if pairs else "0 read: it is empty"
            raise UserError(f"{where}: no pairs in the {split} split ({reason})")
    return ParallelCorpus(
        config.name,
        splits,
        num_read={split: len(pairs) for split, pairs in read.items()},
        num_blank={split: len(pairs) - len(splits[split]) for split, pairs in read.items()},
        notes=notes,
        versions=versions,
    )


def _aligned(source: Path, target: Path) -> list[Pair]:
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise UserError(
            f"{source} has {len(sources)} lines, {target} has {len(targets)}; "
            "line i of one must translate line i of the other"
        )
    return list(zip(sources, targets, strict=True))


def _tables(config: Multi30kConfig | Wmt14Config, cache_dir: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the table of each split and its name for messages."""
    paths = parallel_paths(config)
    tables: dict[str, Any]
    if paths is None:
        hub = hub_set(config)
        tables = load_hub(hub)
        lacking = [split for split in SPLITS if split not in tables]
        if lacking:
            raise UserError(f"{hub.label} has no {' or '.join(lacking)} split")
        places = dict.fromkeys(tables, hub.label)
    else:
        tables = {split: load_table(files, cache_dir) for split, files in paths.items()}
        places = {split: str(files[0]) for split, files in paths.items()}
    if config.max_train_pairs is not None:
        # Before the rows become Python strings: of a large set only the small part is read.
        num_rows = min(len(tables["train"]), config.max_train_pairs)
        tables["train"] = tables["train"].select(range(num_rows))
    return tables, places


def _pairs(table: Any, config: Multi30kConfig | Wmt14Config, where: str) -> list[Pair]:
    columns = columns_of(config)
    langs = (config.source_lang, config.target_lang)
    require_columns(table, columns, where)
    if columns == (_NESTED,):
        sides = translation_columns(table, langs, where)
    else:
        sides = [text_column(table, lang, where) for lang in langs]
    return list(zip(*(map(_one_line, side) for side in sides), strict=True))


def _one_line(text: str) -> str:
    """A sentence is one line: a line end inside a table's cell becomes a space, one at its end goes."""
    if "\n" not in text and "\r" not in text:
        return text
    return text.replace("\r\n", "\n").strip("\r\n").replace("\n", " ")
