"""Encoded sentence pairs, kept in flat arrays: millions of Python lists would fill the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from rmsrepro.data.batches import TranslationBatch, source_row, target_row, translation_batch
from rmsrepro.data.corpus import Pair
from rmsrepro.data.tokenizers import IntArray, TextTokenizer

_CHUNK_PAIRS = 50_000
"""So many pairs are Python lists of tokens at a time."""


class TokenRows:
    """Token rows of different lengths in one array."""

    def __init__(self, lengths: npt.NDArray[np.int64], flat: IntArray) -> None:
        self.lengths = lengths
        self._flat = flat
        self._ends = np.cumsum(lengths)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TokenRows:
        """Copy rows from lists."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum()))
        return cls(lengths, flat)

    @classmethod
    def join(cls, tables: Sequence[TokenRows]) -> TokenRows:
        """Put tables one after the other."""
        return cls(
            np.concatenate([table.lengths for table in tables]),
            np.concatenate([table._flat for table in tables]),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> IntArray:
        end = int(self._ends[row])
        return self._flat[end - int(self.lengths[row]) : end]


@dataclass(frozen=True)
class EncodedPairs:
    """The two sides of a split as the model sees them; every row ends with EOS."""

    sources: TokenRows
    targets: TokenRows
    num_long: int
    """Pairs that were longer than allowed, and so dropped or cut."""
    kept: npt.NDArray[np.int64]
    """Numbers of the pairs given that are here, in order: all, or those that were not dropped."""

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def widths(self) -> npt.NDArray[np.int64]:
        """(N,) columns that each pair takes on its wider side."""
        return np.maximum(self.sources.lengths, self.targets.lengths)

    def batch(self, rows: npt.NDArray[np.int64], update_tokens: int | None = None) -> TranslationBatch:
        """Return the batch of some rows."""
        index: list[int] = rows.tolist()
        return translation_batch(
            [self.sources[row] for row in index],
            [self.targets[row] for row in index],
            index=index,
            update_tokens=update_tokens,
        )


def encode_pairs(
    pairs: Sequence[Pair],
    source_tokenizer: TextTokenizer,
    target_tokenizer: TextTokenizer,
    *,
    max_len: int,
    drop_long: bool,
) -> EncodedPairs:
    """Encode a split.

    A pair is long when its source with EOS, or its target with BOS and EOS, has more than `max_len`
    tokens. Long pairs are dropped or, without `drop_long`, cut (EOS stays).
    """
    sources: list[TokenRows] = []
    targets: list[TokenRows] = []
    num_long, all_kept = 0, [np.zeros(0, np.int64)]
    for begin in range(0, len(pairs), _CHUNK_PAIRS):
        chunk = pairs[begin : begin + _CHUNK_PAIRS]
        src = source_tokenizer.encode_many([source for source, _ in chunk])
        tgt = target_tokenizer.encode_many([target for _, target in chunk])
        fits = [len(s) + 1 <= max_len and len(t) + 2 <= max_len for s, t in zip(src, tgt, strict=True)]
        num_long += fits.count(False)
        kept = [row for row, fit in enumerate(fits) if fit or not drop_long]
        all_kept.append(begin + np.array(kept, np.int64))
        sources.append(TokenRows.of([source_row(src[row], max_len) for row in kept]))
        targets.append(TokenRows.of([target_row(tgt[row], max_len) for row in kept]))
    return EncodedPairs(TokenRows.join(sources), TokenRows.join(targets), num_long, np.concatenate(all_kept))
