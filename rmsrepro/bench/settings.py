"""What of the machine's settings bears on times, and what of it cannot be read."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
CPU_FOLDER = Path("/sys/devices/system/cpu")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30}


def machine_settings(cpu_folder: Path = CPU_FOLDER, huge_pages: Path = HUGE_PAGES) -> dict[str, Any]:
    """Return governor, frequency, huge pages and C library; `unknown` where the system does not tell."""
    return {
        "governor": governor(cpu_folder),
        "frequency_mhz": frequency_mhz(cpu_folder),
        "huge_pages": _chosen(_read(huge_pages)) or UNKNOWN,
        "c_library": " ".join(filter(None, platform.libc_ver())) or UNKNOWN,
    }


def governor(cpu_folder: Path = CPU_FOLDER) -> str:
    """Return what decides the processor's frequency (Linux): `performance`, several names, or unknown."""
    files = sorted(cpu_folder.glob("cpu[0-9]*/cpufreq/scaling_governor"))
    names = {text for file in files if (text := _read(file))}
    return ",".join(sorted(names)) or UNKNOWN


def frequency_mhz(cpu_folder: Path = CPU_FOLDER) -> list[float] | str:
    """Return the lowest and the highest present frequency of a core in MHz, or unknown."""
    files = sorted(cpu_folder.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
    found = [int(text) / 1000 for file in files if (text := _read(file)).isdigit()]
    return [min(found), max(found)] if found else UNKNOWN


def last_level_cache_bytes(cpu_folder: Path = CPU_FOLDER) -> int | None:
    """Return the size of the largest cache of the processor, or None where the system does not tell."""
    sizes = []
    for file in cpu_folder.glob("cpu0/cache/index*/size"):
        text = _read(file)
        number, unit = (text[:-1], text[-1:]) if text[-1:] in _SIZES else (text, "")
        if number.isdigit():
            sizes.append(int(number) * _SIZES.get(unit, 1))
    return max(sizes, default=None)


def settings_flags(settings: Mapping[str, Any], device: str) -> list[str]:
    """Return remarks on settings that a time depends on: those that cannot be read, and a loose governor."""
    if device != "cpu":
        unknown = [] if settings.get("device_clock_mhz") not in (None, UNKNOWN) else ["device clock"]
    else:
        unknown = [
            name
            for name, key in (("governor", "governor"), ("frequency", "frequency_mhz"))
            if settings.get(key, UNKNOWN) == UNKNOWN
        ]
    flags = [f"{name}: unknown, the system does not tell" for name in unknown]
    if device == "cpu" and settings.get("governor", UNKNOWN) not in (UNKNOWN, "performance"):
        flags.append(f"governor: {settings['governor']}, the frequency may move with the load")
    if settings.get("keep_blocks_asked") and not settings.get("keep_blocks"):
        flags.append("large blocks are not kept: this system's C library does not offer it")
    return flags


def agreed(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of all processes as one: the first's, with the extremes of the frequencies."""
    if not found:
        return {}
    joined = dict(found[0])
    ranges = [one["frequency_mhz"] for one in found if isinstance(one.get("frequency_mhz"), list)]
    if ranges:
        joined["frequency_mhz"] = [min(low for low, _ in ranges), max(high for _, high in ranges)]
    return joined


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """Return the word in brackets of "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0]
