"""A first call of a user's norm, on a tiny input: what is wrong with it shows before anything is trained."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rmsrepro.config.errors import first_line
from rmsrepro.norms.factory import NormSpec, build_weight_norm
from rmsrepro.norms.linear import apply_norm
from rmsrepro.norms.registry import norm_info

ROWS_TOLERANCE = 1e-5
"""How far a row's output may move, relative to the largest, when other rows change: rounding."""
_SHAPE = (2, 3)
"""Sentences and positions of the input."""


class WrongNorm(ValueError):
    """A norm whose forward does not do what a norm's must."""


def try_norm(spec: NormSpec, dim: int, devices: Sequence[str] = ("cpu",)) -> None:
    """Call a user's norm in training mode on an fp32 input (2, 3, dim), or (dim, 3) for a norm of weights.

    The norm is built for each call. The global random state on the CPU is left as it was, and no gradient is
    computed. Does nothing for the package's own norms.

    Args:
        spec: the norm.
        dim: the width.
        devices: where it may run; those after the first are for norms that do not run there.

    Raises:
        WrongNorm: the forward raises, its output has another shape or dtype than the input, or a norm
            without a `mask` lets rows influence each other.
        Exception: whatever the norm's constructor raises.
    """
    info = norm_info(spec.name)
    if info.factory is None:
        return
    of_weights = info.scope == "weight"

    def make() -> nn.Module:
        return build_weight_norm(spec, dim) if of_weights else spec.build(dim)

    shape = (dim, 3) if of_weights else (*_SHAPE, dim)
    mask = None
    if info.takes_mask:
        mask = torch.ones(_SHAPE, dtype=torch.bool)
        mask[-1, -1] = False
    for device in devices:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
        try:
            y = _call(make, x, None if mask is None else mask.to(device))
            break
        except WrongNorm as error:
            failure = error
    else:
        raise failure
    if not isinstance(y, Tensor):
        raise WrongNorm(f"its forward returns {type(y).__name__} instead of a tensor")
    if y.shape != x.shape:
        raise WrongNorm(f"its forward returns the shape {tuple(y.shape)} for an input of shape {shape}")
    if y.dtype != x.dtype:
        raise WrongNorm(f"its forward returns {y.dtype} for an input of {x.dtype}: cast back at the end")
    if of_weights or info.takes_mask:
        return
    moved = influence(make, x)
    if moved is not None and moved > ROWS_TOLERANCE:
        raise WrongNorm(
            "its rows influence each other: the output at one position changes with the input at others; a "
            "norm over positions takes them in as forward(x, mask=None) (docs/own_norm.md)"
        )


def influence(make: Callable[[], nn.Module], x: Tensor) -> float | None:
    """Return how far the first row's output moves, relative to its largest entry, when all others change.

    Args:
        make: builds the norm; each call gets a norm and random numbers that are like those of the others.
        x: the input (..., dim), of two rows or more.

    Returns:
        0 where rows are independent; None where the same input gives other values each time.
    """
    other = 2 - 3 * x
    first = (0,) * (x.dim() - 1)
    other[first] = x[first]
    before, again, after = (_call(make, one.clone())[first].double() for one in (x, x, other))
    if not torch.equal(before.nan_to_num(), again.nan_to_num()):
        return None
    if not torch.equal(before.isfinite(), after.isfinite()):
        return float("inf")
    size = float(before.nan_to_num().abs().max()) or 1.0
    return float((after - before).nan_to_num().abs().max()) / size


def _call(make: Callable[[], nn.Module], x: Tensor, mask: Tensor | None = None) -> Tensor:
    devices = [] if x.device.type == "cpu" else [x.device]
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(1)
        module = make().to(x.device).train()
        for parameter in module.parameters():
            # A gain of zero would hide everything.
            if parameter.is_floating_point() and not is_lazy(parameter):
                parameter.add_(0.1)
        try:
            return apply_norm(module, x, mask)
        except (Exception, SystemExit) as error:
            raise WrongNorm(
                f"its forward fails on an input of shape {tuple(x.shape)}: "
                f"{type(error).__name__}: {first_line(error)}{_place(error)}"
            ) from error


def _place(error: BaseException) -> str:
    """Return the line of the user's own code that an error comes from."""
    import rmsrepro

    ours = tuple(str(Path(one.__path__[0])) for one in (rmsrepro, torch))
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(ours)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
