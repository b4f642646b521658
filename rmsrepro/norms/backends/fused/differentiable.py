"""The norm of a rule, and its gradient, in operations that can be differentiated any number of times.

For gradients that are to be differentiated themselves (`create_graph=True`): the kernels' own cannot be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmsrepro.norms.backends.composite import LOW_PRECISION
from rmsrepro.norms.backends.fused.rule import Rule
from rmsrepro.norms.equations import affine, divide

Gradients = tuple[Tensor, Tensor | None, Tensor | None]
"""Of x, gain and bias; None for what is not there."""


def equation(rule: Rule, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the norm of x (..., n), in fp32 or wider."""
    x = x.float() if x.dtype in LOW_PRECISION else x
    c = x - x.mean(-1, keepdim=True) if rule.centred else x
    m = (c[..., : rule.k] ** 2).sum(-1, keepdim=True) * rule.inverse_count
    return affine(divide(c, m, eps=rule.eps, outside=rule.outside), gain, bias)


def _view(one: Tensor) -> Tensor:
    with torch.enable_grad():
        return one.view_as(one)


def gradients(
    rule: Rule, dy: Tensor, x: Tensor, gain: Tensor | None, bias: torch.dtype | None, extra: Tensor | None
) -> Gradients:
    """Return the gradients for the upstream gradient dy, those of x plus `extra`.

    They are nodes of a graph where autograd is on. `bias` is its dtype, None without one.
    """
    zeros = (
        None if bias is None else torch.zeros(x.shape[-1], dtype=bias, device=x.device, requires_grad=True)
    )
    # Through views, which nothing else in the graph hangs on: x may depend on the gain, or on this very norm,
    # and the derivatives wanted are partial. What needs no gradient becomes the leaf of a graph of its own.
    inputs = [
        _view(one) if one.requires_grad else one.detach().requires_grad_()
        for one in (x, gain)
        if one is not None
    ]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        y = equation(rule, inputs[0], None if gain is None else inputs[1], zeros)
    wanted = inputs if zeros is None else [*inputs, zeros]
    found = list(torch.autograd.grad(y, wanted, dy.to(y.dtype), create_graph=again))
    dx = found.pop(0)
    if extra is not None:
        dx = dx + extra
    return dx, None if gain is None else found.pop(0), None if zeros is None else found.pop(0)
