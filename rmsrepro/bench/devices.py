"""On which device is timed, and by which clock."""

from __future__ import annotations

import torch

from rmsrepro.bench.protocol import Clock, EventClock, no_synchronize
from rmsrepro.bench.settings import UNKNOWN


def choose_device(accelerator: str) -> torch.device:
    """Return the device that `trainer.accelerator` (auto, cpu, gpu) means."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator == "cpu" or found is None else found


def choose_clock(device: torch.device) -> Clock:
    """Return the clock for a device: its own events where it has them."""
    if device.type == "cuda":
        return EventClock(torch.accelerator.synchronize, lambda: torch.cuda.Event(enable_timing=True))
    return Clock(no_synchronize if device.type == "cpu" else torch.accelerator.synchronize)


def device_clock_mhz(device: torch.device) -> int | str:
    """Return the present clock of a GPU in MHz, or `unknown` (it takes NVIDIA's management library)."""
    try:
        return int(torch.cuda.clock_rate(device)) if device.type == "cuda" else UNKNOWN
    except (RuntimeError, ImportError, AssertionError):
        return UNKNOWN
