"""The norms as modules: (..., dim) -> (..., dim), in the input's dtype, the input untouched.

`build_norm` makes them; a norm of your own may start from one of them:

    @register_norm("offset_layernorm")
    class OffsetLayerNorm(LayerNorm):
        gain_offset = 1.0   # the stored gain is the offset from one, zero at the start

        def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
            super().__init__(dim, LayerNormParams(eps=eps))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rmsrepro.norms.backends import make_kernel
from rmsrepro.norms.backends.composite import LOW_PRECISION, finish
from rmsrepro.norms.module import ActivationNorm, NormModule
from rmsrepro.norms.params import (
    CRMSNormParams,
    DyTParams,
    GemmaRMSNormParams,
    L2NormParams,
    LayerNormNoBiasParams,
    LayerNormParams,
    LlamaRMSNormParams,
    MistralRMSNormParams,
    NoneParams,
    PRMSNormParams,
    QwenRMSNormParams,
    RMSNormParams,
    ScaleNormParams,
    T5RMSNormParams,
)


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


class ScaleNorm(ActivationNorm[ScaleNormParams]):
    """y = a / sqrt(sum(a^2) + eps) * g with one gain g for all entries; (..., dim) -> (..., dim).

    `weight` is (1,) and starts at sqrt(dim), so that outputs start as long as RMSNorm's.
    Parameters: eps, eps_position (outside: / (|a| + eps)).
    Source: Nguyen & Salazar 2019, section 3.2.
    Differs from L2Norm in having one gain instead of dim, and a start that does not shrink with the width.
    """

    params_class = ScaleNormParams

    def __init__(
        self, dim: int, params: ScaleNormParams | None = None, *, backend: str = "composite"
    ) -> None:
        super().__init__(dim, params, backend=backend)
        self.weight = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, self.dim**0.5)

    def effective_gain(self) -> Tensor:
        """Return the gain, expanded to (dim,)."""
        assert self.weight is not None
        return self.weight.expand(self.dim)


class CRMSNorm(ActivationNorm[CRMSNormParams]):
    """y = a / sqrt((sum(a^2) + sum(a)^2) / (dim + 1) + eps) * gain; (..., dim) -> (..., dim).

    The compressed form of RMSNorm for rows whose sum is zero: of n = dim + 1 entries the last, minus the sum
    of the others, is not stored. `dim` is the stored width.
    Parameters: eps, eps_position (outside: / (root + eps)), gain, bias (off).
    Source: Jiang et al. 2023, "Pre-RMSNorm and Pre-CRMSNorm Transformers", section 4.
    Differs from RMSNorm in counting an entry that is not there; on the stored rows of a centred input it
    equals LayerNorm of the whole.
    """

    params_class = CRMSNormParams


class DyT(NormModule[DyTParams]):
    """y = tanh(alpha * a) * gain + bias, alpha one learned number; (..., dim) -> (..., dim).

    Attributes:
        alpha: (1,), starts at the parameter `alpha`.

    Parameters: alpha (0.5), gain, bias. It has no eps.
    Source: Zhu et al. 2025, "Transformers without Normalization", eq. 1.
    Differs from all norms in having no statistic: rows are squashed entry by entry, not divided, and none of
    the invariances of Zhang & Sennrich 2019, table 1 hold.
    """

    params_class = DyTParams

    def __init__(self, dim: int, params: DyTParams | None = None, *, backend: str = "composite") -> None:
        super().__init__(dim, params, backend=backend)
        self._kernel = make_kernel(self.params, self.dim, backend, squashing)
        self.alpha = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "alpha" in self._parameters:
            nn.init.constant_(self.alpha, self.params.alpha)

    def forward(self, x: Tensor) -> Tensor:
        """Squash x (..., dim); ValueError where the last dimension is not `dim`."""
        self.check_input(x)
        y: Tensor = self._kernel(x, self.weight, self.bias, self.alpha)
        return y


def squashing(params: DyTParams, dim: int) -> Callable[..., Tensor]:
    """Return what DyT computes, as a function of (x (..., dim), gain, bias, alpha (1,))."""
    return squash


def squash(x: Tensor, gain: Tensor | None, bias: Tensor | None, alpha: Tensor) -> Tensor:
    """Return tanh(alpha * x) * gain + bias in x's dtype, rounded once."""
    wide = x.float() if x.dtype in LOW_PRECISION else x
    return finish(torch.tanh(alpha * wide), gain, bias, x.dtype)


class LlamaRMSNorm(ActivationNorm[LlamaRMSNormParams]):
    """y = round(a / sqrt(mean(a^2) + eps)) * gain, round to the input's dtype; (..., dim) -> (..., dim).

    Parameters: eps (1e-6), eps_position, gain, bias (off), casting (before_gain).
    Source: LLaMA's reference implementation (Touvron et al. 2023), as Mistral's and Qwen's.
    Differs from RMSNorm in eps and, for half-precision input, in rounding before the product with the gain as
    well as after it. In fp32 only eps differs.
    """

    params_class = LlamaRMSNormParams


class MistralRMSNorm(LlamaRMSNorm):
    """LlamaRMSNorm with the eps of Mistral 7B, 1e-5."""

    params_class = MistralRMSNormParams


class QwenRMSNorm(LlamaRMSNorm):
    """LlamaRMSNorm under Qwen's name; eps 1e-6 as in Qwen 2 and 3."""

    params_class = QwenRMSNormParams


class T5RMSNorm(ActivationNorm[T5RMSNormParams]):
    """y = round(a / sqrt(mean(a^2) + eps)) * gain, round to the input's dtype; (..., dim) -> (..., dim).

    Parameters: eps (1e-6), eps_position, gain, casting (before_gain). It has no bias.
    Source: Raffel et al. 2020, section 2.1 (a LayerNorm without mean and bias) and their code.
    Differs from LlamaRMSNorm in nothing but the missing bias: both round before the gain. (T5's code rounds
    to the gain's dtype, and returns that; here the output has the input's dtype, as with every norm.)
    """

    params_class = T5RMSNormParams


class GemmaRMSNorm(ActivationNorm[GemmaRMSNormParams]):
    """y = a / sqrt(mean(a^2) + eps) * (1 + weight), rounded once; (..., dim) -> (..., dim).

    `weight` is the gain's offset from one and starts at zero; 1 + weight and the product are in fp32.
    Parameters: eps (1e-6), eps_position, gain, casting (after_gain).
    Source: Gemma's reference implementation (Gemma Team 2024).
    Differs from LlamaRMSNorm in the stored offset, which loses no precision near one and decays towards it,
    and in rounding once. State dicts hold `gain_offset`; one of plain gains is refused.
    """

    params_class = GemmaRMSNormParams
    gain_offset = 1.0


LAYERS: dict[str, type[NormModule[Any]]] = {
    layer.params_class.norm: layer
    for layer in (
        NoNorm,
        LayerNorm,
        LayerNormNoBias,
        RMSNorm,
        PRMSNorm,
        L2Norm,
        ScaleNorm,
        CRMSNorm,
        DyT,
        LlamaRMSNorm,
        MistralRMSNorm,
        QwenRMSNorm,
        T5RMSNorm,
        GemmaRMSNorm,
    )
}
