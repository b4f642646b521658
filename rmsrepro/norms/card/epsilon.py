"""Where settings of eps part: below which size of a row two of them give outputs that differ by 1 %."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rmsrepro.norms.card.drawing import alternating, normal
from rmsrepro.norms.card.subject import Subject

PART = 0.01
"""What counts as a difference, relative to the larger output."""
GRID = [10 ** (-14 + step / 10) for step in range(161)]
"""RMS of a row, from 1e-14 to 1e2."""
SHOWN = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)

Output = Callable[[float], Tensor]
"""RMS of the rows -> y."""


def measure_eps(subject: Subject) -> dict[str, Any]:
    """Return the row RMS below which settings part; None where they never do or cannot be had.

    Rows and columns are `alternating`, so that the statistic of any norm has the size of a row's RMS. For a
    norm of weights they are the rows of W.
    """
    if not subject.has("eps"):
        return {"text": "it has no parameter eps"}
    # eps is a matter of the equation; torch's functions refuse some of the settings compared here.
    subject = replace(subject, backend="composite")
    setting = {"eps": subject.resolved.eps}
    placed = subject.has("eps_position")
    if placed:
        position = subject.resolved.eps_position
        setting["eps_position"] = getattr(position, "value", position)  # a user's may be plain text
    zero, own = _output(subject.at(eps=0.0)), _output(subject)
    found: dict[str, Any] = {
        "setting": setting,
        "short_of_zero_eps_below": _parting(own, zero),
        "eps_1e-5_and_1e-8_part_below": _parting(
            _output(subject.at(eps=1e-5)), _output(subject.at(eps=1e-8))
        ),
    }
    if placed:
        found["inside_and_outside_part_below"] = _parting(
            _output(subject.at(eps_position="inside")), _output(subject.at(eps_position="outside"))
        )
    if zero is not None:
        found["share_of_zero_eps"] = shares(subject, zero)
    return found


def shares(subject: Subject, zero: Output) -> list[dict[str, Any]]:
    """Return the output as a share of the one at eps = 0, for a few settings and sizes of rows."""
    settings: list[dict[str, Any]] = [{"eps": 1e-5}, {"eps": 1e-8}]
    if subject.has("eps_position"):
        settings = [{**one, "eps_position": where} for one in settings for where in ("inside", "outside")]
    rows = []
    for setting in settings:
        output = _output(subject.at(**setting))
        if output is not None:
            values = [float(output(rms).norm() / zero(rms).norm().clamp_min(1e-300)) for rms in SHOWN]
            rows.append({**setting, "rms": list(SHOWN), "share": values})
    return rows


def _output(subject: Subject) -> Output | None:
    """Return y as a function of the rows' RMS, in float64; None where the norm cannot be built so."""
    rows, dim = 4, subject.dim
    signs = alternating(rows, dim)
    try:
        if subject.of_weights:
            module, linear = subject.normed(dim, rows)
            x = normal(3, dim)

            def by_weight(rms: float) -> Tensor:
                with torch.no_grad():
                    linear.weight.copy_(rms * signs)
                    y: Tensor = module(x)
                    return y

            output: Output = by_weight
        else:
            norm = subject.build().double()

            def by_input(rms: float) -> Tensor:
                with torch.no_grad():
                    y: Tensor = norm(rms * signs)
                    return y

            output = by_input
        output(1.0)
    except Exception:
        return None
    return output


def _parting(one: Output | None, two: Output | None) -> float | None:
    """Return the largest RMS at which the outputs differ by more than 1 %, to three digits."""
    if one is None or two is None:
        return None
    apart = [rms for rms in GRID if _apart(one, two, rms)]
    if not apart or apart[-1] == GRID[-1]:
        return None
    low, high = apart[-1], GRID[GRID.index(apart[-1]) + 1]
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _apart(one, two, middle) else (low, middle)
    return float(f"{low:.3g}")


def _apart(one: Output, two: Output, rms: float) -> bool:
    a, b = one(rms), two(rms)
    off, size = float((a - b).abs().max()), max(float(a.abs().max()), float(b.abs().max()))
    return off > PART * size
