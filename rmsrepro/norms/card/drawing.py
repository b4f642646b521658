"""What the card draws: numbers, rows of them, and the seed behind both."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

SEED = 20190
"""Of all that a card draws: the same norm gets the same card."""

EPS = {
    dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}

NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def generator(number: int = 0) -> torch.Generator:
    """Return a generator of its own for each use, on the CPU."""
    return torch.Generator().manual_seed(SEED + number)


def normal(*shape: int, number: int = 0) -> Tensor:
    """Return numbers from N(0, 1) in float64."""
    return torch.randn(*shape, generator=generator(number), dtype=torch.float64)


def alternating(rows: int, dim: int) -> Tensor:
    """Return 1 and -1 in turn along rows and columns, in float64.

    The RMS of a row, of a column and of any part of them is 1, and so is the spread around their mean.
    """
    return 1.0 - 2.0 * ((torch.arange(rows).unsqueeze(-1) + torch.arange(dim)) % 2).double()


def rows_of(*shape: int, number: int = 0) -> Tensor:
    """Return numbers of size 1 in float64, no row or column of them nearly constant.

    A norm that centres magnifies the rounding of such rows, which a few entries from N(0, 1) may well be.
    """
    if min(shape) >= 8:
        return normal(*shape, number=number)
    signs = alternating(math.prod(shape[:-1]), shape[-1]).reshape(shape)
    return signs * (0.5 + torch.rand(*shape, generator=generator(number), dtype=torch.float64))


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Draw initial values from the card's seed and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield
