"""The level `step`: a whole optimiser update, as a bare loop; beside it, if asked for, inside the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from rmsrepro.bench.arms import arrange_arms
from rmsrepro.bench.cells import Arm, ArmStep, Cell
from rmsrepro.bench.levels import Level
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
from rmsrepro.bench.trainer_step import ROLE, TrainerStep, framework_arms, kind_of
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.plain import plain
from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.trainer import quiet_lightning
from rmsrepro.tasks import build_optimizer


class TrainingStep(TaskStep):
    """One optimiser update, as a bare loop: what training does in a step, without a framework.

    batch -> forward -> loss -> backward (over the accumulated batches) -> clip -> optimiser -> schedule.
    """

    def __init__(
        self, config: TrainConfig, data: PreparedData, device: torch.device, gate: ModelGate | None = None
    ) -> None:
        super().__init__(config, data, device, gate)
        self._optimizer, self._schedule = build_optimizer(
            self._task.model, config.optim, config.trainer.max_steps
        )
        self._accumulate = config.trainer.accumulate

    def __call__(self) -> None:
        accumulate = self._accumulate
        for number in range(accumulate):
            loss = self._batch_loss(number)
            (loss / accumulate if accumulate > 1 else loss).backward()
        self._task.configure_gradient_clipping(self._optimizer)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)


class StepLevel(Level):
    """A training step of a built-in model, on real batches."""

    name = "step"

    def arrange(
        self, config: BenchConfig, base: TrainConfig, norms: Iterable[Mapping[str, Any]]
    ) -> tuple[list[Arm], list[str]]:
        """Return the arms, and with bench.framework those that run inside the Trainer."""
        arms, notes = arrange_arms(norms, base.task.name)
        return [*arms, *(framework_arms(arms) if config.framework else [])], notes

    def check(self, config: BenchConfig, base: TrainConfig, arms: Sequence[Arm]) -> None:
        """Raise UserError where the config leaves no place for a norm."""
        check_base(base)

    def identity(self, base: TrainConfig) -> dict[str, Any]:
        """Return what decides the numbers: model, data, optimiser, precision."""
        return {
            **data_identity(base),
            "optim": plain(base.optim),
            "accumulate": base.trainer.accumulate,
            "max_steps": base.trainer.max_steps,
            "log_every": base.trainer.log_every,
        }

    def prepare(self, config: BenchConfig, base: TrainConfig) -> PreparedData:
        """Draw the batches of the timed steps."""
        return prepare_data(base, config.num_batches)

    def cells(self, config: BenchConfig, base: TrainConfig, prepared: PreparedData) -> list[Cell]:
        """Return the one cell."""
        return [Cell(self.name, prepared.shape, "step", dtype_name(base.precision))]

    def facts(self, base: TrainConfig, cell: Cell) -> dict[str, Any]:
        """Return what every row says of the model."""
        return model_facts(base)

    def least_warm_up_steps(self, config: BenchConfig) -> int:
        """Every batch is met before anything counts."""
        return config.num_batches

    def steps_multiple(self, config: BenchConfig, base: TrainConfig) -> int:
        """With records in the comparison each block holds the steps from one row of them to the next."""
        return base.trainer.log_every if config.framework else 1

    def workbench(
        self, config: BenchConfig, base: TrainConfig, prepared: PreparedData, device: torch.device
    ) -> StepWorkbench:
        """Return what builds the steps."""
        return StepWorkbench(base, prepared, device)


class StepWorkbench:
    """Builds training steps."""

    def __init__(self, base: TrainConfig, data: PreparedData, device: torch.device) -> None:
        self._base, self._data, self._device = base, data, device
        self.tolerance = LOSS_TOLERANCE[base.precision]
        self._gate = task_gate(base, data, device)
        self._quiet: ExitStack | None = None

    def builder(self, arm: Arm, cell: Cell) -> Callable[[], ArmStep]:
        """Return what builds the training step of `arm`, as a bare loop or inside the Trainer."""

        def build() -> ArmStep:
            config = arm_config(self._base, arm)
            if arm.role == ROLE:
                if self._quiet is None:
                    self._quiet = ExitStack()
                    self._quiet.enter_context(quiet_lightning())
                return TrainerStep(config, self._data, self._device, kind_of(arm))
            return TrainingStep(config, self._data, self._device, self._gate)

        return build

    def facts(self, cell: Cell) -> dict[str, Any]:
        """Nothing that the level does not say."""
        return {}

    def leave(self, cell: Cell) -> None:
        """Free the references of the gate, and let Lightning speak again."""
        self._gate.forget()
        if self._quiet is not None:
            self._quiet.close()
            self._quiet = None
