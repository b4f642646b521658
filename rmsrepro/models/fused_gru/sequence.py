"""The whole sequence as one operation of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rmsrepro.models.fused_gru import composed
from rmsrepro.models.fused_gru.plan import DTYPES, Fused, Plan
from rmsrepro.models.fused_gru.product import product_with
from rmsrepro.norms.backends.fused.library import Call, kernels
from rmsrepro.norms.backends.plain_tensors import in_memory

SCALES = 12
"""Numbers that the backward pass is given of a row: three for each site."""
ROWS_AT_ONCE = 512
"""Rows, of one step or several, whose gradients are multiplied into those of the weights in one product. More
would save nothing."""
LINE = 64
"""Bytes that no two threads should share."""


def scan(
    layer: Fused, x: Tensor, state: Tensor | None, mask: Tensor | None, *, reverse: bool = False
) -> Tensor:
    """Return the states (T, B, d) after each step, in the order of x.

    Args:
        layer: its norms, weights and parameters.
        x: inputs (T, B, input_dim), of at least one step and one row.
        state: the first (B, d); None: zeros.
        mask: (T, B) bool, False where a row's state stays as it is.
        reverse: read from the last step to the first.
    """
    mask, state = (None if one is None else one.contiguous() for one in (mask, state))
    states: Tensor = _Scan.apply(  # type: ignore[no-untyped-call]
        layer.plan,
        reverse,
        mask,
        x.contiguous(),
        layer.input_weight,
        layer.input_bias,
        state,
        layer.weight,
        layer.parameters,
    )
    return states


@cache
def addresses() -> tuple[Call, int, int]:
    """Return how to call a kernel, and the forward and the backward pass."""
    loaded = kernels()
    return loaded.call, loaded.address("gru_forward"), loaded.address("gru_backward")


def first_fields(plan: Plan, rows: int, parameters: Tensor) -> tuple[int, ...]:
    """Return the fields that every call begins with; `parameters` has the dtype of all tensors."""
    threads = torch.get_num_threads()
    return plan.address, DTYPES[parameters.dtype], rows, plan.width, threads, parameters.data_ptr()


def check(failed: int) -> None:
    """Raise MemoryError where a kernel found no memory."""
    if failed:
        raise MemoryError("no memory for the gradients of a row of a GRU")


def new_sums(plan: Plan, like: Tensor) -> Tensor:
    """Return zeros (threads, entries) for the gradients of the parameters, each thread's on its own lines."""
    line = LINE // like.element_size()
    return like.new_zeros(torch.get_num_threads(), -(-plan.size // line) * line)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        reverse: bool,
        mask: Tensor | None,
        x: Tensor,
        input_weight: Tensor,
        input_bias: Tensor | None,
        first: Tensor | None,
        weight: Tensor,
        parameters: Tensor,
    ) -> Tensor:
        raw = F.linear(x, input_weight, input_bias)
        steps, rows, d = len(x), x.shape[1], plan.width
        state = x.new_zeros(rows, d) if first is None else first
        states = x.new_empty(steps, rows, d)
        differentiable = any(ctx.needs_input_grad)
        scales = x.new_empty(steps, rows, SCALES) if differentiable else None
        products: list[Tensor] = [raw] * steps
        multiply = product_with(weight, rows, steps)
        call, forward, _ = addresses()
        fixed = first_fields(plan, rows, parameters)
        each, item = states.unbind(0), x.element_size()
        raw_at, mask_at = raw.data_ptr(), 0 if mask is None else mask.data_ptr()
        scales_at, new_at = 0 if scales is None else scales.data_ptr(), states.data_ptr()
        per_state = rows * d * item
        for count, now in enumerate(range(steps - 1, -1, -1) if reverse else range(steps)):
            # Without a first state the first product is with zeros.
            product = multiply(state) if count or first is not None else x.new_zeros(rows, 3 * d)
            if differentiable:
                products[now] = product
            failed = call(
                forward,
                *fixed,
                raw_at + now * 3 * per_state,
                product.data_ptr(),
                state.data_ptr(),
                mask_at and mask_at + now * rows,
                scales_at and scales_at + now * rows * SCALES * item,
                new_at + now * per_state,
            )
            check(failed)
            state = each[now]
        if differentiable:
            ctx.plan, ctx.reverse = plan, reverse
            ctx.save_for_backward(
                mask, x, input_weight, input_bias, first, weight, parameters, raw, states, scales, *products
            )
        return states

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        mask, x, input_weight, input_bias, first, weight, parameters, *kept = ctx.saved_tensors
        if torch.is_grad_enabled() or not in_memory(upstream):
            inputs = (x, input_weight, input_bias, first, weight, parameters)
            return None, None, None, *_differentiable(ctx.plan, ctx.reverse, mask, inputs, upstream)
        raw, states, scales, *products = kept
        plan, reverse = ctx.plan, ctx.reverse
        steps, rows, d = len(x), x.shape[1], plan.width
        upstream = upstream if upstream.stride(2) == 1 else upstream.contiguous()
        start = x.new_zeros(rows, d) if first is None else first
        results = _Results(ctx.needs_input_grad[3:], x, input_weight, weight, first, states, reverse)
        direct, sums = x.new_empty(rows, d), new_sums(plan, x)
        multiply = product_with(weight.t(), rows, steps, backward=True)
        call, _, backward = addresses()
        fixed = first_fields(plan, rows, parameters)
        item = x.element_size()
        per_state = rows * d * item
        raw_at, states_at, scales_at = raw.data_ptr(), states.data_ptr(), scales.data_ptr()
        mask_at, up_at = 0 if mask is None else mask.data_ptr(), upstream.data_ptr()
        up_step, up_row = upstream.stride(0) * item, upstream.stride(1)
        product: Tensor | None = None
        for count, now in enumerate(range(steps) if reverse else range(steps - 1, -1, -1)):
            last = count == steps - 1
            before = start.data_ptr() if last else states_at + (now + 1 if reverse else now - 1) * per_state
            dx, dh = results.room(now)
            failed = call(
                backward,
                *fixed,
                raw_at + now * 3 * per_state,
                products[now].data_ptr(),
                before,
                mask_at and mask_at + now * rows,
                scales_at + now * rows * SCALES * item,
                up_at + now * up_step,
                up_row,
                0 if product is None else product.data_ptr(),
                direct.data_ptr(),
                count == 0,
                dx.data_ptr(),
                dh.data_ptr(),
                sums.data_ptr(),
                sums.shape[1],
            )
            check(failed)
            results.done(now)
            if not last or ctx.needs_input_grad[6]:
                product = multiply(dh)
        dfirst = None
        if first is not None and ctx.needs_input_grad[6]:
            assert product is not None
            dfirst = direct + product
        return (
            *(None, None, None, results.dx, results.input_weight, results.input_bias, dfirst),
            *(results.weight, sums.sum(0)[: plan.size]),
        )


class _Results:
    """The gradients that are products of the rows' gradients over many steps, taken some steps at a time.

    The rows' gradients are never there for all steps at once: memory that is used again and again is in the
    cache, and asked for only once.
    """

    def __init__(
        self,
        wanted: Sequence[bool],
        x: Tensor,
        input_weight: Tensor,
        weight: Tensor,
        first: Tensor | None,
        states: Tensor,
        reverse: bool,
    ) -> None:
        steps, rows, d = states.shape
        parts = -(-steps // -(-ROWS_AT_ONCE // rows))
        self.most = -(-steps // parts)
        self.x, self.matrix, self.states, self.first, self.reverse = x, input_weight, states, first, reverse
        self.dxs = x.new_empty(self.most, rows, 3 * d)
        self.dhs = torch.empty_like(self.dxs)
        self.rooms = list(zip(self.dxs.unbind(0), self.dhs.unbind(0), strict=True))
        self.dx = torch.empty_like(x) if wanted[0] else None
        self.input_weight = torch.zeros_like(input_weight) if wanted[1] else None
        self.input_bias = x.new_zeros(3 * d) if wanted[2] else None
        self.weight = torch.zeros_like(weight) if wanted[4] else None

    def room(self, now: int) -> tuple[Tensor, Tensor]:
        """Return where the gradients at step `now` are to be written: of both products, (B, 3 d)."""
        return self.rooms[now % self.most]

    def done(self, now: int) -> None:
        """Take in what is in the room for step `now`; steps come in the order of the backward pass."""
        if self.reverse:
            begin, end = now - now % self.most, now + 1
            full = end % self.most == 0 or end == len(self.x)
        else:
            begin, end = now, min(now - now % self.most + self.most, len(self.x))
            full = begin % self.most == 0
        if full:
            self._take(begin, end)

    def _take(self, begin: int, end: int) -> None:
        dx, dh = (one[: end - begin].view(-1, one.shape[2]) for one in (self.dxs, self.dhs))
        if self.dx is not None:
            torch.mm(dx, self.matrix, out=self.dx[begin:end].view(-1, self.x.shape[2]))
        if self.input_weight is not None:
            self.input_weight.addmm_(dx.t(), self.x[begin:end].view(-1, self.x.shape[2]))
        if self.input_bias is not None:
            self.input_bias += dx.sum(0)
        if self.weight is None:
            return
        # The state before the steps, one position away; beyond the end it is the first one.
        away, rows = 1 if self.reverse else -1, self.x.shape[1]
        outside = end == len(self.x) if self.reverse else begin == 0
        if outside:
            one = dh[-rows:] if self.reverse else dh[:rows]
            dh = dh[:-rows] if self.reverse else dh[rows:]
            if self.first is not None:
                self.weight.addmm_(one.t(), self.first)
            begin, end = (begin, end - 1) if self.reverse else (begin + 1, end)
        self.weight.addmm_(dh.t(), self.states[begin + away : end + away].view(-1, self.states.shape[2]))


def _differentiable(
    plan: Plan, reverse: bool, mask: Tensor | None, inputs: Sequence[Tensor | None], upstream: Tensor
) -> list[Tensor | None]:
    there = [one for one in inputs if one is not None]

    def again(*given: Tensor) -> Tensor:
        names = iter(given)
        x, input_weight, input_bias, first, weight, parameters = (
            None if one is None else next(names) for one in inputs
        )
        assert x is not None
        assert input_weight is not None
        assert weight is not None
        assert parameters is not None
        start = x.new_zeros(x.shape[1], plan.width) if first is None else first
        raw = F.linear(x, input_weight, input_bias)
        return composed.scan(plan, reverse, mask, raw, start, weight, parameters)

    found = iter(composed.gradients(again, there, upstream))
    return [None if one is None else next(found) for one in inputs]
