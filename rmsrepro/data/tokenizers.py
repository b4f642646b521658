"""Text to token numbers and back: characters, bytes, or byte-level BPE (the `tokenizers` library).

Every vocabulary starts with the same four special tokens. They are never found inside a text, whatever it
contains, and `decode` leaves them out. Vocabularies are made from the training split only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import Tokenizer as TokenizerKind
from rmsrepro.data.cache import read_cached, write_cached

PAD, BOS, EOS, UNK = 0, 1, 2, 3
NUM_SPECIALS = 4

IntArray = npt.NDArray[np.int32]

_BPE_VERSION = 1
"""Part of the cache key: raise it when the training settings change."""

# A byte-level token never holds a space character (it is written as another letter), so no merge of
# ordinary text can ever spell one of these.
_BPE_SPECIALS = ["< pad >", "< bos >", "< eos >", "< unk >"]

_CHUNK_CHARACTERS = 1 << 16


class TextTokenizer(ABC):
    """What the tasks see of a tokenizer."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, the four special ones included."""

    @abstractmethod
    def encode_array(self, text: str) -> IntArray:
        """Return the tokens (N,) of a text of any length; the only special one is UNK."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens left out."""

    @abstractmethod
    def to_json(self) -> str:
        """Return everything that `from_json` needs."""

    @abstractmethod
    def num_leading_bytes(self, text: str) -> int:
        """Number of UTF-8 bytes that the first token of a non-empty text stands for."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; see `encode_array`."""
        tokens: list[int] = self.encode_array(text).tolist()
        return tokens

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        return [self.encode(text) for text in texts]

    def num_unknown(self, texts: Iterable[str]) -> int:
        """Number of characters that the vocabulary does not have; always 0 for bytes and byte-level BPE."""
        return 0

    @property
    def digest(self) -> str:
        """SHA-256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @staticmethod
    def from_json(text: str) -> TextTokenizer:
        """Rebuild the tokenizer that `to_json` described."""
        state: dict[str, Any] = json.loads(text)
        match state["kind"]:
            case "char":
                return CharTokenizer(state["characters"])
            case "byte":
                return ByteTokenizer()
            case "bpe":
                return BpeTokenizer(json.dumps(state["model"], ensure_ascii=False))
        raise ValueError(f"unknown tokenizer kind {state['kind']!r}")


class CharTokenizer(TextTokenizer):
    """One token a character (Unicode code point) of the training text; UNK for every other."""

    kind = "char"

    def __init__(self, characters: str) -> None:
        self.characters = characters
        points = np.frombuffer(characters.encode("utf-32-le"), dtype=np.uint32)
        self._points = points
        # One row a code point up to the largest known one, and a last row for all beyond it.
        self._table = np.full(int(points.max(initial=0)) + 2, UNK, dtype=np.int32)
        self._table[points] = np.arange(len(points), dtype=np.int32) + NUM_SPECIALS

    @classmethod
    def train(cls, texts: Iterable[str]) -> CharTokenizer:
        """Take every character of `texts`, in code point order."""
        seen: set[str] = set()
        for text in texts:
            seen.update(text)
        return cls("".join(sorted(seen)))

    @property
    def vocab_size(self) -> int:
        return len(self.characters) + NUM_SPECIALS

    def encode_array(self, text: str) -> IntArray:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        return self._table[np.minimum(points, len(self._table) - 1)]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        # One look-up for all texts: a corpus of short sentences would pay NumPy's overhead for each.
        tokens: list[int] = self.encode_array("".join(texts)).tolist()
        ends = [0, *accumulate(map(len, texts))]
        return [tokens[begin:end] for begin, end in pairwise(ends)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join([self.characters[i - NUM_SPECIALS] for i in ids if i >= NUM_SPECIALS])

    def num_unknown(self, texts: Iterable[str]) -> int:
        return int(np.count_nonzero(self.encode_array("".join(texts)) == UNK))

    def num_leading_bytes(self, text: str) -> int:
        return len(text[0].encode())

    def to_json(self) -> str:
        return json.dumps({"kind": "char", "characters": self.characters}, ensure_ascii=False)


class ByteTokenizer(TextTokenizer):
    """One token a byte of the UTF-8 text; 256 + 4 tokens, nothing to train, nothing unknown."""

    kind = "byte"

    @property
    def vocab_size(self) -> int:
        return 256 + NUM_SPECIALS

    def encode_array(self, text: str) -> IntArray:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32) + NUM_SPECIALS

    def decode(self, ids: Sequence[int]) -> str:
        return bytes([i - NUM_SPECIALS for i in ids if i >= NUM_SPECIALS]).decode("utf-8", "replace")

    def num_leading_bytes(self, text: str) -> int:
        return 1

    def to_json(self) -> str:
        return json.dumps({"kind": "byte"})


class BpeTokenizer(TextTokenizer):
    """Byte-pair encoding over bytes: any text comes back exactly; a merge never spans a line end."""

    kind = "bpe"

    def __init__(self, model_json: str) -> None:
        import tokenizers

        self._model = tokenizers.Tokenizer.from_str(model_json)
        # Not part of the stored model: text that happens to spell a special token is ordinary text.
        self._model.encode_special_tokens = True

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
        """Learn at most `vocab_size` tokens (256 bytes and the special ones included) from `texts`."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        model = tokenizers.Tokenizer(models.BPE())
        # Splitting at line ends first makes a text's tokens the sum of its lines' tokens, so that a long
        # text can be encoded piece by piece.
        model.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split("\n", "merged_with_previous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=_BPE_SPECIALS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        return cls(model.to_str())

    @property
    def vocab_size(self) -> int:
        size: int = self._model.get_vocab_size()
        return size

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_array(self, text: str) -> IntArray:
        parts = [
            np.array(self._model.encode(chunk, add_special_tokens=False).ids, dtype=np.int32)
            for chunk in line_chunks(text)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([i for i in ids if i >= NUM_SPECIALS], skip_special_tokens=False)
        return text

    def num_leading_bytes(self, text: str) -> int:
        # In the byte-level alphabet a token has one character a byte.
        first = self._model.encode(text[:1000], add_special_tokens=False).ids[0]
        return len(self._model.id_to_token(first) or "")

    def to_json(self) -> str:
        return json.dumps({"kind": "bpe", "model": json.loads(self._model.to_str())}, ensure_ascii=False)


def tokenizer_from_json(text: str) -> TextTokenizer:
    """Rebuild a tokenizer of any kind from its `to_json`."""
    return TextTokenizer.from_json(text)


def line_chunks(text: str) -> Iterator[str]:
    """Cut a text into pieces of at least 65,536 characters, each ending at a line end (but the last)."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _CHUNK_CHARACTERS)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def train_tokenizer(
    kind: TokenizerKind, texts: Sequence[str], *, vocab_size: int, cache_dir: Path | None
) -> TextTokenizer:
    """Make the vocabulary of the training texts; a BPE one is kept in `cache_dir` by their content.

    Raises:
        UserError: a BPE vocabulary too small for the 256 bytes and the special tokens.
    """
    if kind is TokenizerKind.byte:
        return ByteTokenizer()
    if kind is TokenizerKind.char:
        return CharTokenizer.train(texts)
    smallest = 256 + NUM_SPECIALS
    if vocab_size < smallest:
        raise UserError(
            f"data.vocab_size={vocab_size}: a byte-level BPE vocabulary has at least {smallest} tokens; "
            f"give {smallest} or more, or use data.tokenizer=byte"
        )
    digest = hashlib.sha256(f"bpe {_BPE_VERSION} {vocab_size}".encode())
    for text in texts:
        digest.update(b"\0" + text.encode("utf-8", "replace"))
    name = f"bpe-{vocab_size}-{digest.hexdigest()[:24]}.json"
    cached = read_cached(cache_dir, name)
    if cached is not None:
        # Whatever a damaged file makes of it: a tokenizer is safe to lose, and is trained again.
        with contextlib.suppress(Exception):
            kept = TextTokenizer.from_json(cached)
            if kept.kind == "bpe" and smallest <= kept.vocab_size <= vocab_size:
                return kept
    tokenizer = BpeTokenizer.train((chunk for text in texts for chunk in line_chunks(text)), vocab_size)
    write_cached(cache_dir, name, tokenizer.to_json())
    return tokenizer
