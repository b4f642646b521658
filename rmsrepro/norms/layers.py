"""The norms as modules: (..., dim) -> (..., dim), in the input's dtype, the input untouched.

`build_norm` makes them; a norm of your own may start from one of them:

    @register_norm("offset_rmsnorm")
    class OffsetRMSNorm(RMSNorm):
        def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
            super().__init__(dim, RMSNormParams(eps=eps))
            torch.nn.init.zeros_(self.weight)

        def effective_gain(self) -> Tensor:
            return 1.0 + self.weight.float()
"""

from __future__ import annotations

import operator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from rmsrepro.norms.backends import make_kernel
from rmsrepro.norms.params import (
    L2NormParams,
    LayerNormNoBiasParams,
    LayerNormParams,
    NoneParams,
    NormParams,
    PRMSNormParams,
    RMSNormParams,
    plain,
)
from rmsrepro.norms.roles import mark_norm

Params = TypeVar("Params", bound=NormParams)


def check_dim(dim: Any) -> int:
    """Return `dim` as an int.

    Raises:
        TypeError: not a whole number (a tuple of dimensions is not supported).
        ValueError: not positive.
    """
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim is one whole number, the size of the last dimension; got {dim!r}")
    size = operator.index(dim)
    if size < 1:
        raise ValueError(f"dim must be positive, got {size}")
    return size


class ActivationNorm(nn.Module, Generic[Params]):
    """Base of the built-in norms: parameters, the shape check and the call of the backend's kernel.

    Args:
        dim: size of the last dimension of the input.
        params: the norm's parameters; the class's defaults when None.
        backend: composite or torch.

    Attributes:
        weight: gain (dim,), ones at start; None without gain.
        bias: bias (dim,), zeros at start; None without bias.

    Raises:
        TypeError, ValueError: `dim` is no positive whole number.
        BackendUnavailable: the backend does not take these parameters.
    """

    params_class: type[Params]
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, dim: int, params: Params | None = None, *, backend: str = "composite") -> None:
        super().__init__()
        self.dim = check_dim(dim)
        self.params = self.params_class() if params is None else params
        self.backend = backend
        self._kernel = make_kernel(self.params, self.dim, backend)
        has_gain: bool = getattr(self.params, "gain", False)
        # layernorm_nobias has a gain and no field `bias`; none has neither.
        has_bias: bool = getattr(self.params, "bias", False)
        self.weight = nn.Parameter(torch.ones(self.dim)) if has_gain else None
        self.bias = nn.Parameter(torch.zeros(self.dim)) if has_bias else None
        # A subclass may store its gain in another way; the built-ins skip the call.
        self._gain_is_weight = type(self).effective_gain is ActivationNorm.effective_gain
        mark_norm(self, self.params.norm)

    def effective_gain(self) -> Tensor:
        """Return the factor (dim,) that multiplies the normalised input: ones where there is no gain."""
        if self.weight is None:
            return torch.ones(self.dim, device=None if self.bias is None else self.bias.device)
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., dim) over its last dimension.

        Raises:
            ValueError: the last dimension is not `dim`; nothing is broadcast.
        """
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ValueError(
                f"{self.params.norm} was built for a last dimension of {self.dim}, "
                f"got the shape {tuple(x.shape)}"
            )
        gain = self.weight if self._gain_is_weight else self.effective_gain()
        return self._kernel(x, gain, self.bias)

    def extra_repr(self) -> str:
        values = [f"{key}={value}" for key, value in plain(self.params).items()]
        return ", ".join([str(self.dim), *values, f"backend={self.backend}"])


class NoNorm(ActivationNorm[NoneParams]):
    """No normalisation: y = x. It has no parameters, and checks the last dimension like the others.

    Source: the baseline of Zhang & Sennrich 2019, tables 2 to 10.
    """

    params_class = NoneParams


class LayerNorm(ActivationNorm[LayerNormParams]):
    """y = (a - mean(a)) / sqrt(var(a) + eps) * gain + bias, over the last dimension; (..., dim) -> (...,
    dim).

    var is the population variance, from the centred input (two passes: no cancellation for a large mean).
    Parameters: eps, eps_position (outside: / (sqrt(var) + eps)), gain, bias.
    Source: Ba, Kiros & Hinton 2016, eq. 4; Zhang & Sennrich 2019, eq. 2 and 3.
    Differs from RMSNorm in subtracting the mean and in its bias. gain=false leaves the bias in place.
    """

    params_class = LayerNormParams


class LayerNormNoBias(ActivationNorm[LayerNormNoBiasParams]):
    """LayerNorm without bias: y = (a - mean(a)) / sqrt(var(a) + eps) * gain; (..., dim) -> (..., dim).

    Parameters: eps, eps_position, gain.
    Source: the control that separates RMSNorm's two changes, no mean and no bias.
    """

    params_class = LayerNormNoBiasParams


class RMSNorm(ActivationNorm[RMSNormParams]):
    """y = a / sqrt(mean(a^2) + eps) * gain, over the last dimension; (..., dim) -> (..., dim).

    Parameters: eps, eps_position (outside: / (RMS(a) + eps)), gain, bias (off), variant (preset).
    Source: Zhang & Sennrich 2019, eq. 4.
    Differs from LayerNorm in keeping the mean: equal to it, without bias, for rows of mean zero.
    """

    params_class = RMSNormParams


class PRMSNorm(ActivationNorm[PRMSNormParams]):
    """y = a / sqrt(m + eps) * gain, m the mean square of the first k entries; (..., dim) -> (..., dim).

    k = max(1, ceil(p * dim)). Parameters: eps, eps_position, gain, bias (off), p (0.0625), k_rule (floor in
    the authors' code), variant (preset).
    Source: Zhang & Sennrich 2019, section 3.2.
    Differs from RMSNorm in estimating the RMS from a part; p=1 is RMSNorm. Below 16 entries the estimate is
    heavy-tailed.
    """

    params_class = PRMSNormParams


class L2Norm(ActivationNorm[L2NormParams]):
    """y = a / sqrt(sum(a^2) + eps) * gain, over the last dimension; (..., dim) -> (..., dim).

    Parameters: eps, eps_position, gain, bias (off).
    Source: Zhang & Sennrich 2019, section 5.1 (L2-Norm).
    Differs from RMSNorm in lacking sqrt(dim): at start its output has length 1 instead of sqrt(dim).
    """

    params_class = L2NormParams


LAYERS: dict[str, type[ActivationNorm[Any]]] = {
    layer.params_class.norm: layer
    for layer in (NoNorm, LayerNorm, LayerNormNoBias, RMSNorm, PRMSNorm, L2Norm)
}
