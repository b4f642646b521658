"""A pass of the user's own model as a step of the level `model`.

The module is timed in the mode, training or evaluation, in which its factory leaves it.

    fwd        the module called on its inputs, without a graph
    fwd_bwd    the same with a graph, then the gradients of its parameters and of inputs that want them

What is differentiated is the output where that is one number, its entry `loss` where it is a mapping that has
one, and else the sum over its floating-point tensors of the mean of their squares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rmsrepro.bench.arms import BASELINE
from rmsrepro.bench.cells import Arm, ArmStep, Cell, Step
from rmsrepro.bench.gate import NoReference
from rmsrepro.bench.model_gate import ModelGate
from rmsrepro.bench.user_model import make, spec_of
from rmsrepro.config.errors import UserError, first_line
from rmsrepro.config.schema import TrainConfig
from rmsrepro.norms import NormSpec
from rmsrepro.norms.targets import arguments
from rmsrepro.runs.seeding import seed_dropout

TOLERANCE = 1e-4
"""Relative difference of first losses between two backends of a norm, for models that compute in float32."""
LOW_TOLERANCE = 2e-2
"""The same, in a narrower type or mixed precision."""
_WIDE = ("float32", "float64")


@dataclass(frozen=True)
class PreparedModel:
    """What the process that runs the bench found of the model."""

    shape: str
    """Of the first tensor among the inputs."""
    dtype: str
    """Of the module's floating-point parameters, or of its inputs where it has none."""


def prepare_model(base: TrainConfig, device: torch.device, *, backward: bool) -> PreparedModel:
    """Run the model once with the baseline's norm, and say what it computes on.

    Raises:
        UserError: it does not run on its inputs, or there is nothing to differentiate.
    """
    target = base.model.name
    spec = NormSpec(BASELINE, {}, "composite")
    try:
        step = UserStep(*make(target, spec, base.seed), spec, base, device, backward=backward)
        step.seed()
        step()
        step.loss()
    except UserError:
        raise
    except NothingToTake as error:
        raise UserError(f"{target}: {error}") from error
    except Exception as error:  # whatever the user's module raises
        raise UserError(
            f"{target}: the module does not run on its inputs: {type(error).__name__}: {first_line(error)}"
        ) from error
    return PreparedModel(step.shape, step.dtype)


class NothingToTake(RuntimeError):
    """A model without an output, or without anything to differentiate; the message says which."""


class UserStep(Step):
    """One pass of the user's module over its inputs.

    Args:
        module, inputs: as the factory gave them; they are moved to the device.
        spec: the norm that it was built with.
        backward: whether gradients are taken.
        gate: what holds the module against float64; None: nothing does.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Any,
        spec: NormSpec,
        base: TrainConfig,
        device: torch.device,
        *,
        backward: bool,
        gate: ModelGate | None = None,
    ) -> None:
        self._spec, self._gate = spec, gate
        self._module = module.to(device)
        self._positions, self._keywords = arguments(_moved(inputs, device))
        tensors = list(_tensors((self._positions, self._keywords)))
        parameters = list(self._module.parameters())
        self._leaves = [one for one in (*parameters, *tensors) if one.requires_grad and one.is_leaf]
        self._backward = backward
        self._device_type = device.type
        self._mixed = base.precision == "bf16-mixed"
        self._seed = base.seed
        self._output: Any = None
        self.shape = "x".join(map(str, tensors[0].shape)) if tensors and tensors[0].ndim else "none"
        floats = [one for one in (*parameters, *tensors) if one.is_floating_point()]
        self.dtype = str(floats[0].dtype).removeprefix("torch.") if floats else "float32"

    def __call__(self) -> None:
        with torch.set_grad_enabled(self._backward), self._autocast():
            output = self._module(*self._positions, **self._keywords)
            if not self._backward:
                self._output = output
                return
            loss = scalar(output)
        if not loss.requires_grad:
            raise NothingToTake(
                "its output depends on nothing that wants a gradient; time the forward pass alone "
                "(bench.modes=[fwd]), or let parameters require gradients"
            )
        loss.backward()
        for leaf in self._leaves:
            leaf.grad = None
        self._output = loss.detach()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._mixed)

    def seed(self) -> None:
        """Start dropout from the run's seed, so that the first outputs of equal arms are equal."""
        seed_dropout(self._seed)

    def check(self) -> str | None:
        """Hold the outputs against float64."""
        if self._gate is None:
            return None
        try:
            return self._gate.wrong(self._spec, self._module, self._outputs, self._exact_outputs)
        except NoReference as error:
            self.remarks = [f"not checked: {error}"]
            return None

    def _outputs(self, module: nn.Module) -> list[Tensor]:
        self.seed()
        with self._autocast():
            return _floats(module(*self._positions, **self._keywords))

    def _exact_outputs(self, module: nn.Module) -> list[Tensor]:
        self.seed()
        wide = _changed((self._positions, self._keywords), lambda one: one.double())
        return _floats(module(*wide[0], **wide[1]))

    def loss(self) -> float | None:
        """The number that is differentiated, of the last pass."""
        with torch.no_grad():
            return float(scalar(self._output))


def scalar(output: Any) -> Tensor:
    """Return the number that stands for a module's output; see the top of this module.

    Raises:
        NothingToTake: there is no floating-point tensor in it.
    """
    if isinstance(output, Mapping) and _is_number(output.get("loss")):
        loss: Tensor = output["loss"]
        return loss
    found = _floats(output)
    if not found:
        raise NothingToTake(f"its output, {_kind(output)}, holds no floating-point tensor")
    if len(found) == 1 and found[0].ndim == 0:
        return found[0]
    return torch.stack([_wide(one).square().mean() for one in found]).sum()


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _tensors(getattr(value, part.name))


def _floats(value: Any) -> list[Tensor]:
    return [one for one in _tensors(value) if one.is_floating_point()]


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return inputs with their floating-point tensors changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _changed(one, change) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_changed(one, change) for one in value)
    return value


def _moved(value: Any, device: torch.device) -> Any:
    """Return inputs on the device; what wants a gradient is a leaf there."""
    if isinstance(value, Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _moved(one, device) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_moved(one, device) for one in value)
    return value.to(device) if hasattr(value, "to") else value


class UserWorkbench:
    """Builds passes of the user's model."""

    def __init__(self, base: TrainConfig, prepared: PreparedModel, device: torch.device) -> None:
        self._base, self._device = base, device
        wide = base.precision == "32" and prepared.dtype in _WIDE
        self.tolerance = TOLERANCE if wide else LOW_TOLERANCE
        self._gate = ModelGate(wide, self._build)

    def _build(self, spec: NormSpec) -> nn.Module:
        module, _ = make(self._base.model.name, spec, self._base.seed)
        return module.to(self._device)

    def builder(self, arm: Arm, cell: Cell) -> Callable[[], ArmStep]:
        """Return what builds the model of `arm`."""

        def build() -> ArmStep:
            spec, backward = spec_of(arm), cell.mode == "fwd_bwd"
            module, inputs = make(self._base.model.name, spec, self._base.seed)
            return UserStep(
                module, inputs, spec, self._base, self._device, backward=backward, gate=self._gate
            )

        return build

    def facts(self, cell: Cell) -> dict[str, Any]:
        """Nothing that the level does not say."""
        return {}

    def leave(self, cell: Cell) -> None:
        """Free the references of the gate."""
        self._gate.forget()
