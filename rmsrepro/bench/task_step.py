"""What the levels of whole models share: real batches, the config of an arm, a step that holds a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from rmsrepro.bench.cells import Arm, Step
from rmsrepro.bench.gate import NoReference
from rmsrepro.bench.model_gate import ModelGate, first_rows
from rmsrepro.config.errors import UserError
from rmsrepro.config.plain import plain
from rmsrepro.config.resolve import resolve
from rmsrepro.config.schema import Backend, TrainConfig
from rmsrepro.data import build_data, data_fingerprint
from rmsrepro.norms import NormSpec
from rmsrepro.runs.execution import tokenizer_cache
from rmsrepro.runs.seeding import seed_dropout
from rmsrepro.tasks import Task, build_task, norm_spec

LOSS_TOLERANCE = {"32": 1e-4, "bf16-mixed": 2e-2}
"""Relative difference of first losses between two backends of a norm, by precision."""
_PATHS = ("path", "cache_dir", "train", "val", "test")


def check_base(base: TrainConfig) -> None:
    """Raise UserError where the config leaves no place for a norm: all arms would be the same."""
    if (base.model.name == "gru" and not base.sites) or (
        base.model.name != "gru" and base.placement.value == "none"
    ):
        raise UserError(
            f"model={base.model.name} with placement={base.placement.value} and "
            f"{len(base.sites)} sites has no norm in it, so there is nothing to compare; "
            "set placement (Transformer) or sites (GRU)"
        )


def arm_config(base: TrainConfig, arm: Arm) -> TrainConfig:
    """The training config of `arm`: `base` with its norm and backend."""
    return resolve(replace(base, norm={"name": arm.norm, **arm.params}, backend=Backend(arm.backend)))


@dataclass
class PreparedData:
    """The batches of the timed steps, and what building a task needs to know about the data."""

    batches: list[Any]
    src_vocab: int
    tgt_vocab: int
    shape: str
    """Of the first batch, as text."""

    def bytes_per_token(self, split: str) -> float:
        """Unknown here: a timing reports no quality."""
        return math.nan


def prepare_data(base: TrainConfig, num_batches: int) -> PreparedData:
    """Draw real training batches for `num_batches` updates."""
    accumulate = base.trainer.accumulate
    cache = tokenizer_cache(base)
    data = build_data(base.data, base.task.name, seed=base.seed, accumulate=accumulate, cache_dir=cache)
    batches = list(islice(iter(data.train_dataloader()), num_batches * accumulate))
    return PreparedData(
        batches=batches,
        src_vocab=data.src_vocab,
        tgt_vocab=data.tgt_vocab,
        shape=_shape(batches[0]),
    )


def _shape(batch: Any) -> str:
    if hasattr(batch, "inputs"):
        return "x".join(str(size) for size in batch.inputs.shape)
    source, target = batch.src.shape, batch.tgt_in.shape
    return f"{source[0]}x{source[1]}->{target[1]}"


def task_gate(base: TrainConfig, data: PreparedData, device: torch.device) -> ModelGate:
    """Return the gate for models of `base`."""

    def build(spec: NormSpec) -> nn.Module:
        norm = {"name": spec.name, **spec.params}
        return build_task(resolve(replace(base, norm=norm, backend=Backend(spec.backend))), data).to(device)

    return ModelGate(base.precision == "32", build)


def data_identity(base: TrainConfig) -> dict[str, Any]:
    """Return what decides the numbers of a model on batches: model, data, precision."""
    data = {name: value for name, value in plain(base.data).items() if name.split("_")[0] not in _PATHS}
    return {
        "model": plain(base.model),
        "task": plain(base.task),
        "data": data,
        "data_hash": data_fingerprint(base.data, base.task.name),
        "placement": base.placement.value,
        "sites": sorted(site.value for site in base.sites),
        "precision": base.precision,
        "seed": base.seed,
    }


def model_facts(base: TrainConfig) -> dict[str, Any]:
    """Return what every row says of a model on batches."""
    return {
        "model": base.model.name,
        "size": base.model.size.value,
        "task": base.task.name,
        "data": base.data.name,
        "placement": base.placement.value,
    }


def dtype_name(precision: str) -> str:
    """Return how records name a precision: float32 for 32."""
    return {"32": "float32"}.get(precision, precision)


class TaskStep(Step):
    """A step of an arm's model on batches that lie on the device already, used in turn, over and over.

    Args:
        config: of the arm, resolved.
        data: the batches.
        gate: what holds the model against float64; None: nothing does.
    """

    def __init__(
        self, config: TrainConfig, data: PreparedData, device: torch.device, gate: ModelGate | None = None
    ) -> None:
        self._task: Task = build_task(config, data)
        self._spec, self._gate = norm_spec(config), gate
        self._task.to(device)
        self._task.train()
        self._batches: Sequence[Any] = [batch.to(device) for batch in data.batches]
        self._device_type = device.type
        self._mixed = config.precision == "bf16-mixed"
        self._seed = config.seed
        self._next = 0

    def _batch_loss(self, number: int) -> Tensor:
        """Run the model on the next batch, the `number`-th of an update; return its share of the loss."""
        batch = self._batches[self._next]
        self._next = (self._next + 1) % len(self._batches)
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._mixed):
            return self._task.training_step(batch, number)

    def seed(self) -> None:
        """Start dropout from the run's seed, so that the first losses of all arms are comparable."""
        seed_dropout(self._seed)

    def check(self) -> str | None:
        """Hold the logits of the first rows against float64."""
        if self._gate is None:
            return None
        task, rows = self._task, first_rows(self._batches[0])

        def run(model: nn.Module) -> list[Tensor]:
            assert isinstance(model, Task)
            return [model.logits_and_targets(rows)[0]]

        def run_mixed(model: nn.Module) -> list[Tensor]:
            with task.evaluating():
                return run(model)

        try:
            return self._gate.wrong(self._spec, task, run_mixed, run)
        except NoReference as error:
            self.remarks = [f"not checked: {error}"]
            return None

    def loss(self) -> float | None:
        """Training loss of the last batch, in nats a token. Waits for the device."""
        last: Tensor | None = self._task.last_loss
        return math.nan if last is None else float(last)

    def tidy(self) -> None:
        """Forget what the task collects for its records. Outside the clock."""
        self._task.pop_training_metrics()
