"""Starts a measuring process, listens to it, and sees it end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import rmsrepro

EVENT_MARK = "@bench "
"""Begins a line of a measuring process that is meant for its parent."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class ProcessFailed(RuntimeError):
    """A measuring process ended without a result; the message says how."""


def child_environment(threads: int | None) -> dict[str, str]:
    """Return the environment of a measuring process: ours, with its threads and this package findable."""
    environment = dict(os.environ)
    if threads is not None:
        environment.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    root = str(Path(rmsrepro.__file__).resolve().parent.parent)
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


def run_worker(
    spec: Mapping[str, Any],
    folder: Path,
    *,
    timeout_s: float,
    on_event: Callable[[Mapping[str, Any]], None],
    command: Sequence[str] = (sys.executable, "-m", "rmsrepro.bench.worker"),
) -> dict[str, Any]:
    """Run one measuring process to its end and return what it found.

    However this function is left, the process and its children are gone.

    Raises:
        ProcessFailed: it ended with an error, wrote no result or took longer than `timeout_s`.
    """
    number = spec["process"]
    spec_path, out_path = folder / f"spec-{number}.json", folder / f"out-{number}.json"
    errors_path = folder / f"errors-{number}.txt"
    spec_path.write_text(json.dumps({**spec, "spawned_at": time.time()}), encoding="utf-8")
    deadline = time.monotonic() + timeout_s
    lines: queue.Queue[str | None] = queue.Queue()
    with errors_path.open("wb") as errors:
        # A session of its own: Ctrl-C reaches only us, and we end the process group as a whole.
        process = subprocess.Popen(
            [*command, str(spec_path), str(out_path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=child_environment(spec["threads"]),
            start_new_session=True,
        )
        reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            code = _listen(process, lines, deadline, timeout_s, on_event)
        finally:
            _end(process, reader)
    if code != 0:
        raise ProcessFailed(f"{_how_it_ended(code)}: {_last_lines(errors_path)}")
    try:
        found: dict[str, Any] = json.loads(out_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProcessFailed(f"it ended without a result: {error}") from error
    return found


def _listen(
    process: subprocess.Popen[str],
    lines: queue.Queue[str | None],
    deadline: float,
    timeout_s: float,
    on_event: Callable[[Mapping[str, Any]], None],
) -> int:
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ProcessFailed(f"it was stopped after {timeout_s:.0f} s (bench.timeout_s)")
        try:
            line = lines.get(timeout=min(left, 1.0))
        except queue.Empty:
            # Something it started may still hold the stream open after it ended.
            line = "" if process.poll() is None else None
        if line is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=left)
        elif line.startswith(EVENT_MARK):
            with contextlib.suppress(ValueError):
                on_event(json.loads(line.removeprefix(EVENT_MARK)))


def _read_lines(stream: IO[str] | None, lines: queue.Queue[str | None]) -> None:
    with contextlib.suppress(ValueError, OSError):
        for line in stream or ():
            lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen[str], reader: threading.Thread) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(timeout=1.0)
    if process.stdout is not None and not reader.is_alive():
        process.stdout.close()


def _how_it_ended(code: int) -> str:
    if code < 0:
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"it was ended by signal {-code}"
    return f"it ended with exit code {code}"


def _last_lines(path: Path, count: int = 3) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-count:]) or "it wrote no message"
