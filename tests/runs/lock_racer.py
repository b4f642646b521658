"""One of several processes that take a lock, hold it, and die as far as the others can see.

Run as: lock_racer.py LOCK DEAD_RECORD TIMES MODE. Prints how often it held the lock, and how often another
held it at the same time. In the mode `nfs` the system's locks fail; in `local` each machine (here: each
process) has its own, as on network file systems of both kinds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from pathlib import Path

from rmsrepro.runs import locks, owners

path, dead, wanted, mode = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]


def without(descriptor: int, operation: int) -> None:
    if mode == "nfs":
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


if mode != "posix":
    fcntl.flock = without
judge = locks.alive


def hesitant(owner: dict[str, object], file: Path | None = None) -> bool:
    found = judge(owner, file)
    time.sleep(0.001)  # a pause where one that was judged dead may be replaced
    return found


locks.alive = hesitant
if mode != "posix":
    # Another machine's processes cannot be asked, and give signs of life.
    owners._place = lambda: {"boot": f"{os.getpid()}", "machine": f"{os.getpid()}", "namespace": None}

marker, overlaps, held = path.with_name("marker"), 0, 0
deadline = time.monotonic() + 60
while held < wanted and time.monotonic() < deadline:
    try:
        with locks.lock(path):
            held += 1
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                overlaps += 1
            time.sleep(0.0005)
            marker.unlink(missing_ok=True)
            # Die, as far as the others can see: the next of them has to take over.
            corpse = path.with_name(f"corpse{os.getpid()}")
            corpse.write_text(dead)
            corpse.replace(path)
    except locks.Locked:
        time.sleep(0.0002)
print(held, overlaps)
