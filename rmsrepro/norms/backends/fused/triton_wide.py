"""The Triton kernels for rows too wide to be held as a whole: `triton_kernels` once more, in blocks.

A program goes over its row for the scale, the mean, the squares and the output, and a backward once more; all
but the first time the row comes from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rmsrepro.norms.backends.fused.triton_kernels import (
    gained,
    input_gradient,
    inverses,
    load_entries,
    normalised,
    quotient,
    scale_of,
)


@triton.jit
def statistics_wide(
    x, residual,
    N: tl.constexpr, K: tl.constexpr, INVERSE: tl.constexpr, ADDED: tl.constexpr,
    CENTRED: tl.constexpr, OUTSIDE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return s, the mean of s a, 1/d' and u of the row that begins at x (and residual), each (1, 1)."""
    lane = tl.arange(0, BLOCK)[None, :]
    largest = tl.zeros((1, BLOCK), ACC)
    for start in range(0, K, BLOCK):
        col = start + lane
        largest = tl.maximum(largest, tl.abs(load_entries(x, residual, col, col, col < K).to(ACC)))
    s = scale_of(tl.max(largest, 1, keep_dims=True), ADDED, OUTSIDE)
    mean = tl.zeros_like(s)
    if CENTRED:
        total = tl.zeros((1, BLOCK), ACC)
        for start in range(0, N, BLOCK):
            col = start + lane
            total += load_entries(x, residual, col, col, col < N).to(ACC) * s
        mean = quotient(tl.sum(total, 1, keep_dims=True), tl.full(s.shape, N, s.dtype))
    squares = tl.zeros((1, BLOCK), ACC)
    for start in range(0, K, BLOCK):
        col = start + lane
        c = tl.where(col < K, load_entries(x, residual, col, col, col < K).to(ACC) * s - mean, 0.0)
        squares += c * c
    r, u = inverses(tl.sum(squares, 1, keep_dims=True) * INVERSE, s, ADDED, OUTSIDE)
    return s, mean, r, u


@triton.jit
def forward_wide(
    x, residual, gain, bias, total, y, x_stride, residual_stride,
    N: tl.constexpr, K: tl.constexpr, INVERSE: tl.constexpr, ADDED: tl.constexpr,
    CENTRED: tl.constexpr, OUTSIDE: tl.constexpr, ROUNDED: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write y = norm(x), or total = x + residual and y = norm(total), for one row a program."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    if residual is not None:
        residual += row * residual_stride
    s, mean, r, _ = statistics_wide(x, residual, N, K, INVERSE, ADDED, CENTRED, OUTSIDE, ACC, BLOCK)
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        mask = col < N
        entries = load_entries(x, residual, col, col, mask)
        if total is not None:
            tl.store(total + row * N + col, entries, mask=mask)
        t = normalised(entries.to(ACC), s, mean, r, CENTRED)
        tl.store(y + row * N + col, gained(t, gain, bias, col, mask, entries.dtype, ROUNDED), mask=mask)


@triton.jit
def load_pair(x, dy, gain, x_row, dy_row, col, mask, ACC: tl.constexpr):
    """Return x, dL/dy and h = gain * dL/dy of some entries of a row."""
    a = tl.load(x + x_row + col, mask=mask, other=0.0).to(ACC)
    upstream = tl.load(dy + dy_row + col, mask=mask, other=0.0).to(ACC)
    h = upstream
    if gain is not None:
        h = upstream * tl.load(gain + col, mask=mask, other=0.0).to(ACC)
    return a, upstream, h


@triton.jit
def backward_wide(
    dy, x, gain, ds, dx, partial_gain, partial_bias, rows, dy_stride, x_stride, ds_stride,
    N: tl.constexpr, K: tl.constexpr, INVERSE: tl.constexpr, ADDED: tl.constexpr,
    CENTRED: tl.constexpr, OUTSIDE: tl.constexpr, ROUNDED: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx (+ ds), and this program's sums over its rows into its row of each partial (programs, N)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)[None, :]
    dtype: tl.constexpr = dx.dtype.element_ty
    for index in range(program, rows, programs):
        row = tl.full((), index, tl.int64)
        x_row, dy_row = row * x_stride, row * dy_stride
        s, mean, r, u = statistics_wide(x + x_row, None, N, K, INVERSE, ADDED, CENTRED, OUTSIDE, ACC, BLOCK)
        h_sum = tl.zeros((1, BLOCK), ACC)
        products = tl.zeros((1, BLOCK), ACC)
        for start in range(0, N, BLOCK):
            col = start + lane
            a, _, h = load_pair(x, dy, gain, x_row, dy_row, col, col < N, ACC)
            products += h * normalised(a, s, mean, r, CENTRED)
            if CENTRED:
                h_sum += h
        h_mean = tl.sum(h_sum, 1, keep_dims=True) * (1.0 / N)
        product = tl.sum(products, 1, keep_dims=True)
        for start in range(0, N, BLOCK):
            col = start + lane
            mask = col < N
            a, upstream, h = load_pair(x, dy, gain, x_row, dy_row, col, mask, ACC)
            d = input_gradient(a, h, col, s, mean, r, u, h_mean, product, K, N, INVERSE, CENTRED, OUTSIDE)
            if ds is not None:
                d += tl.load(ds + row * ds_stride + col, mask=mask, other=0.0).to(ACC)
            tl.store(dx + row * N + col, d.to(dtype), mask=mask)
            # The sums are too wide for registers. The first row of a program finds nothing there yet.
            at, later = program * N + col, mask & (index != program)
            if partial_gain is not None:
                t = normalised(a, s, mean, r, CENTRED)
                t = t.to(dtype).to(ACC) if ROUNDED else t
                so_far = tl.load(partial_gain + at, mask=later, other=0.0)
                tl.store(partial_gain + at, so_far + upstream * t, mask=mask)
            if partial_bias is not None:
                so_far = tl.load(partial_bias + at, mask=later, other=0.0)
                tl.store(partial_bias + at, so_far + upstream, mask=mask)
        # A thread of the next row may read a sum that another thread wrote.
        tl.debug_barrier()
