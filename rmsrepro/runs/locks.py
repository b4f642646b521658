"""A lock file that keeps other processes out of a folder, and that outlives no dead owner."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rmsrepro.runs.files import read_json
from rmsrepro.runs.owners import alive, clock_of, hold_flock, owner_record

if sys.platform != "win32":
    import fcntl

_TURN_S = 10.0
"""A turn takes milliseconds; one that is so old was left by a crash."""


class Locked(RuntimeError):
    """Another living process holds the lock; `owner` is its record."""

    def __init__(self, path: Path, owner: dict[str, Any]) -> None:
        super().__init__(f"process {owner.get('pid')} on {owner.get('host')} is at work there ({path})")
        self.owner = owner


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold `path` as an exclusive lock; a dead owner's lock is taken over.

    The file goes at the end, unless by then it is another's.

    Raises:
        Locked: a living process holds it.
        OSError: the file cannot be written.
    """
    record = owner_record()
    deadline = time.monotonic() + 2 * _TURN_S
    descriptor = None
    while descriptor is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder that another process removes at this moment is made anew.
        with contextlib.suppress(FileNotFoundError), _guard(path.parent) as guarded, _turn(path) as mine:
            descriptor = _acquire(path, record, guarded) if mine else None
        if descriptor is None:
            if time.monotonic() > deadline:
                raise Locked(path, read_json(path) or {})
            time.sleep(0.02)
    try:
        yield
    finally:
        left = read_json(path)
        if left is not None and all(left.get(key) == record[key] for key in ("pid", "host", "start")):
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, record: dict[str, Any], guarded: bool) -> int | None:
    """Write the lock file if none is there, or only a dead owner's.

    Returns:
        the open file, which holds the system's lock too; None: it is worth another try.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists():
        owner = read_json(path)
        if owner is not None and alive(owner, path):
            raise Locked(path, owner)
        if owner is None and not guarded and time.time() - path.stat().st_mtime < 2:
            return None  # just being written; under the guard it was left so by a crash
        _bury(path, owner)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    except FileExistsError:
        return None
    try:
        held = hold_flock(descriptor)
        content = json.dumps({**record, "flock": held}).encode()
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


def _bury(path: Path, dead: dict[str, Any] | None) -> None:
    """Remove the lock of the owner `dead`; one that a living process put in its place meanwhile stays.

    Where turns fail (see `_turn`) two processes may find the same dead owner, and the slower of them would
    remove the lock of the faster: so the file is moved away first, and looked at again.
    """
    grave = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.dead")
    try:
        path.rename(grave)
    except FileNotFoundError:
        return
    if read_json(grave) != dead:
        try:
            os.link(grave, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            grave.rename(path)
    grave.unlink(missing_ok=True)


@contextlib.contextmanager
def _guard(folder: Path, patience_s: float = 2.0) -> Iterator[bool]:
    """Let one process at a time judge the locks in `folder`; yields whether the guard is held.

    The guard is an advisory lock of the folder itself, so it leaves no file and ends with its process.
    Some network file systems have none; another program may hold it for long: then it is done without.
    """
    if sys.platform == "win32":
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    held, deadline = False, time.monotonic() + patience_s
    try:
        while not held:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
            except OSError:
                break
        yield held
    finally:
        if held:
            # Not by closing alone: a process forked meanwhile has the descriptor too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[bool]:
    """Let one process at a time judge and take `path`, also where the guard is none.

    On some network file systems flock fails, on others it holds on one machine only; that a file is created
    once holds everywhere. A turn that a crash left is ended after ten seconds.

    Yields:
        whether it is this process's turn.
    """
    ticket = path.with_name(f"{path.name}.turn")
    try:
        os.close(os.open(ticket, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):
            seen = ticket.stat()
            if abs(clock_of(path.parent) - seen.st_mtime) > _TURN_S and ticket.stat() == seen:
                ticket.unlink()
        yield False
        return
    try:
        yield True
    finally:
        ticket.unlink(missing_ok=True)
