"""What the fused kernels compute, in the numbers that a kernel needs. Read without torch.

One formula covers every norm that they take. For a row a of n entries

    c_j = a_j - mean(a)      or a_j itself, without centring
    m   = sum of c_j^2 over the first k entries, times inverse_count
    d   = sqrt(m + eps)      or sqrt(m) + eps (outside)
    y_j = c_j / d * gain_j + bias_j          0 / 0 is 0, with gradient 0

and its gradient, with h = gain * dL/dy and t = c / d,

    dL/da_j = (h_j - mean(h) [centred] - [j < k] w t_j sum(h t)) / d,
    w       = inverse_count, or inverse_count * d / sqrt(m) (outside; 0 where m is 0).

In floating point the mean of equal entries may miss them by a rounding error, which a centred norm with eps
= 0 divides by itself: rows of one number give 0 only where their mean is exact.

Sources: Ba et al. 2016, eq. 4; Zhang & Sennrich 2019, eq. 4 and section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from rmsrepro.norms.params import (
    Casting,
    DividingParams,
    L2NormParams,
    LayerNormNoBiasParams,
    LayerNormParams,
    NormParams,
    PRMSNormParams,
    RMSFamilyParams,
    ScaleNormParams,
)


@dataclass(frozen=True)
class Rule:
    """A norm of rows of one width, as the kernels take it."""

    k: int
    """How many leading entries the statistic reads."""
    centred: bool
    """Whether the mean is subtracted first; then k is the width."""
    inverse_count: float
    """1/k where the squares are averaged, 1 where they are added."""
    eps: float
    outside: bool
    """Whether eps is added to the root instead of under it."""
    rounded: bool
    """Whether c / d is rounded to the input's dtype before the product with the gain (and that product before
    the bias): `casting=before_gain`."""

    @classmethod
    def of(cls, params: NormParams, dim: int) -> Rule | None:
        """Return the rule of a built-in norm of width `dim`, or None where the formula does not cover it."""
        k, mean = dim, True
        if isinstance(params, PRMSNormParams):
            k = params.entries(dim)
        elif isinstance(params, L2NormParams | ScaleNormParams):
            mean = False
        elif not isinstance(params, RMSFamilyParams | LayerNormParams | LayerNormNoBiasParams):
            return None
        assert isinstance(params, DividingParams)
        return cls(
            k=k,
            centred=isinstance(params, LayerNormParams | LayerNormNoBiasParams),
            inverse_count=1 / k if mean else 1.0,
            eps=params.eps,
            outside=params.outside,
            rounded=getattr(params, "casting", Casting.after_gain) is Casting.before_gain,
        )
