"""Memory of a measuring process: blocks that are kept, inputs that no cache holds, the peak of a step."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Names of mallopt's parameters in glibc's malloc.h."""
ALIGNMENT = 64
"""Bytes that every input begins at a multiple of, as with torch's own allocator."""


def keep_large_blocks() -> bool:
    """Let the C library keep all memory it is given back, for the rest of this process.

    By default glibc takes blocks from 128 KiB up (32 MiB at most, as it learns) straight from the system and
    returns them after use, so that a lone layer meets a page fault for every 4 KiB it writes. Returns whether
    the library does it (glibc).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # No block of its own from the system, and none of the heap goes back.
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Return the most memory that tensors made in one call of `step` take at once, in bytes.

    What lay there before (parameters, inputs) does not count. Slow: never on the clock. None where the device
    does not tell.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


class Ring:
    """Inputs and upstream gradients that are handed out in turn, over and over, to all who ask.

    Args:
        shape: of one input.
        gradients: whether there are upstream gradients, and inputs want gradients.
        least_bytes: the inputs take at least so much memory together.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        gradients: bool,
        least_bytes: int,
    ) -> None:
        numel = math.prod(shape)
        item = dtype.itemsize
        stride = math.ceil(numel * item / ALIGNMENT) * ALIGNMENT // item
        count = max(2, math.ceil(least_bytes / (numel * item)))
        self.bytes = count * numel * item * (1 + gradients)
        inputs = _chunks(_normal(count * stride, dtype, device, mean=0.5, seed=0), count, stride, shape)
        upstream = inputs
        if gradients:
            upstream = _chunks(_normal(count * stride, dtype, device, mean=0.0, seed=1), count, stride, shape)
        self._items = [(x.requires_grad_(gradients), dy) for x, dy in zip(inputs, upstream, strict=True)]
        self._next = 0

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the next input, and its upstream gradient where there are any."""
        item = self._items[self._next]
        self._next = (self._next + 1) % len(self._items)
        return item


def _normal(numel: int, dtype: torch.dtype, device: torch.device, *, mean: float, seed: int) -> Tensor:
    """Return numbers from N(mean, 1), drawn once and repeated: a kernel's time does not depend on them."""
    drawn = torch.randn(min(numel, 2**20), generator=torch.Generator().manual_seed(seed)) + mean
    values = torch.empty(numel, dtype=dtype, device=device)
    for start in range(0, numel, drawn.numel()):
        part = values[start : start + drawn.numel()]
        part.copy_(drawn[: part.numel()])
    return values


def _chunks(values: Tensor, count: int, stride: int, shape: tuple[int, ...]) -> list[Tensor]:
    numel = math.prod(shape)
    starts = (number * stride for number in range(count))
    return [values[start : start + numel].view(shape).detach() for start in starts]
