"""The processes that train one run together (trainer=ddp, trainer=fsdp), on this machine.

The process of the command is number 0: it alone has the run's lock, records, tracker and signals. It starts
the others (`rmsrepro.runs.follower`), and each gets what it has to know through its standard input, which
stays open: when it closes, because the first process has ended in whatever way, the others end too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from rmsrepro.config.errors import first_line
from rmsrepro.config.schema import Strategy, TrainerConfig
from rmsrepro.data.loaders import Part, PartOfList
from rmsrepro.runs.processor import available_cores

_START_S = 300.0
"""Seconds that the other processes get to read their data and build their model."""
END_S = 30.0
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT")


class Together(ClusterEnvironment):
    """What Lightning asks about processes that somebody else has started, all on this machine."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        super().__init__()
        self._rank, self._size, self._port = rank, size, port

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


class Ranks:
    """A process among those of its run: its number, and what they tell each other while they train."""

    def __init__(self, rank: int = 0, size: int = 1, port: int = 0) -> None:
        self.rank, self.size = rank, size
        self.environment = Together(rank, size, port)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def part_of(self, loader: Any) -> Any:
        """Return this process's part of a loader of batches."""
        if self.size == 1:
            return loader
        return (PartOfList if hasattr(loader, "__len__") else Part)(loader, self.rank, self.size)

    def told(self, number: int | None, device: torch.device) -> int | None:
        """Return the signal that the first process was told to stop by; all have to call it."""
        if self.size == 1:
            return number
        value = torch.tensor([number or 0], device=device)
        torch.distributed.broadcast(value, src=0)
        return int(value) or None

    def gather(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the states of all processes, in order; all have to call it."""
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, state)
        return found


class ProcessFailed(RuntimeError):
    """One of the processes of a run has ended before the run did."""


class Followers:
    """The other processes of a run, as the first one sees them."""

    def __init__(self, ranks: Ranks, port: int) -> None:
        self.ranks, self._port = ranks, port
        self._processes: list[subprocess.Popen[str]] = []
        self._said: list[Any] = []
        self._ready: list[int] = []
        self._environment = {name: os.environ.get(name) for name in _ENVIRONMENT}

    def begin(self, threads: int | None) -> None:
        """Start the processes, which import what they need and wait for `go`."""
        for _ in range(1, self.ranks.size):
            said = tempfile.TemporaryFile()  # noqa: SIM115
            ready, tell = os.pipe()
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "rmsrepro.runs.follower", str(tell)],
                    stdin=subprocess.PIPE,
                    stdout=said,
                    stderr=said,
                    text=True,
                    pass_fds=(tell,),
                    env={**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})},
                    # A signal of the terminal reaches the first process alone, which tells the others.
                    start_new_session=True,
                )
            finally:
                os.close(tell)
            self._processes.append(process)
            self._said.append(said)
            self._ready.append(ready)

    def go(self, order: dict[str, Any]) -> None:
        """Let the processes build the same run, and wait until all of them are about to train.

        Raises:
            ProcessFailed: one has ended instead.
        """
        for rank, process in enumerate(self._processes, 1):
            assert process.stdin is not None
            line = json.dumps({**order, "rank": rank, "size": self.ranks.size, "port": self._port})
            with contextlib.suppress(BrokenPipeError):  # it has ended; that is told below
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
        deadline = time.monotonic() + _START_S
        for rank, ready in enumerate(self._ready, 1):
            os.set_blocking(ready, False)
            while True:
                with contextlib.suppress(BlockingIOError):
                    if os.read(ready, 1):
                        break
                    raise ProcessFailed(self._end_of(rank))
                if time.monotonic() > deadline:
                    raise ProcessFailed(f"process {rank} was not ready to train after {_START_S:.0f} s")
                time.sleep(0.01)

    def explained(self, error: Exception) -> Exception:
        """Return what `error`, raised while training together, came from: perhaps another process."""
        if not isinstance(error, RuntimeError) or isinstance(error, ProcessFailed):
            return error
        text = str(error).lower()
        if not any(word in text for word in ("connection", "gloo", "nccl", "peer")):
            return error
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes, 1):
                if process.poll() not in (None, 0):
                    return ProcessFailed(self._end_of(rank))
            time.sleep(0.05)
        return error

    def _end_of(self, rank: int) -> str:
        process, said = self._processes[rank - 1], self._said[rank - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        code = process.returncode
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit status {code}"
        said.seek(0)
        lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
        why = f": {first_line(lines[-1])}" if lines else ""
        return f"process {rank} of {self.ranks.size} (counted from 0) {how}{why}"

    def end(self, *, patience_s: float) -> None:
        """End the processes: those that are not done after `patience_s` are killed."""
        deadline = time.monotonic() + patience_s
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        for process, said, ready in zip(self._processes, self._said, self._ready, strict=True):
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            if process.poll() is None:
                process.kill()
            process.wait()
            said.close()
            os.close(ready)
        self._processes, self._said, self._ready = [], [], []
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name, value in self._environment.items():  # Lightning sets them
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def process_count(trainer: TrainerConfig) -> int:
    """Return how many processes train a run."""
    return 1 if trainer.strategy is Strategy.single else trainer.devices


def threads_each(trainer: TrainerConfig) -> int | None:
    """Return the threads of torch in each process, or None where torch chooses.

    Several processes that each take all cores would wait for each other.
    """
    if trainer.num_threads is not None or process_count(trainer) == 1:
        return trainer.num_threads
    return max(1, available_cores() // process_count(trainer))


@contextlib.contextmanager
def followers(trainer: TrainerConfig) -> Iterator[Followers]:
    """Start the other processes of a run, if it has any, and end them with the body."""
    size, port = process_count(trainer), _free_port()
    started = Followers(Ranks(0, size, port), port)
    patience_s = 0.0
    try:
        started.begin(threads_each(trainer))
        yield started
        patience_s = END_S
    except Exception as error:
        better = started.explained(error)
        if better is error:
            raise
        raise better from error
    finally:
        started.end(patience_s=patience_s)


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
    return port


def own_state(state: dict[str, Any], ranks: Ranks) -> dict[str, Any] | None:
    """Return the part of a checkpoint's state that was this process's own; None where it had none.

    Args:
        state: what this package stored; `ranks` is in those of several processes alone.
    """
    each = state.get("ranks")
    if isinstance(each, Iterable):
        known = list(each)
        return known[ranks.rank] if ranks.rank < len(known) else None
    return state if ranks.first else None
