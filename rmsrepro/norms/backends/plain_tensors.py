"""Whether a kernel may read a tensor where it lies, or primitive operations alone follow what is done."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

PLAIN = frozenset({Tensor, nn.Parameter})
"""Types of tensors that are no subclass of somebody's."""


def in_memory(x: Tensor) -> bool:
    """Whether x, a tensor with storage on a device, is no subclass, no batch of several and no lazy view.

    Batched gradients (`is_grads_batched=True`) come as the older kind of batched tensors; a view may be
    marked to be negated when it is read, and a tensor of zeros need not have any memory.
    """
    return (
        type(x) in PLAIN
        and not x.is_neg()
        and not x._is_zerotensor()
        and not torch._C._functorch.is_legacy_batchedtensor(x)
    )


def transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
