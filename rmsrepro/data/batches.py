"""What a training step receives.

Both batches are plain dataclasses with a `.to(device)`, which is all that Lightning needs to move them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rmsrepro.data.tokenizers import BOS, EOS, PAD

IGNORE = -100
"""The target of a padded position, as `torch.nn.functional.cross_entropy` ignores it."""


@dataclass(frozen=True, eq=False)
class LMBatch:
    """Windows of a text and the token that follows each position."""

    inputs: Tensor
    """(B, T) token numbers."""
    targets: Tensor
    """(B, T) the inputs moved by one; IGNORE on padding."""
    update_tokens: int
    """Target tokens in the whole optimiser update, over all its accumulated batches."""
    num_tokens: int = -1
    """Target tokens of this batch; counted when not given."""
    whole_tokens: int = -1
    """Target tokens of the batch that this one is a process's part of; its own where it is whole."""

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            object.__setattr__(self, "num_tokens", _count(self.targets))
        if self.whole_tokens < 0:
            object.__setattr__(self, "whole_tokens", self.num_tokens)

    def part(self, rank: int, size: int) -> LMBatch:
        """Return the part of process `rank` of `size`: every size-th row (see `_rows_of`)."""
        rows, counts = _rows_of(self.inputs.shape[0], rank, size)
        targets = self.targets[rows]
        return LMBatch(
            self.inputs[rows],
            targets if counts else torch.full_like(targets, IGNORE),
            self.update_tokens,
            whole_tokens=self.whole_tokens,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LMBatch:
        """Return the same batch on another device."""
        return LMBatch(
            self.inputs.to(device, non_blocking=non_blocking),
            self.targets.to(device, non_blocking=non_blocking),
            self.update_tokens,
            self.num_tokens,
            self.whole_tokens,
        )


@dataclass(frozen=True, eq=False)
class TranslationBatch:
    """Sentence pairs, padded on the right. A source is its tokens and EOS; a target begins with BOS."""

    src: Tensor
    """(B, S) token numbers, EOS last, PAD after it."""
    src_mask: Tensor
    """(B, S) bool, True on tokens (EOS included), False on padding."""
    tgt_in: Tensor
    """(B, T) what the decoder is fed: BOS and the tokens, PAD after them."""
    tgt_out: Tensor
    """(B, T) what it should answer: the tokens and EOS, IGNORE after them."""
    update_tokens: int
    """Target tokens in the whole optimiser update, over all its accumulated batches."""
    index: list[int] = field(default_factory=list)
    """Row numbers of the pairs in their split."""
    num_tokens: int = -1
    """Target tokens of this batch (EOS counted); counted when not given."""
    whole_tokens: int = -1
    """Target tokens of the batch that this one is a process's part of; its own where it is whole."""

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            object.__setattr__(self, "num_tokens", _count(self.tgt_out))
        if self.whole_tokens < 0:
            object.__setattr__(self, "whole_tokens", self.num_tokens)

    def part(self, rank: int, size: int) -> TranslationBatch:
        """Return the part of process `rank` of `size`: every size-th row (see `_rows_of`), padded as here."""
        rows, counts = _rows_of(self.src.shape[0], rank, size)
        targets = self.tgt_out[rows]
        return TranslationBatch(
            self.src[rows],
            self.src_mask[rows],
            self.tgt_in[rows],
            targets if counts else torch.full_like(targets, IGNORE),
            self.update_tokens,
            self.index[rows] if counts else [],
            whole_tokens=self.whole_tokens,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TranslationBatch:
        """Return the same batch on another device."""
        return TranslationBatch(
            self.src.to(device, non_blocking=non_blocking),
            self.src_mask.to(device, non_blocking=non_blocking),
            self.tgt_in.to(device, non_blocking=non_blocking),
            self.tgt_out.to(device, non_blocking=non_blocking),
            self.update_tokens,
            self.index,
            self.num_tokens,
            self.whole_tokens,
        )


def _rows_of(rows: int, rank: int, size: int) -> tuple[slice, bool]:
    """Return which of a batch's rows are those of process `rank`, and whether they count.

    All processes have to compute something for each batch, so one for which no row is left computes the
    first row, without a target.
    """
    return (slice(rank, None, size), True) if rank < rows else (slice(0, 1), False)


def _count(targets: Tensor) -> int:
    return int((targets != IGNORE).sum())


def pad_rows(rows: Sequence[npt.NDArray[np.int32] | Sequence[int]], fill: int = PAD) -> tuple[Tensor, Tensor]:
    """Put rows of different lengths into one tensor, padded on the right.

    Returns:
        values (B, T) long and mask (B, T) bool, True where a row has a token; T is the longest row.
    """
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    mask = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
    values = np.full(mask.shape, fill, dtype=np.int64)
    if len(rows):
        values[mask] = np.concatenate(rows)
    return torch.from_numpy(values), torch.from_numpy(mask)


def translation_batch(
    sources: Sequence[npt.NDArray[np.int32] | Sequence[int]],
    targets: Sequence[npt.NDArray[np.int32] | Sequence[int]],
    *,
    index: Sequence[int],
    update_tokens: int | None = None,
) -> TranslationBatch:
    """Make a batch of token rows that end with EOS on both sides.

    Args:
        update_tokens: None: this batch is a whole update.
    """
    src, src_mask = pad_rows(sources)
    tgt_out, tgt_mask = pad_rows(targets, fill=IGNORE)
    tgt_in = torch.full_like(tgt_out, PAD)
    tgt_in[:, 0] = BOS
    tgt_in[:, 1:] = tgt_out[:, :-1]
    # A row shorter than the widest has its EOS moved onto the first padded column.
    tgt_in.masked_fill_(~tgt_mask, PAD)
    num_tokens = sum(len(row) for row in targets)
    return TranslationBatch(
        src,
        src_mask,
        tgt_in,
        tgt_out,
        num_tokens if update_tokens is None else update_tokens,
        list(index),
        num_tokens,
    )


def source_row(tokens: Sequence[int], max_len: int) -> list[int]:
    """A source as the model reads it: its tokens, cut to fit, and EOS: at most `max_len` long."""
    return [*tokens[: max_len - 1], EOS]


def target_row(tokens: Sequence[int], max_len: int) -> list[int]:
    """A target as the model should write it: tokens, cut to fit, and EOS: with BOS at most `max_len` long."""
    return [*tokens[: max_len - 2], EOS]
