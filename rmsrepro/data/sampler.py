"""Which examples make batch number i: pure functions of (seed, i), so that a run resumes anywhere.

Random numbers come from the counter-based generator Philox 4x64 (Salmon et al. 2011), keyed by the seed and
a stream name, with the batch or epoch number as its counter. Only its raw words are used: NumPy promises
that they stay the same between versions, which it does not for `Generator.integers` or `permutation`.
Nothing here touches a global random state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]

POOL_BATCHES = 100
"""Sentences are sorted by length within a pool of about so many batches."""


@lru_cache(maxsize=64)
def _key(seed: int, stream: str) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{stream}:{seed}".encode(), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def random_words(seed: int, stream: str, counter: int, count: int) -> npt.NDArray[np.uint64]:
    """Return `count` random 64-bit words (count,), a pure function of the other arguments."""
    # Word 2 of the counter: each number owns 2**128 blocks of the generator, so none overlap.
    start = np.array([0, 0, counter, 0], dtype=np.uint64)
    words: npt.NDArray[np.uint64] = np.random.Philox(key=_key(seed, stream), counter=start).random_raw(count)
    return words


def window_starts(seed: int, batch: int, count: int, num_starts: int) -> IndexArray:
    """Return `count` window starts (count,) in [0, num_starts) for language-model batch `batch`."""
    words = random_words(seed, "lm", batch, count)
    # The remainder is biased by less than num_starts / 2**64.
    return (words % np.uint64(num_starts)).astype(np.int64)


def shuffled(seed: int, stream: str, counter: int, count: int) -> IndexArray:
    """Return a random permutation (count,) of range(count)."""
    return np.argsort(random_words(seed, stream, counter, count), kind="stable").astype(np.int64)


def pack(widths: npt.NDArray[np.int64], budget: int, max_rows: int | None) -> list[tuple[int, int]]:
    """Cut sentences that are sorted by width (ascending) into batches, greedily.

    A batch holds as many consecutive rows as keep rows * widest within `budget`, and at most `max_rows`; a
    row that is wider than the budget is a batch of its own.

    Returns:
        (start, end) of each batch; together they cover every row once.
    """
    batches: list[tuple[int, int]] = []
    start, total = 0, len(widths)
    while start < total:
        most = max(1, budget // max(1, int(widths[start])))
        if max_rows is not None:
            most = min(most, max_rows)
        window = widths[start : start + most]
        # rows * widest never falls along the window, so the last row that still fits can be searched for.
        cost = window * np.arange(1, len(window) + 1)
        rows = max(1, int(np.searchsorted(cost, budget, side="right")))
        batches.append((start, start + rows))
        start += rows
    return batches


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one epoch: row numbers of each, and their numbers of target tokens."""

    batches: list[IndexArray]
    target_tokens: list[int]


def plan_epoch(
    source_widths: npt.NDArray[np.int64],
    target_widths: npt.NDArray[np.int64],
    *,
    seed: int,
    epoch: int,
    budget: int,
    max_rows: int | None,
) -> EpochPlan:
    """Plan an epoch in which every sentence pair appears exactly once.

    All pairs are shuffled, sorted by length within large pools (so that a batch holds little padding),
    packed to the token budget, and the batches shuffled.

    Args:
        source_widths: (N,) columns that a source sentence takes.
        target_widths: (N,) columns that a target sentence takes, which is also its number of target tokens.
        budget: most rows * widest row of a batch, on the wider of the two sides.
    """
    count = len(source_widths)
    widths = np.maximum(source_widths, target_widths)
    order = shuffled(seed, "translation/rows", epoch, count)
    pool = max(1, int(POOL_BATCHES * budget / max(1.0, float(widths.mean()))))
    batches: list[IndexArray] = []
    for start in range(0, count, pool):
        rows = order[start : start + pool]
        rows = rows[np.lexsort((target_widths[rows], widths[rows]))]
        batches += [rows[a:b] for a, b in pack(widths[rows], budget, max_rows)]
    mixed = [batches[i] for i in shuffled(seed, "translation/batches", epoch, len(batches))]
    return EpochPlan(mixed, [int(target_widths[rows].sum()) for rows in mixed])


class EpochSequence:
    """The endless sequence of batches over epochs; batch n is found without drawing those before it."""

    def __init__(self, plan: Callable[[int], EpochPlan]) -> None:
        self._plan = lru_cache(maxsize=3)(plan)
        self._ends: list[int] = []  # number of batches up to the end of each epoch planned so far

    def locate(self, batch: int) -> tuple[int, int]:
        """Return (epoch, number within it) of a batch."""
        while not self._ends or self._ends[-1] <= batch:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + len(self._plan(len(self._ends)).batches))
        epoch = int(np.searchsorted(self._ends, batch, side="right"))
        return epoch, batch - (self._ends[epoch - 1] if epoch else 0)

    def rows(self, batch: int) -> IndexArray:
        """Return the row numbers of a batch."""
        epoch, number = self.locate(batch)
        return self._plan(epoch).batches[number]

    def target_tokens(self, batch: int) -> int:
        """Return the number of target tokens of a batch."""
        epoch, number = self.locate(batch)
        return self._plan(epoch).target_tokens[number]

    def epochs(self, batch: int) -> float:
        """Return how many epochs the first `batch` batches are."""
        epoch, number = self.locate(batch)
        return epoch + number / len(self._plan(epoch).batches)


def update_of(batch: int, accumulate: int) -> range:
    """Return the batches of the optimiser update that `batch` belongs to."""
    first = batch - batch % accumulate
    return range(first, first + accumulate)
