from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import CldrConfig, Multi30kConfig, ParallelFilesConfig, Tokenizer
from rmsrepro.data import build_data
from rmsrepro.data.batches import IGNORE, TranslationBatch
from rmsrepro.data.translation import TranslationData

Rows = list[tuple[str, str]]


def make(
    folder: Path,
    train: Rows,
    val: Rows | None = None,
    test: Rows | None = None,
    *,
    seed: int = 1,
    accumulate: int = 1,
    encoding: str = "utf-8",
    line_end: str = "\n",
    **fields: object,
) -> TranslationData:
    paths = {}
    for split, rows in (("train", train), ("val", val or train[:2]), ("test", test or train[:2])):
        for number, side in enumerate(("src", "tgt")):
            path = folder / f"{split}.{side}"
            path.write_bytes("".join(row[number] + line_end for row in rows).encode(encoding))
            paths[f"{split}_{side}"] = str(path)
    settings = {"tokenizer": Tokenizer.char, "max_len": 16, "batch_tokens": 48, **paths, **fields}
    config = ParallelFilesConfig(**settings)  # type: ignore[arg-type]
    data = build_data(config, "translation", seed=seed, accumulate=accumulate, cache_dir=folder / "cache")
    assert isinstance(data, TranslationData)
    return data


def numbered(count: int) -> Rows:
    return [("s" * (1 + i % 9), "t" * (1 + (i * 7) % 11)) for i in range(count)]


def sentences(data: TranslationData, batch: TranslationBatch) -> Rows:
    """Read a batch back, checking its form on the way."""
    rows = []
    for src, mask, tgt_in, tgt_out in zip(
        batch.src, batch.src_mask, batch.tgt_in, batch.tgt_out, strict=True
    ):
        kept = tgt_out != IGNORE
        assert src[mask][-1] == 2
        assert (src[~mask] == 0).all()
        assert tgt_out[kept][-1] == 2
        assert tgt_in[0] == 1
        assert torch.equal(tgt_in[kept][1:], tgt_out[kept][:-1])
        assert (tgt_in[~kept] == 0).all()
        rows.append(
            (
                data.src_tokenizer.decode(src[mask].tolist()),
                data.tgt_tokenizer.decode(tgt_out[kept].tolist()),
            )
        )
    return rows


def test_every_pair_once_an_epoch_within_the_budget(tmp_path: Path) -> None:
    rows = numbered(70)
    data = make(tmp_path, rows, batch_sentences=6)
    for epoch in range(3):
        seen: Rows = []
        number = 0
        while data._epochs.locate(number)[0] < epoch:
            number += 1
        while data._epochs.locate(number)[0] == epoch:
            batch = data.batch_at(number)
            assert max(batch.src.numel(), batch.tgt_in.numel()) <= 48
            assert len(batch.index) <= 6
            read = sentences(data, batch)
            assert read == [rows[i] for i in batch.index]
            seen += read
            number += 1
        assert sorted(seen) == sorted(rows)
        assert data.epochs(number) == epoch + 1


@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_update_tokens_are_exact_also_across_epochs(tmp_path: Path, accumulate: int) -> None:
    data = make(tmp_path, numbered(20), accumulate=accumulate)
    batches = [data.batch_at(number) for number in range(accumulate * 12)]
    assert data.epochs(len(batches)) > 2
    for update in range(12):
        group = batches[update * accumulate : (update + 1) * accumulate]
        total = sum(int((batch.tgt_out != IGNORE).sum()) for batch in group)
        assert [batch.update_tokens for batch in group] == [total] * accumulate
        assert sum(batch.num_tokens for batch in group) == total


def test_batch_is_a_function_of_seed_and_number(tmp_path: Path) -> None:
    data, again, other = (make(tmp_path, numbered(50), seed=seed) for seed in (1, 1, 2))
    expected = [data.batch_at(number) for number in range(40)]
    for number in (39, 3, 39, 0):
        batch = again.batch_at(number)
        assert batch.index == expected[number].index
        assert torch.equal(batch.src, expected[number].src)
        assert torch.equal(batch.tgt_out, expected[number].tgt_out)
    assert [other.batch_at(n).index for n in range(5)] != [batch.index for batch in expected[:5]]


def test_lengths_at_the_limit(tmp_path: Path) -> None:
    """max_len=16: a source with its end mark, a target with both marks, may have 16 tokens."""
    kept = [("s" * 15, "t" * 14), ("s", "t")]
    long = [("s" * 16, "t"), ("s", "t" * 15), ("s" * 5000, "t" * 5000), ("s" * 17, "t" * 17)]
    data = make(tmp_path, kept + long, val=kept + long, test=long[2:], batch_tokens=16)
    splits = data.summary()["splits"]
    assert splits["train"]["pairs"] == 2
    assert splits["train"]["dropped"] == {"blank": 0, "too_long": 4}
    assert splits["train"]["cut"] == 0
    assert splits["val"]["pairs"] == 6
    assert splits["val"]["dropped"] == {"blank": 0, "too_long": 0}
    assert (splits["val"]["cut"], splits["test"]["cut"]) == (4, 2)
    trained = [row for number in range(2) for row in sentences(data, data.batch_at(number))]
    assert sorted(trained) == sorted(kept)
    read = {}
    for batch in data.val_dataloader():
        assert batch.src.shape[1] <= 16
        assert batch.tgt_in.shape[1] <= 15  # and the end mark
        read |= dict(zip(batch.index, sentences(data, batch), strict=True))
    assert [read[i] for i in range(6)] == [
        *kept, ("s" * 15, "t"), ("s", "t" * 14), ("s" * 15, "t" * 14), ("s" * 15, "t" * 14),
    ]  # fmt: skip
    assert data.val_texts == kept + long  # scored whole
    assert data.test_texts == long[2:]


