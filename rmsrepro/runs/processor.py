"""The processor and the tools of this machine, read from the system. Imports no torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

CPU_FOLDER = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
_COMPILERS = ("c++", "g++", "clang++")


_PLACE = ("physical_package_id", "die_id", "core_id")


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cpus() -> list[int]:
    """Return the numbers of the logical processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_cores() -> int:
    """Return how many processors this process may use."""
    return len(usable_cpus())


def physical_cores(cpus: list[int], cpu_folder: Path = CPU_FOLDER) -> int | None:
    """Return on how many physical cores these logical processors lie, or None where that is not told."""
    places = set()
    for cpu in cpus:
        found = tuple(_number(cpu_folder / f"cpu{cpu}/topology/{name}") for name in _PLACE)
        if found[-1] is None:
            return None
        places.add(found)
    return len(places) or None


def cpu_quota(cgroups: Path = CGROUPS) -> float | None:
    """Return how many processors a container's limit amounts to, or None where there is no limit."""
    try:
        quota, period = (cgroups / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        quota = str(_number(cgroups / "cpu/cpu.cfs_quota_us"))
        period = str(_number(cgroups / "cpu/cpu.cfs_period_us"))
    if not (quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0):
        return None
    return int(quota) / int(period)


def load_average() -> float | None:
    """Return how many processes ran or waited to run in the last minute, or None where that is not told."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def compiler() -> str | None:
    """Return the first line that the C++ compiler (CXX, else c++, g++, clang++) says of itself, or None."""
    for name in filter(None, (os.environ.get("CXX"), *_COMPILERS)):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return f"{name}: {(said.stdout.splitlines() or ['of unknown version'])[0].strip()}"
    return None


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
