"""The records of a run: `metrics.jsonl` as it goes, `metrics.csv` and `result.json` at the end."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rmsrepro.runs.files import to_json, write_atomic

SCHEMA_VERSION = 1
_FIRST_COLUMNS = ("step", "train_seconds", "tokens")


def parse_number(value: Any) -> Any:
    """Turn the strings that `to_json` writes for non-finite floats back into floats."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return value


class MetricsLog:
    """Appends one row a step to `metrics.jsonl`; rows of one step are merged before they are written.

    A row is held back until a later step (or `flush`) shows that it is complete, so that a step's training
    and validation figures share a row. The row that is held back belongs into each checkpoint (`pending`):
    a run that goes on from there repeats no earlier step, and would never write it again.
    """

    def __init__(
        self, path: Path, *, keep_to_step: int | None = None, pending: dict[str, Any] | None = None
    ) -> None:
        """Open `path` anew, or go on with it.

        Args:
            keep_to_step: the step of the checkpoint that the run goes on from; rows of later steps, which it
                will repeat, are dropped. None: begin with an empty file.
            pending: the row that was held back when that checkpoint was written.
        """
        self._path = path
        self._file: io.FileIO | None = None
        self._pending = dict(pending) if keep_to_step is not None and pending else None
        self._written = count_rows([])
        if keep_to_step is not None and path.exists():
            rows = rows_before(path, keep_to_step, self._pending)
            self._written = count_rows(rows)
            write_atomic(path, "".join(to_json(row, indent=None) + "\n" for row in rows))
        elif path.exists():
            path.unlink()

    @property
    def pending(self) -> dict[str, Any] | None:
        """A copy of the row that is held back."""
        return dict(self._pending) if self._pending is not None else None

    @property
    def written(self) -> list[int]:
        """How many rows are in the file, and the step of the last, as `count_rows` tells them."""
        return list(self._written)

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Merge `values` into the row of `step`.

        Raises:
            ValueError: a metric's name holds a slash, or the step goes back.
        """
        wrong = [name for name in values if "/" in name]
        if wrong:
            raise ValueError(f"metric names have no slash: {', '.join(wrong)}")
        if self._pending is not None and self._pending["step"] != step:
            if step < self._pending["step"]:
                raise ValueError(f"metrics of step {step} after those of step {self._pending['step']}")
            self._write()
        if self._pending is None:
            self._pending = {"step": step}
        self._pending.update(values)

    @property
    def path(self) -> Path:
        return self._path

    def flush(self) -> None:
        """Write the row that was held back, and close the file until there is another."""
        self._write()
        if self._file is not None:
            self._file.close()
            self._file = None

    def sync(self) -> None:
        """Wait until the disk has all rows that were written."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def _write(self) -> None:
        if self._pending is None:
            return
        if self._file is None:  # kept open between rows: opening costs several times what writing does
            # Not buffered: what a run that is killed leaves behind.
            self._file = io.FileIO(self._path, "a")
        line = (to_json(self._pending, indent=None) + "\n").encode()
        begin = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:  # a full disk: no half of a row for others to stumble over
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), begin)
            raise
        count, last = self._written
        step = self._pending["step"]
        self._written = [count + (step != last), step]
        self._pending = None


class NoLog:
    """The log of a process that writes no records (one of several that train a run together)."""

    pending: dict[str, Any] | None = None
    written: Sequence[int] = ()

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl`; a torn last line (a crash while writing) is left out."""
    rows: dict[int, dict[str, Any]] = {}
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.setdefault(row["step"], {}).update({key: parse_number(value) for key, value in row.items()})
    return [rows[step] for step in sorted(rows)]


def rows_before(path: Path, step: int, pending: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the rows that were in a `metrics.jsonl` when a checkpoint was written.

    Args:
        step: of the checkpoint.
        pending: the row that the checkpoint holds; the file may have got it later.
    """
    held = pending["step"] if pending else None
    return [row for row in read_metrics(path) if row["step"] <= step and row["step"] != held]


def count_rows(rows: list[dict[str, Any]]) -> list[int]:
    """Return the number of rows and the step of the last (-1: there is none)."""
    return [len(rows), rows[-1]["step"] if rows else -1]


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Write `rows` with one header of all columns, blank where a row lacks a metric."""
    names = {name for row in rows for name in row}
    columns = [name for name in _FIRST_COLUMNS if name in names] + sorted(names - set(_FIRST_COLUMNS))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())
