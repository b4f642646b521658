from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import Tokenizer
from rmsrepro.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    TextTokenizer,
    line_chunks,
    tokenizer_from_json,
    train_tokenizer,
)

TEXT = "the cat sat on the mat, the hat  of the cat.\n\n grün < pad > <unk>\n" * 20

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
BPE = BpeTokenizer.train([TEXT], 280)


def test_char_ids_follow_the_special_ones() -> None:
    tokenizer = CharTokenizer.train(["cab", "ü"])
    assert tokenizer.vocab_size == 4 + 4
    assert tokenizer.encode("abcü") == [4, 5, 6, 7]
    assert tokenizer.encode("azb") == [4, 3, 5]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([1, 4, 5, 0, 3, 7, 2]) == "abü"
    assert tokenizer.num_unknown(["az", "b😀", ""]) == 2


def test_byte_ids() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 260
    assert tokenizer.encode("aü") == [97 + 4, 0xC3 + 4, 0xBC + 4]
    assert tokenizer.decode([1, 101, 0xC3 + 4, 0xBC + 4, 2]) == "aü"
    assert tokenizer.decode([0xC3 + 4]) == "\ufffd"


@given(ANY_TEXT)
def test_bytes_and_bpe_give_back_any_text(text: str) -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(4 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.num_unknown([text]) == 0


@given(st.text("".join(sorted(set(TEXT)))))
def test_char_gives_back_known_text(text: str) -> None:
    tokenizer = CharTokenizer.train([TEXT])
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["< pad >", "a< bos >b", "< eos >", "< unk >", "<unk>", "<pad>"])
def test_text_that_spells_a_special_token_is_text(text: str) -> None:
    again = tokenizer_from_json(BPE.to_json())
    for tokenizer in (BPE, again):
        ids = tokenizer.encode(text)
        assert min(ids) >= 4
        assert tokenizer.decode(ids) == text


def test_bpe_specials_and_no_space_in_front() -> None:
    assert [BPE._model.id_to_token(i) for i in range(4)] == ["< pad >", "< bos >", "< eos >", "< unk >"]
    assert BPE.vocab_size == 280
    assert BPE.decode(BPE.encode("cat")) == "cat"
    assert BPE.encode("cat") != BPE.encode(" cat")
    assert len(BPE.encode("the cat")) < len("the cat")


def test_bpe_of_a_long_text_is_the_sum_of_its_lines() -> None:
    text = TEXT * 120
    assert len(list(line_chunks(text))) > 1
    assert BPE.encode(text) == [i for line in text.splitlines(keepends=True) for i in BPE.encode(line)]


@given(st.text("ab\n", max_size=50))
def test_chunks_join_to_the_text(text: str) -> None:
    long = text * 3000
    assert "".join(line_chunks(long)) == long


@pytest.mark.parametrize("kind", list(Tokenizer))
def test_json_round_trip(kind: Tokenizer) -> None:
    tokenizer = train_tokenizer(kind, [TEXT], vocab_size=280, cache_dir=None)
    again = TextTokenizer.from_json(tokenizer.to_json())
    assert again.kind == kind.value
    assert again.vocab_size == tokenizer.vocab_size
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert again.digest == tokenizer.digest
    with pytest.raises(ValueError, match="unknown tokenizer kind 'word'"):
        TextTokenizer.from_json('{"kind": "word"}')


@pytest.mark.parametrize("kind", list(Tokenizer))
def test_many_texts_at_once(kind: Tokenizer) -> None:
    tokenizer = train_tokenizer(kind, [TEXT], vocab_size=280, cache_dir=None)
    texts = ["the cat", "", "grün\n", "😀"]
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_many([]) == []
    assert tokenizer.encode_array("the mat").dtype == np.int32


@pytest.mark.parametrize("kind", list(Tokenizer))
@pytest.mark.parametrize("text", ["über", "the cat", "\n"])
def test_leading_bytes(kind: Tokenizer, text: str) -> None:
    tokenizer = train_tokenizer(kind, [TEXT, text], vocab_size=280, cache_dir=None)
    first = tokenizer.encode(text)[:1]
    expected = 1 if kind is Tokenizer.byte else len(tokenizer.decode(first).encode())
    if kind is Tokenizer.bpe and "\ufffd" in tokenizer.decode(first):
        expected = 1  # half a character
    assert tokenizer.num_leading_bytes(text) == expected


def test_bpe_is_kept_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train_tokenizer(Tokenizer.bpe, [TEXT], vocab_size=280, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(BpeTokenizer, "train", None)  # a second training would fail
    again = train_tokenizer(Tokenizer.bpe, [TEXT], vocab_size=280, cache_dir=tmp_path)
    assert again.to_json() == first.to_json()
    monkeypatch.undo()
    train_tokenizer(Tokenizer.bpe, [TEXT, "x"], vocab_size=280, cache_dir=tmp_path)
    train_tokenizer(Tokenizer.bpe, [TEXT], vocab_size=279, cache_dir=tmp_path)
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == 3
    assert all(name.endswith(".json") for name in names)


def test_damaged_cache_is_made_again(tmp_path: Path) -> None:
    first = train_tokenizer(Tokenizer.bpe, [TEXT], vocab_size=280, cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    flipped = whole.replace('"h"', '"j"', 1)
    digest = hashlib.sha256(b'{"kind": "bpe", "model": {}}').hexdigest()
    # Cut off; JSON with another letter; no tokenizer; as it was kept before it had a digest.
    for damaged in (
        whole[:100],
        flipped,
        f'{digest}\n{{"kind": "bpe", "model": {{}}}}',
        whole.partition("\n")[2],
    ):
        assert damaged != whole
        path.write_text(damaged)
        again = train_tokenizer(Tokenizer.bpe, [TEXT], vocab_size=280, cache_dir=tmp_path)
        assert again.to_json() == first.to_json()
        assert path.read_text() == whole


def test_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    tokenizer = train_tokenizer(Tokenizer.bpe, [TEXT], vocab_size=280, cache_dir=tmp_path / "file")
    assert tokenizer.vocab_size == 280


def test_too_small_vocabulary() -> None:
    with pytest.raises(UserError, match=r"data\.vocab_size=100.*at least 260"):
        train_tokenizer(Tokenizer.bpe, [TEXT], vocab_size=100, cache_dir=None)
