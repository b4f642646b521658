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


def zero_padding(x: Tensor, mask: Tensor | None, fill: Tensor | None = None) -> Tensor:
    """Set the padded positions of `x` (B, S, D) to zero, or to the vector `fill` (D,) where there is one.

    `mask` is (B, S), True where there is a token; None: no padding.
    """
    if mask is None:
        return x
    if fill is None:
        return x.masked_fill(~mask.unsqueeze(-1), 0.0)
    return torch.where(mask.unsqueeze(-1), x, fill.to(x.dtype))
