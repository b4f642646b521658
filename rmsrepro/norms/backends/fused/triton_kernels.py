"""The Triton kernels of `rule`'s formula. Importing this needs triton; `triton_norms` launches them.

Each works on tiles of (rows, entries). `forward` and `backward` hold whole rows; those of `triton_wide` go
over a row in blocks, as often as they need it.

Sums are in ACC: fp32, or fp64 for fp64. Squares of fp32 leave its range at |a| of 1e-19 and 1e19, so a row is
first multiplied by s, the power of two that brings its largest magnitude to [1, 2), which is exact:

    c' = s c,   m' = s^2 m,   d' = s d = sqrt(m' + (sqrt(eps) s)^2) or sqrt(m') + eps s,   t = c' / d'.

Constants that all kernels take, known when one is compiled:
    N, K, INVERSE: width, entries of the statistic, and the factor of their sum of squares.
    ADDED: sqrt(eps), or eps (outside).
    CENTRED, OUTSIDE, ROUNDED: as in `Rule`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ------------------------------------------------------------------------------------ one number a row


@triton.jit
def power_of_two(largest):
    """Return s, with s * largest in [1, 2); at most 2^100 (fp64: 2^900), so that eps * s is finite."""
    if largest.dtype == tl.float64:
        exponent = (largest.to(tl.int64, bitcast=True) >> 52) & 2047
        exponent = tl.minimum(tl.maximum(2046 - exponent, 1), 1923)
        return (exponent << 52).to(tl.float64, bitcast=True)
    else:
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
        exponent = tl.minimum(tl.maximum(254 - exponent, 1), 227)
        return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(largest, ADDED: tl.constexpr, OUTSIDE: tl.constexpr):
    """Return s for rows whose statistic reads entries up to `largest`."""
    if not OUTSIDE:
        # Where sqrt(eps) is larger, the squares may vanish beside eps, and sqrt(eps) * s may not overflow.
        # Made of the sums' dtype by hand: a constant below fp32's range would make all that follows fp64.
        largest = tl.maximum(largest, tl.full(largest.shape, ADDED, largest.dtype))
    return power_of_two(largest)


@triton.jit
def root(m):
    """Return sqrt(m), rounded properly: tl.sqrt of fp32 is an approximation."""
    if m.dtype == tl.float64:
        return tl.sqrt(m)
    else:
        return tl.sqrt_rn(m)


@triton.jit
def quotient(a, b):
    """Return a / b, rounded properly: so is the plain division."""
    if b.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def inverses(m, s, ADDED: tl.constexpr, OUTSIDE: tl.constexpr):
    """Return 1/d' and the factor u of c' in the gradient of d': 1/d', or 1/sqrt(m') (outside).

    Each is 0 where its denominator is 0. A d below 1e-25 (fp64: 1e-200) counts as zero, as 1/d^2 overflows.
    """
    if OUTSIDE:
        rms = root(m)
        d = rms + ADDED * s
    else:
        added = ADDED * s
        d = root(m + added * added)
    # Nor may 1/d' overflow, as it would for constant rows of 1e38, centred, with a small eps outside.
    if m.dtype == tl.float64:
        vanished = d <= tl.maximum(1e-200 * s, tl.full(s.shape, 2.3e-308, s.dtype))
    else:
        vanished = d <= tl.maximum(1e-25 * s, tl.full(s.shape, 1.2e-38, s.dtype))
    # Divided by 1 first: no NaN or infinity is formed that a `where` would have to hide.
    r = tl.where(vanished, 0.0, quotient(tl.full(d.shape, 1.0, d.dtype), tl.where(vanished, 1.0, d)))
    if OUTSIDE:
        zero = rms == 0
        u = tl.where(zero, 0.0, quotient(tl.full(d.shape, 1.0, d.dtype), tl.where(zero, 1.0, rms)))
    else:
        u = r
    return r, u


# -------------------------------------------------------------------------------------- entries of rows


@triton.jit
def load_entries(x, residual, x_at, residual_at, mask):
    """Return the rows of x, or of x + residual rounded to x's dtype, 0 outside the mask."""
    a = tl.load(x + x_at, mask=mask, other=0.0)
    if residual is not None:
        b = tl.load(residual + residual_at, mask=mask, other=0.0)
        if a.dtype == tl.float64:
            a += b.to(tl.float64)
        else:
            a = (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)
    return a


@triton.jit
def normalised(a, s, mean, r, CENTRED: tl.constexpr):
    """Return t = c / d."""
    if CENTRED:
        return (a * s - mean) * r
    else:
        # Not (a s) r: entries that the statistic does not read may be too large for s.
        return a * (s * r)


@triton.jit
def gained(t, gain, bias, col, mask, dtype: tl.constexpr, ROUNDED: tl.constexpr):
    """Return t * gain + bias in the output's dtype, rounded once or after each step."""
    ACC: tl.constexpr = t.dtype
    if ROUNDED:
        t = t.to(dtype).to(ACC)
    if gain is not None:
        t *= tl.load(gain + col, mask=mask, other=0.0).to(ACC)
        if ROUNDED:
            t = t.to(dtype).to(ACC)
    if bias is not None:
        t += tl.load(bias + col, mask=mask, other=0.0).to(ACC)
    return t.to(dtype)


@triton.jit
def input_gradient(
    a, h, col, s, mean, r, u, h_mean, product,
    K: tl.constexpr, N: tl.constexpr, INVERSE: tl.constexpr, CENTRED: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Return dL/da from h = gain * dL/dy, its mean (centred) and product = sum(h t)."""
    # Not normalised(..., u): s * u may overflow, and past K entries may, which the `where` takes out.
    g = (a * s - mean) * u if OUTSIDE else normalised(a, s, mean, r, CENTRED)
    if K < N:
        g = tl.where(col < K, g, 0.0)
    inner = h - g * (product * INVERSE)
    if CENTRED:
        inner -= h_mean
    return inner * (r * s)


# ------------------------------------------------------------------------------- rows held as a whole


@triton.jit
def statistics(
    a, col,
    N: tl.constexpr, K: tl.constexpr, INVERSE: tl.constexpr, ADDED: tl.constexpr,
    CENTRED: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Return s, the mean of s a (0 without centring), 1/d' and u of rows (ROWS, BLOCK), each (ROWS, 1)."""
    # Entries past the end are 0.
    head = tl.where(col < K, a, 0.0) if K < N else a
    s = scale_of(tl.max(tl.abs(head), 1, keep_dims=True), ADDED, OUTSIDE)
    c = head * s
    mean = tl.zeros_like(s)
    if CENTRED:
        mean = quotient(tl.sum(c, 1, keep_dims=True), tl.full(s.shape, N, s.dtype))
        c = tl.where(col < N, c - mean, 0.0)
    r, u = inverses(tl.sum(c * c, 1, keep_dims=True) * INVERSE, s, ADDED, OUTSIDE)
    return s, mean, r, u


@triton.jit
def forward(
    x, residual, gain, bias, total, y, rows, x_stride, residual_stride,
    N: tl.constexpr, K: tl.constexpr, INVERSE: tl.constexpr, ADDED: tl.constexpr,
    CENTRED: tl.constexpr, OUTSIDE: tl.constexpr, ROUNDED: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write y = norm(x), or total = x + residual and y = norm(total), for ROWS rows a program."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < N)
    entries = load_entries(x, residual, row * x_stride + col, row * residual_stride + col, mask)
    if total is not None:
        tl.store(total + row * N + col, entries, mask=mask)
    a = entries.to(ACC)
    s, mean, r, _ = statistics(a, col, N, K, INVERSE, ADDED, CENTRED, OUTSIDE)
    t = normalised(a, s, mean, r, CENTRED)
    tl.store(y + row * N + col, gained(t, gain, bias, col, col < N, entries.dtype, ROUNDED), mask=mask)


@triton.jit
def backward(
    dy, x, gain, ds, dx, partial_gain, partial_bias, rows, dy_stride, x_stride, ds_stride,
    N: tl.constexpr, K: tl.constexpr, INVERSE: tl.constexpr, ADDED: tl.constexpr,
    CENTRED: tl.constexpr, OUTSIDE: tl.constexpr, ROUNDED: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write dx (+ ds), and this program's sums over its rows into its row of each partial (programs, N)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    col = tl.arange(0, BLOCK)[None, :]
    if gain is not None:
        factor = tl.load(gain + col, mask=col < N, other=0.0).to(ACC)
    if partial_gain is not None:
        sum_gain = tl.zeros((ROWS, BLOCK), ACC)
    if partial_bias is not None:
        sum_bias = tl.zeros((ROWS, BLOCK), ACC)
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        row = (tile * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        mask = (row < rows) & (col < N)
        entries = tl.load(x + row * x_stride + col, mask=mask, other=0.0)
        upstream = tl.load(dy + row * dy_stride + col, mask=mask, other=0.0).to(ACC)
        a = entries.to(ACC)
        s, mean, r, u = statistics(a, col, N, K, INVERSE, ADDED, CENTRED, OUTSIDE)
        t = normalised(a, s, mean, r, CENTRED)
        h = upstream * factor if gain is not None else upstream
        h_mean = tl.zeros_like(s)
        if CENTRED:
            h_mean = tl.sum(h, 1, keep_dims=True) * (1.0 / N)
        product = tl.sum(h * t, 1, keep_dims=True)
        d = input_gradient(a, h, col, s, mean, r, u, h_mean, product, K, N, INVERSE, CENTRED, OUTSIDE)
        if ds is not None:
            d += tl.load(ds + row * ds_stride + col, mask=mask, other=0.0).to(ACC)
        tl.store(dx + row * N + col, d.to(entries.dtype), mask=mask)
        if partial_gain is not None:
            sum_gain += upstream * (t.to(entries.dtype).to(ACC) if ROUNDED else t)
        if partial_bias is not None:
            sum_bias += upstream
    if partial_gain is not None:
        tl.store(partial_gain + program * N + col, tl.sum(sum_gain, 0, keep_dims=True), mask=col < N)
    if partial_bias is not None:
        tl.store(partial_bias + program * N + col, tl.sum(sum_bias, 0, keep_dims=True), mask=col < N)


@triton.jit
def sum_column(partial, out, programs, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the sum over the rows of partial (programs, N) for COLUMNS columns a program."""
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), partial.dtype.element_ty)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial + row * N + col, mask=(row < programs) & (col < N), other=0.0)
    tl.store(out + col, tl.sum(total, 0, keep_dims=True).to(out.dtype.element_ty), mask=col < N)


@triton.jit
def sum_partials(
    partial_gain, partial_bias, dgain, dbias, programs,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gain and bias from what the programs of a backward left."""
    if partial_gain is not None:
        sum_column(partial_gain, dgain, programs, N, ROWS, COLUMNS)
    if partial_bias is not None:
        sum_column(partial_bias, dbias, programs, N, ROWS, COLUMNS)
