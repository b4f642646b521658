"""Which process works on a folder, and whether it still lives. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from rmsrepro.runs.files import number

if sys.platform != "win32":
    import fcntl

_STALE_S = 600.0
"""For so long without a sign of life a process that cannot be asked is believed to run."""


def alive(owner: dict[str, Any], path: Path | None = None) -> bool:
    """Whether the process of `owner` (an `owner_record`) still runs, as far as can be seen here.

    A lock of the system (flock) that is held on `path` is proof of life; one that was held on this very
    kernel and no longer is, of death. Otherwise a process of this kernel and of this process's namespace is
    asked for by its number, and compared by when it started. What was before a restart of this machine is
    dead. Any other process (another machine's, another container's) cannot be asked: it is believed for ten
    minutes after its newest sign of life.

    Args:
        path: the file that `owner` was read from. Signs of life are the times at which it or the
            `running.json` beside it was written or touched (`touch_lock`), by the clock of the file
            system: those of two machines may be apart. Without it, `updated` of `owner`.
    """
    if not isinstance(owner.get("host"), str):
        return False  # damaged: it names no process
    held = None if path is None else _flocked(path)
    if held:
        return True
    if _started_again(owner):
        return False
    here, kernel = _place(), owner.get("boot")
    if kernel is None or here["boot"] is None:
        # A record of an older version, or a system that names no kernel: the host's name must do.
        local = owner.get("host") == socket.gethostname()
    elif kernel != here["boot"]:
        local = False
        known = here["machine"] is not None and owner.get("machine") == here["machine"]
        if known and owner.get("host") == socket.gethostname():
            return False
    elif held is False and owner.get("flock"):
        return False
    else:
        local = owner.get("namespace") == here["namespace"]
    return _runs(owner) if local else _signs(owner, path)


def _runs(owner: dict[str, Any]) -> bool:
    """Whether the process with the number of `owner` is there, and is the one that was meant."""
    pid = int(number(owner.get("pid")))
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    # A dead process whose parent has not asked for its end keeps its number: a zombie.
    return owner.get("start") in (None, process_start(pid)) and _state(pid) not in ("Z", "X")


def _signs(owner: dict[str, Any], path: Path | None) -> bool:
    """Whether there was a sign of life lately. A time to come is one: the clock was set back since."""
    if path is None:
        return abs(time.time() - number(owner.get("updated"))) < _STALE_S
    times = []
    for file in (path, path.with_name("running.json")):
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    now = clock_of(path.parent)
    return any(abs(now - moment) < _STALE_S for moment in times)


def clock_of(folder: Path) -> float:
    """Return the present by the clock that gives the files of `folder` their times."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:  # no right to write there, or a full disk
        return time.time()


def _flocked(path: Path) -> bool | None:
    """Whether a process holds the system's lock on `path`; None where that cannot be known."""
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        # Shared: two that look at once do not take each other for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        return True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    finally:
        os.close(descriptor)
    return False


def hold_flock(descriptor: int, patience_s: float = 1.0) -> bool:
    """Take the system's lock on an open file, which ends with the process; False where there is none."""
    if sys.platform == "win32":
        return False
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:  # one that looks, for a moment
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        except OSError:
            return False


def touch_lock(folder: Path) -> None:
    """Give a sign of life to other machines: renew the time of the `lock.json` in a run's folder."""
    with contextlib.suppress(OSError):
        os.utime(folder / "lock.json")


def process_start(pid: int) -> str | None:
    """Return a mark of when `pid` started, so that a reused number is no impostor; None where unknown."""
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else None


def _state(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[0] if fields else None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; none where there is no such file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


@cache
def _place() -> dict[str, str | None]:
    """Return what names this kernel since its start, this machine, and the namespace of process numbers."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = None
    return {
        "boot": _line("/proc/sys/kernel/random/boot_id"),
        "machine": _line("/etc/machine-id"),
        "namespace": namespace,
    }


def _line(file: str) -> str | None:
    try:
        return Path(file).read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def owner_record() -> dict[str, Any]:
    """What a lock file holds about this process."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "start": process_start(os.getpid()),
        "updated": time.time(),
        **_place(),
        **_slurm_job(),
    }


def _slurm_job() -> dict[str, Any]:
    """The job of Slurm that this process belongs to, and how often it was started before; empty outside."""
    job = os.environ.get("SLURM_JOB_ID")
    return {} if job is None else {"job": job, "restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}


def _started_again(owner: dict[str, Any]) -> bool:
    """Whether `owner` is of this process's own job of Slurm, from before Slurm started it again."""
    own = _slurm_job()
    if not own or str(owner.get("job")) != own["job"]:
        return False
    return number(owner.get("restarts"), math.inf) < own["restarts"]
