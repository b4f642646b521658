"""The gate of a layer: what it computes is held against float64 before it is timed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rmsrepro.norms.card.drawing import EPS
from rmsrepro.norms.card.numerics import ALLOWED, Result, distances, gradients, run
from rmsrepro.norms.card.subject import Subject

BOUNDS = {**ALLOWED, torch.float64: {"output": 64.0, "gradient": 256.0}}
"""Largest errors in units of the dtype's eps, as a norm's card has them."""
ROWS = 1024
"""Beyond so many rows, errors of sums over all rows may grow with the root of their number: rounding errors
that add up at random. (Half precision is summed in fp32, and its bounds stay.)"""


class Gate:
    """Compares layers on one input with their norms in float64.

    The reference is the norm's equation; for a norm of the user's own, its own copy in float64. Both get the
    gains and biases of the layer as they are stored.

    Args:
        x: input, in the dtype and on the device that are timed.
        upstream: gradient of the output, likewise; None: only the output is compared.
    """

    def __init__(self, x: Tensor, upstream: Tensor | None) -> None:
        self._x, self._upstream = x.detach(), upstream
        self._references: dict[str, Result] = {}

    def wrong(self, subject: Subject, module: nn.Module) -> str | None:
        """Return what is wrong with `module`, a layer of the norm `subject`, or None.

        Raises:
            NoReference: the norm of a user does not run in float64.
        """
        expected = self._reference(subject, module)
        if self._upstream is None:
            with torch.no_grad():
                found = distances((module(self._x), []), (expected[0], []), self._x, self._x)
            parts = ["output"]
        else:
            got = run(module, self._x, self._upstream)
            found = distances(got, expected, self._x, self._upstream)
            parts = ["output", "gradient"]
        eps, bounds = EPS[self._x.dtype], self._bounds(subject)
        far = [part for part in parts if not found[part] <= bounds[part] * eps]
        if not far:
            return None
        told = ", ".join(f"{part} off by {found[part] / eps:.3g} eps" for part in far)
        allowed = ", ".join(f"{bounds[part]:g}" for part in far)
        return f"it computes something else than {subject.reference_name}: {told} (allowed {allowed})"

    def _bounds(self, subject: Subject) -> dict[str, float]:
        bounds = dict(BOUNDS[self._x.dtype])
        rows = self._x.numel() // self._x.shape[-1]
        if self._x.dtype.itemsize > 2:
            grown = max(1.0, math.sqrt(rows / ROWS))
            bounds["gradient"] *= grown  # of gains and biases
            if subject.spec.takes_mask:
                bounds["output"] *= grown  # its statistics are sums over the rows
        return bounds

    def _reference(self, subject: Subject, module: nn.Module) -> Result:
        """Return y and the gradients of x and the parameters; one for all backends of a norm."""
        key = repr((subject.name, sorted(subject.params.items())))
        if key not in self._references:
            try:
                self._references[key] = self._exact(subject, module)
            except Exception as error:
                if subject.built_in:
                    raise
                raise NoReference(f"{type(error).__name__}: {error}") from error
        return self._references[key]

    def _exact(self, subject: Subject, module: nn.Module) -> Result:
        with subject.in_float64():
            wide = self._x.double().requires_grad_(self._upstream is not None)
            with torch.set_grad_enabled(self._upstream is not None):
                y, leaves = subject.reference(module)(wide)
            if self._upstream is None:
                return y.detach(), []
            return y.detach(), gradients(y, [wide, *leaves], self._upstream.double())


class NoReference(RuntimeError):
    """There is nothing in float64 to compare with; the message says why."""
