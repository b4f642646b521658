"""The norms as pure equations: the ground truth that every implementation is compared with.

Each function maps x (..., n) to (..., n) in the dtype it is given (give float64 for a reference), shares no
code with the layers and is differentiable twice. `weight` and `bias` are (n,) or None. With eps = 0 a row
whose denominator is zero gives 0 with gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rmsrepro.norms.params import (
    BatchNormParams,
    CRMSNormParams,
    DividingParams,
    DyTParams,
    GemmaRMSNormParams,
    L2NormParams,
    LayerNormNoBiasParams,
    LayerNormParams,
    NoneParams,
    NormParams,
    PRMSNormParams,
    RMSFamilyParams,
    ScaleNormParams,
)

Equation = Callable[..., Tensor]
"""f(x (..., n), weight, bias) -> (..., n)."""


def divide(a: Tensor, m: Tensor, *, eps: float, outside: bool) -> Tensor:
    """Return a / sqrt(m + eps), or a / (sqrt(m) + eps) when `outside`; 0 where that denominator is 0.

    a is (..., n) and m is (..., 1), not negative.
    """
    # The root is taken of 1 where its argument is 0: sqrt has no finite slope there, and a `where` behind it
    # would multiply that slope by zero into NaN.
    inner = m if outside else m + eps
    root = torch.where(inner == 0, 0.0, torch.sqrt(torch.where(inner == 0, 1.0, inner)))
    denominator = root + eps if outside else root
    zero = denominator == 0
    return torch.where(zero, 0.0, a / torch.where(zero, 1.0, denominator))


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return y * weight + bias, leaving out what is None."""
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def none(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return x."""
    return x


def layernorm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float, outside: bool = False
) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias, var = mean((x - mean)^2).

    Source: Ba et al. 2016, eq. 4.
    """
    centred = x - x.mean(-1, keepdim=True)
    return affine(
        divide(centred, (centred**2).mean(-1, keepdim=True), eps=eps, outside=outside), weight, bias
    )


def prmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    k: int,
    outside: bool = False,
) -> Tensor:
    """Return x / sqrt(m + eps) * weight + bias, m = mean of the first k squares.

    Source: Zhang & Sennrich 2019, section 3.2.
    """
    return affine(divide(x, (x[..., :k] ** 2).mean(-1, keepdim=True), eps=eps, outside=outside), weight, bias)


def rmsnorm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float, outside: bool = False
) -> Tensor:
    """Return x / sqrt(m + eps) * weight + bias, m = mean(x^2).

    Source: Zhang & Sennrich 2019, eq. 4.
    """
    return prmsnorm(x, weight, bias, eps=eps, k=x.shape[-1], outside=outside)


def l2norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float, outside: bool = False
) -> Tensor:
    """Return x / sqrt(m + eps) * weight + bias, m = sum(x^2).

    Source: Zhang & Sennrich 2019, section 5.1.
    """
    return affine(divide(x, (x**2).sum(-1, keepdim=True), eps=eps, outside=outside), weight, bias)


def scalenorm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float, outside: bool = False
) -> Tensor:
    """Return x / sqrt(m + eps) * weight, m = sum(x^2) and one weight (1,) for all entries.

    Source: Nguyen & Salazar 2019, eq. 5.
    """
    return l2norm(x, weight, bias, eps=eps, outside=outside)


def crmsnorm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float, outside: bool = False
) -> Tensor:
    """Return x / sqrt(m + eps) * weight + bias, m = (sum(x^2) + sum(x)^2) / (n + 1).

    x holds the first n of n + 1 entries whose sum is zero; the last, -sum(x), is not stored. What is returned
    are the first n entries of the RMSNorm of all of them.
    Source: Jiang et al. 2023, section 4.
    """
    whole = torch.cat((x, -x.sum(-1, keepdim=True)), -1)
    return affine(divide(x, (whole**2).mean(-1, keepdim=True), eps=eps, outside=outside), weight, bias)


def dyt(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, alpha: Tensor | float
) -> Tensor:
    """Return tanh(alpha * x) * weight + bias; alpha is one number.

    Source: Zhu et al. 2025, eq. 1.
    """
    return affine(torch.tanh(alpha * x), weight, bias)


def offset_rmsnorm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float, outside: bool = False
) -> Tensor:
    """Return the RMSNorm of x times (1 + weight). Source: Gemma's reference implementation, 2024."""
    return rmsnorm(x, None if weight is None else 1 + weight, bias, eps=eps, outside=outside)


def batchnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    outside: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias, mean and var of each entry over the positions.

    x is (..., n), mask (...) is True for the positions that count; var is the population variance.
    Source: Ioffe & Szegedy 2015, algorithm 1.
    """
    rows = x.reshape(-1, x.shape[-1]) if mask is None else x[mask]
    mean = rows.mean(0)
    return affine(divide(x - mean, ((rows - mean) ** 2).mean(0), eps=eps, outside=outside), weight, bias)


def weightnorm(v: Tensor, g: Tensor, *, eps: float, outside: bool = False) -> Tensor:
    """Return the matrix whose row i is g_i v_i / sqrt(|v_i|^2 + eps); v is (out, in), g (out,).

    Source: Salimans & Kingma 2016, eq. 2.
    """
    return divide(v, (v**2).sum(-1, keepdim=True), eps=eps, outside=outside) * g.unsqueeze(-1)


def equation(params: NormParams, dim: int) -> Equation:
    """Return the equation of a built-in norm as f(x, weight, bias), its parameters filled in.

    dyt's f takes its learned `alpha` as a keyword (at first the parameter's value), batchnorm's the `mask`.

    Raises:
        TypeError: the parameters are not those of a built-in norm of activations (weightnorm maps weights).
    """
    if isinstance(params, NoneParams):
        return none
    if isinstance(params, DyTParams):
        return partial(dyt, alpha=params.alpha)
    function: Callable[..., Tensor]
    extra: dict[str, Any] = {}
    if isinstance(params, LayerNormParams | LayerNormNoBiasParams):
        function = layernorm
    elif isinstance(params, GemmaRMSNormParams):
        function = offset_rmsnorm
    elif isinstance(params, RMSFamilyParams):
        function = rmsnorm
    elif isinstance(params, PRMSNormParams):
        function, extra = prmsnorm, {"k": params.entries(dim)}
    elif isinstance(params, L2NormParams):
        function = l2norm
    elif isinstance(params, ScaleNormParams):
        function = scalenorm
    elif isinstance(params, CRMSNormParams):
        function = crmsnorm
    elif isinstance(params, BatchNormParams):
        function = batchnorm
    else:
        raise TypeError(f"no equation for {type(params).__name__}")
    assert isinstance(params, DividingParams)
    return partial(function, eps=params.eps, outside=params.outside, **extra)
