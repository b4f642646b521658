"""Shows a sweep while it runs, from the records alone: which job ended how, how many are left, how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
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
from rmsrepro.runs.files import read_json


class Monitor:
    """Watches the run folders of a sweep from a thread; a bar on a terminal, a line a job elsewhere."""

    def __init__(self, console: Console, jobs: Sequence[tuple[str, str]], folder: Path) -> None:
        self._console, self._folder = console, folder
        self._jobs = dict(jobs)
        self._before = {run_id: _stamp(folder / run_id) for run_id in self._jobs}
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

    def _look(self) -> None:
        for run_id in list(self._jobs):
            folder = self._folder / run_id
            if _stamp(folder) == self._before[run_id]:
                continue
            result = read_json(folder / "result.json")
            if result is None:
                continue
            text = self._jobs.pop(run_id)
            self._show(run_id, text, result)

    def _show(self, run_id: str, overrides: str, result: dict[str, object]) -> None:
        done = self._total - len(self._jobs)
        metrics = result.get("metrics")
        clocks = result.get("clocks")
        loss = metrics.get("val_loss") if isinstance(metrics, dict) else None
        seconds = clocks.get("total_s", 0.0) if isinstance(clocks, dict) else 0.0
        tail = f"  val_loss {loss:.4f}" if isinstance(loss, int | float) else ""
        line = f"[{done}/{self._total}] {result['status']} {run_id}{tail}  {float(seconds):.1f} s"
        if is_contended(result):
            line += " (contended)"
        if result["status"] == "failed":
            line += f"\n  {result.get('error')}\n  overrides: {overrides}"
        elif result["status"] == "diverged":
            line += f"\n  {result.get('error')}"
        elif self._progress is None and done < self._total:
            left = (time.monotonic() - self._start) / done * (self._total - done)
            line += f"  (about {left:.0f} s left)"
        target = self._progress.console if self._progress is not None else self._console
        target.print(line, highlight=False, markup=False, soft_wrap=True)
        if self._progress is not None:
            self._progress.update(self._task, completed=done)


def _stamp(folder: Path) -> int | None:
    try:
        return (folder / "result.json").stat().st_mtime_ns
    except OSError:
        return None