def test_blank_pairs_are_counted_in_every_split(tmp_path: Path) -> None:
    rows = [("one", "eins"), ("", "zwei"), ("three", " "), ("four", "vier")]
    data = make(tmp_path, rows, val=rows, test=rows[:3])
    splits = data.summary()["splits"]
    assert [splits[s]["dropped"]["blank"] for s in ("train", "val", "test")] == [2, 2, 2]
    assert [splits[s]["pairs"] for s in ("train", "val", "test")] == [2, 2, 1]
    assert [splits[s]["pairs_read"] for s in ("train", "val", "test")] == [4, 4, 3]
    assert data.val_texts == [("one", "eins"), ("four", "vier")]
    assert all(batch.src_mask.any(dim=1).all() for batch in data.val_dataloader())


def test_evaluation_covers_a_split_in_a_fixed_order(tmp_path: Path) -> None:
    data = make(tmp_path, numbered(40), val=numbered(30), test=numbered(7))
    for loader, rows in ((data.val_dataloader(), numbered(30)), (data.test_dataloader(), numbered(7))):
        batches = list(loader)
        assert len(batches) == len(loader)
        read = [row for batch in batches for row in sentences(data, batch)]
        index = [i for batch in batches for i in batch.index]
        assert sorted(index) == list(range(len(rows)))
        assert read == [rows[i] for i in index]
        assert [batch.index for batch in loader] == [batch.index for batch in batches]
        assert all(batch.update_tokens == batch.num_tokens for batch in batches)


def test_vocabularies(tmp_path: Path) -> None:
    rows = [("abc", "xyz"), ("ab", "xü")]
    data = make(tmp_path, rows, val=[("abq", "xyz☃☃"), ("a", "x")])
    assert (data.src_vocab, data.tgt_vocab) == (4 + 3, 4 + 4)
    assert data.tokenizer is data.tgt_tokenizer
    unknown = data.summary()["splits"]["val"]["unknown_characters"]
    assert unknown == {"source": 1, "target": 2}
    shared = make(tmp_path, rows, shared_vocab=True)
    assert shared.src_tokenizer is shared.tgt_tokenizer
    assert shared.src_vocab == shared.tgt_vocab == 4 + 7
    assert shared.fingerprint != data.fingerprint


@pytest.mark.parametrize("tokenizer", list(Tokenizer))
def test_the_same_corpus_in_three_ways(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [("one small", "ein kleiner"), ("two", "zwölf"), ("three", "drei")] * 2
    made = [
        make(tmp_path, rows, tokenizer=tokenizer, vocab_size=265, encoding=encoding, line_end=line_end)
        for encoding, line_end in (("utf-8", "\n"), ("utf-8-sig", "\n"), ("utf-8", "\r\n"))
    ]
    for other in made[1:]:
        assert other.src_tokenizer.to_json() == made[0].src_tokenizer.to_json()
        assert other.tgt_tokenizer.to_json() == made[0].tgt_tokenizer.to_json()
        assert other.fingerprint == made[0].fingerprint
        assert other.summary() == made[0].summary()
        for number in range(4):
            assert torch.equal(other.batch_at(number).src, made[0].batch_at(number).src)
            assert torch.equal(other.batch_at(number).tgt_out, made[0].batch_at(number).tgt_out)


def test_multi30k_with_bpe(multi30k: Path, pairs: Rows, tmp_path: Path) -> None:
    config = Multi30kConfig(path=str(multi30k), vocab_size=300, max_len=40, batch_tokens=120)
    data = build_data(config, "translation", seed=1, accumulate=1, cache_dir=tmp_path / "cache")
    assert isinstance(data, TranslationData)
    read = [row for batch in data.eval_batches("train") for row in sentences(data, batch)]
    assert sorted(read) == sorted(pairs)
    summary = data.summary()
    assert summary["tokenizer"]["source"]["kind"] == "bpe"
    assert "tokenizers_version" in summary["tokenizer"]
    assert json.loads(json.dumps(summary)) == summary


def test_cldr(tmp_path: Path) -> None:
    config = CldrConfig(num_train=300, num_val=20, num_test=30)
    data = build_data(config, "translation", seed=1, accumulate=1, cache_dir=tmp_path)
    assert isinstance(data, TranslationData)
    summary = data.summary()
    assert {split: counts["pairs"] for split, counts in summary["splits"].items()} == {
        "train": 300,
        "val": 20,
        "test": 30,
    }
    assert all(counts["dropped"] == {"blank": 0, "too_long": 0} for counts in summary["splits"].values())
    assert all(counts["cut"] == 0 for counts in summary["splits"].values())  # 64 tokens hold any sentence
    assert summary["versions"]["babel"]
    train = [row for batch in data.eval_batches("train") for row in sentences(data, batch)]
    assert not {source for source, _ in train} & {source for source, _ in data.val_texts + data.test_texts}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_tokens": 15}, r"data\.batch_tokens=15 is less than one sentence \(data\.max_len=16\)"),
        ({"max_len": 2}, r"data\.max_len=2: a sentence has a begin mark, a token, an end mark"),
        ({"batch_sentences": 0}, r"data\.batch_sentences=0"),
        ({"max_len": 3, "batch_tokens": 3}, "all 3 training pairs are longer than data.max_len=3 tokens"),
    ],
)
def test_what_cannot_be(tmp_path: Path, fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(tmp_path, [("long one", "lang"), ("longer", "länger"), ("longest", "längst")], **fields)
