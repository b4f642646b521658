"""The level `layer`: one norm by itself, over shapes, dtypes and modes. Needs no model and no data.

    fwd        y = norm(x), without a graph
    fwd_bwd    y = norm(x), then the gradients of x and of the parameters for a given dL/dy

All arms of a cell take their inputs in turn from one ring of more memory than the last cache holds, so that
every input comes from memory, whichever arm used the one before. dL/dy lies there as well, made beforehand.
Beside the norms a copy of the input is timed in the same rounds: the machine's own bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rmsrepro.bench.arms import arrange_arms
from rmsrepro.bench.cells import Arm, ArmStep, Cell, Cost, Step
from rmsrepro.bench.counting import copy_cost, layer_cost
from rmsrepro.bench.gate import Gate, NoReference
from rmsrepro.bench.levels import Level
from rmsrepro.bench.memory import Ring
from rmsrepro.bench.settings import last_level_cache_bytes
from rmsrepro.config.bench import BenchConfig, parse_shape
from rmsrepro.config.schema import TrainConfig
from rmsrepro.norms import norm_info
from rmsrepro.norms.card.subject import Subject, enliven

ASSUMED_CACHE_BYTES = 32 * 2**20
"""Taken for the last cache where the system does not tell its size."""
ROTATION = 2
"""The ring is so many times as large as the last cache."""
COPY = Arm("copy/memory", "copy", {}, "memory", role="copy")


class LayerLevel(Level):
    """Single norms on inputs from N(0.5, 1), their parameters in the input's dtype."""

    name = "layer"
    equal_steps = False

    def arrange(
        self, config: BenchConfig, base: TrainConfig, norms: Iterable[Mapping[str, Any]]
    ) -> tuple[list[Arm], list[str]]:
        """Return the norms that are layers, those that are none as unavailable, and the copy."""
        arms, notes = arrange_arms(norms)
        return [*(replace(arm, unavailable=_why_no_layer(arm)) for arm in arms), COPY], notes

    def identity(self, base: TrainConfig) -> dict[str, Any]:
        """Nothing beside arms and settings."""
        return {}

    def cells(self, config: BenchConfig, base: TrainConfig, prepared: Any) -> list[Cell]:
        """Return a cell for each dtype, shape and mode."""
        return [
            Cell(self.name, shape, mode, dtype)
            for dtype in config.dtypes
            for shape in config.shapes
            for mode in config.modes
        ]

    def facts(self, base: TrainConfig, cell: Cell) -> dict[str, Any]:
        """There is neither model nor data."""
        return dict.fromkeys(("model", "size", "task", "data", "placement"))

    def cost(self, arm: Arm, cell: Cell) -> Cost:
        """Return bytes and operations by the equation."""
        shape = parse_shape(cell.shape)
        if arm.role == "copy":
            return copy_cost(shape, cell.dtype)
        return layer_cost(arm.norm, arm.params, shape, cell.mode, cell.dtype)

    def workbench(
        self, config: BenchConfig, base: TrainConfig, prepared: Any, device: torch.device
    ) -> LayerWorkbench:
        """Return what builds the layers."""
        return LayerWorkbench(device)


def _why_no_layer(arm: Arm) -> str | None:
    if arm.unavailable is not None:
        return arm.unavailable
    if norm_info(arm.norm).scope == "weight":
        return (
            f"{arm.norm} normalises the weights of a linear map, once a call, however many rows go through "
            "the map; it is timed in a model (bench=model)"
        )
    return "it computes nothing, so there is no layer to time" if arm.norm == "none" else None


class LayerWorkbench:
    """Builds layers, and the ring that they share in a cell."""

    tolerance = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cache_bytes = _cache_bytes(device)
        self._open: tuple[Cell, Ring, Gate] | None = None

    def builder(self, arm: Arm, cell: Cell) -> Callable[[], ArmStep]:
        """Return what builds the layer of `arm`, or of one of its twins, with parameters of its own."""

        def build() -> ArmStep:
            ring, gate = self._enter(cell)
            if arm.role == "copy":
                return CopyStep(ring)
            subject = Subject(arm.norm, arm.params, arm.backend, parse_shape(cell.shape)[-1])
            module = enliven(subject.build()).to(self._device, getattr(torch, cell.dtype))
            kind = BackwardStep if cell.mode == "fwd_bwd" else ForwardStep
            return kind(subject, module, ring, gate)

        return build

    def facts(self, cell: Cell) -> dict[str, Any]:
        """Return the memory that the inputs of the cell rotate through, and the cache it is to exceed."""
        ring, _ = self._enter(cell)
        return {"rotating_bytes": ring.bytes, "cache_bytes": self._cache_bytes}

    def leave(self, cell: Cell) -> None:
        """Free the ring."""
        self._open = None

    def _enter(self, cell: Cell) -> tuple[Ring, Gate]:
        if self._open is None or self._open[0] != cell:
            self._open = None  # the old ring goes before the new one comes
            backward = cell.mode == "fwd_bwd"
            ring = Ring(
                parse_shape(cell.shape),
                getattr(torch, cell.dtype),
                self._device,
                gradients=backward,
                least_bytes=ROTATION * (self._cache_bytes or ASSUMED_CACHE_BYTES),
            )
            x, upstream = ring.take()
            self._open = (cell, ring, Gate(x, upstream if backward else None))
        return self._open[1:]


def _cache_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return last_level_cache_bytes()


class LayerStep(Step):
    """One call of a norm on the next input of the ring."""

    def __init__(self, subject: Subject, module: nn.Module, ring: Ring, gate: Gate) -> None:
        self._subject, self._module, self._gate = subject, module, gate
        self._take = ring.take
        self._parameters = [one for one in module.parameters() if one.requires_grad]

    def __call__(self) -> None:
        self.repeat(1)

    def repeat(self, count: int) -> None:
        """Call the norm `count` times."""
        raise NotImplementedError

    def check(self) -> str | None:
        """Hold values, and with a backward pass gradients, against float64."""
        try:
            return self._gate.wrong(self._subject, self._module)
        except NoReference as error:
            self.remarks = [f"not checked: it does not run in float64 ({error})"]
            return None


class ForwardStep(LayerStep):
    """The forward pass, without a graph."""

    def repeat(self, count: int) -> None:
        """Call the norm `count` times."""
        module, take = self._module, self._take
        with torch.no_grad():
            for _ in range(count):
                x, _ = take()
                module(x)


class BackwardStep(LayerStep):
    """Forward and backward: the gradients of the input and of all parameters, kept nowhere."""

    def repeat(self, count: int) -> None:
        """Call the norm `count` times."""
        module, take, parameters, grad = self._module, self._take, self._parameters, torch.autograd.grad
        for _ in range(count):
            x, upstream = take()
            grad(module(x), [x, *parameters], upstream)


class CopyStep(Step):
    """A copy of the next input of the ring, into memory that is asked for as a norm's output is."""

    def __init__(self, ring: Ring) -> None:
        self._take = ring.take

    def __call__(self) -> None:
        self.repeat(1)

    def repeat(self, count: int) -> None:
        """Copy `count` inputs."""
        take = self._take
        with torch.no_grad():
            for _ in range(count):
                x, _ = take()
                x.clone()
