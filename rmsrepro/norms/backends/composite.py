"""Norms from primitive tensor operations, their gradients by autograd, as in the paper's own code.

All norms share one path, so that times of this backend compare equations and not the care taken over them:

    layernorm   c = a - mean(a)     y = c * r(c) * gain + bias
    rmsnorm                         y = a * r(a) * gain
    prmsnorm                        y = a * r(first k of a) * gain
    l2norm, scalenorm               y = a * r(a) * gain, without the 1/sqrt(n)
    crmsnorm                        y = a * r(a and sum(a)) * gain

where r = 1/denominator is one number a row. As the authors' PyTorch module does, the root mean square is
taken from the 2-norm of the row, for two reasons beyond speed: its gradient is of the size of 1/|a|, while
that of mean(a^2) goes as 1/|a|^3 and leaves fp32 at |a| of 1e13; and it is zero, not NaN, for a row of zeros.

Range in fp32: |a| from 1e-18 to 1e18, values and gradients. Beyond, results are finite or 0, never NaN
(layernorm: as long as |a - mean(a)| itself is finite). That costs two operations on one number a row, the
same for all norms, and one more for layernorm's mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rmsrepro.norms.backends import Kernel
from rmsrepro.norms.params import (
    Casting,
    CRMSNormParams,
    DividingParams,
    L2NormParams,
    LayerNormNoBiasParams,
    LayerNormParams,
    NoneParams,
    NormParams,
    PRMSNormParams,
    RMSFamilyParams,
    ScaleNormParams,
)

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
"""Computed in fp32 throughout and rounded at the end, or with `casting=before_gain` before the gain."""

LONGEST_SUM = 256
"""Most squares added in one go: 256 * (1e18)^2 is still below fp32's largest number, 3.4e38."""

LARGEST = {torch.float32: torch.finfo(torch.float32).max, torch.float64: torch.finfo(torch.float64).max}

SQUARE_FITS = {dtype: number**0.5 for dtype, number in LARGEST.items()}
"""The largest number whose square is finite."""

SUM_FITS = {torch.float32: 1e30, torch.float64: 1e200}
"""A sum beyond is of entries whose squares overflow by far, whatever the width."""

VANISHING = {torch.float32: 1e-25, torch.float64: 1e-200}
"""A smaller denominator counts as zero. The root mean square of squares that do not underflow is larger, and
denominator^(-3/2), which its gradient needs, is still finite."""

vector_norm = torch.linalg.vector_norm


