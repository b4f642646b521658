"""eps from the response to rows of many scales."""

from __future__ import annotations

import torch
from torch import Tensor

from rmsrepro.norms.probing.finding import Eps, EpsPosition
from rmsrepro.norms.probing.rows import Core, slopes

EXPONENTS = torch.arange(-72, 17, dtype=torch.float64) / 4
"""Scales of the grid, as powers of ten: four a decade from 1e-18 to 1e4."""

GOOD_FIT = 0.02
"""Largest residual at which a rule counts as met."""


def fit_eps(core: Core, row: Tensor, *, least: float = 0.0) -> Eps:
    """Return eps and its place, from the denominators of `row` (m,) times each scale of the grid.

    With s the scale and d the row's statistic, the rules are sqrt(s^2 d^2 + eps), s d + eps and
    max(s d, eps). They agree at both ends and part in between by up to a factor of two.

    Args:
        core: a map of rows.
        row: (m,), entries about one.
        least: smaller scales are left out.
    """
    scales = 10.0**EXPONENTS
    scales = scales[scales >= least]
    found = slopes(core, scales[:, None] * row)[:, 0]
    usable = torch.isfinite(found) & (found > 0)
    scales, denominators = scales[usable], 1 / found[usable]
    if len(scales) < 20:
        return Eps(EpsPosition.other, 0.0, float("inf"))
    unit = (denominators / scales)[-4:].median()
    pure = unit * scales
    if (denominators / pure).log().abs().max() < GOOD_FIT:
        return Eps(EpsPosition.none, 0.0, float((denominators / pure).log().abs().max()))
    smallest = denominators[0]
    ruled = pure < 0.3 * smallest
    if int(ruled.sum()) < 2:
        return Eps(EpsPosition.other, 0.0, float("inf"))
    inside = (denominators[ruled].square() - pure[ruled].square()).median()
    outside = (denominators[ruled] - pure[ruled]).median()
    rules = {
        EpsPosition.inside: (inside, (pure.square() + inside).sqrt()),
        EpsPosition.outside: (outside, pure + outside),
        EpsPosition.floor: (smallest, pure.clamp_min(smallest)),
    }
    residuals = {
        rule: float((denominators / fitted).log().abs().max()) for rule, (_, fitted) in rules.items()
    }
    best = min(residuals, key=lambda rule: residuals[rule])
    position = best if residuals[best] < GOOD_FIT else EpsPosition.other
    return Eps(position, float(rules[best][0]), residuals[best])
