"""x + y and the norm of the sum, in one pass where the norm's backend can do that."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn.modules import module as modules

from rmsrepro.norms.linear import apply_norm
from rmsrepro.norms.module import ActivationNorm


def adds(norm: nn.Module | None) -> TypeGuard[ActivationNorm[Any]]:
    """Whether `add_norm` makes one pass of the sum and this norm."""
    return isinstance(norm, ActivationNorm) and norm.adds and type(norm).forward is ActivationNorm.forward


def add_norm(
    norm: nn.Module | None, x: Tensor, y: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x + y and norm(x + y); x and y are (..., dim), `mask` as in `apply_norm`.

    A norm that somebody watches by hooks, and operands of different kinds (fp32 and bf16 under autocast),
    take two steps, with the same result.
    """
    if adds(norm) and x.shape == y.shape and x.dtype == y.dtype and not watched(norm):
        return norm.add(x, y)
    total = x + y
    return total, apply_norm(norm, total, mask)


def watched(module: nn.Module) -> bool:
    """Whether somebody sees what goes into a module or comes out: by hooks, or a forward of its own."""
    hooks: Any = modules
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or hooks._has_any_global_hook()
    )
