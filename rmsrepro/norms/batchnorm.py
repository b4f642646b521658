"""BatchNorm over the positions of a batch, padding left out, and its statistics in loops over time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rmsrepro.norms.backends import make_kernel
from rmsrepro.norms.backends.composite import LOW_PRECISION, VANISHING, finish, vector_norm
from rmsrepro.norms.module import NormModule
from rmsrepro.norms.params import BatchNormParams


@dataclass
class _Pooled:
    """The statistics of several calls, added up: sums over rows, each entry (dim,)."""

    mean: Tensor | float = 0.0
    """Sum of the rows."""
    square: Tensor | float = 0.0
    """Sum of the squared distances to the mean of each call."""
    count: Tensor | float = 0.0
    freedom: Tensor | float = 0.0
    """Rows less one a call: what `square` is divided by."""


class BatchNorm(NormModule[BatchNormParams]):
    """y = (a - mean) / sqrt(var + eps) * gain + bias, mean and var of each entry over the positions.

    forward: x (..., dim), mask (...) or None -> (..., dim). In training the statistics are those of all
    leading positions where the mask is True, each a row; in evaluation they are the running ones.

    Attributes:
        running_mean, running_var: (dim,) buffers; each training call moves them by `momentum` towards its
            own (var divided by rows - 1). Calls with less than two rows leave them as they are. Calls inside
            `recurrence` count as one, each by its rows.

    Parameters: eps, eps_position (outside: / (sqrt(var) + eps)), gain, bias, momentum.
    Source: Ioffe & Szegedy 2015, algorithm 1; Zhang & Sennrich 2019, table 1; per time step in recurrences as
    Cooijmans et al. 2017, with one set of running statistics for all steps.
    Differs from all other norms in looking at other positions: padding must be masked, a batch changes what
    its rows give, and training differs from evaluation. For language modelling it is refused, since the
    statistics would tell of tokens to come.
    """

    params_class = BatchNormParams
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, dim: int, params: BatchNormParams | None = None, *, backend: str = "composite"
    ) -> None:
        super().__init__(dim, params, backend=backend)
        self.register_buffer("running_mean", torch.zeros(self.dim))
        self.register_buffer("running_var", torch.ones(self.dim))
        self._pooled: _Pooled | None = None
        self._by_batch = make_kernel(self.params, self.dim, backend, of_batch)
        self._by_running = make_kernel(self.params, self.dim, backend, of_running)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "running_mean" in self._buffers:
            self.running_mean.zero_()
            self.running_var.fill_(1.0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise x (..., dim), counting the positions where mask (...) is True.

        Raises:
            ValueError: the last dimension is not `dim`, or the mask does not fit the leading ones.
        """
        self.check_input(x)
        if mask is not None and mask.shape != x.shape[:-1]:
            raise ValueError(
                f"{self.params.norm}: a mask for the shape {tuple(x.shape)} has the shape "
                f"{tuple(x.shape[:-1])}, got {tuple(mask.shape)}"
            )
        if not self.training:
            y: Tensor = self._by_running(x, self.weight, self.bias, self.running_mean, self.running_var)
            return y
        flat = None if mask is None else mask.reshape(-1)
        y, mean, length, count = self._by_batch(x, self.weight, self.bias, flat)
        self._count_in(mean, length, count)
        return y

    def _count_in(self, mean: Tensor, length: Tensor, count: Tensor) -> None:
        """Add a call's statistics; `length` is the root of the summed squared distances."""
        freedom = count - 1
        if self._pooled is None:
            self._update(mean, length * (length / freedom.clamp_min(1)), freedom)
            return
        pooled = self._pooled
        # A single row has no spread, and says little of the mean: it counts for nothing, as alone.
        weight = count * (freedom > 0)
        pooled.mean = pooled.mean + weight * mean
        pooled.square = pooled.square + length * length
        pooled.count = pooled.count + weight
        pooled.freedom = pooled.freedom + freedom

    def _update(self, mean: Tensor, var: Tensor, freedom: Tensor) -> None:
        with torch.no_grad():
            for running, new in ((self.running_mean, mean), (self.running_var, var)):
                # What overflowed is left out: an infinite variance would never be forgotten.
                new = torch.where(new.isfinite(), new, running).to(running.dtype)
                momentum = (freedom > 0).to(running.dtype) * self.params.momentum
                running.lerp_(new, momentum)

    def _close(self) -> None:
        """Make one update of what was pooled."""
        pooled, self._pooled = self._pooled, None
        if pooled is not None and isinstance(pooled.count, Tensor) and isinstance(pooled.freedom, Tensor):
            mean = pooled.mean / pooled.count.clamp_min(1)
            assert isinstance(pooled.square, Tensor)
            self._update(mean, pooled.square / pooled.freedom.clamp_min(1), pooled.freedom)