class RowScale:
    """r = 1/denominator for each row of v (..., size): called with v, returns (..., 1).

    Args:
        size: last dimension of v.
        mean: whether the squares are averaged (rms) or summed (l2).
        unstored: entries of the row that v does not hold (0, or 1 for crmsnorm): `call` is given them.
        eps: as in the parameters; 0 is legal.
        outside: whether eps is added to the root instead of under it.
        split: whether a long row is summed in parts. Off for a slice of the rows: torch is slow in summing
            parts of a slice.
    """

    def __init__(
        self, size: int, *, mean: bool, eps: float, outside: bool, split: bool = True, unstored: int = 0
    ) -> None:
        self.eps = eps
        self.outside = outside
        self.parts = _parts(size) if split else 1
        self.part_root = (size // self.parts) ** 0.5
        # Without parts a long row is made smaller by a power of two, which is exact.
        halvings = math.ceil(math.log2(size / LONGEST_SUM) / 2) if size > LONGEST_SUM else 0
        self.shrink = 1.0 if self.parts > 1 else 2.0**-halvings
        self.root_count = (size + unstored) ** 0.5 if mean else 1.0
        self.divisor = self.root_count / self.part_root if self.parts > 1 else self.root_count * self.shrink
        # hypot(rms, sqrt(eps)) is sqrt(rms^2 + eps) without leaving the range, in both directions. A tensor
        # of no dimensions takes part on any device; one for each dtype saves a conversion a call.
        root = math.sqrt(eps)
        # It is never 0, since hypot has no gradient at (0, 0).
        self.root_eps = _numbers(root)
        self.tiny = _numbers(0.0) if unstored else {}
        # The 2-norm of one entry is its magnitude, with no square that overflows: the limit is set by hand.
        self.largest = SQUARE_FITS if size == 1 else LARGEST
        self.can_vanish = (eps if outside else root) < 1e-18

    def __call__(self, v: Tensor, unstored: Tensor | None = None) -> Tensor:
        """Return (..., 1) for v (..., size) and, if there is one, the row's unstored entry (..., 1)."""
        largest = self.largest[v.dtype]
        if self.parts > 1:
            v = vector_norm(v.unflatten(-1, (self.parts, -1)), dim=-1).clamp_max(largest) / self.part_root
        elif self.shrink != 1.0:
            v = v * self.shrink
        # An overflowed norm becomes the largest number, where clamp's gradient is 0: no inf / inf is formed.
        rms: Tensor = vector_norm(v, dim=-1, keepdim=True).clamp_max(largest)
        if self.divisor != 1.0:
            rms = rms / self.divisor
        if unstored is not None:
            # Where the sum is too large, so are the squares: it is cut off as they are, with gradient 0. The
            # inner hypot is never 0, where the outer had no gradient; with eps inside it adds eps on the way.
            fits = SUM_FITS[v.dtype]
            unstored = torch.where(unstored.abs() < fits, unstored, fits) / self.root_count
            root_eps = self.root_eps if not self.outside else self.tiny
            rms = torch.hypot(torch.hypot(rms, root_eps[rms.dtype]), unstored)
        if self.outside:
            denominator: Tensor = rms + self.eps
        elif self.eps and unstored is None:
            denominator = torch.hypot(rms, self.root_eps[rms.dtype])
        else:
            denominator = rms
        if not self.can_vanish:
            return denominator.reciprocal()
        # A denominator of 0 gives 1/inf = 0, and gradient 0. The reciprocal's own gradient, 1/denominator^2,
        # would overflow for rows near 1e-20; through the root it does not.
        vanished = denominator < VANISHING[denominator.dtype]
        root: Tensor = denominator.masked_fill(vanished, math.inf).rsqrt()
        return root * root


def _numbers(value: float) -> dict[torch.dtype, Tensor]:
    """Return max(value, the smallest normal number) as a tensor of no dimensions, for each dtype."""
    return {
        dtype: torch.tensor(max(value, torch.finfo(dtype).tiny), dtype=dtype, device="cpu")
        for dtype in LARGEST
    }


def _parts(size: int) -> int:
    """Return the fewest equal parts of at most LONGEST_SUM entries, or 1 where `size` has no such divisor."""
    if size <= LONGEST_SUM:
        return 1
    for parts in range(math.ceil(size / LONGEST_SUM), LONGEST_SUM + 1):
        if size % parts == 0 and size // parts >= 16:
            return parts
    return 1


def centre(x: Tensor) -> Tensor:
    """Return x - mean(x), (..., n) -> (..., n)."""
    mean = x.mean(-1, keepdim=True)
    # A sum that overflowed (|x| beyond 1e38/n) would make the row NaN; such a row is left where it is. In
    # place and outside the graph, since that is the cheapest; a NaN in x itself still reaches the output
    # through x.
    mean.detach().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return x - mean


def finish(y: Tensor, gain: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return y * gain + bias in `dtype`, rounded once."""
    if gain is not None:
        y = y * gain
    if bias is not None:
        y = y + bias
    return y if y.dtype == dtype else y.to(dtype)


def finish_rounded(y: Tensor, gain: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return y * gain + bias in `dtype`, rounded before the gain and after each operation."""
    y = y.to(dtype)
    if gain is not None:
        y = (y * gain).to(dtype)
    return y if bias is None else (y + bias).to(dtype)


FINISH = {Casting.after_gain: finish, Casting.before_gain: finish_rounded}


def identity(x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """The kernel of norm=none."""
    return x


def layernorm(scale: RowScale, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """Centre each row, then scale it by its own root mean square."""
    centred = centre(x.float() if x.dtype in LOW_PRECISION else x)
    return finish(centred * scale(centred), gain, bias, x.dtype)


def rms(
    scale: RowScale,
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    *,
    finish: Callable[..., Tensor] = finish,
) -> Tensor:
    """Scale each row: rmsnorm or l2norm, as `scale` averages or sums."""
    wide = x.float() if x.dtype in LOW_PRECISION else x
    return finish(wide * scale(wide), gain, bias, x.dtype)


def partial_rms(
    scale: RowScale,
    k: int,
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    *,
    finish: Callable[..., Tensor] = finish,
) -> Tensor:
    """Scale each row by the statistic of its first k entries."""
    wide = x.float() if x.dtype in LOW_PRECISION else x
    return finish(wide * scale(wide[..., :k]), gain, bias, x.dtype)


def compressed_rms(scale: RowScale, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale each row by the statistic of its entries and of the one left out, which is minus their sum."""
    wide = x.float() if x.dtype in LOW_PRECISION else x
    return finish(wide * scale(wide, wide.sum(-1, keepdim=True)), gain, bias, x.dtype)


def make_kernel(params: NormParams, dim: int, *, split: bool = True) -> Kernel:
    """Return the composite kernel of a built-in norm of width `dim`.

    Args:
        params: the norm's parameters.
        dim: size of the last dimension.
        split: as for `RowScale`. For torch's operations parts are cheaper than making the row smaller.

    Raises:
        TypeError: the norm has no kernel of x, gain and bias alone.
    """
    if isinstance(params, NoneParams):
        return identity
    if isinstance(params, PRMSNormParams):
        k, rounded = params.entries(dim), FINISH[params.casting]
        if k < dim:
            return partial(partial_rms, row_scale(params, k, mean=True, split=False), k, finish=rounded)
        return partial(rms, row_scale(params, dim, mean=True, split=split), finish=rounded)
    if isinstance(params, LayerNormParams | LayerNormNoBiasParams):
        return partial(layernorm, row_scale(params, dim, mean=True, split=split))
    if isinstance(params, RMSFamilyParams):
        return partial(rms, row_scale(params, dim, mean=True, split=split), finish=FINISH[params.casting])
    if isinstance(params, L2NormParams | ScaleNormParams):
        return partial(rms, row_scale(params, dim, mean=False, split=split))
    if isinstance(params, CRMSNormParams):
        return partial(compressed_rms, row_scale(params, dim, mean=True, split=split, unstored=1))
    raise TypeError(f"no composite kernel for {type(params).__name__}")


def row_scale(
    params: DividingParams, size: int, *, mean: bool, split: bool = True, unstored: int = 0
) -> RowScale:
    """Return the `RowScale` with the eps of `params`."""
    return RowScale(size, mean=mean, eps=params.eps, outside=params.outside, split=split, unstored=unstored)
