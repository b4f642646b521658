"""What the invariances say about gradients, measured on y = n(W x) with a fixed gradient from above.

For y = g * a / RMS(a) + b with a = W x and eps = 0: the gradients of g and b do not change with the scale of
x or of W; that of W does not change with the scale of x, and goes as 1/scale of W; and it is at right angles
to W. The last three follow from n(c W x) = n(W x) for any differentiable n, so a norm whose outputs have an
invariance and whose gradients do not has a wrong backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rmsrepro.norms.card.drawing import normal
from rmsrepro.norms.card.invariance import CASES, FACTORS, INPUTS, Setting, remembered
from rmsrepro.norms.card.numerics import largest
from rmsrepro.norms.card.result import Check, Findings, not_applicable
from rmsrepro.norms.card.subject import gains_of

STATEMENTS: Mapping[str, tuple[str, str]] = {
    "gain_unchanged_by_input_scale": ("dL/dg unchanged by the scale of x", "dataset_rescaling"),
    "gain_unchanged_by_weight_scale": ("dL/dg unchanged by the scale of W", "weight_matrix_rescaling"),
    "bias_unchanged_by_input_scale": ("dL/db unchanged by the scale of x", "dataset_rescaling"),
    "bias_unchanged_by_weight_scale": ("dL/db unchanged by the scale of W", "weight_matrix_rescaling"),
    "weight_unchanged_by_input_scale": ("dL/dW unchanged by the scale of x", "dataset_rescaling"),
    "weight_inverse_to_weight_scale": ("dL/dW as 1/scale of W", "weight_matrix_rescaling"),
    "weight_orthogonal_to_weight": ("<dL/dW, W> = 0", "weight_matrix_rescaling"),
}
"""Statement: in words, and the invariance that it follows from."""


def measure_gradients(setting: Setting) -> dict[str, dict[str, Any] | None]:
    """Return for each statement whether it holds and by how much it is off; None without a gain or bias."""
    found: dict[str, dict[str, Any] | None] = {}
    for scale, tolerance in zip(setting.scales, setting.tolerances, strict=True):
        for name, off in _deviations(setting, scale).items():
            before = found.get(name)
            if off is None:
                found[name] = None
            else:
                # A gradient is off by a few times what the output is off by.
                holds = off <= 10 * tolerance and (before is None or before["holds"])
                worst = off if before is None else max(off, before["deviation"])
                found[name] = {"holds": holds, "deviation": worst}
    return found


def _deviations(setting: Setting, scale: float) -> dict[str, float | None]:
    module, linear = setting.subject.normed(INPUTS, setting.width)
    module.train()
    weight = linear.weight.detach().clone()
    x = scale * normal(CASES, INPUTS, number=10)
    upstream = normal(CASES, setting.width, number=13)
    gains = {name: one for name, one in gains_of(module).items() if one.requires_grad}
    leaves = {"weight": linear.weight, **gains}
    restore = remembered(module)

    def gradients(w: Tensor, x: Tensor) -> dict[str, Tensor]:
        restore()
        with torch.no_grad():
            linear.weight.copy_(w)
        found = torch.autograd.grad(module(x), list(leaves.values()), upstream, allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if one is None else one
            for (name, leaf), one in zip(leaves.items(), found, strict=True)
        }

    base = gradients(weight, x)
    with torch.no_grad():
        restore()
        linear.weight.copy_(weight)
        y = module(x)
    # What is left of gradients that are 0 is noise: they are held against a part of the terms that cancel.
    terms = 1e-3 * largest(upstream) * largest(y)
    floors = dict.fromkeys(leaves, terms) | {"weight": terms / max(largest(weight), 1e-300)}
    wider_x = [gradients(weight, c * x) for c in FACTORS]
    wider_w = [(c, gradients(c * weight, x)) for c in FACTORS]
    off: dict[str, float | None] = {}
    for name in ("gain", "bias"):
        there = name in leaves
        off[f"{name}_unchanged_by_input_scale"] = (
            max(_relative(one[name], base[name], floors[name]) for one in wider_x) if there else None
        )
        off[f"{name}_unchanged_by_weight_scale"] = (
            max(_relative(one[name], base[name], floors[name]) for _, one in wider_w) if there else None
        )
    slope = base["weight"]
    floor = floors["weight"]
    off["weight_unchanged_by_input_scale"] = max(_relative(one["weight"], slope, floor) for one in wider_x)
    off["weight_inverse_to_weight_scale"] = max(
        _relative(c * one["weight"], slope, floor) for c, one in wider_w
    )
    product = (slope * weight).sum().abs() / (slope.norm() * weight.norm()).clamp_min(terms)
    off["weight_orthogonal_to_weight"] = _finite(float(product))
    return off


def _relative(changed: Tensor, base: Tensor, floor: float) -> float:
    return _finite(float((changed - base).abs().max() / base.abs().max().clamp_min(max(floor, 1e-300))))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def follow_from_invariances(
    gradients: Mapping[str, dict[str, Any] | None], held: Mapping[str, bool]
) -> Check:
    """Check that the statements hold whose invariance was measured on the outputs."""
    findings = Findings()
    due = [name for name, (_, source) in STATEMENTS.items() if held.get(source) and gradients.get(name)]
    for name in due:
        one = gradients[name]
        words, source = STATEMENTS[name]
        findings.expect(
            one is not None and one["holds"],
            f"{words} does not hold although {source.replace('_', ' ')} does: the backward is wrong",
        )
    if not due:
        return not_applicable("it has none of the invariances that they follow from")
    return findings.check(
        f"all {len(due)} that follow from its invariances hold", {name: gradients[name] for name in due}
    )
