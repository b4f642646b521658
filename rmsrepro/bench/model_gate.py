"""The gate of whole models: what an arm computes on a few rows is held against the same model in float64.

The reference has the arm's weights, and its norm on the composite backend. Both run in evaluation, off the
clock. What is compared is the distance of all outputs together, relative to their size. It is bounded; the
bound is wider where the reference shows that its outputs move far when its weights move by little, as those
of a pRMSNorm over very few entries do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from rmsrepro.bench.gate import NoReference
from rmsrepro.config.errors import first_line
from rmsrepro.norms import NormSpec

ROWS = 2
"""Rows of the first batch that are compared."""
BOUND, EPS = 1e-3, 2.0**-23
"""Largest relative distance of a model that computes in float32, and the rounding of that type."""
LOW_BOUND, LOW_EPS = 5e-2, 2.0**-8
"""The same, in a narrower type or mixed precision."""
NUDGE = 2.0**-20
"""Relative size of the change of the weights that shows how much rounding is amplified."""
MARGIN = 16.0
"""So many times what one rounding of the weights makes of the outputs is allowed."""

Run = Callable[[nn.Module], Sequence[Tensor]]


class ModelGate:
    """Compares arms with their references, one reference a norm.

    Args:
        wide: whether the models compute in float32 or wider.
        build: makes the model of a norm.
    """

    def __init__(self, wide: bool, build: Callable[[NormSpec], nn.Module]) -> None:
        self._bound, self._eps = (BOUND, EPS) if wide else (LOW_BOUND, LOW_EPS)
        self._build = build
        self._references: dict[str, nn.Module] = {}

    def wrong(self, spec: NormSpec, model: nn.Module, run: Run, run_exact: Run) -> str | None:
        """Return what is wrong with what `model`, built with `spec`, computes, or None.

        Args:
            run: returns the outputs of the arm's model.
            run_exact: returns those of the reference, whose parameters are float64.

        Raises:
            NoReference: the model does not run in float64, or its outputs are nothing but rounding.
        """
        with torch.no_grad():
            try:
                reference = self._reference(spec)
                reference.load_state_dict(model.state_dict())
                expected = run_exact(reference.eval())
                _nudge(reference)
                moved = distance(run_exact(reference), expected)
            except Exception as error:  # a user's norm or model may take no float64
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise NoReference(f"it does not run in float64 ({reason})") from error
            allowed = max(self._bound, MARGIN * moved / NUDGE * self._eps)
            if not allowed < 1:
                raise NoReference("its outputs are so sensitive that here they are nothing but rounding")
            training = [part for part in model.modules() if part.training]
            try:
                found = run(model.eval())
            finally:
                for part in training:
                    part.training = True
        off = distance(found, expected)
        if off <= allowed:
            return None
        return f"it computes something else than in float64: off by {off:.2g} (allowed {allowed:.2g})"

    def forget(self) -> None:
        """Free the references."""
        self._references.clear()

    def _reference(self, spec: NormSpec) -> nn.Module:
        key = repr((spec.name, sorted(spec.params.items())))
        if key not in self._references:
            self._references[key] = self._build(replace(spec, backend="composite")).double()
        return self._references[key]


def _nudge(model: nn.Module) -> None:
    """Change each weight by about `NUDGE` of itself, always in the same way."""
    for number, parameter in enumerate(model.parameters()):
        signs = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter.mul_(1 + NUDGE * signs.to(parameter))


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return |found - expected| / |expected| over all tensors; infinite where their shapes differ."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return math.inf
    pairs = list(zip(found, expected, strict=True))
    off = _squares(one.double() - other for one, other in pairs)
    size = _squares(other for _, other in pairs)
    return math.sqrt(off / size) if size > 0 else math.sqrt(off)


def _squares(tensors: Iterable[Tensor]) -> float:
    return sum(float(one.double().square().sum()) for one in tensors)


def first_rows(batch: Any, count: int = ROWS) -> Any:
    """Return the first rows of a batch of `rmsrepro.data.batches`."""
    parts = {one.name: getattr(batch, one.name) for one in fields(batch)}
    cut = {name: part[:count] for name, part in parts.items() if isinstance(part, Tensor | list)}
    return replace(batch, **cut, num_tokens=-1)
