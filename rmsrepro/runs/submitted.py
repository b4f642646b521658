"""Jobs of submitit: processes of their own, here or in Slurm, that live apart from the sweep.

They do not get the terminal's Ctrl-C: they are started by threads that hold that signal back, and a process
starts with what its thread held back. So the sweep decides what becomes of them. Those on this machine are
told to stop, and save their runs first; those in a queue go on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rmsrepro.config.errors import first_line
from rmsrepro.runs.files import write_atomic
from rmsrepro.runs.workers import STOP_FILE, end_sweep_with, stop_after_this_job, told_to_stop

Part = Callable[[Sequence[Sequence[str]], Path], list[Any]]
"""Runs these jobs with Hydra's launcher, submitit's files in that folder."""


@dataclass(frozen=True)
class Lost:
    """A job that left no result: killed, cancelled, or never begun."""

    error: str


def launch_locally(run: Part, jobs: Sequence[Sequence[str]], n_jobs: int, folder: Path) -> list[Any]:
    """Run each job in a process of its own, `n_jobs` at a time; return what they returned, in order.

    A launch of all of them would start them all at once.
    """
    stop_file = folder / "stop"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[STOP_FILE] = str(stop_file.resolve())

    def one(number: int) -> Any:
        if told_to_stop():
            return Lost("not begun")
        return _launch(lambda: run([jobs[number]], folder / str(number))[0])

    futures: list[Future[Any]] = [Future() for _ in jobs]
    waiting = iter(range(len(jobs)))

    def some() -> None:
        # Taking the next of an iterator is one step, so no two threads get the same.
        for number in waiting:
            _fulfil(futures[number], lambda number=number: one(number))  # type: ignore[misc]

    def stop() -> None:
        stop_after_this_job()
        write_atomic(stop_file, "")
        _stop_processes(folder, lambda: all(future.done() for future in futures))

    try:
        with end_sweep_with(stop):
            for _ in range(min(n_jobs, len(jobs))):
                _in_background(some)
            results = [_wait(future) for future in futures]
    finally:
        os.environ.pop(STOP_FILE, None)
    return _tidied(results, folder)


def launch_in_queue(run: Part, jobs: Sequence[Sequence[str]], folder: Path) -> list[Any]:
    """Submit the jobs to Slurm as one array, and wait for all; return what they returned, in order.

    On Ctrl-C the jobs go on: only the waiting ends.
    """
    found: Future[list[Any]] = Future()

    def work() -> list[Any]:
        results = _launch(lambda: run(jobs, folder))
        return _one_by_one(folder, len(jobs), results) if isinstance(results, Lost) else list(results)

    _in_background(lambda: _fulfil(found, work))
    return _tidied(_wait(found), folder)


def _tidied(results: list[Any], folder: Path) -> list[Any]:
    """Remove submitit's files, unless they may tell what became of a job; return the results."""
    if not any(isinstance(result, Lost) for result in results):
        shutil.rmtree(folder, ignore_errors=True)
    return results


def _one_by_one(folder: Path, count: int, lost: Lost) -> list[Any]:
    """Wait for every job of an array of which one left no result: Hydra's launcher gives up at the first."""
    import submitit

    by_number: dict[int, Any] = {}
    for path in folder.iterdir():
        name = path.name
        if path.is_dir() and name.replace("_", "").isdigit():
            number = int(name.partition("_")[2] or 0)
            by_number[number] = submitit.SlurmJob(folder / "%j", name)
    if not by_number:
        return [lost] * count  # it could not be submitted

    def result(number: int) -> Any:
        job = by_number.get(number)
        return lost if job is None else _launch(lambda: job.results()[0].return_value)

    return [result(number) for number in range(count)]


def _launch(launch: Callable[[], Any]) -> Any:
    """Return what `launch` returns, or `Lost` where a job gave no result."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError, UncompletedJobError

    try:
        return launch()
    except (FailedJobError, FailedSubmissionError, UncompletedJobError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        # The first line says which job it was, the last one mostly why it ended.
        return Lost(first_line(lines[0] if len(lines) < 2 else f"{lines[0]} ... {lines[-1]}"))


def _in_background(work: Callable[[], None]) -> None:
    """Call `work` in a thread that holds back Ctrl-C, for what it starts too, and keeps no process alive."""

    def holding_back() -> None:
        # Not SIGTERM: that is how the jobs are told to stop.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        work()

    threading.Thread(target=holding_back, name="submitted", daemon=True).start()


def _fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _wait(future: Future[Any]) -> Any:
    """Wait so that a signal handler of this thread gets its turn."""
    while True:
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=0.2)


def _stop_processes(folder: Path, over: Callable[[], bool], patience_s: float = 30.0) -> None:
    """Tell all jobs under `folder` to stop, and wait until they have.

    Each is told once, and then saves its run. After `patience_s` it is told again, and stops without.
    """
    told: dict[int, int] = {}
    started = time.monotonic()
    while not over():
        late = time.monotonic() - started > patience_s
        for pid in _controllers(folder):
            if told.get(pid, 0) < 1 + late:
                told[pid] = told.get(pid, 0) + 1
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # By its group, a number that another process has by now is told from a job's.
                    if os.getpgid(pid) == os.getpgid(0):
                        os.kill(pid, signal.SIGTERM)
        if time.monotonic() - started > patience_s + 10:
            return
        time.sleep(0.05)


def _controllers(folder: Path) -> list[int]:
    """Return the numbers of the processes that watch over the jobs; their folders are named by them."""
    return [
        int(path.name)
        for path in folder.glob("*/*")
        if path.is_dir() and path.name.isdigit() and not list(path.glob("*_result.pkl"))
    ]


# --------------------------------------------------------------------------------- inside a job


class Requeue:
    """Lets a job that submitit wants back in the queue (out of time, preempted) save its run first.

    submitit handles that signal by leaving at once. Here it becomes a SIGTERM, which the run waits for a safe
    moment with; `leave` then does what submitit would have done.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._number: int | None = None
        self._asked = False
        name = f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"
        number = getattr(signal, name, None)
        in_job = "SUBMITIT_EXECUTOR" in os.environ
        if not in_job or number is None or threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(number)
        if callable(handler):
            self._handler, self._number = handler, int(number)
            signal.signal(number, self._ask)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._asked = True
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler):
            handler(signal.SIGTERM, frame)

    def leave(self, exit_code: int) -> None:
        """End a job whose run was interrupted, where its end is not a result."""
        if self._asked and self._handler is not None and self._number is not None:
            self._handler(self._number, None)
        if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
            # Without a result the sweep waits on, if Slurm starts the job again.
            raise SystemExit(exit_code)

    def close(self) -> None:
        """Give the signal back to submitit."""
        if self._number is not None:
            signal.signal(self._number, self._handler)
