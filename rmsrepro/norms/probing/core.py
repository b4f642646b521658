"""Find the core of a norm: the map of rows that is left without gain and bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rmsrepro.norms.probing.affine import LARGE, TOLERANCE, odd_even
from rmsrepro.norms.probing.finding import Over
from rmsrepro.norms.probing.rows import Core, mean_share, split
from rmsrepro.norms.probing.subject import Subject

ROWS = 16
POSITIONS = 32
"""Rows that share a statistic, when it is taken over positions."""

FEWEST_ENTRIES = 4
"""Parts of fewer entries tell nothing: two entries fit any line."""


@dataclass(frozen=True)
class FoundCore:
    """A map (R, width) -> (R, width) that scales each row by one number, its mean subtracted or not."""

    call: Core
    width: int
    mean_share: float | None
    groups: int = 1
    fixed_gain: bool = False


def random_rows(count: int, width: int, seed: int = 2) -> Tensor:
    """Return rows (count, width), float64, whose mean is as large as their spread; no entry is near zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, width, generator=generator, dtype=torch.float64) + 1.0
    return rows + 0.25 * rows.sign()


def find_core(subject: Subject, over: Over, *, known_gain: bool = True) -> FoundCore | None:
    """Return the core of a scale-invariant map, or None where it is not its input times one number a row.

    Args:
        subject: gains one, biases zero.
        over: row, or positions: then the rows of the core are the entries, along the other rows.
        known_gain: False where a gain could not be made one; rows then come out with an RMS of 1.
    """
    if over is Over.positions:
        x = LARGE * random_rows(POSITIONS, subject.width, 7).t()
        core = _padded(lambda x: _odd(subject, x.t()).t(), subject.width)
        found = split(x, core(x))
        return FoundCore(core, POSITIONS, mean_share(x, found)) if found.residual <= TOLERANCE else None
    x = LARGE * random_rows(ROWS, subject.width, 7)
    core = _padded(lambda x: _odd(subject, x))
    y = core(x)
    found = split(x, y)
    if found.residual <= TOLERANCE:
        call = core if known_gain else _divided(core, _usual_length(y))
        return FoundCore(call, subject.width, mean_share(x, found))
    return _with_fixed_gain(core, x, y) or _in_groups(core, x, y)


def _with_fixed_gain(core: Core, x: Tensor, y: Tensor) -> FoundCore | None:
    """Find g (n,) with y = number of the row * g * (x - mean or x): a gain that no parameter holds."""
    for share in (0.0, 1.0):
        z = x - share * x.mean(-1, keepdim=True)
        ratio = y / z
        gain = (ratio / ratio[:, z.abs().amin(0).argmax(), None]).median(0).values
        fitted = z * gain
        number = (y * fitted).sum(-1, keepdim=True) / fitted.square().sum(-1, keepdim=True)
        if (y - number * fitted).abs().max() <= TOLERANCE * y.abs().max():
            # Its size cannot be told from the statistic's: rows are taken to come out with an RMS of 1.
            call = _divided(core, gain * _usual_length(y / gain))
            return FoundCore(call, x.shape[1], share, fixed_gain=True)
    return None


def _usual_length(y: Tensor) -> Tensor:
    """The RMS of rows (R, n), the middle one."""
    return y.square().mean(-1).sqrt().median()


def _divided(core: Core, gain: Tensor) -> Core:
    return lambda x: core(x) / gain


def _in_groups(core: Core, x: Tensor, y: Tensor) -> FoundCore | None:
    """Find the fewest equal parts of a row that each have a number of their own."""
    width = x.shape[1]
    for groups in range(2, width // FEWEST_ENTRIES + 1):
        if width % groups:
            continue
        part = width // groups
        parts = x.reshape(-1, part)
        found = split(parts, y.reshape(-1, part))
        if found.residual <= TOLERANCE:
            call = _padded(lambda x: core(x.reshape(-1, width)).reshape(x.shape), groups)
            return FoundCore(call, part, mean_share(parts, found), groups)
    return None


def _odd(subject: Subject, x: Tensor) -> Tensor:
    """The map without what it adds: (f(x) - f(-x)) / 2."""
    return odd_even(subject, x)[0]


def _padded(core: Callable[[Tensor], Tensor], multiple: int = 1) -> Core:
    """Call `core`, which takes a multiple of so many rows, with any number of them, and not too many at once.

    A core of positions takes exactly that many.
    """
    most = 1 << 21

    def call(x: Tensor) -> Tensor:
        size = max(1, most // x.shape[1]) if multiple == 1 else multiple
        done = []
        for part in x.split(size):
            missing = -len(part) % multiple
            filled = torch.cat([part, part[-1:].expand(missing, -1)]) if missing else part
            done.append(core(filled)[: len(part)])
        return torch.cat(done)

    return call
