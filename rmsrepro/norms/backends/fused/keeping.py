"""What lies in the cache folder: whether it can be written, what failed, what is used. Imports no torch.

    CACHE/kernels-<hash>/lock                          as old as the last use
    CACHE/kernels-<hash>/<levels>-<compiler>.failed    what that compiler failed with

Each version of the sources has a folder of its own. After a build, those that nobody used for `UNUSED_S` go.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from rmsrepro.norms.backends.fused.compilers import BuildFailed, Toolchain

DAY_S = 86400.0
UNUSED_S = 30 * DAY_S
STAMP_S = DAY_S
"""How old the mark of the last use may be: a folder that is used gets one write a day."""
LOCK_S = 1.0
"""How long to wait for a process that looks whether a folder is used, which takes it no time."""
_FOLDER = re.compile(r"kernels-[0-9a-f]{16}(\.unused-.*)?")
_STEERING = (
    *("COMPILER_PATH", "CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("LIBRARY_PATH", "TMPDIR"),
)
"""Variables with which a compiler, or what loads its library, succeeds or fails."""


def why_not_writable(folder: Path) -> str | None:
    """Return why nothing can be written to `folder`, there already or not; None if it can. Leaves no trace.

    The system's rights do not tell: root has all of them, and a file system may be read-only or full.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path) or path == path.parent)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
    except OSError as error:
        return error.strerror or str(error)
    return None


# --------------------------------------------------------------------------------------------- what failed


def record_failure(place: Path, tools: Toolchain, error: BuildFailed, folder: Path) -> None:
    """Keep that a compiler cannot build the library `place`; written in `folder`, then moved there whole."""
    record = {"compiler": tools.version, "when": time.strftime("%Y-%m-%d"), "why": str(error)}
    path = _failed(place, tools)
    written = folder / path.name
    with contextlib.suppress(OSError):
        written.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(written, path)


def failed_before(place: Path, tools: Toolchain) -> BuildFailed | None:
    """Return with what this compiler failed to build `place` when it was last tried."""
    try:
        record = json.loads(_failed(place, tools).read_text(encoding="utf-8"))
        when, why = str(record["when"]), str(record["why"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return BuildFailed(f"{why}; so it was on {when}, and rmsrepro build-kernels tries again")


def forget_failures(folder: Path, tools: Toolchain) -> None:
    """Remove what is kept of this compiler, which has built a library."""
    for path in folder.glob(f"*-{_identity(tools)}.failed"):
        path.unlink(missing_ok=True)


def _failed(place: Path, tools: Toolchain) -> Path:
    return place.with_name(f"{place.stem}-{_identity(tools)}.failed")


def _identity(tools: Toolchain) -> str:
    """Return a hash of what would make another attempt end otherwise: the compiler and what steers it."""
    program = Path(tools.command[0]).resolve()
    try:
        status = program.stat()
        file: tuple[int, ...] = (status.st_size, status.st_mtime_ns)
    except OSError:
        file = ()
    steering = [os.environ.get(name) for name in _STEERING]
    known = (tools.command, str(program), file, tools.version, tools.openmp, tools.python_headers, steering)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:12]


# --------------------------------------------------------------------------------------------- what is used


def mark_used(folder: Path) -> None:
    """Mark a folder as used, so that `remove_unused` leaves it; at most once a day.

    A folder may be gone afterwards, where another process was about to remove it.
    """
    with contextlib.suppress(OSError):  # of somebody else, who marks it when it is used
        if _unused_s(folder) < STAMP_S:
            return
        with (folder / "lock").open("a") as file:
            until = time.monotonic() + LOCK_S
            # Whoever builds here keeps the lock for long, and its files are new: no need to wait for it.
            while not _locked(file.fileno(), fcntl.LOCK_SH) and time.monotonic() < until:
                time.sleep(0.01)
            os.utime(file.fileno())


def remove_unused(cache: Path, but: Path) -> None:
    """Remove the folders of kernels in `cache` that were not used for `UNUSED_S`, except `but`.

    A process that builds in one has its lock, and one that is about to load from one has marked it.
    """
    with contextlib.suppress(OSError):
        for folder in list(cache.iterdir()):
            if folder != but and _FOLDER.fullmatch(folder.name) and not folder.is_symlink():
                with contextlib.suppress(OSError):
                    _remove_if_unused(folder)


def _remove_if_unused(folder: Path) -> None:
    if ".unused-" not in folder.name:  # else of a process that was killed over it
        if _unused_s(folder) < UNUSED_S:
            return
        with (folder / "lock").open("a") as file:
            if not _locked(file.fileno(), fcntl.LOCK_EX) or _unused_s(folder) < UNUSED_S:
                return
            # At once and whole: nobody finds half of it.
            folder = folder.rename(folder.with_name(f"{folder.name}.unused-{os.getpid()}"))
    shutil.rmtree(folder, ignore_errors=True)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unused_s(folder: Path) -> float:
    """Return for how long nothing in a folder was written or marked as used."""
    newest = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
    return time.time() - newest
