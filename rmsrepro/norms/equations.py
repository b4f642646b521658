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
    EpsPosition,
    L2NormParams,
    LayerNormNoBiasParams,
    LayerNormParams,
    NoneParams,
    NormParams,
    PRMSNormParams,
    RMSNormParams,
)

Equation = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


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


def equation(params: NormParams, dim: int) -> Equation:
    """Return the equation of a built-in norm as f(x, weight, bias), its parameters filled in.

    Raises:
        TypeError: the parameters are not those of a built-in norm.
    """
    if isinstance(params, NoneParams):
        return none
    function: Callable[..., Tensor]
    extra: dict[str, Any] = {}
    if isinstance(params, LayerNormParams | LayerNormNoBiasParams):
        function = layernorm
    elif isinstance(params, RMSNormParams):
        function = rmsnorm
    elif isinstance(params, PRMSNormParams):
        function, extra = prmsnorm, {"k": params.entries(dim)}
    elif isinstance(params, L2NormParams):
        function = l2norm
    else:
        raise TypeError(f"no equation for {type(params).__name__}")
    return partial(function, eps=params.eps, outside=params.eps_position is EpsPosition.outside, **extra)
