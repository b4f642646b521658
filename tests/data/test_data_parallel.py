from __future__ import annotations

import codecs
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import Multi30kConfig, ParallelFilesConfig, Wmt14Config
from rmsrepro.data.parallel import hub_set, load_parallel

Write = Callable[[Path, Sequence[object]], Path]


def plain(folder: Path, source: str, target: str, encoding: str = "utf-8") -> ParallelFilesConfig:
    (folder / "a.en").write_bytes(source.encode(encoding))
    (folder / "a.de").write_bytes(target.encode(encoding))
    files = {"src": str(folder / "a.en"), "tgt": str(folder / "a.de")}
    return ParallelFilesConfig(
        **{f"{split}_{side}": path for split in ("train", "val", "test") for side, path in files.items()}
    )


def test_unusual_line_breaks_keep_pairs_aligned(tmp_path: Path) -> None:
    config = plain(tmp_path, "a\u2028b\nc\x0bd\ne\x85f\n", "1\n2\n3\n")
    corpus = load_parallel(config, tmp_path)
    assert corpus.splits["train"] == [("a\u2028b", "1"), ("c\x0bd", "2"), ("e\x85f", "3")]
    assert corpus.num_blank == {"train": 0, "val": 0, "test": 0}


def test_blank_sides_are_dropped_on_both_sides_and_counted(tmp_path: Path) -> None:
    config = plain(tmp_path, "one\n\n three\n \t\nfive", "eins\nzwei\n\u2028\nvier\nfünf\n")
    corpus = load_parallel(config, tmp_path)
    assert corpus.splits["train"] == [("one", "eins"), ("five", "fünf")]
    assert corpus.num_blank["train"] == 3
    assert corpus.num_read["train"] == 5


def test_unequal_numbers_of_lines(tmp_path: Path) -> None:
    config = plain(tmp_path, "line\n" * 10, "Zeile\n" * 9)
    with pytest.raises(UserError, match=r"a\.en has 10 lines, .*a\.de has 9; line i of one"):
        load_parallel(config, tmp_path)


def test_the_same_corpus_in_three_ways(tmp_path: Path) -> None:
    source, target = "one\ntwo\n", "eins\nzwölf\n"
    expected = [("one", "eins"), ("two", "zwölf")]
    assert load_parallel(plain(tmp_path, source, target), tmp_path).splits["train"] == expected
    bom = plain(tmp_path, source, target, "utf-8-sig")
    assert (tmp_path / "a.en").read_bytes().startswith(codecs.BOM_UTF8)
    assert load_parallel(bom, tmp_path).splits["train"] == expected
    crlf = plain(tmp_path, source.replace("\n", "\r\n"), target.replace("\n", "\r\n"))
    assert load_parallel(crlf, tmp_path).splits["train"] == expected
    with pytest.raises(UserError, match=r"a\.de: not UTF-8: line 2 has byte 0xf6 at byte 2 of the line"):
        load_parallel(plain(tmp_path, source, target, "latin-1"), tmp_path)


def test_gzipped_and_cut_off_splits(tmp_path: Path) -> None:
    for side in ("src", "tgt"):
        lines = "".join(f"{side} {i}\n" for i in range(40))
        (tmp_path / f"{side}.gz").write_bytes(gzip.compress(lines.encode()))
    config = ParallelFilesConfig(train_src=str(tmp_path / "src.gz"), train_tgt=str(tmp_path / "tgt.gz"))
    corpus = load_parallel(config, tmp_path)
    assert {split: len(rows) for split, rows in corpus.splits.items()} == {"train": 36, "val": 2, "test": 2}
    assert corpus.splits["test"] == [("src 38", "tgt 38"), ("src 39", "tgt 39")]
    assert len(corpus.notes) == 2
    config.max_train_pairs = 5
    limited = load_parallel(config, tmp_path)
    assert limited.splits["train"] == corpus.splits["train"][:5]
    assert limited.notes[-1] == "only the first 5 training pairs were read (data.max_train_pairs)"


def test_one_side_only(tmp_path: Path) -> None:
    config = plain(tmp_path, "a\n", "b\n")
    config.val_tgt = None
    with pytest.raises(
        UserError, match=r"data\.val_tgt is not set, though the other side of val is: .*a\.en"
    ):
        load_parallel(config, tmp_path)
    config.test_src, config.val_src = str(tmp_path / "a.em"), None
    with pytest.raises(UserError, match=r"data\.test_src=.*a\.em: no such file .*did you mean a\.en"):
        load_parallel(config, tmp_path)


def test_nothing_but_blank_pairs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no pairs in the train split \(2 read, all with a blank side"):
        load_parallel(plain(tmp_path, "\na\n", "b\n\n"), tmp_path)
    with pytest.raises(UserError, match=r"no pairs in the train split \(0 read"):
        load_parallel(plain(tmp_path, "", ""), tmp_path)


def test_an_empty_split_is_named_by_its_own_file(tmp_path: Path) -> None:
    config = plain(tmp_path, "a\n", "b\n")
    for name in ("val.en", "val.de"):
        (tmp_path / name).write_text("")
    config.val_src, config.val_tgt = str(tmp_path / "val.en"), str(tmp_path / "val.de")
    with pytest.raises(UserError) as caught:
        load_parallel(config, tmp_path)
    assert str(caught.value) == f"{tmp_path / 'val.en'}: no pairs in the val split (0 read: it is empty)"
    (tmp_path / "val.en").write_text("\n")
    (tmp_path / "val.de").write_text("x\n")
    with pytest.raises(UserError) as caught:
        load_parallel(config, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'val.en'}: no pairs in the val split (1 read, all with a blank side)"
    )


