"""How the worker processes of a sweep are told to stop, so that each saves its run first."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rmsrepro.runs.interruption import SIGNALS

_SWEEP = "RMSREPRO_SWEEP_PROCESS"
_TOGETHER = "RMSREPRO_SWEEP_JOBS"
STOP_FILE = "RMSREPRO_SWEEP_STOP"
"""The variable that names a file: once it exists, no job of this sweep begins."""
_stopping = False
_ends: list[Callable[[], None]] = []


def become_sweep(jobs_here: int = 1) -> None:
    """Mark this process, for the workers that it will start, as the sweep itself.

    Args:
        jobs_here: how many jobs will run on this machine at a time.
    """
    global _stopping
    _stopping = False
    os.environ[_SWEEP] = _this_process()
    os.environ[_TOGETHER] = str(jobs_here)


def _this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def is_worker() -> bool:
    """Whether this process is a worker of a sweep."""
    return os.environ.get(_SWEEP, _this_process()) != _this_process()


def jobs_together() -> int:
    """Return how many jobs the sweep of this process runs on its machine at a time; 1 without a sweep."""
    return int(os.environ.get(_TOGETHER, "1")) if is_worker() else 1


@contextlib.contextmanager
def end_sweep_with(stop: Callable[[], None]) -> Iterator[None]:
    """Let `stop_workers` call `stop` too, while the body runs."""
    _ends.append(stop)
    try:
        yield
    finally:
        _ends.remove(stop)


def told_to_stop() -> bool:
    """Whether this worker shall begin no further job.

    It does not simply exit: as soon as one worker is gone, the pool kills the others, which may still be
    saving.
    """
    stop_file = os.environ.get(STOP_FILE)
    return _stopping or _orphaned() or (stop_file is not None and os.path.exists(stop_file))


_parent: int | None = None


def _orphaned() -> bool:
    """Whether the process that started this worker is gone: nobody waits for its answers any more.

    A worker of a sweep that was killed outright would else train what its queue still holds.
    """
    global _parent
    if not is_worker():
        return False
    if _parent is None:
        pool = multiprocessing.parent_process()
        # A pool's worker knows who started it, even if that process is gone by now.
        _parent = os.getppid() if pool is None or pool.pid is None else pool.pid
    return os.getppid() != _parent


_LOOK_S = 1.0
_at_work = False
_watcher: threading.Thread | None = None


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Be at a job while the body runs; a worker of a pool ends by itself once the sweep is gone.

    A sweep that is killed outright tells its workers nothing, and the pool would keep them for minutes. So
    each looks for its parent: gone, it ends at once between two jobs, and within one it is told to stop by
    SIGTERM, saves its run, and ends then. Jobs that are processes of their own, such as submitit's, go on.
    """
    global _at_work, _watcher
    if _watcher is None and is_worker() and multiprocessing.parent_process() is not None:
        _watcher = threading.Thread(target=_end_with_parent, name="rmsrepro-parent", daemon=True)
        _watcher.start()
    _at_work = True
    try:
        yield
    finally:
        _at_work = False


def _end_with_parent() -> None:
    """End this process soon after its parent, once no job is under way in it."""
    told = False
    while True:
        time.sleep(_LOOK_S)
        if not _orphaned():
            continue
        if not _at_work:
            os._exit(1)  # a job that begins at this moment finds that it shall not, and writes nothing
        if not told:
            told = True
            os.kill(os.getpid(), signal.SIGTERM)


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
    for stop in tuple(_ends):
        stop()
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
