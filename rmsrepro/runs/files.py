"""Files that are whole or absent: atomic writes, and a lock that outlives no dead owner."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
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
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def alive(owner: dict[str, Any]) -> bool:
    """Whether the process that wrote `owner` (pid, host, start) still runs, as far as can be seen here."""
    if owner.get("host") != socket.gethostname():
        # Another machine's process cannot be asked: believe it while it keeps its file fresh.
        return time.time() - float(owner.get("updated", 0)) < 600
    pid = int(owner.get("pid", 0))
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return owner.get("start") in (None, process_start(pid))


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
    }


class Locked(RuntimeError):
    """Another living process holds the lock; `owner` is its record."""

    def __init__(self, path: Path, owner: dict[str, Any]) -> None:
        super().__init__(f"process {owner.get('pid')} on {owner.get('host')} is at work there ({path})")
        self.owner = owner


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold `path` as an exclusive lock; a dead owner's lock is taken over.

    Raises:
        Locked: a living process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(20):
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            owner = read_json(path)
            if owner is None:
                # Just being written, or left empty by a crash: give a living writer a moment.
                time.sleep(0.05)
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > 2:
                        path.unlink()
                continue
            if alive(owner):
                raise Locked(path, owner) from None
            with contextlib.suppress(FileNotFoundError):
                # Rename first: of several that find the dead owner only one gets the file away.
                grave = path.with_name(f"{path.name}.{os.getpid()}.dead")
                path.rename(grave)
                grave.unlink()
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(owner_record()))
        break
    else:
        raise Locked(path, read_json(path) or {})
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
