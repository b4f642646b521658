"""Memory of a measuring process: blocks that the C library keeps, and what a step takes at its peak."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Names of mallopt's parameters in glibc's malloc.h."""


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
