from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import PydocConfig, TextFilesConfig, TinyShakespeareConfig, WikitextConfig
from rmsrepro.data.corpus import complete_splits
from rmsrepro.data.pydoc import pydoc_text
from rmsrepro.data.text import load_text


def test_pydoc(tmp_path: Path) -> None:
    corpus = load_text(PydocConfig(), tmp_path)
    text = pydoc_text()
    assert "".join(corpus.splits[split] for split in ("train", "val", "test")) == text
    assert 300_000 < len(text) < 1_500_000
    assert len(corpus.splits["train"]) == int(len(text) * 0.9)
    assert abs(len(corpus.splits["val"]) - len(corpus.splits["test"])) <= 1
    assert corpus.versions == {"python": sys.version.split()[0]}
    assert corpus.notes == ["one text, divided 90/5/5 in its own order"]


def test_shakespeare_folder(tmp_path: Path) -> None:
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress(b"to be\r\nor not"))
    (tmp_path / "valid.txt").write_text("to be")
    (tmp_path / "test.txt").write_bytes("\ufefför not".encode())
    (tmp_path / "README.md").write_text("no split")
    corpus = load_text(TinyShakespeareConfig(path=str(tmp_path)), tmp_path)
    assert corpus.splits == {"train": "to be\nor not", "val": "to be", "test": "ör not"}
    assert corpus.notes == []


@pytest.mark.parametrize("as_folder", [True, False])
def test_single_file_is_divided(tmp_path: Path, as_folder: bool) -> None:
    (tmp_path / "input.txt").write_text("0123456789" * 10)
    path = tmp_path if as_folder else tmp_path / "input.txt"
    splits = load_text(TinyShakespeareConfig(path=str(path)), tmp_path).splits
    assert {split: len(text) for split, text in splits.items()} == {"train": 90, "val": 5, "test": 5}
    assert splits["val"] + splits["test"] == "0123456789"


def test_text_files_without_validation_and_test(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("0123456789" * 10)
    corpus = load_text(TextFilesConfig(train=str(tmp_path / "my.txt")), tmp_path)
    assert corpus.splits == {"train": "0123456789" * 9, "val": "01234", "test": "56789"}
    assert corpus.notes == [
        "no test split was found: the last 5 % of the training split (5 characters) were cut off",
        "no val split was found: the 5 % before the test part of the training split (5 characters) "
        "were cut off",
    ]
    (tmp_path / "val.txt").write_text("validate")
    config = TextFilesConfig(train=str(tmp_path / "my.txt"), val=str(tmp_path / "val.txt"))
    splits = load_text(config, tmp_path).splits
    assert (len(splits["train"]), splits["val"], splits["test"]) == (95, "validate", "56789")


def test_validation_split_trains_when_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text("v" * 100)
    (tmp_path / "test.txt").write_text("t" * 10)
    corpus = load_text(WikitextConfig(path=str(tmp_path)), tmp_path)
    assert corpus.splits == {"train": "v" * 95, "val": "v" * 5, "test": "t" * 10}
    assert corpus.notes[0] == "no training split was found: the validation split was used to train"
    assert len(corpus.notes) == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_wikitext_tables(
    tmp_path: Path, jsonl: Callable[[Path, Sequence[object]], Path], suffix: str
) -> None:
    """The rows of the Hub's set are lines with their newline; an empty line may be an empty string."""
    rows = [" = Title = \n", "", " A line\u2028of text . \n"]
    for split in ("train", "validation", "test"):
        if suffix == ".parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.table({"text": rows}), tmp_path / f"{split}-00000-of-00001.parquet")
        else:
            jsonl(tmp_path / f"{split}{suffix}", [{"text": row} for row in rows])
    splits = load_text(WikitextConfig(path=str(tmp_path)), tmp_path / "cache").splits
    assert splits == dict.fromkeys(("train", "val", "test"), " = Title = \n\n A line\u2028of text . \n")


def test_wrong_column(tmp_path: Path, jsonl: Callable[[Path, Sequence[object]], Path]) -> None:
    for split in ("train", "val", "test"):
        jsonl(tmp_path / f"{split}.jsonl", [{"texts": "a", "id": 1}])
    with pytest.raises(UserError, match=r"no column 'text'; its columns are texts, id; did you mean texts\?"):
        load_text(WikitextConfig(path=str(tmp_path)), tmp_path / "cache")


def test_column_of_numbers(tmp_path: Path, jsonl: Callable[[Path, Sequence[object]], Path]) -> None:
    for split in ("train", "val", "test"):
        jsonl(tmp_path / f"{split}.jsonl", [{"text": 3}])
    with pytest.raises(UserError, match="column 'text' holds int in row 1"):
        load_text(WikitextConfig(path=str(tmp_path)), tmp_path / "cache")


def test_missing_paths(tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "book.txt").write_text("x")
    with pytest.raises(UserError, match=r"data\.path=.*shakespear: no such .*; did you mean shakespeare\?"):
        load_text(TinyShakespeareConfig(path=str(tmp_path / "shakespear")), tmp_path)
    with pytest.raises(UserError, match=r"data\.train=.*bock\.txt: no such .*; did you mean book\.txt\?"):
        load_text(TextFilesConfig(train=str(tmp_path / "bock.txt")), tmp_path)
    with pytest.raises(UserError, match=r"data\.train=.* is a folder; give a file: .* has book.txt, shakes"):
        load_text(TextFilesConfig(train=str(tmp_path)), tmp_path)
    with pytest.raises(UserError, match=r"data\.train is not set"):
        load_text(TextFilesConfig(), tmp_path)
    with pytest.raises(UserError, match=r"no train\.\*, validation\.\*, test\.\* there .* is empty"):
        load_text(TinyShakespeareConfig(path=str(tmp_path / "shakespeare")), tmp_path)
    with pytest.raises(UserError, match=r"did you mean shakespeare\?"):
        load_text(TextFilesConfig(train=str(tmp_path / "shakespere" / "deep" / "a.txt")), tmp_path)


def test_two_files_for_one_split(tmp_path: Path) -> None:
    for name in ("train.txt", "train.txt.gz"):
        (tmp_path / name).write_text("x")
    with pytest.raises(
        UserError, match=r"several files could be the train split \(train.txt, train.txt.gz\)"
    ):
        load_text(TinyShakespeareConfig(path=str(tmp_path)), tmp_path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_text(tmp_path: Path, content: str) -> None:
    (tmp_path / "empty.txt").write_text(content)
    with pytest.raises(UserError, match=r"empty\.txt"):
        load_text(TextFilesConfig(train=str(tmp_path / "empty.txt")), tmp_path)


def test_misspelt_subset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.subset=wikitext-2-raw: .*did you mean wikitext-2-raw-v1"):
        load_text(WikitextConfig(subset="wikitext-2-raw"), tmp_path)


def test_no_split_to_train_on() -> None:
    with pytest.raises(UserError, match="folder: neither a training nor a validation split"):
        complete_splits({"test": "x"}, "folder", "characters")
    with pytest.raises(UserError, match="folder: 2 pairs are too few to cut test and val from"):
        complete_splits({"train": ["a", "b"]}, "folder", "pairs")
    splits, _ = complete_splits({"train": ["a", "b", "c"]}, "folder", "pairs")
    assert splits == {"train": ["a"], "val": ["b"], "test": ["c"]}
