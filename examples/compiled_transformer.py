"""A Transformer encoder whose norms are compiled: what is left of RMSNorm's saving then?

    cd examples
    rmsrepro bench bench=model norm=layernorm,rmsnorm,prmsnorm model=compiled_transformer:compiled
    rmsrepro bench bench=model norm=layernorm,rmsnorm,prmsnorm model=compiled_transformer:eager

The two are the same model. `compiled` hands it to torch.compile, which fuses the operations of each norm,
LayerNorm's and RMSNorm's alike, with each other and with what stands beside them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsrepro.norms.targets import GivenNorm

WIDTH, HEADS, LAYERS, BATCH, LENGTH = 256, 4, 4, 8, 64


class Block(nn.Module):
    """x + attention(n(x)), then x + feed-forward(n(x)); (batch, length, WIDTH) -> the same."""

    def __init__(self, norm: GivenNorm) -> None:
        super().__init__()
        self.before_attention = norm.build(WIDTH)
        self.before_feed_forward = norm.build(WIDTH)
        self.to_heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.from_heads = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        heads = self.to_heads(self.before_attention(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.from_heads(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.before_feed_forward(x))


def eager(norm: GivenNorm) -> tuple[nn.Module, Tensor]:
    """Return the model, run operation by operation, and an input."""
    blocks = [Block(norm) for _ in range(LAYERS)]
    return nn.Sequential(*blocks, norm.build(WIDTH)), torch.randn(BATCH, LENGTH, WIDTH)


def compiled(norm: GivenNorm) -> tuple[nn.Module, Tensor]:
    """Return the model, compiled at its first call, and an input."""
    model, x = eager(norm)
    model.compile()
    return model, x
