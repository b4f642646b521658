from __future__ import annotations

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device

from rmsrepro.data.batches import (
    IGNORE,
    LMBatch,
    TranslationBatch,
    pad_rows,
    source_row,
    target_row,
    translation_batch,
)


def test_pad_rows() -> None:
    values, mask = pad_rows([[5, 6, 7], [], np.array([8], dtype=np.int32)])
    assert values.tolist() == [[5, 6, 7], [0, 0, 0], [8, 0, 0]]
    assert mask.tolist() == [[True, True, True], [False, False, False], [True, False, False]]
    assert values.dtype == torch.long
    assert mask.dtype == torch.bool


def test_translation_batch_by_hand() -> None:
    batch = translation_batch([[10, 11, 2], [12, 2]], [[20, 2], [21, 22, 23, 2]], index=[7, 3])
    assert batch.src.tolist() == [[10, 11, 2], [12, 2, 0]]
    assert batch.src_mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.tgt_in.tolist() == [[1, 20, 0, 0], [1, 21, 22, 23]]
    assert batch.tgt_out.tolist() == [[20, 2, IGNORE, IGNORE], [21, 22, 23, 2]]
    assert batch.num_tokens == batch.update_tokens == 6
    assert batch.index == [7, 3]


def test_rows_are_cut_before_the_end_mark() -> None:
    tokens = [10, 11, 12, 13]
    assert source_row(tokens, 5) == [10, 11, 12, 13, 2]
    assert source_row(tokens, 4) == [10, 11, 12, 2]
    assert target_row(tokens, 6) == [10, 11, 12, 13, 2]
    assert target_row(tokens, 5) == [10, 11, 12, 2]


def test_tokens_are_counted_when_not_given() -> None:
    targets = torch.tensor([[5, IGNORE], [6, 7]])
    assert LMBatch(torch.zeros(2, 2).long(), targets, 3).num_tokens == 3
    pair = TranslationBatch(targets, targets > 0, targets, targets, 9)
    assert (pair.num_tokens, pair.update_tokens, pair.index) == (3, 9, [])


def test_lightning_moves_batches() -> None:
    batch = translation_batch([[10, 2]], [[20, 2]], index=[4], update_tokens=30)
    moved = move_data_to_device(batch, torch.device("meta"))
    assert isinstance(moved, TranslationBatch)
    for tensor in (moved.src, moved.src_mask, moved.tgt_in, moved.tgt_out):
        assert tensor.device.type == "meta"
    assert (moved.update_tokens, moved.num_tokens, moved.index) == (30, 2, [4])
    lm = move_data_to_device(LMBatch(batch.src, batch.tgt_out, 8), torch.device("meta"))
    assert isinstance(lm, LMBatch)
    assert lm.inputs.device.type == lm.targets.device.type == "meta"
    assert (lm.update_tokens, lm.num_tokens) == (8, 2)
