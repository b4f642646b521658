"""Ctrl-C and SIGTERM end a run at the next safe moment, with its checkpoint written and its record true.

Lightning turns KeyboardInterrupt into an exit of its own, so both signals raise `Interrupted` instead.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from rmsrepro.config.errors import ProgramEnd

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(ProgramEnd):
    """The process was told to stop; `exit_code` is what it must exit with (128 + signal number)."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class Interruption:
    """Holds a signal back while a training step is under way; the same one again is not held back.

    Another signal after the first is the same request once more (Ctrl-C reaches every process of a terminal,
    and the sweep then sends SIGTERM to its workers), so it does not disturb a run that is being saved.

    Args:
        before: called at the first signal, before `Interrupted` is raised.
    """

    def __init__(self, before: Callable[[], None] | None = None) -> None:
        self.pending: int | None = None
        self.deferring = False
        self._first: int | None = None
        self._before = before

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = signum
            if self._before is not None:
                self._before()
            if self.deferring:
                self.pending = signum
                return
        elif signum != self._first:
            return
        raise Interrupted(signum)

    def install(self) -> dict[int, object]:
        """Become the handler of both signals; return the handlers there were.

        Lightning puts a handler of its own in front when a fit begins, which would end the run in the middle
        of something: the run installs this one again from inside.
        """
        return {number: signal.signal(number, self.handle) for number in SIGNALS}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back while the body runs: what it writes belongs together. Then `check` is due."""
        before, self.deferring = self.deferring, True
        try:
            yield
        finally:
            self.deferring = before

    def check(self) -> None:
        """Raise what was held back: called where everything is consistent."""
        if self.pending is not None:
            raise Interrupted(self.pending)


@contextlib.contextmanager
def handling_signals(before: Callable[[], None] | None = None) -> Iterator[Interruption]:
    """Handle SIGINT and SIGTERM for the body (outside the main thread: only `Interruption`, no handler)."""
    interruption = Interruption(before)
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    handlers = interruption.install()
    try:
        yield interruption
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the body by `Interrupted`, as Ctrl-C does by KeyboardInterrupt (in the main thread)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, Interruption().handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
