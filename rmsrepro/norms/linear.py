"""Norms of linear maps: n(W x + b), and maps whose weights are normalised instead of what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsrepro.norms.backends import make_kernel
from rmsrepro.norms.backends.composite import LOW_PRECISION, RowScale, row_scale
from rmsrepro.norms.factory import NormSpec, build_weight_norm
from rmsrepro.norms.module import check_dim
from rmsrepro.norms.params import WeightNormParams
from rmsrepro.norms.roles import mark_norm, takes_mask


class WeightNorm(nn.Module):
    """W with rows W_i = g_i v_i / sqrt(|v_i|^2 + eps): v (rows, in) -> W (rows, in), in v's dtype.

    Args:
        rows: how many rows.
        params: eps, eps_position (outside: / (|v_i| + eps)).
        backend: composite or compiled.

    Attributes:
        weight: the gains g (rows,); ones until `match` is called.

    Source: Salimans & Kingma 2016, eq. 2; Zhang & Sennrich 2019, table 1.
    Differs from the norms of activations in that it costs no more for more positions, and in what it does not
    notice: the scale of the data. It has no bias; the linear map keeps its own.
    """

    def __init__(
        self, rows: int, params: WeightNormParams | None = None, *, backend: str = "composite"
    ) -> None:
        super().__init__()
        self.dim = check_dim(rows)
        self.params = WeightNormParams() if params is None else params
        self.backend = backend
        self.weight = nn.Parameter(torch.ones(self.dim))
        self.bias = None
        mark_norm(self, self.params.norm)

    def effective_gain(self) -> Tensor:
        """Return the gains (rows,)."""
        return self.weight

    def forward(self, v: Tensor) -> Tensor:
        """Normalise the rows of v (rows, in); ValueError where it has other rows."""
        if v.ndim != 2 or v.shape[0] != self.dim:
            raise ValueError(
                f"{self.params.norm} was built for {self.dim} rows, got the shape {tuple(v.shape)}"
            )
        w: Tensor = make_kernel(self.params, v.shape[-1], self.backend, row_normalising)(v, self.weight)
        return w

    def match(self, v: Tensor) -> None:
        """Set the gains so that W is v, (rows, in): the map computes what it would without the norm."""
        with torch.no_grad():
            wide = v.float() if v.dtype in LOW_PRECISION else v
            scale = row_scale(self.params, wide.shape[-1], mean=False)(wide)
            self.weight.copy_(scale.squeeze(-1).reciprocal().nan_to_num(posinf=0.0))


def row_normalising(params: WeightNormParams, width: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what WeightNorm computes, as a function of (v (rows, width), gains (rows,))."""
    return partial(normalise_rows, row_scale(params, width, mean=False))


def normalise_rows(scale: RowScale, v: Tensor, gain: Tensor) -> Tensor:
    """Return the rows of v scaled, each times its gain."""
    wide = v.float() if v.dtype in LOW_PRECISION else v
    return (wide * scale(wide) * gain.unsqueeze(-1)).to(v.dtype)


class WeightNormLinear(nn.Linear):
    """A linear map with normalised rows: (..., in) -> (..., out).

    Its parameters are those of the map it was made from, `weight` (out, in) now holding the directions v, and
    `norm.weight`, the gains.

    Args:
        linear: the map; its parameters are shared.
        norm: the norm of as many rows as `rows` selects.
        rows: the slices of rows that are normalised, in order; None for all.
    """

    def __init__(self, linear: nn.Linear, norm: nn.Module, rows: Sequence[slice] | None = None) -> None:
        # Not nn.Linear's own constructor: it would draw random weights that nobody needs.
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.norm = norm.to(linear.weight)
        self.index: Tensor | None
        index = None if rows is None else torch.cat([torch.arange(self.out_features)[one] for one in rows])
        self.register_buffer("index", index, persistent=False)
        self.match_gains()

    def effective_weight(self) -> Tensor:
        """Return the matrix W (out, in) that the map multiplies with."""
        if self.index is None:
            normed: Tensor = self.norm(self.weight)
            return normed
        return self.weight.index_copy(0, self.index, self.norm(self.weight[self.index]))

    def match_gains(self) -> None:
        """Set the gains so that the map computes what it would without the norm, if the norm can."""
        match: Callable[[Tensor], None] | None = getattr(self.norm, "match", None)
        if match is not None:
            match(self.weight if self.index is None else self.weight[self.index])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.effective_weight(), self.bias)


class NormedLinear(nn.Module):
    """n(W x + b), or with a norm of weights W' x + b: (..., in) -> (..., out). Made by `normed_linear`.

    Attributes:
        linear: the linear map, a `WeightNormLinear` for a norm of weights.
        norm: the norm of its output; None for `none` and for a norm of weights.
    """

    def __init__(self, linear: nn.Linear, norm: nn.Module | None) -> None:
        super().__init__()
        self.linear = linear
        self.norm = norm

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x (..., in); mask (...) is True for the positions that a norm over positions may count."""
        return apply_norm(self.norm, self.linear(x), mask)


def normed_linear(linear: nn.Linear, spec: NormSpec) -> NormedLinear:
    """Normalise a linear map, by its output or by its weights as the norm's scope says.

    Args:
        linear: the map; its parameters are shared with the result.
        spec: the norm.

    Raises:
        ValueError, TypeError, BackendUnavailable: as `build_norm`.
    """
    if spec.scope == "weight":
        return NormedLinear(weight_normed(linear, spec), None)
    return NormedLinear(linear, None if spec.is_none else spec.build(linear.out_features))


def weight_normed(linear: nn.Linear, spec: NormSpec, rows: Sequence[slice] | None = None) -> nn.Linear:
    """Return `linear` with normalised weights for a norm of weights, itself for any other norm.

    Args:
        linear: the map; its parameters are shared with the result.
        spec: the norm.
        rows: the slices of output rows that are normalised, in order; None for all, [] for none.
    """
    if spec.scope != "weight" or rows == []:
        return linear
    chosen = range(linear.out_features)
    count = len(chosen) if rows is None else sum(len(chosen[one]) for one in rows)
    return WeightNormLinear(linear, build_weight_norm(spec, count), rows)


def match_gains(model: nn.Module) -> None:
    """After weights were drawn anew, let each `WeightNormLinear` of `model` compute what it would without."""
    for module in model.modules():
        if isinstance(module, WeightNormLinear):
            module.match_gains()


def apply_norm(norm: nn.Module | None, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return norm(x), or x without a norm; a norm over positions is given the mask (...) of x (..., dim)."""
    if norm is None:
        return x
    y: Tensor = norm(x, mask) if takes_mask(norm) else norm(x)
    return y
