"""What a run adds to Lightning's loop: clocks, records, the checkpoint, the watch for divergence."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT

from rmsrepro.config.schema import TrainerConfig
from rmsrepro.data.loaders import ResumableData
from rmsrepro.runs.checkpoint_files import checkpoint_to_write, discard_unfinished, keep_checkpoint
from rmsrepro.runs.clocks import Clocks
from rmsrepro.runs.divergence import Divergence
from rmsrepro.runs.files import to_json, write_atomic
from rmsrepro.runs.interruption import Interruption
from rmsrepro.runs.owners import owner_record, touch_lock
from rmsrepro.runs.processes import Ranks, own_state
from rmsrepro.runs.progress import ProgressView
from rmsrepro.runs.records import MetricsLog, NoLog
from rmsrepro.runs.seeding import rng_state, set_rng_state
from rmsrepro.runs.trackers import Tracker
from rmsrepro.tasks.base import Task

STATE_KEY = "rmsrepro"
"""Where a checkpoint keeps what this package adds to Lightning's: config, tokenizers, clocks, RNG state."""

_BEAT_S = 30.0


def synchronise(device: torch.device) -> None:
    """Wait for a GPU to finish; on a CPU everything has finished already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class RunCallback(L.Callback):
    """Follows one run through `Trainer.fit`.

    The device is waited for at log boundaries only, where the losses are read; on a CPU the loss is looked
    at after each update. The first `warmup_steps` updates of a session (allocation, first calls) are taken
    off the training clock and reported.
    """

    def __init__(
        self,
        *,
        folder: Path,
        trainer_config: TrainerConfig,
        clocks: Clocks,
        log: MetricsLog | NoLog,
        tracker: Tracker,
        view: ProgressView,
        interruption: Interruption,
        payload: dict[str, Any],
        running: Callable[[int], dict[str, Any]],
        ranks: Ranks | None = None,
        data: ResumableData[Any] | None = None,
    ) -> None:
        """See the class.

        Args:
            payload: what each checkpoint holds of the run.
            running: from a step to what `running.json` tells.
            data: whose position each checkpoint holds.
        """
        self._folder = folder
        self._config = trainer_config
        self._clocks = clocks
        self._log = log
        self._tracker = tracker
        self._view = view
        self._interruption = interruption
        self._payload = payload
        self._data = data
        self._running = running
        self._ranks = ranks or Ranks()
        self._divergence = Divergence(trainer_config.divergence_factor)
        self._tokens = 0
        self._start_step = 0
        self._start_seconds = 0.0
        self._last_step = -1
        self._beat = 0.0
        self._told: int | None = None
        self.warmup_steps = 0
        self.warmup_s = 0.0
        self.validated_step = -1
        self.diverged: str | None = None

    # ------------------------------------------------------------------------ resuming

    def load(self, state: dict[str, Any]) -> None:
        """Take up the token count, clocks and divergence watch of the run's own last checkpoint."""
        self._tokens = int(state["tokens"])
        self._clocks.load_state_dict(state["clocks"])
        self._divergence.load_state_dict(state["divergence"])

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        assert isinstance(pl_module, Task)
        own = {"training_buffer": pl_module.training_buffer(), "rng": rng_state()}
        checkpoint[STATE_KEY] = {
            **self._payload,
            "pending_row": self._log.pending,
            "rows": list(self._log.written),
            **own,
            "divergence": self._divergence.state_dict(),
            "step": trainer.global_step,
            "tokens": self._tokens,
            **({} if self._data is None else {"data": self._data.state_dict()}),
            "clocks": self._clocks.state_dict(),
        }
        if self._ranks.size > 1:
            checkpoint[STATE_KEY]["ranks"] = self._ranks.gather(own)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        assert isinstance(pl_module, Task)
        state = checkpoint[STATE_KEY]
        own = own_state(state, self._ranks)
        if own is None:
            return  # a process more than its parent had
        set_rng_state(own["rng"])
        if state["run_id"] == self._payload["run_id"]:
            # Not for a run that continues a parent: its first row speaks of its own updates.
            pl_module.load_training_buffer(own["training_buffer"])

    # ------------------------------------------------------------------------ training

    # Lightning passes over a hook that it cannot call. Each of these would cost a pass through its profiler
    # at every step, and do nothing.
    on_train_batch_start = None  # type: ignore[assignment]
    on_before_backward = None  # type: ignore[assignment]
    on_after_backward = None  # type: ignore[assignment]
    on_before_optimizer_step = None  # type: ignore[assignment]
    on_before_zero_grad = None  # type: ignore[assignment]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start_step = self._last_step = trainer.global_step
        left = self._config.max_steps - trainer.global_step
        self.warmup_steps = min(5, max(1, left // 20))
        synchronise(pl_module.device)
        if threading.current_thread() is threading.main_thread():
            self._interruption.install()
        self._interruption.deferring = True
        self._start_seconds = self._clocks.read("train")
        self._clocks.switch("train")

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert isinstance(pl_module, Task)
        self._tokens += batch.whole_tokens
        step = trainer.global_step
        if step == self._last_step:
            return  # in the middle of an accumulated update
        self._last_step = step
        if step - self._start_step == self.warmup_steps:
            self._end_warmup(pl_module)
        if time.monotonic() - self._beat > _BEAT_S:
            self.beat(step)
        boundary = step % self._config.log_every == 0 or step >= self._config.max_steps
        if (boundary or pl_module.device.type == "cpu") and (loss := pl_module.last_loss_value()) is not None:
            self.diverged = self._divergence.reason(loss)
        validates = step % (self._config.val_every or 1) == 0
        if self._ranks.size > 1 and (boundary or validates or pl_module.device.type == "cpu"):
            self._told = self._ranks.told(self._interruption.pending, pl_module.device)
        if boundary or self.diverged:
            # At the last step the run validates too, there or after the loop.
            more = not self.diverged and (validates or step >= self._config.max_steps)
            self._record_training(pl_module, step, more=more)
        if self.diverged:
            trainer.should_stop = True
            return
        if not validates:
            # Where a validation follows, the checkpoint and the held-back signal wait for its end.
            self._safe_point(trainer, step)

    def _end_warmup(self, module: Task) -> None:
        synchronise(module.device)
        self.warmup_s = self._clocks.read("train") - self._start_seconds
        self._clocks.reassign(self.warmup_s, "train", "other")

    def _record_training(self, module: Task, step: int, *, more: bool = False) -> None:
        synchronise(module.device)
        seconds = self._clocks.read("train")
        if step - self._start_step < self.warmup_steps:
            seconds = self._start_seconds
        with self._clocks.on("logging"):
            values = {"train_seconds": seconds, "tokens": self._tokens, **module.pop_training_metrics()}
            self.record(step, values, more=more)

    def record(self, step: int, values: dict[str, Any], *, more: bool = False) -> None:
        """Write a row, mirror it, and show it; now and then tell `status` how far the run is.

        Args:
            more: a validation of the same step follows.
        """
        self._log.add(step, values)
        self._tracker.log(step, values)
        self._view.update(step, values, more=more)
        if time.monotonic() - self._beat > 2:
            self.beat(step)

    def beat(self, step: int) -> None:
        """Tell `rmsrepro status` that the run lives and how far it is."""
        self._beat = time.monotonic()
        if not self._ranks.first:
            return
        touch_lock(self._folder)
        told = to_json({**owner_record(), **self._running(step)})
        # Every two seconds of training, and of no use after a crash.
        write_atomic(self._folder / "running.json", told, durable=False)

    def _safe_point(self, trainer: L.Trainer, step: int) -> None:
        if self._ranks.size > 1:
            # One process alone must not stop: the others would wait for it. So what was agreed on counts.
            if self._told is not None:
                self.save(trainer)
                self._interruption.pending = self._told
                self._interruption.check()
        elif self._interruption.pending is not None:
            self.save(trainer)
            self._interruption.check()
        if step % (self._config.checkpoint_every or 1) == 0 or step >= self._config.max_steps:
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Write checkpoints/last.ckpt; the one before stays as previous.ckpt."""
        with self._clocks.on("checkpoint"):
            self._log.sync()  # a run that goes on from here does not make these rows again
            try:
                # All processes take part, the first one writes.
                trainer.save_checkpoint(checkpoint_to_write(self._folder))
                if self._ranks.first:
                    keep_checkpoint(self._folder)
            finally:
                if self._ranks.first:
                    discard_unfinished(self._folder)

    # ---------------------------------------------------------------------- validation

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        synchronise(pl_module.device)
        self._clocks.switch("eval")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        fitting = trainer.state.fn == "fit"
        self._clocks.switch("train" if fitting else "other")
        if not fitting:
            return
        step = trainer.global_step
        self.validated_step = step
        seconds = self._clocks.read("train")
        with self._clocks.on("logging"):
            values = dict(pl_module.validation_metrics)
            self.record(step, {"train_seconds": seconds, "tokens": self._tokens, **values})
        if not math.isfinite(values.get("val_loss", 0.0)):
            self._record_training(pl_module, step)
            self.diverged = self.diverged or f"the validation loss is {values['val_loss']}"
            trainer.should_stop = True
            return
        self._safe_point(trainer, step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        synchronise(pl_module.device)
        self._clocks.switch("other")
        self._interruption.deferring = False

    @property
    def step(self) -> int:
        """Updates made so far, those of earlier sessions included."""
        return max(0, self._last_step)

    @property
    def tokens(self) -> int:
        """Target tokens trained on so far."""
        return self._tokens

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any, **named: Any
    ) -> None:
        if time.monotonic() - self._beat > _BEAT_S:
            self.beat(max(0, self._last_step))
