"""The level `model`: forward and backward of a whole model, without an optimiser.

    fwd        the forward pass and the loss as in training, without a graph
    fwd_bwd    the same with a graph, then the gradients of all parameters, kept nowhere

Of the package's models on real batches, or of the user's own on the inputs it brings (user_step.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rmsrepro.bench.arms import arrange_arms
from rmsrepro.bench.cells import Arm, ArmStep, Cell
from rmsrepro.bench.devices import choose_device
from rmsrepro.bench.levels import Level, Workbench
from rmsrepro.bench.model_gate import ModelGate
from rmsrepro.bench.task_step import (
    LOSS_TOLERANCE,
    PreparedData,
    TaskStep,
    arm_config,
    check_base,
    data_identity,
    dtype_name,
    model_facts,
    prepare_data,
    task_gate,
)
from rmsrepro.bench.user_model import check_arms
from rmsrepro.bench.user_step import PreparedModel, UserWorkbench, prepare_model
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.schema import ImportedModelConfig, TrainConfig
from rmsrepro.norms.targets import source_hash

BACKWARD = "fwd_bwd"


class ModelStep(TaskStep):
    """One pass of a built-in model over the next batch.

    Args:
        backward: whether gradients are taken.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: PreparedData,
        device: torch.device,
        gate: ModelGate | None = None,
        *,
        backward: bool,
    ) -> None:
        super().__init__(config, data, device, gate)
        self._backward = backward
        self._parameters = [one for one in self._task.parameters() if one.requires_grad]

    def __call__(self) -> None:
        if not self._backward:
            with torch.no_grad():
                self._batch_loss(0)
            return
        self._batch_loss(0).backward()
        for parameter in self._parameters:
            parameter.grad = None


class ModelLevel(Level):
    """Forward and backward of a built-in model, or of one of the user's own."""

    name = "model"

    def arrange(
        self, config: BenchConfig, base: TrainConfig, norms: Iterable[Mapping[str, Any]]
    ) -> tuple[list[Arm], list[str]]:
        """Return the arms; a model of the user's own has no task that could forbid a norm."""
        return arrange_arms(norms, None if is_imported(base) else base.task.name)

    def check(self, config: BenchConfig, base: TrainConfig, arms: Sequence[Arm]) -> None:
        """Raise UserError where there is no place for a norm, or where the user's model cannot be timed."""
        if is_imported(base):
            check_arms(base, arms)
        else:
            check_base(base)

    def identity(self, base: TrainConfig) -> dict[str, Any]:
        """Return what decides the numbers: model, data, precision."""
        if is_imported(base):
            target = base.model.name
            source = source_hash(target)
            return {"target": target, "source": source, "precision": base.precision, "seed": base.seed}
        return data_identity(base)

    def prepare(self, config: BenchConfig, base: TrainConfig) -> PreparedData | PreparedModel:
        """Draw batches, or look at the user's model and its inputs."""
        if is_imported(base):
            device = choose_device(base.trainer.accelerator)
            return prepare_model(base, device, backward=BACKWARD in modes(config))
        return prepare_data(one_batch_a_step(base), config.num_batches)

    def cells(
        self, config: BenchConfig, base: TrainConfig, prepared: PreparedData | PreparedModel
    ) -> list[Cell]:
        """Return a cell for each mode."""
        dtype = prepared.dtype if isinstance(prepared, PreparedModel) else "float32"
        mixed = dtype_name(base.precision)
        return [
            Cell(self.name, prepared.shape, mode, dtype if mixed == "float32" else mixed)
            for mode in modes(config)
        ]

    def facts(self, base: TrainConfig, cell: Cell) -> dict[str, Any]:
        """Return what every row says of the model; the user's own has neither task nor data."""
        if is_imported(base):
            nothing = dict.fromkeys(("size", "task", "data", "placement"))
            return {"model": base.model.name, **nothing}
        return model_facts(base)

    def least_warm_up_steps(self, config: BenchConfig) -> int:
        """Every batch is met before anything counts."""
        return config.num_batches

    def workbench(
        self,
        config: BenchConfig,
        base: TrainConfig,
        prepared: PreparedData | PreparedModel,
        device: torch.device,
    ) -> Workbench:
        """Return what builds the passes."""
        if isinstance(prepared, PreparedModel):
            return UserWorkbench(base, prepared, device)
        return ModelWorkbench(one_batch_a_step(base), prepared, device)


class ModelWorkbench:
    """Builds passes of built-in models."""

    def __init__(self, base: TrainConfig, data: PreparedData, device: torch.device) -> None:
        self._base, self._data, self._device = base, data, device
        self.tolerance = LOSS_TOLERANCE[base.precision]
        self._gate = task_gate(base, data, device)

    def builder(self, arm: Arm, cell: Cell) -> Callable[[], ArmStep]:
        """Return what builds the passes of `arm`."""
        backward = cell.mode == BACKWARD
        return lambda: ModelStep(
            arm_config(self._base, arm), self._data, self._device, self._gate, backward=backward
        )

    def facts(self, cell: Cell) -> dict[str, Any]:
        """Nothing that the level does not say."""
        return {}

    def leave(self, cell: Cell) -> None:
        """Free the references of the gate."""
        self._gate.forget()


def modes(config: BenchConfig) -> list[str]:
    """Return what is timed: as asked, or forward and backward."""
    return list(config.modes) or [BACKWARD]


def is_imported(base: TrainConfig) -> bool:
    """Whether the model is the user's own."""
    return isinstance(base.model, ImportedModelConfig)


def one_batch_a_step(base: TrainConfig) -> TrainConfig:
    """Return `base` without accumulation: there is no update that batches could add up to."""
    return replace(base, trainer=replace(base.trainer, accumulate=1))
