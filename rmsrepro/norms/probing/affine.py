"""Which parameter is the gain and which the bias: found by changing each and looking at the output."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from rmsrepro.norms.probing.finding import Gain
from rmsrepro.norms.probing.subject import NotCallable, Subject

TOLERANCE = 1e-4
"""Relative: coarse enough for a module that computes in fp32 inside."""

LARGE = 1e4
"""A scale of rows at which eps no longer matters."""


class Role(Enum):
    """What changing a parameter does to the output."""

    gain = "gain"
    """It multiplies: offset + parameter times the normalised row."""
    bias = "bias"
    """It is added, the same for every row."""
    both = "both"
    """It is added and multiplies, as one tensor that holds a gain and a bias."""
    shapes_gain = "shapes_gain"
    """It multiplies in another way, as by its exponential."""
    unused = "unused"


@dataclass(frozen=True)
class Part:
    """A parameter or buffer and its role."""

    name: str
    role: Role
    size: Gain = Gain.none
    """Of a gain: one number, or one an entry."""
    offset: float = 0.0
    """Of a gain: what is added to the parameter before it multiplies."""


def odd_even(subject: Subject, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the odd and the even part of the map at `rows` (R, n): a norm's core is odd, its bias even."""
    plus, minus = subject(rows), subject(-rows)
    return (plus - minus) / 2, (plus + minus) / 2


def draw_values(subject: Subject, generator: torch.Generator) -> None:
    """Set every parameter to random values between 0.5 and 1.5: none is zero by chance, or starts so."""
    parameters = dict(subject.module.named_parameters())
    for name, one in subject.tensors().items():
        if name in parameters:
            drawn = torch.rand(one.shape, generator=generator, dtype=torch.float64) + 0.5
            subject.set_values(name, drawn)


def find_parts(subject: Subject, rows: Tensor) -> list[Part]:
    """Return the role of each parameter and floating buffer.

    Args:
        subject: its parameters hold random values (`draw_values`); they are put back after each change.
        rows: (R, n), large enough that eps does not matter.
    """
    odd, even = odd_even(subject, rows)
    size = float(odd.abs().max())
    return [_part(subject, name, rows, odd, even, size) for name in subject.tensors()]


def _part(subject: Subject, name: str, rows: Tensor, odd: Tensor, even: Tensor, size: float) -> Part:
    kept = subject.tensors()[name].clone()
    try:
        subject.set_values(name, kept * 1.5 + 0.25)
        new_odd, new_even = odd_even(subject, rows)
        odd_change, even_change = (new_odd - odd).abs().max(), new_even - even
        adds = float(even_change.abs().max()) > TOLERANCE * size
        multiplies = float(odd_change) > TOLERANCE * size
        if not (adds or multiplies):
            return Part(name, Role.unused)
        if adds:
            return Part(name, Role.both if multiplies else Role.bias)
        return _gain(subject, name, rows, kept)
    except NotCallable:  # it does not take the values tried
        return Part(name, Role.shapes_gain)
    finally:
        subject.set_values(name, kept)


def _gain(subject: Subject, name: str, rows: Tensor, kept: Tensor) -> Part:
    """Tell a gain, which enters linearly, and find what is added to it first."""
    at = []
    for value in (0.0, 1.0, 2.0):
        subject.set_values(name, value)
        at.append(odd_even(subject, rows)[0])
    slope = at[1] - at[0]
    linear = (at[2] - at[1] - slope).abs().max() <= TOLERANCE * slope.abs().max()
    if kept.numel() not in (1, subject.width) or not linear or not slope.abs().max() > 0:
        return Part(name, Role.shapes_gain)
    offset = float((at[0] * slope).sum() / slope.square().sum())
    if (at[0] - offset * slope).abs().max() > TOLERANCE * slope.abs().max():
        return Part(name, Role.shapes_gain)
    return Part(name, Role.gain, Gain.scalar if kept.numel() == 1 else Gain.entries, round(offset, 4))


def neutralise(subject: Subject, parts: list[Part], original: dict[str, Tensor]) -> None:
    """Give all parameters their original values, but the gains what makes them one, and the biases zero."""
    for name, value in original.items():
        subject.set_values(name, value)
    for part in parts:
        if part.role is Role.gain:
            subject.set_values(part.name, 1.0 - part.offset)
        if part.role is Role.bias:
            subject.set_values(part.name, 0.0)
