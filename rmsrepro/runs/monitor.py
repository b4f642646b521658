"""Shows a sweep while it runs, from the records alone: which job ended how, how many are left, how long."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rmsrepro.runs.contention import is_contended
from rmsrepro.runs.files import number, read_json
from rmsrepro.runs.lost import stamp
from rmsrepro.runs.reasons import DIVERGED
from rmsrepro.runs.status import total_seconds

_BEAT_S = 20.0


class Monitor:
    """Watches the run folders of a sweep from a thread; a bar on a terminal, a line a job elsewhere.

    Args:
        jobs: run id and overrides of each.
        beat: called every few seconds, as a sign of life.
    """

    def __init__(
        self,
        console: Console,
        jobs: Sequence[tuple[str, str]],
        folder: Path,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._beat, self._next_beat = beat, 0.0
        self._reasons: dict[str, str] = {}
        self._console, self._folder = console, folder
        self._jobs = dict(jobs)
        self._before = {run_id: stamp(folder / run_id) for run_id in self._jobs}
        self._total = len(self._jobs)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sweep-monitor", daemon=True)
        self._progress: Progress | None = None
        self._start = time.monotonic()

    def __enter__(self) -> Monitor:
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("runs"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("left"), TimeRemainingColumn(), console=self._console,
            )  # fmt: skip
            self._task = self._progress.add_task("runs", total=self._total)
            self._progress.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None:
            self._look()
        if self._progress is not None:
            self._progress.stop()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            self._look()
            if time.monotonic() >= self._next_beat:
                self._next_beat = time.monotonic() + _BEAT_S
                self._beat()

    def _look(self) -> None:
        for run_id in list(self._jobs):
            folder = self._folder / run_id
            if stamp(folder) == self._before[run_id]:
                continue
            result = read_json(folder / "result.json")
            if result is None:
                continue
            text = self._jobs.pop(run_id)
            self._show(run_id, text, result)

    def _show(self, run_id: str, overrides: str, result: dict[str, object]) -> None:
        done = self._total - len(self._jobs)
        metrics, status = result.get("metrics"), str(result.get("status"))
        loss = metrics.get("val_loss") if isinstance(metrics, dict) else None
        tail = f"  val_loss {number(loss, math.inf):.4f}" if isinstance(loss, int | float) else ""
        line = f"[{done}/{self._total}] {status} {run_id}{tail}  {total_seconds(result):.1f} s"
        if is_contended(result):
            line += " (contended)"
        if status in ("failed", "diverged"):
            line += f"\n  {self._reason(run_id, status, str(result.get('error')))}\n  overrides: {overrides}"
        elif self._progress is None and done < self._total:
            left = (time.monotonic() - self._start) / done * (self._total - done)
            line += f"  (about {left:.0f} s left)"
        self.say(line)
        if self._progress is not None:
            self._progress.update(self._task, completed=done)

    def _reason(self, run_id: str, status: str, error: str) -> str:
        """Say why a run failed, and what to do; what many have in common is said with the first."""
        first = self._reasons.setdefault(error, run_id)
        if first != run_id:
            return f"for the same reason as {first}"
        return f"{error}; {DIVERGED}" if status == "diverged" else error

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        target = self._progress.console if self._progress is not None else self._console
        target.print(line, highlight=False, markup=False, soft_wrap=True)
