"""What the tests of the command line share: tiny settings, outcomes, records."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.norms import registry

LM = ["debug=fast", "model.d_model=16"]
TRANSLATION = [
    "debug=fast", "model.d_model=16", "task=translation", "data=cldr", "data.num_train=200",
    "data.num_val=20", "data.num_test=20", "data.max_len=48", "task.max_decode_len=8",
]  # fmt: skip


@dataclass
class Ran:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one message of a refused command."""
        assert self.code == 2, (self.code, self.out, self.err)
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("error: ")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rmsrepro.cli", *arguments]


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment with `changes`; None takes a variable away."""
    merged = {**os.environ, **(changes or {})}
    return {key: value for key, value in merged.items() if value is not None}


def records(folder: str | Path = "outputs") -> dict[str, dict[str, Any]]:
    """All result.json by run id."""
    found = {
        file.parent.name: json.loads(file.read_text()) for file in Path(folder).glob("runs/*/result.json")
    }
    assert all(name == record["run_id"] for name, record in found.items())
    return found


def tree(folder: Path = Path()) -> set[str]:
    return {str(item.relative_to(folder)) for item in folder.rglob("*")}


@dataclass
class Trained:
    """A finished run that several tests use."""

    path: Path
    record: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoints" / "last.ckpt"


Start = Callable[..., "subprocess.Popen[str]"]
"""`start("train", "norm=rmsnorm", env={"HOME": None})`: see the fixture."""
SLOW = """\
import time

from torch import nn


class Slow(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x):
        if self.training:
            time.sleep({seconds})
        return x
"""


@contextlib.contextmanager
def slow_norm(seconds: float) -> Iterator[None]:
    """Have `norm=slow_norm:Slow` here, which takes its time: a signal then meets the run on any machine."""
    path, strings = list(sys.path), dict(registry._import_strings)
    Path("slow_norm.py").write_text(SLOW.format(seconds=seconds))
    yield
    sys.path[:] = path
    sys.modules.pop("slow_norm", None)
    registry._import_strings.clear()
    registry._import_strings.update(strings)


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str] | None, seconds: float = 200
) -> None:
    """Wait for a condition while a process runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process is not None:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def stopped_at(step: int) -> Iterator[None]:
    """Every run in this process is told to stop (SIGTERM) after so many updates."""
    from rmsrepro.runs.callbacks import RunCallback

    original = RunCallback.on_train_batch_end

    def stop(this: Any, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        original(this, trainer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCallback, "on_train_batch_end", stop)
        yield
