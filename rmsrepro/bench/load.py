"""What else the machine did while we measured."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq and steal in the first line of /proc/stat."""


class OtherLoad:
    """Processors kept busy by others between the construction and `stop`.

    Linux only; elsewhere, or where /proc/stat is not maintained, the answer is None: unknown.
    """

    def __init__(self, stat_path: Path = Path("/proc/stat")) -> None:
        self._stat_path = stat_path
        self._began = time.perf_counter()
        self._busy = self._machine_busy_seconds()
        self._own = _own_busy_seconds()

    def stop(self) -> float | None:
        """Mean number of cores busy with others, or None where that cannot be read."""
        busy, own = self._machine_busy_seconds(), _own_busy_seconds() - self._own
        elapsed = time.perf_counter() - self._began
        if busy is None or self._busy is None or elapsed <= 0:
            return None
        machine = busy - self._busy
        # A machine that was less busy than this process alone: the counters do not count.
        if machine < 0.5 * own:
            return None
        return max(0.0, machine - own) / elapsed

    def _machine_busy_seconds(self) -> float | None:
        try:
            first = self._stat_path.read_text().split("\n", 1)[0].split()
            ticks = [int(field) for field in first[1:]]
            return sum(ticks[field] for field in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError, AttributeError):
            return None


def _own_busy_seconds() -> float:
    times = os.times()
    return times.user + times.system


def peak_rss_bytes() -> int | None:
    """Largest resident memory of this process so far, or None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if os.uname().sysname == "Darwin" else int(peak) * 1024


def load_flags(processes: Sequence[Mapping[str, Any]], limit: float) -> tuple[bool, list[str]]:
    """Whether other programs left the processor alone, as far as is known, and what to say of it.

    Load that the system does not tell is flagged as unknown and takes no trust: the A/A control, which
    must be conclusive, has met that load as well.
    """
    known = {
        process["process"]: process["other_load"]
        for process in processes
        if process.get("other_load") is not None
    }
    loud = {number: load for number, load in known.items() if load > limit}
    flags = []
    if loud:
        flags.append(
            f"other load: in {len(loud)} of {len(processes)} processes other programs kept up to "
            f"{max(loud.values()):.2f} cores busy (bench.max_other_load={limit:g})"
        )
    if len(known) < len(processes):
        flags.append("other load: unknown, the system does not tell")
    return not loud, flags
