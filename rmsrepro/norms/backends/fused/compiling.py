"""From the C++ sources to a library in a given folder: what is compiled, and how. Imports no torch."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rmsrepro.norms.backends.fused.compilers import (
    KernelsUnavailable,
    Toolchain,
    failure,
    first_error,
    why_not_loaded,
)
from rmsrepro.norms.backends.fused.levels import Level
from rmsrepro.norms.backends.fused.programs import Done, TooSlow, run_all

SOURCES = Path(__file__).parent / "cpu"
COMMON_FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-funswitch-loops",
    "-pthread",
)
COMPILE_S = 300.0
"""Longest time for one file."""
Tell = Callable[[str], None]


def sources() -> list[Path]:
    """Return the C++ files, headers included, in a fixed order."""
    found = (path for path in SOURCES.iterdir() if path.suffix in {".cpp", ".hpp"})
    return sorted(path for path in found if not path.name.startswith("."))


def build_library(
    tools: Toolchain,
    levels: Sequence[Level],
    folder: Path,
    extra_flags: Sequence[str],
    tell: Tell,
) -> tuple[Path, bool]:
    """Compile the kernels for `levels` in `folder`, and see that what comes out can be loaded.

    Returns:
        The library, and whether it uses several threads.

    Raises:
        BuildFailed: the compiler fails, or the library cannot be loaded.
        KernelsUnavailable: the same for a reason that may pass: too little time, memory or disk.
    """
    library = folder / "kernels.so"
    functions = [f"rmsrepro_{name}_{level.name}" for level in levels for name in ("forward", "backward")]
    openmp = tools.openmp
    while True:
        _compile(tools, levels, library, extra_flags, openmp, tell)
        # What is linked to a sanitizer can be loaded only where that was loaded first.
        wrong = None if extra_flags else why_not_loaded(library, functions)
        if wrong is None:
            break
        if not openmp:
            raise failure(
                wrong,
                f"{shlex.join(tools.command)} built kernels that cannot be loaded ({wrong}); CXX names "
                "another compiler, RMSREPRO_CACHE another folder",
            )
        openmp = False  # some compilers have the header of OpenMP and not its library
    return library, openmp


def _compile(
    tools: Toolchain,
    levels: Sequence[Level],
    library: Path,
    extra_flags: Sequence[str],
    openmp: bool,
    tell: Tell,
) -> None:
    common = [*tools.command, *COMMON_FLAGS, *(["-fopenmp"] if openmp else []), *extra_flags]
    commands: list[list[str]] = []
    objects: list[Path] = []
    open_files = dict.fromkeys((level.name for level in levels), 0)
    owners: list[str | None] = []

    def add(source: Path, level: str | None, flags: Sequence[str]) -> None:
        objects.append(library.parent / f"{source.stem}-{level}.o")
        commands.append([*common, *flags, "-c", str(source), "-o", str(objects[-1])])
        owners.append(level)

    for level in levels:
        for source in sources():
            if source.suffix == ".cpp" and source.name != "binding.cpp":
                flags = [*level.flags, f"-DLEVEL={level.name}", f"-DWIDTH={level.width}"]
                add(source, level.name, flags)
                open_files[level.name] += 1
    if tools.python_headers is not None:
        add(SOURCES / "binding.cpp", None, [f"-I{tools.python_headers}"])
    since = time.monotonic()

    def compiled(index: int, done: Done) -> None:
        _check(tools, done, objects[index])
        owner = owners[index]
        if owner is not None:
            open_files[owner] -= 1
            if open_files[owner] == 0 and len(levels) > 1:
                tell(f"{owner}: compiled after {time.monotonic() - since:.1f} s")

    _run_all(commands, compiled)
    # Python's own symbols are found in the process that loads the library.
    undefined = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
    # A C compiler compiles C++, and would leave out its library.
    runtime = "-lc++" if platform.system() == "Darwin" else "-lstdc++"
    link = [*common, "-shared", *undefined, *map(str, objects), runtime, "-o", str(library)]
    _run_all([link], lambda index, done: _check(tools, done, library))


def _run_all(commands: Sequence[Sequence[str]], ended: Callable[[int, Done], None]) -> None:
    try:
        run_all(commands, limit_s=COMPILE_S, ended=ended)
    except TooSlow as error:
        raise KernelsUnavailable(f"{error}; CXX names another compiler") from error


def _check(tools: Toolchain, done: Done, result: Path) -> None:
    if done.code != 0 or not result.is_file():
        why = first_error(done.err) if done.code != 0 else "it wrote no file"
        raise failure(
            f"{done.err}\nexit code {done.code}",
            f"{shlex.join(tools.command)} failed to build the kernels ({why}); CXX names another compiler",
        )
