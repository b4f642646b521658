"""What an inspection of a model found. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rmsrepro.norms.probing.finding import Finding

TRAINING, EVALUATION = "training", "evaluation"


@dataclass(frozen=True)
class Layer:
    """A submodule that is a norm (or bounded, as DyT), by probing."""

    path: str
    """Its name in the model; "" for the model itself."""
    class_name: str
    finding: Finding
    calls: Mapping[str, int] | None = None
    """How often it ran in one forward pass of training and of evaluation; None without inputs."""

    @property
    def never_called(self) -> list[str]:
        """The modes in which the model ran without it."""
        return [mode for mode, count in (self.calls or {}).items() if count == 0]


@dataclass(frozen=True)
class Call:
    """A normalisation inside a module's forward that belongs to no norm-like submodule."""

    path: str
    class_name: str
    function: str
    """F.layer_norm, aten._transformer_encoder_layer_fwd, ..., or "written out"."""
    divided_by: str | None
    """As `Finding.divisor`; None where it was not looked at."""
    subtracts_mean: bool
    has_bias: bool
    eps: float | None = None
    eps_position: str | None = None
    modes: tuple[str, ...] = ()
    count: int = 1
    """Calls in one forward pass."""
    over: str | None = None
    """The dimensions that share a statistic; None for the last one, and where that was not looked at."""


@dataclass(frozen=True)
class Inspection:
    """All that is normalised in a model."""

    class_name: str
    num_modules: int
    layers: tuple[Layer, ...]
    calls: tuple[Call, ...] = ()
    modes: tuple[str, ...] = ()
    """The modes in which the model ran on inputs; none without them."""
    notes: tuple[str, ...] = field(default=())
    """What could not be looked at."""
