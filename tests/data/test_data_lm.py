from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import TextFilesConfig, Tokenizer
from rmsrepro.data import build_data
from rmsrepro.data.batches import IGNORE
from rmsrepro.data.lm import LMData

TEXT = "".join(f"line {i} says ü\n" for i in range(60))


def make(folder: Path, *, seed: int = 1, accumulate: int = 1, raw: bytes = b"", **fields: object) -> LMData:
    path = folder / "text.txt"
    path.write_bytes(raw or TEXT.encode())
    config = TextFilesConfig(train=str(path), **{"max_len": 8, "batch_tokens": 35, **fields})  # type: ignore[arg-type]
    data = build_data(config, "lm", seed=seed, accumulate=accumulate, cache_dir=folder / "cache")
    assert isinstance(data, LMData)
    return data


def test_training_windows_are_pieces_of_the_text(tmp_path: Path) -> None:
    data = make(tmp_path, accumulate=3)
    train = data.tokens["train"]
    text = data.tokenizer.decode(train.tolist())
    for number in (0, 1, 1000):
        batch = data.batch_at(number)
        assert batch.inputs.shape == batch.targets.shape == (4, 8)  # 35 // 8 windows
        assert batch.inputs.dtype == batch.targets.dtype == torch.long
        assert (batch.num_tokens, batch.update_tokens) == (32, 96)
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        for row in torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1).tolist():
            assert data.tokenizer.decode(row) in text


def test_batch_is_a_function_of_seed_and_number(tmp_path: Path) -> None:
    data, again, other = (make(tmp_path, seed=seed) for seed in (1, 1, 2))
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    numbers = [7, 0, 7, 3]
    assert all(torch.equal(data.batch_at(n).inputs, again.batch_at(n).inputs) for n in numbers)
    assert not torch.equal(data.batch_at(0).inputs, data.batch_at(1).inputs)
    assert not torch.equal(data.batch_at(0).inputs, other.batch_at(0).inputs)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_start_is_drawn(tmp_path: Path) -> None:
    """The first and the last possible window of the split occur."""
    data = make(tmp_path, raw=bytes(range(65, 105)))
    assert len(data.tokens["train"]) == 36
    firsts = torch.cat([data.batch_at(n).inputs[:, 0] for n in range(100)])
    assert sorted(set(firsts.tolist())) == data.tokens["train"][: 36 - 8].tolist()


@pytest.mark.parametrize("length", [2, 8, 9, 32, 33, 34, 100])
@pytest.mark.parametrize("budget", [8, 35])
def test_validation_predicts_every_token_but_the_first_once(tmp_path: Path, length: int, budget: int) -> None:
    (tmp_path / "val.txt").write_text(("abcdefg" * 20)[:length])
    data = make(tmp_path, val=str(tmp_path / "val.txt"), batch_tokens=budget, tokenizer=Tokenizer.byte)
    tokens = data.tokens["val"].tolist()
    inputs: list[int] = []
    targets: list[int] = []
    batches = list(data.val_dataloader())
    assert len(batches) == len(data.val_dataloader())
    for batch in batches:
        assert batch.inputs.shape[1] == 8
        keep = batch.targets != IGNORE
        assert batch.num_tokens == batch.update_tokens == int(keep.sum())
        assert (batch.inputs[~keep] == 0).all()
        inputs += batch.inputs[keep].tolist()
        targets += batch.targets[keep].tolist()
    assert inputs == tokens[:-1]
    assert targets == tokens[1:]
    first_rows = batches[0].inputs.tolist()
    assert first_rows[0][: length - 1] == tokens[:8][: length - 1]  # windows do not overlap
    if length > 9:
        second = first_rows[1] if budget == 35 else batches[1].inputs.tolist()[0]
        assert second[: length - 9] == tokens[8:16][: length - 9]


@pytest.mark.parametrize("tokenizer", list(Tokenizer))
def test_bytes_of_a_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = make(tmp_path, tokenizer=tokenizer, vocab_size=270)
    for split in ("train", "val", "test"):
        tokens = data.tokens[split].tolist()
        text = data.tokenizer.decode(tokens)
        first = 1 if tokenizer is Tokenizer.byte else len(data.tokenizer.decode(tokens[:1]).encode())
        assert data.bytes_per_token(split) == pytest.approx((len(text.encode()) - first) / (len(tokens) - 1))
    if tokenizer is Tokenizer.byte:
        assert data.bytes_per_token("val") == 1.0


def test_the_same_text_in_three_ways(tmp_path: Path) -> None:
    raws = [TEXT.encode(), TEXT.encode("utf-8-sig"), TEXT.replace("\n", "\r\n").encode()]
    data = [make(tmp_path, raw=raw, tokenizer=Tokenizer.bpe, vocab_size=270) for raw in raws]
    for other in data[1:]:
        assert other.tokenizer.to_json() == data[0].tokenizer.to_json()
        assert other.fingerprint == data[0].fingerprint
        assert other.summary() == data[0].summary()
        assert torch.equal(other.batch_at(5).inputs, data[0].batch_at(5).inputs)
    with pytest.raises(UserError, match=r"text\.txt: not UTF-8: line 1 has byte 0xfc"):
        make(tmp_path, raw=TEXT.encode("latin-1"))


def test_summary_is_complete_and_plain(tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("line 1 says ☃☃ü\n")
    summary = make(tmp_path, val=str(tmp_path / "val.txt")).summary()
    assert json.loads(json.dumps(summary)) == summary
    size = len(TEXT)
    held = int(size * 0.05)
    assert summary["splits"]["train"] == {
        "characters": size - held,
        "bytes": len(TEXT[: size - held].encode()),
        "tokens": size - held,
        "predicted_tokens": size - held - 1,
        "bytes_per_token": pytest.approx(len(TEXT[1 : size - held].encode()) / (size - held - 1)),
        "dropped": {},
        "cut": 0,
        "unknown_characters": 0,
    }
    assert summary["splits"]["val"]["unknown_characters"] == 2
    assert summary["source"] == "text_files"
    assert (summary["max_len"], summary["windows_per_batch"]) == (8, 4)
    assert summary["tokenizer"]["text"]["vocab_size"] == 4 + len(set(TEXT))
    assert len(summary["notes"]) == 1
    assert str(tmp_path) not in json.dumps(summary)


def test_vocabulary_is_of_the_training_split_only(tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("☃ snow")
    data = make(tmp_path, val=str(tmp_path / "val.txt"))
    assert data.tokens["val"][0] == 3
    assert data.src_vocab == data.tgt_vocab == data.tokenizer.vocab_size == 4 + len(set(TEXT))


@pytest.mark.parametrize(
    ("raw", "fields", "message"),
    [
        (b"abcdefgh", {}, "the train split has 6 tokens, but at least 9 are needed for one window"),
        (b"a" * 30, {}, "the val split has 1 tokens, but at least 2 are needed"),
        (b"", {"max_len": 64}, r"data\.batch_tokens=35 is less than one window \(data\.max_len=64\)"),
        (b"", {"max_len": 0}, r"data\.max_len=0: a window has at least 1 token"),
    ],
)
def test_what_cannot_be(tmp_path: Path, raw: bytes, fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(tmp_path, raw=raw, **fields)


def test_epochs(tmp_path: Path) -> None:
    data = make(tmp_path)
    assert data.epochs(0) == 0
    assert data.epochs(10) == pytest.approx(10 * 32 / (len(data.tokens["train"]) - 1))
    assert np.issubdtype(data.tokens["train"].dtype, np.int32)
