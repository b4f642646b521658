"""Rows divided by a power mean of their magnitudes: is the 2 of RMSNorm special?"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor, nn


class Gains(Enum):
    """How many gains there are."""

    each = "each"
    """One for each entry, as in RMSNorm."""
    one = "one"
    """One for all."""
    none = "none"


class LpNorm(nn.Module):
    """y = c a / (M(a) + eps) * gain, with the power mean M(a) = mean(|a|^order)^(1/order)

    `order` 2 is RMSNorm with eps outside the root, and 1 the mean magnitude, which needs no square (Hoffer et
    al. 2018, "Norm matters", use it in BatchNorm); the higher the order, the more the largest entry decides.
    A row of zeros stays one and passes no gradient on.

    Args:
        dim: size of the last dimension of the input.
        order: of the mean, 1 or more.
        groups: the row is cut into so many parts of equal size, and each is divided by its own mean.
        matched: choose c so that Gaussian rows come out with an RMS of 1 whatever the order; else c = 1.
        gains: how many gains there are; they start at 1.
        eps: added to the mean.

    Raises:
        ValueError: an order below 1, or a number of groups that does not divide `dim`.
    """

    def __init__(
        self,
        dim: int,
        *,
        order: float = 1.0,
        groups: int = 1,
        matched: bool = True,
        gains: Gains = Gains.each,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if order < 1:
            raise ValueError(f"order must be 1 or more, got {order:g}")
        if groups < 1 or dim % groups:
            raise ValueError(f"groups={groups} does not divide the width {dim}")
        self.dim, self.order, self.groups, self.eps = dim, order, groups, eps
        self.factor = gaussian_mean(order) if matched else 1.0
        size = {Gains.each: dim, Gains.one: 1}.get(gains)
        self.weight = None if size is None else nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., dim), in fp32 where its dtype is narrower; the result has x's dtype."""
        if x.shape[-1] != self.dim:
            raise ValueError(f"lpnorm was built for a last dimension of {self.dim}, got {tuple(x.shape)}")
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        parts = wide.unflatten(-1, (self.groups, self.dim // self.groups))
        # Measured by its largest entry no row overflows or vanishes. The result does not depend on what a row
        # is measured by, so the gradient does not either.
        largest = parts.detach().abs().amax(-1, keepdim=True)
        empty = largest == 0
        largest = largest.masked_fill(empty, 1.0)
        parts = parts / largest
        mean = parts.abs().pow(self.order).mean(-1, keepdim=True)
        # Of nothing but zeros the root has no gradient.
        size = mean.masked_fill(empty, 1.0).pow(1 / self.order)
        y = (parts * (self.factor / (size + self.eps / largest))).masked_fill(empty, 0.0).flatten(-2)
        return (y if self.weight is None else y * self.weight).to(x.dtype)


def gaussian_mean(order: float) -> float:
    """Return (E |z|^order)^(1/order) of a standard normal z: .798 for order 1, 1 for order 2."""
    return math.sqrt(2) * (math.gamma((order + 1) / 2) / math.sqrt(math.pi)) ** (1 / order)
