"""What all tasks share: the training step, the optimiser, validation and plain evaluation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from rmsrepro.config.errors import UserError, contained, nearest
from rmsrepro.config.schema import TrainConfig
from rmsrepro.data.batches import IGNORE
from rmsrepro.tasks.metrics import TokenMeter
from rmsrepro.tasks.optim import build_optimizer, decayed_parameter_names

SPLITS = ("val", "test")


class Batch(Protocol):
    """What every batch tells besides its tensors."""

    @property
    def num_tokens(self) -> int:
        """Target tokens in this batch."""

    @property
    def update_tokens(self) -> int:
        """Target tokens in all batches of the optimiser update that this one belongs to."""

    def to(self, device: torch.device) -> Any:
        """The same batch on another device."""


class SplitLoaders(Protocol):
    """The part of a data module that evaluation needs."""

    def val_dataloader(self) -> Iterable[Any]: ...
    def test_dataloader(self) -> Iterable[Any]: ...


class Task(L.LightningModule, ABC):
    """A model with a loss over tokens. Subclasses say how a batch becomes logits and targets.

    Training reports through buffers instead of `self.log`, which costs half a millisecond a call: the
    recorder takes `pop_training_metrics()` at log boundaries, and `validation_metrics` after each
    validation.
    """

    label_smoothing: float = 0.0
    """Share of the target distribution spread evenly over the whole vocabulary, in training only."""

    def __init__(self, config: TrainConfig, model: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.processes = 1
        """Processes that train this run, whose mean gradients an update follows (as DDP and FSDP do it)."""
        self.validation_metrics: dict[str, float] = {}
        """The figures of the last validation: `val_loss`, `val_perplexity` and the task's own."""
        self.hypotheses: dict[str, list[str]] = {}
        """What the last final scoring produced, a text for each example scored, by split."""
        self._meter = TokenMeter()
        # By now, as FSDP turns matrices into pieces of a vector.
        self._decayed = decayed_parameter_names(model)
        # Loss sum and target tokens of each batch since the last pop, and of the very last one. Plain
        # lists and dicts, as setting an attribute of a module is slow.
        self._losses: list[tuple[Tensor, int]] = []
        self._popped: tuple[Tensor, int] | None = None
        self._update: dict[str, Tensor | float] = {}

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def logits_and_targets(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Run the model; return logits (B, T, V) and targets (B, T), IGNORE where there is no token."""

    @abstractmethod
    def split_metrics(self, split: str, sums: dict[str, float]) -> dict[str, float]:
        """Name the figures of a split (`val_loss`, ...) from what TokenMeter computed."""

    def final_scores(self, data: Any, split: str, *, limit: int | None = None) -> dict[str, float | str]:
        """Scores of the trained model that are too slow for each validation; this task has none."""
        return {}

    # ----------------------------------------------------------------------- training

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The batch's share of the update's mean loss per target token, times batches and processes.

        Lightning divides by the number of accumulated batches and adds up the gradients, and of several
        processes the mean gradient is taken, so an update follows the mean over all its tokens, however they
        are spread over its batches and processes.
        """
        with contained():
            logits, targets = self.logits_and_targets(batch)
        loss_sum = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        self._losses.append((loss_sum.detach(), batch.num_tokens))
        return loss_sum * (self.config.trainer.accumulate * self.processes / batch.update_tokens)

    @property
    def last_loss(self) -> Tensor | None:
        """Training loss of the last batch, per target token: a detached scalar on the model's device.

        None before the first batch. Reading its value waits for the device.
        """
        last = self._losses[-1] if self._losses else self._popped
        if last is None:
            return None
        loss_sum, tokens = last
        return loss_sum / tokens

    def last_loss_value(self) -> float | None:
        """Return `last_loss` as a number, which waits for the device; None before the first batch.

        Of several processes it is the loss of the whole batch; all of them have to ask.
        """
        last = self._losses[-1] if self._losses else self._popped
        if last is None:
            return None
        loss_sum, tokens = self._over_processes(float(last[0]), last[1])
        return loss_sum / tokens

    def _over_processes(self, *values: float) -> Sequence[float]:
        """Return the sums of these numbers over all processes; every process has to call it."""
        if self.processes == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(sums)
        return [float(value) for value in sums.cpu()]

    def pop_training_metrics(self) -> dict[str, float]:
        """Return what training did since the last call, and forget it.

        `train_loss`: the loss that is optimised (label smoothing and dropout included), in nats, the mean
        over all target tokens since the last call. `grad_norm`: the global gradient norm before
        clipping, and `lr`: the learning rate, both of the last update. Empty when nothing was trained.
        Of several processes the loss is the mean over the tokens of all, and all of them have to ask.
        """
        if not self._losses:
            return {}
        sums, counts = zip(*self._losses, strict=True)
        total, tokens = self._over_processes(float(torch.stack(sums).cpu().double().sum()), sum(counts))
        metrics = {"train_loss": total / tokens}
        metrics |= {name: float(value) for name, value in self._update.items()}
        self._popped = self._losses[-1]
        self._losses.clear()
        self._update.clear()
        return metrics

    def training_buffer(self) -> dict[str, Any]:
        """What `pop_training_metrics` will report, in types that a checkpoint may hold."""
        return {
            "losses": [[float(loss_sum), tokens] for loss_sum, tokens in self._losses],
            "update": {name: float(value) for name, value in self._update.items()},
        }

    def load_training_buffer(self, state: dict[str, Any]) -> None:
        """Take up what `training_buffer` gave, so that a resumed run reports the same means."""
        self._losses = [
            (torch.tensor(loss_sum, device=self.device), int(tokens)) for loss_sum, tokens in state["losses"]
        ]
        self._update = dict(state["update"])

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW and its schedule, stepped once an update."""
        optimizer, schedule = build_optimizer(
            self.model, self.config.optim, self.config.trainer.max_steps, decayed=self._decayed
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global norm at optim.clip_norm (or at what the Trainer was given), and keep the norm.

        Done here because Lightning's own clipping refuses fused optimisers in mixed precision (there is
        no gradient scaler in bf16, so nothing is in its way), and because the norm is then known.
        """
        limit = self.config.optim.clip_norm if gradient_clip_val is None else gradient_clip_val
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strategy = None if self._trainer is None else self._trainer.strategy
        if isinstance(strategy, FSDPStrategy):
            # Each process has a part of each gradient; only the wrapper knows the norm of the whole.
            assert strategy.model is not None
            clip: Any = strategy.model.clip_grad_norm_
            self._update["grad_norm"] = clip(math.inf if limit is None else limit)
        elif limit is None:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self._update["grad_norm"] = get_total_norm(gradients)
        else:
            self._update["grad_norm"] = clip_grad_norm_(parameters, limit)
        self._update["lr"] = optimizer.param_groups[0]["lr"]

    # --------------------------------------------------------------------- validation

    def on_validation_epoch_start(self) -> None:
        self._meter.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with contained():
            self._meter.update(*self.logits_and_targets(batch))

    def on_validation_epoch_end(self) -> None:
        self.validation_metrics = self.split_metrics("val", self._meter.compute())

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout off, no gradients, and the precision of training."""
        was_training = self.training
        self.eval()
        mixed = self.config.precision == "bf16-mixed"
        try:
            with (
                torch.inference_mode(),
                torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=mixed, cache_enabled=False),
            ):
                yield
        finally:
            self.train(was_training)


def evaluate(
    module: Task, data: SplitLoaders, split: str, device: torch.device | str | None = None
) -> dict[str, float]:
    """Return the loss figures of a whole split (`test_loss`, `test_perplexity`, ...), outside a Trainer.

    The module is moved to `device` when one is given. The same figures as Lightning's validation loop
    gives for `val`.

    Raises:
        UserError: a split other than val and test.
    """
    check_split(split)
    if device is not None:
        module.to(device)
    meter = TokenMeter().to(module.device)
    loader = data.val_dataloader() if split == "val" else data.test_dataloader()
    with module.evaluating():
        for batch in loader:
            meter.update(*module.logits_and_targets(batch.to(module.device)))
    return module.split_metrics(split, meter.compute())


def check_split(split: str) -> None:
    """Raise UserError unless `split` can be evaluated."""
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}: expected val or test{nearest(split, SPLITS)}")
