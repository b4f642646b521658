"""From the C++ sources to a library: found where it was built before, else built. Imports no torch.

    CACHE/kernels-<hash of sources, flags and levels>/<levels>.so, <levels>.json, lock

CACHE is RMSREPRO_CACHE, else XDG_CACHE_HOME/rmsrepro, else ~/.cache/rmsrepro. At first use the level of this
processor alone is compiled, which takes seconds; `rmsrepro build-kernels` compiles all levels into one
library, which then runs on any processor of the kind.

Beside them lies what a compiler failed with, so that it is not tried again by each command (keeping.py).

One process builds at a time; others that want the same wait for it. A library is written beside its place and
moved there whole, and its size and hash are kept in the JSON file: what is cut off or changed is not loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from rmsrepro.norms.backends.fused.compilers import BuildFailed, KernelsUnavailable, Toolchain, toolchain
from rmsrepro.norms.backends.fused.compiling import COMMON_FLAGS, COMPILE_S, Tell, build_library, sources
from rmsrepro.norms.backends.fused.keeping import (
    failed_before,
    forget_failures,
    mark_used,
    record_failure,
    remove_unused,
    why_not_writable,
)
from rmsrepro.norms.backends.fused.levels import Level, best_level, known_levels

WAIT_S = 2 * COMPILE_S
"""How long to wait for another process that builds; then both do."""


@dataclass(frozen=True)
class Built:
    """A library that was built, as its JSON file has it."""

    levels: list[str]
    compiler: str
    openmp: bool
    python_headers: bool
    size: int
    sha256: str


def cache_folder() -> Path:
    """Return the folder of all built libraries.

    Raises:
        KernelsUnavailable: there is no home directory to put it in, or no such user's.
    """
    chosen, base = os.environ.get("RMSREPRO_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(chosen or Path(base or "~/.cache", "rmsrepro")).expanduser()
    except RuntimeError as error:
        name, value = ("RMSREPRO_CACHE", chosen) if chosen else ("XDG_CACHE_HOME", base)
        user = (value or "~").partition("/")[0]
        if user != "~":
            raise KernelsUnavailable(
                f"{name}={value}: {user} is the home of no user that is known here; set RMSREPRO_CACHE to "
                "a folder"
            ) from error
        raise KernelsUnavailable(
            "there is no home directory to keep the kernels in; set RMSREPRO_CACHE to a folder"
        ) from error
    # Whoever changes the working directory afterwards finds it as well.
    return folder.absolute()


def find(levels: Sequence[Level], extra_flags: Sequence[str] = ()) -> tuple[Path, Built] | None:
    """Return an intact library that holds `levels`, one of all levels first; None where there is none."""
    for wanted in (known_levels(), levels):
        path = _place(wanted, extra_flags)
        built = _intact(path)
        if built is not None and {level.name for level in levels} <= set(built.levels):
            return path, built
    return None


def find_or_build(say: Tell | None = None) -> tuple[Path, Level]:
    """Return a library that holds the best level of this processor, and that level; build it if need be.

    Args:
        say: told before a build that takes seconds.

    Raises:
        KernelsUnavailable: it is not there and cannot be built.
        ValueError: RMSREPRO_KERNEL_LEVEL names a level that this processor has not.
    """
    level = best_level()
    found = find([level])
    if found is not None:
        mark_used(found[0].parent)
        if found[0].is_file():
            return found[0], level
    ready_to_build([level])  # else there is nothing to announce
    if say is not None:
        damaged = next((one for one in (_place(known_levels()), _place([level])) if one.is_file()), None)
        about = f"; {damaged} is damaged" if damaged else ", once"
        say(f"building the fused kernels for this processor{about}")
    return build([level], tell=say), level


def ready_to_build(levels: Sequence[Level]) -> Toolchain:
    """Return the compiler that would build `levels`, as far as can be known beforehand; builds nothing.

    Raises:
        KernelsUnavailable: no compiler, it failed before, or the cache folder cannot be written.
    """
    tools, place = toolchain(), _place(levels)
    failed = failed_before(place, tools)
    if failed is not None:
        raise failed
    reason = why_not_writable(place.parent)
    if reason is not None:
        raise _not_written(place, reason)
    return tools


def build(
    levels: Sequence[Level],
    *,
    extra_flags: Sequence[str] = (),
    anew: bool = False,
    again: bool = False,
    tell: Tell | None = None,
) -> Path:
    """Compile the kernels for `levels` into one library and return its path; one that is there is left.

    Args:
        levels: of this kind of processor.
        extra_flags: of compiler and linker, for instance a sanitizer's; they enter the hash.
        anew: whether to build although it is there.
        again: whether to try although this compiler failed before.
        tell: told when the last file of a level is compiled, and when another process has to be waited for.

    Raises:
        KernelsUnavailable: no compiler, it fails, or the cache folder cannot be written.
    """
    tools, place = toolchain(), _place(levels, extra_flags)
    tell = tell or (lambda message: None)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _lock(place.parent, tell) as locked:
            found = None if anew else find(levels, extra_flags)
            if found is not None:
                return found[0]
            # While this process waited, another may have tried, or removed the folder as unused.
            failed = None if anew or again else failed_before(place, tools)
            if failed is not None:
                raise failed
            place.parent.mkdir(parents=True, exist_ok=True)
            if locked:
                for left in place.parent.glob("build-*"):  # of a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
            prefix = "build-" if locked else "unlocked-"
            with tempfile.TemporaryDirectory(prefix=prefix, dir=place.parent) as folder:
                try:
                    library, openmp = build_library(tools, levels, Path(folder), extra_flags, tell)
                except BuildFailed as error:
                    record_failure(place, tools, error, Path(folder))
                    raise
                _install(library, place, levels, tools, openmp)
            forget_failures(place.parent, tools)
    except OSError as error:
        raise _not_written(place, error.strerror or str(error)) from error
    remove_unused(cache_folder(), but=place.parent)
    return place


def _not_written(place: Path, reason: str) -> KernelsUnavailable:
    return KernelsUnavailable(
        f"the kernels cannot be written to {place.parent} ({reason}); set RMSREPRO_CACHE to a folder that "
        "can be"
    )


def _place(levels: Sequence[Level], extra_flags: Sequence[str] = ()) -> Path:
    everything = len(levels) > 1 and tuple(levels) == known_levels()
    name = "all" if everything else "+".join(level.name for level in levels)
    return cache_folder() / f"kernels-{_digest(tuple(extra_flags))}" / f"{name}.so"


@cache
def _digest(extra_flags: tuple[str, ...]) -> str:
    """Return the hash of what decides what is built, but for the compiler: what is built stays good."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    levels = [(level.name, level.width, level.flags) for level in known_levels()]
    # Machines that share a home directory may differ in the C library and in Python.
    system = platform.system(), platform.machine(), platform.libc_ver(), sysconfig.get_config_var("SOABI")
    digest.update(repr((COMMON_FLAGS, extra_flags, levels, system)).encode())
    return digest.hexdigest()[:16]


