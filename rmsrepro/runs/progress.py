"""What a person sees while a run trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

_QUIET_S = 20.0


def speaker(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line as it is: no markup, no wrapping in the middle of a path."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    return say


class ProgressView(Protocol):
    def __enter__(self) -> ProgressView: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, step: int, values: Mapping[str, Any], *, more: bool = False) -> None:
        """Show that `step` updates are done and the newest of the metrics.

        Args:
            more: a validation of the same step follows, whose figures will come by another call.
        """


class Silent:
    """Nothing: inside a sweep the sweep itself shows progress."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, step: int, values: Mapping[str, Any], *, more: bool = False) -> None:
        pass


class Bar:
    """A rich progress bar with the newest losses."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(min_width=2 * len(str(total)) + 1, no_wrap=True)),
            TextColumn("{task.fields[losses]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(_shortened(title, console.width), total=total, losses="")
        self._values: dict[str, Any] = {}

    def __enter__(self) -> Bar:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def update(self, step: int, values: Mapping[str, Any], *, more: bool = False) -> None:
        self._values.update(values)
        self._progress.update(self._task, completed=step, losses=_losses(self._values, short=True))


class Lines:
    """One line a validation, or after twenty quiet seconds: for logs and pipes."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._last = time.monotonic()
        self._values: dict[str, Any] = {}

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, step: int, values: Mapping[str, Any], *, more: bool = False) -> None:
        self._values.update(values)
        quiet = "train_loss" in values and time.monotonic() - self._last > _QUIET_S
        if not more and ("val_loss" in values or quiet):
            self._last = time.monotonic()
            self._console.print(
                f"step {step}/{self._total}  {_losses(self._values)}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def progress_view(console: Console, title: str, total: int, *, enabled: bool) -> ProgressView:
    """Return the view that fits the console."""
    if not enabled:
        return Silent()
    return Bar(console, title, total) if console.is_terminal else Lines(console, total)


def _losses(values: Mapping[str, Any], *, short: bool = False) -> str:
    names = [name for name in ("train_loss", "val_loss") if name in values]
    said = {name: name.removesuffix("_loss") if short else name for name in names}
    return "  ".join(f"{said[name]} {values[name]:.4f}" for name in names)


_BESIDE_TITLE = 60
"""Columns of a bar's numbers at their longest, and of a bar that can be seen."""


def _shortened(title: str, width: int) -> str:
    """Return a run id with its middle left out where the numbers beside it would lack room."""
    room = max(12, width - _BESIDE_TITLE)
    # The seed and the hash at its end tell runs apart.
    return title if len(title) <= room else f"{title[: room // 3]}…{title[-(room - room // 3 - 1) :]}"
