"""The levels of a bench: what a cell is, what its arms do, what has to be prepared.

A level has two halves. `Level` lives in the process that runs the bench and says what will be measured;
`Workbench` lives in each measuring process and builds the steps. What goes from one to the other (`prepare`)
is saved with torch.save.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rmsrepro.bench.arms import arrange_arms
from rmsrepro.bench.cells import Arm, ArmStep, Cell, Cost
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.schema import TrainConfig

if TYPE_CHECKING:
    import torch


class Workbench(Protocol):
    """Builds the steps of a level in a measuring process."""

    tolerance: float
    """Largest relative difference of two first losses that should agree."""

    def builder(self, arm: Arm, cell: Cell) -> Callable[[], ArmStep]:
        """Return what builds the step of `arm` in `cell`, or of one of its twins.

        Building raises BackendUnavailable where the arm does not exist in this cell: it is then shown as
        unavailable there. Any other exception makes it failed.
        """

    def facts(self, cell: Cell) -> dict[str, Any]:
        """Return what this process found of the cell, for all its rows. Asked after the first build."""

    def leave(self, cell: Cell) -> None:
        """Free what the cell alone needed."""


class Level:
    """What one level times. Subclasses say the rest."""

    name: ClassVar[str]
    equal_steps: ClassVar[bool] = True
    """Whether all arms do the same number of steps in a block: for steps that walk through batches of
    different size. Else each arm does as many as fill the block."""

    def arrange(
        self, config: BenchConfig, base: TrainConfig, norms: Iterable[Mapping[str, Any]]
    ) -> tuple[list[Arm], list[str]]:
        """Return the arms, baselines first, and notes; see `arrange_arms`."""
        return arrange_arms(norms, base.task.name)

    def check(self, config: BenchConfig, base: TrainConfig, arms: Sequence[Arm]) -> None:
        """Raise UserError for what cannot be timed at this level."""

    def identity(self, base: TrainConfig) -> dict[str, Any]:
        """Return what decides the numbers beside the arms and the settings of the bench: plain values."""
        raise NotImplementedError

    def prepare(self, config: BenchConfig, base: TrainConfig) -> Any:
        """Return what the measuring processes need, such as batches."""
        return None

    def cells(self, config: BenchConfig, base: TrainConfig, prepared: Any) -> list[Cell]:
        """Return the cells, in the order of the tables."""
        raise NotImplementedError

    def facts(self, base: TrainConfig, cell: Cell) -> dict[str, Any]:
        """Return what every row of the cell says besides level, shape, mode and dtype: model, task, ..."""
        raise NotImplementedError

    def cost(self, arm: Arm, cell: Cell) -> Cost:
        """Return what a step needs by its equation."""
        return Cost()

    def least_warm_up_steps(self, config: BenchConfig) -> int:
        """Return the steps each arm does before anything counts, whatever the time says."""
        return 1

    def steps_multiple(self, config: BenchConfig, base: TrainConfig) -> int:
        """Return what the steps of a block are a multiple of: for what happens every so many steps only."""
        return 1

    def workbench(
        self, config: BenchConfig, base: TrainConfig, prepared: Any, device: torch.device
    ) -> Workbench:
        """Return the half of the level that builds steps."""
        raise NotImplementedError


_LEVELS = {
    "layer": "rmsrepro.bench.layer:LayerLevel",
    "model": "rmsrepro.bench.model_step:ModelLevel",
    "step": "rmsrepro.bench.step:StepLevel",
}
"""Imported when asked for: a layer needs neither models nor data."""


def get_level(name: str) -> Level:
    """Return the level of this name."""
    module, _, attribute = _LEVELS[name].partition(":")
    level: Level = getattr(importlib.import_module(module), attribute)()
    return level
