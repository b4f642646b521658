"""Programs that are run and end in time, they and their children. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO


class TooSlow(Exception):
    """A program did not end in time and was stopped."""


@dataclass(frozen=True)
class Done:
    """What a program came to."""

    code: int
    out: str
    err: str


def run(command: Sequence[str], *, limit_s: float) -> Done:
    """Run one program; see `run_all`."""
    results: list[Done] = []
    run_all([command], limit_s=limit_s, ended=lambda index, done: results.append(done))
    return results[0]


def run_all(commands: Sequence[Sequence[str]], *, limit_s: float, ended: Callable[[int, Done], None]) -> None:
    """Run programs, as many at once as there are processors; none of them outlives the call.

    Args:
        commands: the programs with their arguments.
        limit_s: how long each may take.
        ended: called with a program's place in `commands` when it has ended; what it raises ends the others.

    Raises:
        TooSlow: one did not end in time.
        OSError: one cannot be started.
    """
    waiting, running = list(enumerate(commands))[::-1], list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < usable_processors():
                index, command = waiting.pop()
                running.append(_Running(index, command))
            for program in running[:]:
                done = program.look(limit_s)
                if done is not None:
                    running.remove(program)
                    ended(program.index, done)
            if running:
                time.sleep(0.005)
    finally:
        for program in running:
            program.end()


def usable_processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass
class _Running:
    """A program that runs. What it says goes to files: a pipe stays open as long as any child of it lives."""

    index: int
    command: Sequence[str]
    out: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    err: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def __post_init__(self) -> None:
        self.since = time.monotonic()
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self.out,
                stderr=self.err,
                env={**os.environ, "LC_ALL": "C"},
                # Of its own, so that its children end with it.
                process_group=0,
            )
        except BaseException:
            self._close()
            raise

    def look(self, limit_s: float) -> Done | None:
        if self.process.poll() is not None:
            done = Done(self.process.returncode, _text(self.out), _text(self.err))
            self._close()
            return done
        if time.monotonic() - self.since > limit_s:
            raise TooSlow(f"{self.command[0]} did not end within {limit_s:g} s and was stopped")
        return None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self.out.close()
        self.err.close()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
