"""Instruction levels of processors: which this one has, how kernels are compiled for each. Imports no torch.

A level is a set of vector instructions. The same source is compiled for each with the vector width of that
level, since vectors too wide for the instructions at hand are several times slower than those that fit.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

FORCED = "RMSREPRO_KERNEL_LEVEL"
"""Environment variable that names the level to use, for comparisons and tests."""


@dataclass(frozen=True)
class Level:
    """One compilation of the kernels."""

    name: str
    width: int
    """Bytes of a vector."""
    flags: tuple[str, ...] = ()
    """Of the compiler."""
    needs: frozenset[str] = frozenset()
    """What /proc/cpuinfo lists for a processor that runs it."""


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    # Compilers otherwise prefer half the width, out of care for processors that slowed down.
    "-mprefer-vector-width=512",
)
_NEEDS_AVX2 = frozenset({"avx2", "fma", "f16c"})
_NEEDS_AVX512 = _NEEDS_AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}

PORTABLE = Level("portable", 16)
"""Any processor: vectors of 16 bytes, which x86-64 and 64-bit ARM have by definition."""

X86_LEVELS = (
    Level("avx512bf16", 64, (*_AVX512, "-mavx512bf16"), _NEEDS_AVX512 | {"avx512_bf16"}),
    Level("avx512", 64, _AVX512, _NEEDS_AVX512),
    Level("avx2", 32, _AVX2, _NEEDS_AVX2),
    PORTABLE,
)
"""Best first."""


def known_levels() -> tuple[Level, ...]:
    """Return the levels that are compiled for this kind of processor, best first."""
    return X86_LEVELS if platform.machine().lower() in {"x86_64", "amd64"} else (PORTABLE,)


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return what Linux lists of this processor's instructions; nothing elsewhere."""
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def best_level() -> Level:
    """Return the level to use: the one that RMSREPRO_KERNEL_LEVEL names, else the best this processor runs.

    Raises:
        ValueError: there is no such level, or this processor does not run it.
    """
    levels, flags = known_levels(), processor_flags()
    wanted = os.environ.get(FORCED)
    if not wanted:
        return next(level for level in levels if level.needs <= flags)
    level = next((level for level in levels if level.name == wanted), None)
    if level is None:
        names = ", ".join(level.name for level in levels)
        raise ValueError(f"{FORCED}={wanted}: the levels of this kind of processor are {names}")
    missing = sorted(level.needs - flags)
    if missing:
        raise ValueError(f"{FORCED}={wanted}: this processor lacks {', '.join(missing)}")
    return level
