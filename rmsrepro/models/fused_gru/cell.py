"""One step as one operation of autograd, its products apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsrepro.models.fused_gru import composed
from rmsrepro.models.fused_gru.plan import Fused, Plan
from rmsrepro.models.fused_gru.sequence import SCALES, addresses, check, first_fields, new_sums
from rmsrepro.norms.backends.plain_tensors import in_memory, straight


def cell(layer: Fused, x: Tensor, state: Tensor) -> Tensor:
    """Return the new state (B, d) from the raw product with the input x (B, 3 d) and the state (B, d)."""
    x, state = x.contiguous(), state.contiguous()
    product = torch.mm(state, layer.weight.t())
    new: Tensor = _apply(layer.plan, x, product, state, layer.parameters)
    return new


class _Cell(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, x: Tensor, product: Tensor, state: Tensor, parameters: Tensor
    ) -> Tensor:
        rows = len(state)
        new = torch.empty_like(state)
        differentiable = any(ctx.needs_input_grad)
        scales = x.new_empty(rows, SCALES) if differentiable else None
        call, forward, _ = addresses()
        failed = call(
            forward,
            *first_fields(plan, rows, parameters),
            x.data_ptr(),
            product.data_ptr(),
            state.data_ptr(),
            0,
            0 if scales is None else scales.data_ptr(),
            new.data_ptr(),
        )
        check(failed)
        if differentiable:
            ctx.plan = plan
            ctx.save_for_backward(x, product, state, parameters, scales)
        return new

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, product, state, parameters, scales = ctx.saved_tensors
        plan = ctx.plan
        if torch.is_grad_enabled() or not in_memory(upstream):

            def again(*inputs: Tensor) -> Tensor:
                return composed.step(plan, *inputs)

            return None, *composed.gradients(again, (x, product, state, parameters), upstream)
        rows, d = state.shape
        upstream = upstream.contiguous()
        dx, dh, direct = torch.empty_like(x), torch.empty_like(x), torch.empty_like(state)
        sums = new_sums(plan, x)
        call, _, backward = addresses()
        failed = call(
            backward,
            *first_fields(plan, rows, parameters),
            x.data_ptr(),
            product.data_ptr(),
            state.data_ptr(),
            0,
            scales.data_ptr(),
            upstream.data_ptr(),
            d,
            0,
            direct.data_ptr(),
            True,
            dx.data_ptr(),
            dh.data_ptr(),
            sums.data_ptr(),
            sums.shape[1],
        )
        check(failed)
        return None, dx, dh, direct, sums.sum(0)[: plan.size]


_apply = straight(_Cell)
