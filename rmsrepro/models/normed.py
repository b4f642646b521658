"""What all models do with a norm: put it where there is one to put, and prepare linear maps for loops."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsrepro.norms import NormSpec, apply_norm
from rmsrepro.norms.linear import NormedLinear, WeightNormLinear

NormedMap = Callable[[Tensor, Tensor | None], Tensor]
"""(x (..., in), mask (...) of the positions that a norm over positions may count) -> (..., out)"""


def has_modules(norm: NormSpec) -> bool:
    """Return whether the norm is a module on activations: `none` and norms of weights are not."""
    return not norm.is_none and norm.scope == "activation"


def norm_module(norm: NormSpec, dim: int) -> nn.Module | None:
    """Build the norm for activations (..., dim), or return None where it has no module for them."""
    return norm.build(dim) if has_modules(norm) else None


def effective_weight(linear: nn.Linear) -> Tensor:
    """Return the matrix (out, in) that `linear` multiplies with."""
    return linear.effective_weight() if isinstance(linear, WeightNormLinear) else linear.weight


def for_loop(normed: NormedLinear, dtype: torch.dtype) -> NormedMap:
    """Return `normed` for many calls on inputs of `dtype`: normalised weights are computed once, here."""
    linear = normed.linear
    if not isinstance(linear, WeightNormLinear):
        return normed
    project = linear_for_loop(linear, dtype)
    return lambda x, mask: apply_norm(normed.norm, project(x), mask)


def linear_for_loop(linear: nn.Linear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return `linear` for many calls on inputs of `dtype`: normalised weights are computed once, here."""
    if not isinstance(linear, WeightNormLinear):
        return linear
    # Cast here too: autocast keeps the casts of parameters, but would cast this matrix anew at each call.
    weight = linear.effective_weight().to(dtype)
    bias = None if linear.bias is None else linear.bias.to(dtype)
    return lambda x: F.linear(x, weight, bias)
