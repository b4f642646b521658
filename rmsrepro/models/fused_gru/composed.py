"""The fused GRU in primitive operations on the same inputs, and its gradients by autograd.

For gradients that are themselves differentiated (create_graph=True): slow, and right any number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rmsrepro.models.fused_gru.plan import Plan, SitePlan
from rmsrepro.norms.equations import affine, divide


def step(plan: Plan, x: Tensor, product: Tensor, state: Tensor, parameters: Tensor) -> Tensor:
    """Return the new state (B, d) from the raw products (B, 3 d) with input and state."""
    d = plan.width
    gates_x, candidate_x, gates_h, candidate_h = (
        _site(site, row[:, site.start : site.start + site.width], parameters)
        for site, row in zip(plan.sites, (x, x, product, product), strict=True)
    )
    reset, update = torch.sigmoid(gates_x + gates_h).split(d, 1)
    candidate = torch.tanh(candidate_x + reset * candidate_h)
    return candidate + update * (state - candidate)


def scan(
    plan: Plan,
    reverse: bool,
    mask: Tensor | None,
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    parameters: Tensor,
) -> Tensor:
    """Return the states (T, B, d) from the raw products x (T, B, 3 d); see `sequence.scan`."""
    states: list[Tensor] = []
    for now in range(len(x) - 1, -1, -1) if reverse else range(len(x)):
        new = step(plan, x[now], torch.mm(state, weight.t()), state, parameters)
        state = new if mask is None else torch.where(mask[now].unsqueeze(1), new, state)
        states.append(state)
    return torch.stack(states[::-1] if reverse else states)


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of function(*inputs), each a part of the graph where autograd is on."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Through other names for the inputs: one that was computed from another must not be followed to it.
        names = [one.view_as(one) if one.requires_grad else one.detach().requires_grad_() for one in inputs]
        value = function(*names)
    return torch.autograd.grad(value, names, upstream, create_graph=again, allow_unused=True)


def _site(site: SitePlan, a: Tensor, parameters: Tensor) -> Tensor:
    gain, bias = (
        parameters[start : start + site.width] if start >= 0 else None for start in (site.gain, site.bias)
    )
    rule = site.rule
    if rule is None:
        return affine(a, gain, bias)
    c = a - a.mean(-1, keepdim=True) if rule.centred else a
    m = (c[:, : rule.k] ** 2).sum(-1, keepdim=True) * rule.inverse_count
    return affine(divide(c, m, eps=rule.eps, outside=rule.outside), gain, bias)
