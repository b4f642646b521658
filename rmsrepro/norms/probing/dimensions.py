"""Which dimensions of a module's input share a statistic: found by changing entries along each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rmsrepro.norms.probing.affine import TOLERANCE
from rmsrepro.norms.probing.subject import NotCallable, private_copy

MOST_ENTRIES = 1 << 24
"""Larger inputs are not tried at their own size."""

MOST_SHAPES = 4
"""Of the shapes that a module was called with, so many of different numbers of dimensions are tried."""

SHORT = (2, 5, 3, 7)
"""Sizes of dimensions whose size does not matter."""


@dataclass(frozen=True)
class Dimensions:
    """The dimensions along which an entry's output depends on other entries."""

    read: tuple[int, ...]
    """Counted from the first, which is 0; empty where each entry stands alone."""
    shape: tuple[int, ...]
    """Of the input."""

    @property
    def last_only(self) -> bool:
        return self.read == (len(self.shape) - 1,)


def dimensions_read(
    module: nn.Module, row_shape: Sequence[int], shapes: Sequence[tuple[int, ...]] = ()
) -> Dimensions | None:
    """Return along which dimensions `module`, in evaluation, reads other entries; None where it does not run.

    Args:
        module: stays as it is.
        row_shape: of a row that it takes; () where that is not known.
        shapes: of inputs that it was called with. Of several, the first is returned for which it is not the
            last dimension alone. Without them it is called with (batch, time, *row), or, where it does not
            take that, with channels first.
    """
    row = tuple(row_shape)
    found = None
    seen = {len(shape): shape for shape in reversed(shapes) if shape}
    if not seen:
        for shape in ((2, 5, *row), (2, *row, 5), (2, *row, 3, 5)):
            found = _read(module, shape, shape)
            if found is not None:
                return found
        return None
    for shape in list(seen.values())[::-1][:MOST_SHAPES]:
        for tried in _sizes(shape, row):
            one = _read(module, tried, shape)
            if one is not None:
                if one.read and not one.last_only:
                    return one
                found = found or one
                break
    return found


def _sizes(shape: tuple[int, ...], row: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield smaller sizes for the same dimensions, those of a row kept, then the shape as it is."""
    yield tuple(size if size in row else SHORT[place % len(SHORT)] for place, size in enumerate(shape))
    if math.prod(shape) <= MOST_ENTRIES:
        yield shape


def _read(module: nn.Module, shape: tuple[int, ...], called_with: tuple[int, ...]) -> Dimensions | None:
    for dtype in (torch.float64, torch.float32):
        try:
            copied = private_copy(module).eval().to(dtype)
            return Dimensions(_dependences(copied, shape, dtype), called_with)
        except (Exception, SystemExit):  # whatever a user's module raises for a strange input
            continue
    return None


def _dependences(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(4)
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    for one in module.parameters():
        if one.is_floating_point():  # a gain of zero would hide everything
            one.data.copy_(torch.rand(one.shape, generator=generator) + 0.5)
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) + 1.0).to(device, dtype)

    def call(x: Tensor) -> Tensor:
        torch.default_generator.manual_seed(0)
        with torch.no_grad():
            y = module(x.clone())
        if not isinstance(y, Tensor) or y.shape != x.shape:
            raise NotCallable("it does not map a tensor to one of the same shape")
        return y

    y = call(x)
    least = TOLERANCE * y.abs().max()
    # Two places: a statistic of some entries only may read one of them and no other.
    places = (tuple(0 for _ in shape), tuple(size - 1 for size in shape))
    return tuple(
        dimension
        for dimension in range(len(shape))
        if any(
            bool((call(_changed(x, place, dimension))[place] - y[place]).abs() > least) for place in places
        )
    )


def _changed(x: Tensor, place: tuple[int, ...], dimension: int) -> Tensor:
    """Change the other entries of the line through `place` along a dimension."""
    line: tuple[int | slice, ...] = (*place[:dimension], slice(None), *place[dimension + 1 :])
    changed = x.clone()
    changed[line] = 3 * x[line] + 1
    changed[place] = x[place]
    return changed
