"""The norms that torch ships: F.layer_norm and F.rms_norm, eps inside the root.

On a CPU F.layer_norm is one fused kernel and F.rms_norm a chain of elementwise operations, so a comparison of
the two within this backend says what swapping the built-ins costs, not what the equations cost.

Their range is torch's own and narrower than the composite backend's: in fp32, F.layer_norm overflows where
the sum of squares does (|a| about 1e18 at width 1024) and gives NaN from about 1e19; F.rms_norm's gradient on
a CPU is accurate up to about 1e12.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rmsrepro.norms.backends import Kernel
from rmsrepro.norms.backends.composite import LOW_PRECISION, identity
from rmsrepro.norms.params import LayerNormNoBiasParams, LayerNormParams, NormParams, RMSNormParams


def _widen(x: Tensor, gain: Tensor | None) -> Tensor:
    """Return x, in fp32 where torch's kernel would be wrong or refuse.

    On a CPU the half-precision backward of F.layer_norm adds the gains' and biases' gradients in half
    precision (65536 ones add up to 256 in bf16). On a GPU it adds in fp32, but wants gain and input of one
    dtype.
    """
    if x.dtype in LOW_PRECISION and (not x.is_cuda or (gain is not None and gain.dtype != x.dtype)):
        return x.float()
    return x


def _as_dtype(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return parameter if parameter is None or parameter.dtype == dtype else parameter.to(dtype)


def layer_norm(shape: tuple[int], eps: float, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """F.layer_norm with the output in x's dtype."""
    wide = _widen(x, gain)
    dtype = wide.dtype
    y = F.layer_norm(wide, shape, _as_dtype(gain, dtype), _as_dtype(bias, dtype), eps)
    return y if y.dtype == x.dtype else y.to(x.dtype)


def rms_norm(shape: tuple[int], eps: float, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """F.rms_norm with the output in x's dtype; it takes no bias."""
    wide = _widen(x, gain)
    y = F.rms_norm(wide, shape, _as_dtype(gain, wide.dtype), eps)
    return y if y.dtype == x.dtype else y.to(x.dtype)


def make_kernel(params: NormParams, dim: int) -> Kernel:
    """Return torch's kernel for parameters that `backends.refusal` takes.

    Raises:
        TypeError: torch has no function for these parameters.
    """
    if isinstance(params, LayerNormParams | LayerNormNoBiasParams):
        return partial(layer_norm, (dim,), params.eps)
    if isinstance(params, RMSNormParams):
        return partial(rms_norm, (dim,), params.eps)
    if params.norm == "none":
        return identity
    raise TypeError(f"torch has no function for {params.norm}")
