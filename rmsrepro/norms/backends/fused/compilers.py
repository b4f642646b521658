"""The C++ compiler: which one there is, what it can do, and how it is run. Imports no torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rmsrepro.norms.backends.fused.programs import TooSlow, run

COMPILERS = ("c++", "g++", "clang++")
INSTALL_HINT = (
    "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; "
    "macOS: xcode-select --install)"
)
LOOK_S = 30.0
"""Longest time for a question to a compiler."""


class KernelsUnavailable(RuntimeError):
    """The kernels cannot be had; the message says in one sentence what is missing and what to do about it."""


class BuildFailed(KernelsUnavailable):
    """The compiler, or what it built, is no good, and would not be at another attempt either."""


_PASSING = (
    *("cannot allocate memory", "disk quota", "exit code -", "input/output error", "killed"),
    *("memory exhausted", "no space left", "out of memory", "read-only file system"),
    *("resource temporarily unavailable", "too many open files"),
)


def failure(said: str, message: str) -> KernelsUnavailable:
    """Return the error for a program that failed and `said` why, by whether the reason may pass by itself."""
    passing = any(words in said.lower() for words in _PASSING)
    return KernelsUnavailable(message) if passing else BuildFailed(message)


@dataclass(frozen=True)
class Toolchain:
    """A compiler and what it can do."""

    command: tuple[str, ...]
    """The program, and arguments that CXX has beside it."""
    version: str
    openmp: bool
    python_headers: str | None
    """Folder of Python.h, for calls with little overhead; None where it is not installed."""


def toolchain() -> Toolchain:
    """Return the compiler: CXX where it is set, else the first of c++, g++ and clang++.

    Raises:
        KernelsUnavailable: there is none, or it does not run.
    """
    return _toolchain(os.environ.get("CXX", "").strip())


@cache
def _toolchain(wanted: str) -> Toolchain:
    command = _command(wanted)
    try:
        done = run([*command, "--version"], limit_s=LOOK_S)
        if done.code != 0 or not done.out.strip():
            raise KernelsUnavailable(
                f"the compiler {shlex.join(command)} does not run (--version: exit code {done.code}, "
                f"{first_error(done.err)}); {INSTALL_HINT}"
            )
        headers = Path(sysconfig.get_path("include"))
        return Toolchain(
            command,
            done.out.strip().splitlines()[0],
            openmp=_knows_openmp(command),
            python_headers=str(headers) if (headers / "Python.h").is_file() else None,
        )
    except (OSError, TooSlow) as error:
        reason = getattr(error, "strerror", None) or error
        raise KernelsUnavailable(
            f"the compiler {shlex.join(command)} does not run ({reason}); {INSTALL_HINT}"
        ) from error


def _command(wanted: str) -> tuple[str, ...]:
    if not wanted:
        found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
        if found is None:
            raise KernelsUnavailable(f"no C++ compiler ({', '.join(COMPILERS)}); {INSTALL_HINT}")
        return (found,)
    try:
        # A path with blanks in it, else a program with arguments, as in CXX="ccache g++".
        program, *arguments = [wanted] if shutil.which(wanted) else shlex.split(wanted)
    except ValueError as error:
        raise KernelsUnavailable(f"CXX={wanted} cannot be read ({error})") from error
    found = shutil.which(program)
    if found is None:
        raise KernelsUnavailable(f"CXX={wanted}: {program} is no program; correct CXX, or {INSTALL_HINT}")
    return (found, *arguments)


def _knows_openmp(command: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.cpp"
        source.write_text("#include <omp.h>\nint f() { return omp_get_max_threads(); }\n", encoding="ascii")
        result = Path(folder) / "try.so"
        flags = ["-fopenmp", "-shared", "-fPIC", str(source), "-o", str(result)]
        return run([*command, *flags], limit_s=LOOK_S).code == 0 and result.is_file()


def why_not_loaded(library: Path, functions: Sequence[str]) -> str | None:
    """Return why a library cannot be loaded, or which of its functions is missing; None when all is well.

    In a process of its own: loading what is no library may end it.

    Raises:
        KernelsUnavailable: it did not end.
    """
    if not sys.executable:  # Python inside of another program
        return None
    program = "import ctypes, sys; a = ctypes.CDLL(sys.argv[1]); [getattr(a, name) for name in sys.argv[2:]]"
    # -I and -S: nothing of the user's is imported, and it starts in half the time.
    try:
        done = run([sys.executable, "-I", "-S", "-c", program, str(library), *functions], limit_s=LOOK_S)
    except TooSlow as error:
        raise KernelsUnavailable(f"the kernels cannot be tried ({error})") from error
    if done.code == 0:
        return None
    said = done.err.strip().splitlines() or [f"exit code {done.code}"]
    return said[-1].replace(f"{library}: ", "")


def first_error(said: str) -> str:
    """Return the line of a compiler's words that says what went wrong."""
    lines = said.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line.lower()), lines[0]).strip()
