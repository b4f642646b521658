"""Bytes and operations that a norm needs by its equation, whatever a backend makes of it.

For R rows of n entries of s bytes; gains and biases are n entries each, read once a pass.

Bytes: what must cross between memory and processor at least once, nothing staying in a cache from one pass
to the next.

    forward     x read, y written                        2 R n s
    backward    x and dL/dy read, dL/dx written          3 R n s
    both also   the parameters read; backward their gradients written

A statistic of each row is one number, and not counted. BatchNorm's statistics need the whole batch before the
first output: it reads x once more forward, x and dL/dy once more backward.

Operations: an addition, product, quotient, root or tanh of one number is one. For one row, with gain and bias
where the norm has them by default, eps added and k the entries a partial statistic reads:

    norm          forward      backward
    layernorm     7 n + 2      13 n
    rmsnorm       4 n + 2       9 n + 3
    prmsnorm      2 n + 2 k + 2    7 n + 2 k + 3
    l2norm        4 n + 1       9 n + 2
    crmsnorm      5 n + 3      10 n + 3
    dyt           4 n          12 n

Backward takes the statistic of each row from the forward pass and works the rest out anew, as a fused kernel
does; how the terms arise stands beside the code.
"""

from __future__ import annotations

import math
from typing import Any

from rmsrepro.bench.cells import Cost
from rmsrepro.norms import norm_info, resolve_params
from rmsrepro.norms.params import (
    BatchNormParams,
    CRMSNormParams,
    DyTParams,
    GemmaRMSNormParams,
    L2NormParams,
    LayerNormNoBiasParams,
    LayerNormParams,
    NormParams,
    PRMSNormParams,
    RMSFamilyParams,
    ScaleNormParams,
)

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def copy_cost(shape: tuple[int, ...], dtype: str) -> Cost:
    """Return what a copy of an input costs: read once, written once."""
    return Cost(bytes=2 * math.prod(shape) * ITEM_BYTES[dtype], flops=0)


def layer_cost(name: str, given: dict[str, Any], shape: tuple[int, ...], mode: str, dtype: str) -> Cost:
    """Return what one call of a norm costs, forward (`fwd`) or with its backward pass (`fwd_bwd`).

    Empty for a user's norm, whose equation is not known.
    """
    params = resolve_params(name, **given)
    if norm_info(name).factory is not None or not isinstance(params, NormParams):
        return Cost()
    rows, width = math.prod(shape[:-1]), shape[-1]
    flops = _forward(params, rows, width)
    if flops is None:
        return Cost()
    streams, parameters = 2, _parameters(params, width)
    once_more = isinstance(params, BatchNormParams)
    streams += once_more
    passes = 1
    if mode == "fwd_bwd":
        flops += _backward(params, rows, width)
        streams += 3 + 2 * once_more
        passes = 3  # read forward and backward, their gradients written
    item = ITEM_BYTES[dtype]
    return Cost(bytes=item * (streams * rows * width + passes * parameters), flops=flops)


def _has_gain(params: NormParams) -> bool:
    return isinstance(params, ScaleNormParams) or bool(getattr(params, "gain", False))


def _has_bias(params: NormParams) -> bool:
    return bool(getattr(params, "bias", False))


def _parameters(params: NormParams, width: int) -> int:
    """How many numbers gain, bias and alpha are."""
    if isinstance(params, ScaleNormParams):
        return 1
    learned = width * (_has_gain(params) + _has_bias(params))
    return learned + isinstance(params, DyTParams)


def _forward(params: NormParams, rows: int, width: int) -> int | None:
    """Operations of the forward pass; None where there is no statistic and no map to count."""
    affine = width * (_has_gain(params) + _has_bias(params))
    if isinstance(params, DyTParams):
        return rows * (2 * width + affine)  # alpha x, tanh
    if isinstance(params, LayerNormParams | LayerNormNoBiasParams):
        # mean n, centre n, square and mean 2 n, eps and root 2, divide n
        return rows * (5 * width + 2 + affine)
    if isinstance(params, BatchNormParams):
        # the same for each entry; eps and root once a column
        return rows * (5 * width + affine) + 2 * width
    if isinstance(params, CRMSNormParams):
        # sum n - 1 and its square 1; squares 2 n - 1; add 1, mean 1, eps and root 2; divide n
        return rows * (4 * width + 3 + affine)
    if isinstance(params, L2NormParams | ScaleNormParams):
        # squares 2 n - 1, eps and root 2, divide n
        return rows * (3 * width + 1 + affine)
    if isinstance(params, PRMSNormParams):
        return rows * (2 * params.entries(width) + 2 + width + affine)
    if isinstance(params, RMSFamilyParams):
        # square and mean 2 n, eps and root 2, divide n; Gemma's gain is 1 + weight, once a call
        offset = width if isinstance(params, GemmaRMSNormParams) and params.gain else 0
        return rows * (3 * width + 2 + affine) + offset
    return None


def _backward(params: NormParams, rows: int, width: int) -> int:
    """Operations of the backward pass, h = dL/dy * gain, r = 1/denominator, t the normalised row."""
    gain, bias = _has_gain(params), _has_bias(params)
    if isinstance(params, DyTParams):
        # alpha x, tanh, square, 1 - square: 4 n; h n; h times that n; dx n; dalpha 2 n; dgain 2 n; dbias n
        return rows * width * (4 + gain + 1 + 1 + 2 + 2 * gain + bias)
    if isinstance(params, LayerNormParams | LayerNormNoBiasParams | BatchNormParams):
        # centre n, t n, h n, mean of h n, mean of h t 2 n, dx = (h - mean - t mean) r 4 n, dgain 2 n, dbias n
        return rows * width * (2 + gain + 1 + 2 + 4 + 2 * gain + bias)
    # h n, dot of h and x 2 n - 1, r^3 dot / n 4, dx = r h - c x 3 n, dgain = sum of x r dy 3 n, dbias n
    dot, scalars = 2 * width - 1, 4
    correction = 2 * width
    if isinstance(params, PRMSNormParams):
        correction = 2 * params.entries(width)
    elif isinstance(params, CRMSNormParams):
        correction = 3 * width  # c (x + the sum)
    elif isinstance(params, L2NormParams | ScaleNormParams):
        scalars = 3  # no mean
    learned = width * (gain + 3 * gain + bias)
    return rows * (dot + scalars + width + correction + learned)
