"""placeholder"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def product_with(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """Return a (rows, n) -> a weight^T (rows, m), for many calls; weight is (m, n)."""
    transposed = weight.t()
    return lambda a: torch.mm(a, transposed)
