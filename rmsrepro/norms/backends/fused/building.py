"""From the C++ sources to a library: found where it was built before, else built. Imports no torch.

    CACHE/kernels-<hash of sources, compiler and flags>/<levels>.so

CACHE is RMSREPRO_CACHE, else XDG_CACHE_HOME/rmsrepro, else ~/.cache/rmsrepro. At first use the level of this
processor alone is compiled, which takes seconds; `rmsrepro build-kernels` compiles all levels into one
library, which then runs on any processor of the kind. A library is written beside its place and moved there
whole, so that processes that start at once, or die half-way, leave none that is broken.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rmsrepro.norms.backends.fused.levels import Level, best_level, known_levels

SOURCES = Path(__file__).parent / "cpu"
COMMON_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
INSTALL_HINT = (
    "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
)
TIMEOUT_S = 300


class KernelsUnavailable(RuntimeError):
    """The kernels cannot be had; the message says in one sentence what is missing and what to install."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler and what it can do."""

    compiler: str
    version: str
    openmp: bool
    python_headers: str | None
    """Folder of Python.h, for calls with little overhead; None where it is not installed."""


def cache_folder() -> Path:
    """Return the folder of all built libraries."""
    chosen = os.environ.get("RMSREPRO_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rmsrepro"


def sources() -> list[Path]:
    """Return the C++ files, headers included, in a fixed order."""
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".cpp", ".hpp"})


@cache
def toolchain() -> Toolchain:
    """Return the compiler: CXX where it is set, else the first of c++, g++ and clang++.

    Raises:
        KernelsUnavailable: there is none, or it does not run.
    """
    wanted = os.environ.get("CXX")
    found = next((path for name in ([wanted] if wanted else COMPILERS) if (path := shutil.which(name))), None)
    if found is None:
        missing = f"CXX={wanted} is no program" if wanted else f"no C++ compiler ({', '.join(COMPILERS)})"
        raise KernelsUnavailable(f"{missing}; {INSTALL_HINT}")
    try:
        version = _run([found, "--version"]).stdout.splitlines()[0]
    except (OSError, IndexError) as error:
        raise KernelsUnavailable(f"the compiler {found} does not run ({error}); {INSTALL_HINT}") from error
    headers = Path(sysconfig.get_path("include"))
    return Toolchain(
        found,
        version,
        openmp=_compiles(found, ["-fopenmp"], "#include <omp.h>\nint f() { return omp_get_max_threads(); }"),
        python_headers=str(headers) if (headers / "Python.h").is_file() else None,
    )


def find_or_build(say: Callable[[str], None] | None = None) -> tuple[Path, Level]:
    """Return a library that holds the best level of this processor, and that level; build it if need be.

    Args:
        say: told before a build that takes seconds.

    Raises:
        KernelsUnavailable: it is not there and cannot be built.
        ValueError: RMSREPRO_KERNEL_LEVEL names a level that this processor has not.
    """
    level = best_level()
    for built in (_place(known_levels()), _place([level])):
        if built.is_file():
            return built, level
    if say is not None:
        say("building the fused kernels for this processor, once")
    return build([level]), level


def build(levels: Sequence[Level], *, extra_flags: Sequence[str] = ()) -> Path:
    """Compile the kernels for `levels` into one library and return its path.

    Args:
        extra_flags: of compiler and linker, for instance a sanitizer's; they enter the hash.

    Raises:
        KernelsUnavailable: no compiler, it fails, or the cache folder cannot be written.
    """
    tools, place = toolchain(), _place(levels, extra_flags)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=place.parent) as folder:
            _compile_all(tools, levels, Path(folder), extra_flags)
            # Whoever built the same in the meantime wrote the same.
            os.replace(Path(folder) / "kernels.so", place)
    except OSError as error:
        raise KernelsUnavailable(
            f"the kernels cannot be written to {place.parent} ({error.strerror or error}); set "
            "RMSREPRO_CACHE to a folder that can be"
        ) from error
    return place


def _place(levels: Sequence[Level], extra_flags: Sequence[str] = ()) -> Path:
    name = "all" if len(levels) > 1 else levels[0].name
    return cache_folder() / f"kernels-{_digest(tuple(extra_flags))}" / f"{name}.so"


@cache
def _digest(extra_flags: tuple[str, ...]) -> str:
    """Return the hash of what decides what is built, but for the compiler: what is built stays good."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    levels = [(level.name, level.width, level.flags) for level in known_levels()]
    python = sysconfig.get_config_var("SOABI")
    digest.update(
        repr((COMMON_FLAGS, extra_flags, levels, platform.system(), platform.machine(), python)).encode()
    )
    return digest.hexdigest()[:16]


def _compile_all(tools: Toolchain, levels: Sequence[Level], folder: Path, extra_flags: Sequence[str]) -> None:
    common = [tools.compiler, *COMMON_FLAGS, *(["-fopenmp"] if tools.openmp else []), *extra_flags]
    jobs: list[list[str]] = []
    objects: list[str] = []

    def add(source: Path, name: str, flags: Sequence[str]) -> None:
        objects.append(str(folder / f"{name}.o"))
        jobs.append([*common, *flags, "-c", str(source), "-o", objects[-1]])

    for level in levels:
        for source in sources():
            if source.suffix == ".cpp" and source.name != "binding.cpp":
                flags = [*level.flags, f"-DLEVEL={level.name}", f"-DWIDTH={level.width}"]
                add(source, f"{source.stem}-{level.name}", flags)
    if tools.python_headers is not None:
        add(SOURCES / "binding.cpp", "binding", [f"-I{tools.python_headers}"])
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(_compile, jobs))
    # Python's own symbols are found in the process that loads the library.
    undefined = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
    _compile([*common, "-shared", *undefined, *objects, "-o", str(folder / "kernels.so")])


def _compile(command: Sequence[str]) -> None:
    result = _run(command)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "error" in line.lower()] or ["no message"]
        raise KernelsUnavailable(
            f"{command[0]} failed to build the kernels ({lines[0].strip()}); CXX names another compiler"
        )


def _compiles(compiler: str, flags: Sequence[str], text: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.cpp"
        source.write_text(text, encoding="ascii")
        command = [compiler, *flags, "-shared", "-fPIC", str(source), "-o", str(Path(folder) / "try.so")]
        return _run(command).returncode == 0


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"{command[0]} did not end within {TIMEOUT_S} s") from error
