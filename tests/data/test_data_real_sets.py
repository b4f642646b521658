"""The real sets, where they are at hand: read by the code that reads a user's own copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rmsrepro.config.schema import Multi30kConfig, TinyShakespeareConfig, Tokenizer, WikitextConfig
from rmsrepro.data import build_data
from rmsrepro.data.lm import LMData
from rmsrepro.data.parallel import load_parallel
from rmsrepro.data.text import load_text


def test_multi30k(shared_data: Callable[[str], str], tmp_path: Path) -> None:
    config = Multi30kConfig(path=shared_data("multi30k"))
    corpus = load_parallel(config, tmp_path)
    assert corpus.num_read == {"train": 29000, "val": 1014, "test": 1000}
    assert corpus.num_blank == {"train": 0, "val": 0, "test": 0}
    assert corpus.splits["train"][0] == (
        "Two young, White males are outside near many bushes.",
        "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    )
    assert corpus.splits["test"][0][0] == "A man in an orange hat starring at something."


def test_multi30k_batches(shared_data: Callable[[str], str], tmp_path: Path) -> None:
    config = Multi30kConfig(path=shared_data("multi30k"), max_train_pairs=2000, vocab_size=1000)
    data = build_data(config, "translation", seed=1, accumulate=1, cache_dir=tmp_path)
    splits = data.summary()["splits"]
    assert splits["train"]["pairs"] + splits["train"]["dropped"]["too_long"] == 2000
    assert splits["val"]["pairs"] == 1014
    assert splits["val"]["unknown_characters"] == {"source": 0, "target": 0}
    assert sum(len(batch.index) for batch in data.test_dataloader()) == 1000


def test_tinyshakespeare(shared_data: Callable[[str], str], tmp_path: Path) -> None:
    config = TinyShakespeareConfig(path=shared_data("tinyshakespeare"), batch_tokens=768)
    data = build_data(config, "lm", seed=1, accumulate=1, cache_dir=tmp_path)
    assert isinstance(data, LMData)
    splits = data.summary()["splits"]
    assert [splits[s]["characters"] for s in ("train", "val", "test")] == [1003854, 55770, 55770]
    assert data.tgt_vocab == 65 + 4
    assert data.batch_at(0).inputs.shape == (12, 64)
    assert sum(batch.num_tokens for batch in data.val_dataloader()) == 55769


def test_wikitext2(shared_data: Callable[[str], str], tmp_path: Path) -> None:
    """Only its validation and test files are there: the first is divided into training and validation."""
    config = WikitextConfig(path=shared_data("wikitext2_valtest"), tokenizer=Tokenizer.char)
    corpus = load_text(config, tmp_path)
    assert corpus.notes[0] == "no training split was found: the validation split was used to train"
    assert corpus.splits["train"].startswith(" \n = Homarus gammarus = \n")
    assert len(corpus.splits["train"]) > 1_000_000
    assert len(corpus.splits["val"]) == int((len(corpus.splits["train"]) + len(corpus.splits["val"])) * 0.05)
    assert len(corpus.splits["test"]) > 1_000_000
