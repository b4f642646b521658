"""Files that are whole or absent: atomic writes, and a lock that outlives no dead owner."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

_STALE_S = 600.0
"""For so long without a sign of life another machine's process is believed to run."""


def write_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one, never a part.

    Args:
        durable: whether that holds for a crash of the machine too, which takes several milliseconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """Serialise with non-finite floats as the strings "nan", "inf" and "-inf": strict JSON."""
    return json.dumps(_strict(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in `path`, or None where the file is absent or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def number(value: Any, otherwise: float = 0.0) -> float:
    """Return a record's value as a finite number; `otherwise` where it stands for none."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return found if math.isfinite(found) else otherwise


def alive(owner: dict[str, Any], path: Path | None = None) -> bool:
    """Whether the process that wrote `owner` (pid, host, start) still runs, as far as can be seen here.

    Args:
        path: the file that `owner` was read from. Another machine's process cannot be asked: it is
            believed for ten minutes after the newest sign of life, which is `updated` of `owner` or the
            time at which `path` or the `running.json` beside it was last written or touched
            (`touch_lock`).
    """
    if not isinstance(owner.get("host"), str):
        return False  # damaged: it names no process
    if _started_again(owner):
        return False
    if owner["host"] != socket.gethostname():
        signs = [number(owner.get("updated"))]
        if path is not None:
            for file in (path, path.with_name("running.json")):
                with contextlib.suppress(OSError):
                    signs.append(file.stat().st_mtime)
        return time.time() - max(signs) < _STALE_S
    pid = int(number(owner.get("pid")))
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return owner.get("start") in (None, process_start(pid))


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


def touch_lock(folder: Path) -> None:
    """Give a sign of life to other machines: renew the time of the `lock.json` in a run's folder."""
    with contextlib.suppress(OSError):
        os.utime(folder / "lock.json")


def process_start(pid: int) -> str | None:
    """Return a mark of when `pid` started, so that a reused number is no impostor; None where unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return None


def owner_record() -> dict[str, Any]:
    """What a lock file holds about this process."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "start": process_start(os.getpid()),
        "updated": time.time(),
        **_slurm_job(),
    }


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
    """
    record = owner_record()
    for _ in range(60):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder that another process removes at this moment is made anew.
        with contextlib.suppress(FileNotFoundError), _guard(path.parent) as guarded:
            if _acquire(path, record, guarded):
                break
        time.sleep(0.05)
    else:
        raise Locked(path, read_json(path) or {})
    try:
        yield
    finally:
        left = read_json(path)
        if left is not None and all(left.get(key) == record[key] for key in ("pid", "host", "start")):
            path.unlink(missing_ok=True)


def _acquire(path: Path, record: dict[str, Any], guarded: bool) -> bool:
    """Write the lock file if none is there, or only a dead owner's; False: it is worth another try."""
    if path.exists():
        owner = read_json(path)
        if owner is not None and alive(owner, path):
            raise Locked(path, owner)
        if owner is None and not guarded and time.time() - path.stat().st_mtime < 2:
            return False  # just being written; under the guard it was left so by a crash
        _bury(path, owner)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(record))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True


def _bury(path: Path, dead: dict[str, Any] | None) -> None:
    """Remove the lock of the owner `dead`; one that a living process put in its place meanwhile stays.

    Without the guard two processes may find the same dead owner, and the slower of them would remove the
    lock of the faster: so the file is moved away first, and looked at again.
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
