"""A training step inside Lightning's Trainer, which waits between blocks for the batches it is given.

The Trainer owns its loop, so it runs in a thread of its own, and is held where it asks for a batch. To time n
steps, n batches are handed over in one go: the steps are done when the Trainer asks for the next one. That
costs some ten microseconds a block, whatever is in it.
"""

from __future__ import annotations

import io
import math
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import lightning as L
import torch
from rich.console import Console

from rmsrepro.bench.cells import Arm
from rmsrepro.bench.task_step import PreparedData, TaskStep
from rmsrepro.config.schema import TrainConfig
from rmsrepro.data.loaders import BatchList
from rmsrepro.runs.callbacks import RunCallback
from rmsrepro.runs.clocks import Clocks
from rmsrepro.runs.interruption import Interruption
from rmsrepro.runs.progress import progress_view
from rmsrepro.runs.records import MetricsLog
from rmsrepro.runs.trackers import NoTracker
from rmsrepro.runs.trainer import make_trainer

ROLE = "framework"
TRAINER, RECORDS = "trainer", "records"
ARMS = (TRAINER, RECORDS)
"""What is timed beside the bare loop: the Trainer alone, and with the records and clocks of a run."""
THREAD = "trainer of a bench"
_NEVER = 2**60
"""More steps than any timing makes."""
_END_S = 30.0


def framework_arms(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms that show what the framework adds to the first baseline, or none without a baseline."""
    bare = next((arm for arm in arms if arm.is_baseline and arm.unavailable is None), None)
    if bare is None:
        return []
    found: list[Arm] = []
    for kind in ARMS:
        against = [bare.label, *(arm.label for arm in found)]
        label = f"{bare.norm}+{kind}/{bare.backend}"
        found.append(Arm(label, bare.norm, bare.params, bare.backend, role=ROLE, against=against))
    return found


def kind_of(arm: Arm) -> str:
    """Return which of `ARMS` a framework's arm is."""
    return arm.label.rpartition("/")[0].rpartition("+")[2]


class TrainingOver(Exception):
    """Thrown into a Trainer's loop to end it."""


class HeldBatches:
    """An endless loader that hands out batches as they are released, and is otherwise waited at."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches
        self._orders: SimpleQueue[int] = SimpleQueue()
        self._reports: SimpleQueue[BaseException | None] = SimpleQueue()

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            self._reports.put(None)
            count = self._orders.get()
            if count == 0:
                raise TrainingOver
            for _ in range(count):
                yield self._batches[number % len(self._batches)]
                number += 1

    def wait(self) -> None:
        """Return when a batch is asked for that was not released.

        Raises:
            RuntimeError: whoever asked for batches has ended.
        """
        report = self._reports.get()
        if report is not None:
            raise RuntimeError(f"the Trainer has ended: {type(report).__name__}: {report}") from report

    def release(self, count: int) -> None:
        """Hand out `count` batches, and wait until they are used up."""
        self._orders.put(count)
        self.wait()

    def end(self) -> None:
        """Let whoever waits for a batch end by `TrainingOver`."""
        self._orders.put(0)

    def report_end(self, reason: BaseException) -> None:
        """Tell the other side that no batch will be asked for any more."""
        self._reports.put(reason)


class TrainerStep(TaskStep):
    """One optimiser update by the Trainer.

    Args:
        config: of the arm, resolved.
        data: the batches, used in turn, over and over, as in the bare loop.
        kind: one of `ARMS`.
    """

    in_thread = True

    def __init__(self, config: TrainConfig, data: PreparedData, device: torch.device, kind: str) -> None:
        super().__init__(config, data, device)
        self._accumulate = config.trainer.accumulate
        self._held = HeldBatches(self._batches)
        self._kind = kind
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        endless = replace(
            config.trainer,
            max_steps=_NEVER,
            val_every=_NEVER,
            checkpoint_every=_NEVER,
            divergence_factor=math.inf,
        )
        config = replace(config, trainer=endless)
        unused = BatchList(self._batches.__getitem__, len(self._batches))
        callbacks: list[RunCallback] = []
        if kind == RECORDS:
            self._folder = tempfile.TemporaryDirectory(prefix="rmsrepro-bench-")
            callbacks = [_records(config, Path(self._folder.name))]
        trainer = make_trainer(config, *callbacks)
        loaders = {"train_dataloaders": self._held, "val_dataloaders": unused}
        self._thread = threading.Thread(target=self._fit, args=(trainer, loaders), name=THREAD, daemon=True)
        self._thread.start()
        self._held.wait()
        # The Trainer fetches a batch ahead of the one in use: with this one it is ready to begin.
        self._held.release(1)

    def _fit(self, trainer: L.Trainer, loaders: dict[str, Any]) -> None:
        try:
            trainer.fit(self._task, **loaders)
        except TrainingOver:
            return
        except BaseException as error:
            self._held.report_end(error)
        else:
            self._held.report_end(RuntimeError("it has stopped by itself"))

    def __call__(self) -> None:
        self.repeat(1)

    def repeat(self, count: int) -> None:
        """Do `count` updates.

        Raises:
            RuntimeError: the Trainer has ended.
        """
        self._held.release(count * self._accumulate)

    def tidy(self) -> None:
        """Forget what the task collects; the records do so themselves."""
        if self._kind != RECORDS:
            super().tidy()

    def close(self) -> None:
        """End the Trainer and its thread."""
        self._held.end()
        self._thread.join(_END_S)
        if self._folder is not None:
            self._folder.cleanup()


def _records(config: TrainConfig, folder: Path) -> RunCallback:
    """Return the records and clocks of a run without a tracker, off a terminal."""
    view = progress_view(
        Console(file=io.StringIO()), "bench", config.trainer.max_steps, enabled=config.trainer.progress
    )
    return RunCallback(
        folder=folder,
        trainer_config=config.trainer,
        clocks=Clocks(),
        log=MetricsLog(folder / "metrics.jsonl"),
        tracker=NoTracker(),
        view=view,
        interruption=Interruption(),
        payload={},
        running=lambda step: {"step": step},
    )