# ------------------------------------------------------------------------------- what it computes


def of_batch(params: BatchNormParams, dim: int) -> Callable[..., tuple[Tensor, ...]]:
    """Return what training computes, as a function of (x (..., dim), gain, bias, mask (rows,) | None).

    It gives y, and of the counted rows: the mean (dim,), the root of the summed squared distances to it
    (dim,), and their number.
    """
    return partial(_of_batch, params.eps, params.outside, dim)


def of_running(params: BatchNormParams, dim: int) -> Callable[..., Tensor]:
    """Return what evaluation computes, as a function of (x (..., dim), gain, bias, mean, var)."""
    return partial(_of_running, params.eps, params.outside)


def _of_batch(
    eps: float,
    outside: bool,
    dim: int,
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, ...]:
    wide = x.float() if x.dtype in LOW_PRECISION else x
    rows = wide.reshape(-1, dim)
    if mask is None:
        count = rows.new_full((), max(rows.shape[0], 1))
        mean = _finite(rows.sum(0) / count)
        off = rows - mean
    else:
        padding = ~mask.unsqueeze(-1)
        count = mask.sum().clamp_min(1).to(rows.dtype)
        mean = _finite(rows.masked_fill(padding, 0.0).sum(0) / count)
        off = (rows - mean).masked_fill(padding, 0.0)
    # Divided by the largest of them first: squares of 1e19 overflow, those of 1e-23 underflow. The factor
    # is a constant of the graph, as it cancels.
    size = off.detach().abs().amax(0) if off.shape[0] else off.new_ones(dim)
    size = size.masked_fill(size == 0, 1.0)
    length = vector_norm(off / size, dim=0)
    std = length * (size / count.sqrt())
    y = finish((wide - mean) * _reciprocal(std, eps, outside), gain, bias, x.dtype)
    return y, mean.detach(), (length * size).detach(), count


def _of_running(
    eps: float,
    outside: bool,
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
) -> Tensor:
    wide = x.float() if x.dtype in LOW_PRECISION else x
    std = var.to(wide.dtype).sqrt()
    return finish((wide - mean.to(wide.dtype)) * _reciprocal(std, eps, outside), gain, bias, x.dtype)


def _reciprocal(std: Tensor, eps: float, outside: bool) -> Tensor:
    """Return 1 / sqrt(std^2 + eps), or 1 / (std + eps); 0 where that denominator is 0."""
    if outside:
        denominator = std + eps
    else:
        # hypot has no gradient at (0, 0), so its second argument never is 0.
        root = std.new_tensor(max(eps**0.5, torch.finfo(std.dtype).tiny))
        denominator = torch.hypot(std, root)
    vanished = denominator < VANISHING[denominator.dtype]
    root = denominator.masked_fill(vanished, torch.inf).rsqrt()
    return root * root


def _finite(mean: Tensor) -> Tensor:
    """Return the mean with 0 for a sum that overflowed: such entries are left where they are."""
    return torch.where(mean.isfinite(), mean, 0.0)


@contextlib.contextmanager
def recurrence(norms: Sequence[BatchNorm]) -> Iterator[None]:
    """Count all training calls inside as one update of the running statistics.

    A loop over time normalises each step by itself. Step by step, the running statistics would end up being
    those of the last few steps, which only the longest sentences reach.
    """
    for norm in norms:
        norm._pooled = _Pooled()
    try:
        yield
    finally:
        for norm in norms:
            norm._close()
