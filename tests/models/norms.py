"""Norms that a user might bring, for the tests of models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rmsrepro.norms import list_norms, norm_info, register_norm, unregister_norm

PLAIN, MASKED, WEIGHTS = "models_test_plain", "models_test_masked", "models_test_weights"
TASKS = ("lm", "translation")
KINDS = ("transformer", "gru")


@contextmanager
def users_norms() -> Iterator[None]:
    """Register the three norms, each of another kind."""

    @register_norm(PLAIN)
    class Plain(nn.Module):
        """a / (max |a| + eps) * gain, with a gain that looks like none."""

        def __init__(self, dim: int, *, eps: float = 1e-3) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.ones(1, dim))
            self.eps = eps

        def forward(self, x: Tensor) -> Tensor:
            return (x / (x.abs().amax(-1, keepdim=True) + self.eps) * self.matrix).to(x.dtype)

    @register_norm(MASKED)
    class Masked(nn.Module):
        """a / (largest |a| of the unmasked positions + 1) * gain; in evaluation the largest of training.

        It remembers the masks.
        """

        largest: Tensor

        def __init__(self, dim: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(dim))
            self.register_buffer("largest", torch.ones(()))
            self.seen: list[tuple[torch.Size, Tensor | None]] = []

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            self.seen.append((x.shape, mask))
            assert mask is None or mask.shape == x.shape[:-1]
            largest = self.largest
            if self.training:
                size = x.abs() if mask is None else x.abs().masked_fill(~mask.unsqueeze(-1), 0.0)
                largest = size.max() if size.numel() else size.new_zeros(())
                self.largest = torch.maximum(self.largest, largest.detach().to(self.largest.dtype))
            return (x / (largest + 1.0) * self.weight).to(x.dtype)

    @register_norm(WEIGHTS, scope="weight")
    class Weights(nn.Module):
        """Rows W_i / sum |W_i| * gain."""

        def __init__(self, rows: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(rows))

        def forward(self, v: Tensor) -> Tensor:
            return v / v.abs().sum(1, keepdim=True) * self.weight.unsqueeze(1)

    try:
        yield
    finally:
        for name in (PLAIN, MASKED, WEIGHTS):
            unregister_norm(name)


EVERY = [*list_norms(), PLAIN, MASKED, WEIGHTS]
"""All norms, and those of `users_norms`."""
OVER_POSITIONS = [name for name in list_norms() if norm_info(name).takes_mask] + [MASKED]
OF_WEIGHTS = [name for name in list_norms() if norm_info(name).scope == "weight"] + [WEIGHTS]


def suits(norm: str, task: str) -> bool:
    return task == "translation" or norm not in OVER_POSITIONS
