"""Padding masks: True where there is a token."""

from __future__ import annotations

import torch
from torch import Tensor


def needed_mask(mask: Tensor) -> Tensor | None:
    """Return None where `mask` hides nothing, so that the faster path without a mask is taken.

    Looked at on the CPU only: on another device the question would make the host wait for it.
    """
    if mask.device.type == "cpu" and bool(mask.all()):
        return None
    return mask


def counted_targets(tgt_in: Tensor, src_mask: Tensor, *, pad_id: int, bos_id: int) -> Tensor:
    """Return the target positions (B, T) that a norm over positions counts: the tokens of rows with a source.

    A row without a source is no example, only a filled place in the batch, as padding is.
    """
    mask = tgt_in != pad_id
    if bos_id == pad_id:  # then the first token is no padding, though it looks like it
        mask[:, :1] = True
    return mask & src_mask.any(1, keepdim=True)


def zero_padding(x: Tensor, mask: Tensor | None, fill: Tensor | None = None) -> Tensor:
    """Set the padded positions of `x` (B, S, D) to zero, or to the vector `fill` (D,) where there is one.

    `mask` is (B, S), True where there is a token; None: no padding.
    """
    if mask is None:
        return x
    if fill is None:
        return x.masked_fill(~mask.unsqueeze(-1), 0.0)
    return torch.where(mask.unsqueeze(-1), x, fill.to(x.dtype))
