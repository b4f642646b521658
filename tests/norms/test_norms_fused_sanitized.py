"""The C++ kernels under sanitizers, of addresses and undefined behaviour, in memory of exactly their size."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from rmsrepro.norms.backends.fused import building, compilers, compiling
from rmsrepro.norms.backends.fused.levels import Level, best_level, known_levels, processor_flags

WORKER = Path(__file__).with_name("sanitizer_worker.py")
CHECKS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-O1")
MEMORY = ("-fsanitize=address", "-fno-sanitize-recover=all", "-g1", "-O1")
PLANTS = {
    "a vector beyond the end of a row": (
        "rows.hpp",
        "for (; j + lanes<E> <= end; j += lanes<E>) f(Whole{}, j);",
        "for (; j < end; j += lanes<E>) f(Whole{}, j);",
    ),
    "a row too many": (
        "norms.hpp",
        "const int64_t last = rows * (thread + 1) / threads;",
        "const int64_t last = rows * (thread + 1) / threads + 1;",
    ),
}


@cache
def runtime() -> str | None:
    """The sanitizers' library, which must be loaded before all others; None where there is none."""
    try:
        command = compilers.toolchain().command
        with_checks = [*command, *CHECKS, "-shared", "-fPIC", "-x", "c++", "-", "-o", os.devnull]
        tried = subprocess.run(with_checks, input=b"int f() { return 1; }", capture_output=True, check=False)
        asked = [*command, "-print-file-name=libasan.so"]
        path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (compilers.KernelsUnavailable, OSError, subprocess.CalledProcessError):
        return None
    return path if tried.returncode == 0 and Path(path).is_absolute() and Path(path).is_file() else None


@pytest.fixture(autouse=True)
def _sanitizers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if runtime() is None:
        pytest.skip("the compiler has no sanitizers that can be loaded beforehand (libasan)")
    monkeypatch.setenv("RMSREPRO_CACHE", str(tmp_path / "cache"))


def ran(library: Path, level: Level, kernels: str, sources: Path) -> subprocess.CompletedProcess[str]:
    # -I and -S: nothing but the standard library is imported.
    command = [sys.executable, "-I", "-S", str(WORKER), str(library), level.name, str(sources), kernels]
    environment = os.environ | {
        "LD_PRELOAD": str(runtime()),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps memory to its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=250)


def levels() -> list[object]:
    """The levels of this processor under all checks; the best one under that of addresses, which is fast."""
    flags = processor_flags()
    return [
        pytest.param(best_level(), MEMORY, id=f"{best_level().name}-addresses"),
        *(
            pytest.param(level, CHECKS, id=level.name, marks=[pytest.mark.slow])
            for level in known_levels()
            if level.needs <= flags
        ),
    ]


@pytest.mark.parametrize(("level", "checks"), levels())
def test_kernels_stay_within_their_memory(level: Level, checks: tuple[str, ...]) -> None:
    library = building.build([level], extra_flags=checks)
    for kernels, least in (("norms", 700), ("gru", 300)):
        done = ran(library, level, kernels, compiling.SOURCES)
        assert done.returncode == 0, done.stderr[-4000:]
        count, word = done.stdout.split()
        assert (int(count) >= least, word) == (True, "calls")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], Path]:
    """Copy the sources with a fault, build from the copy from then on, and return it."""

    def plant(name: str, right: str, wrong: str) -> Path:
        copy = tmp_path / "cpu"
        shutil.copytree(compiling.SOURCES, copy)
        text = (copy / name).read_text(encoding="utf-8")
        assert right in text, "the source has changed: plant the fault elsewhere"
        (copy / name).write_text(text.replace(right, wrong), encoding="utf-8")
        monkeypatch.setattr(compiling, "SOURCES", copy)
        building._digest.cache_clear()
        return copy

    return plant


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.slow] if at else []) for at, name in enumerate(PLANTS)]
)
def test_a_planted_fault_is_found(fault: str, planted: Callable[[str, str, str], Path]) -> None:
    level = known_levels()[-1]
    sources = planted(*PLANTS[fault])
    try:
        library = building.build([level], extra_flags=MEMORY)
    finally:
        building._digest.cache_clear()
    done = ran(library, level, "norms", sources)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert str(sources) in done.stderr
