"""How the worker processes of a sweep are told to stop, so that each saves its run first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

from rmsrepro.runs.interruption import SIGNALS

_SWEEP = "RMSREPRO_SWEEP_PROCESS"
_stopping = False


def become_sweep() -> None:
    """Mark this process, for the workers that it will start, as the sweep itself."""
    os.environ[_SWEEP] = str(os.getpid())


def is_worker() -> bool:
    """Whether this process is a worker of a sweep."""
    return os.environ.get(_SWEEP, str(os.getpid())) != str(os.getpid())


def told_to_stop() -> bool:
    """Whether this worker shall begin no further job.

    It does not simply exit: as soon as one worker is gone, the pool kills the others, which may still be
    saving.
    """
    return _stopping or _orphaned()


_parent: int | None = None


def _orphaned() -> bool:
    """Whether the process that started this worker is gone: nobody waits for its answers any more.

    A worker of a sweep that was killed outright would else train what its queue still holds.
    """
    global _parent
    if not is_worker():
        return False
    if _parent is None:
        _parent = os.getppid()
    return os.getppid() != _parent


def stop_after_this_job(signum: int | None = None, frame: FrameType | None = None) -> None:
    """Begin no further job in this worker (also the handler of signals between jobs)."""
    global _stopping
    _stopping = True


def watch_between_jobs() -> None:
    """In a worker, let a signal that arrives between two jobs only be remembered."""
    if is_worker() and threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, stop_after_this_job)


def stop_workers(patience_s: float = 15.0) -> None:
    """Ask the workers of this process to stop, and wait until they have, at most `patience_s`."""
    from joblib.externals.loky import reusable_executor

    executor = reusable_executor._executor
    if executor is None:
        return
    processes = list((executor._processes or {}).values())
    for process in processes:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while executor._pending_work_items and time.monotonic() < deadline:
        if not any(process.is_alive() for process in processes):
            break
        time.sleep(0.05)
    executor.shutdown(wait=False, kill_workers=True)