def _intact(path: Path) -> Built | None:
    """Return what is known of a library; None where it is missing, cut off or changed."""
    try:
        built = Built(**json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))
        # The size alone first: what is read is not what a writer has got to in the meantime.
        if path.stat().st_size != built.size or _hash(path) != built.sha256:
            return None
    except (OSError, ValueError, TypeError):
        return None
    return built


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _lock(folder: Path, tell: Tell | None) -> Iterator[bool]:
    """Wait until no other process builds in `folder`; yield whether that is so.

    The system gives the lock back when its owner dies. It is False where the file system has no locks, and
    when the owner does not end: then several may build the same, and the last one's is kept.
    """
    with (folder / "lock").open("a") as file:
        since, locked = time.monotonic(), False
        while not locked and time.monotonic() - since < WAIT_S:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                if tell is not None:
                    tell("another process builds the fused kernels; waiting for it")
                    tell = None
                time.sleep(0.05)
            except OSError:
                break
        yield locked


def _install(library: Path, place: Path, levels: Sequence[Level], tools: Toolchain, openmp: bool) -> None:
    built = Built(
        [level.name for level in levels],
        tools.version,
        openmp,
        tools.python_headers is not None,
        library.stat().st_size,
        _hash(library),
    )
    about = library.with_suffix(".json")
    about.write_text(json.dumps(asdict(built), indent=1) + "\n", encoding="utf-8")
    # Whoever reads between the two finds that they do not belong together, and waits for the lock.
    os.replace(about, place.with_suffix(".json"))
    os.replace(library, place)