def test_multi30k_files(multi30k: Path, pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    corpus = load_parallel(Multi30kConfig(path=str(multi30k)), tmp_path / "cache")
    assert corpus.splits == {"train": pairs, "val": pairs[:3], "test": pairs[3:5]}
    turned = Multi30kConfig(path=str(multi30k), source_lang="de", target_lang="en", max_train_pairs=2)
    corpus = load_parallel(turned, tmp_path / "cache")
    assert corpus.splits["train"] == [(de, en) for en, de in pairs[:2]]
    assert corpus.num_read["train"] == 2


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_wmt14_files(tmp_path: Path, jsonl: Write, kind: str) -> None:
    rows = [{"translation": {"de": "eins", "en": "one"}}, {"translation": {"de": "zwei", "en": None}}]
    for split in ("train", "validation", "test"):
        if kind == "jsonl":
            jsonl(tmp_path / f"{split}.jsonl", rows)
        else:
            import pyarrow
            from pyarrow import parquet

            for shard in range(2):
                table = pyarrow.Table.from_pylist(rows[shard : shard + 1])
                parquet.write_table(table, tmp_path / f"{split}-0000{shard}-of-00002.parquet")
    corpus = load_parallel(Wmt14Config(path=str(tmp_path)), tmp_path / "cache")
    assert corpus.splits["train"] == [("one", "eins")]
    assert corpus.num_blank == {"train": 1, "val": 1, "test": 1}
    with pytest.raises(UserError, match=r"'translation' has no language 'fr'; it has (de, en|en, de)"):
        load_parallel(Wmt14Config(path=str(tmp_path), target_lang="fr"), tmp_path / "cache")


def test_line_ends_in_table_cells(tmp_path: Path, jsonl: Write) -> None:
    for split in ("train", "val", "test"):
        jsonl(tmp_path / f"{split}.jsonl", [{"en": "two\r\nlines\n", "de": "zwei\nZeilen"}])
    corpus = load_parallel(Multi30kConfig(path=str(tmp_path)), tmp_path / "cache")
    assert corpus.splits["train"] == [("two lines", "zwei Zeilen")]


def test_missing_columns_name_those_found(multi30k: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.jsonl\.gz: no column 'fr'; its columns are en, de"):
        load_parallel(Multi30kConfig(path=str(multi30k), target_lang="fr"), tmp_path / "cache")
    with pytest.raises(UserError, match="no column 'translation'; its columns are en, de"):
        load_parallel(Wmt14Config(path=str(multi30k)), tmp_path / "cache")


def test_missing_split(multi30k: Path, tmp_path: Path) -> None:
    (multi30k / "val.jsonl").unlink()
    with pytest.raises(UserError, match=r"no validation\.\* there .*has test_2016_flickr\.jsonl\.gz, train"):
        load_parallel(Multi30kConfig(path=str(multi30k)), tmp_path)
    with pytest.raises(UserError, match=r"is a file; data=multi30k needs the folder"):
        load_parallel(Multi30kConfig(path=str(multi30k / "train.jsonl.gz")), tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the file is empty"),
        (b'{"en": "a", "de": "\xe4"}\n', "not UTF-8: line 1 has byte 0xe4 at byte 19"),
        (b'{"en": "a" "de": "b"}\n', "cannot be read as json"),
    ],
)
def test_damaged_table(multi30k: Path, tmp_path: Path, raw: bytes, message: str) -> None:
    (multi30k / "val.jsonl").write_bytes(raw)
    with pytest.raises(UserError, match=message) as caught:
        load_parallel(Multi30kConfig(path=str(multi30k)), tmp_path / "cache")
    assert "val.jsonl" in str(caught.value)


def test_tables_with_byte_order_mark_and_crlf(multi30k: Path, tmp_path: Path, pairs: list[object]) -> None:
    raw = (multi30k / "val.jsonl").read_bytes()
    (multi30k / "val.jsonl").write_bytes(codecs.BOM_UTF8 + raw.replace(b"\n", b"\r\n"))
    corpus = load_parallel(Multi30kConfig(path=str(multi30k)), tmp_path / "cache")
    assert corpus.splits["val"] == pairs[:3]


def test_changed_file_is_read_again(multi30k: Path, tmp_path: Path, jsonl: Write) -> None:
    import os

    config = Multi30kConfig(path=str(multi30k))
    load_parallel(config, tmp_path / "cache")
    path = multi30k / "val.jsonl"
    stamp = path.stat().st_mtime_ns
    jsonl(path, [{"en": "new", "de": "neu"}])
    os.utime(path, ns=(stamp, stamp))
    assert load_parallel(config, tmp_path / "cache").splits["val"] == [("new", "neu")]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Multi30kConfig(target_lang="en"), "source_lang and data.target_lang are both en"),
        (Multi30kConfig(target_lang="fr"), "data.target_lang=fr: data=multi30k has en, de"),
        (Wmt14Config(source_lang="de", target_lang="fr"), "no de-fr: one of the two languages must be en"),
        (Multi30kConfig(max_train_pairs=0), "data.max_train_pairs=0"),
    ],
)
def test_wrong_settings_need_no_download(
    config: Multi30kConfig | Wmt14Config, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        load_parallel(config, tmp_path)


def test_names_on_the_hub() -> None:
    wmt = hub_set(Wmt14Config())
    assert (wmt.repository, wmt.subset, wmt.columns) == ("wmt/wmt14", "de-en", ("translation",))
    assert hub_set(Wmt14Config(source_lang="cs", target_lang="en")).subset == "cs-en"
    multi = hub_set(Multi30kConfig())
    assert (multi.repository, multi.subset, multi.columns) == ("bentrevett/multi30k", None, ("en", "de"))
