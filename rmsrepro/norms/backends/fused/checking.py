"""Compare kernels with the equations in float64, in values and gradients, over all that a rule covers.

Errors are in units of what is allowed (`errors`), so that 1 is the limit for every dtype and scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from rmsrepro.norms.backends.fused.rule import Rule
from rmsrepro.norms.equations import equation
from rmsrepro.norms.params import BUILTIN_PARAMS, GemmaRMSNormParams, NormParams


class Launchers(Protocol):
    """What is checked: see `triton_norms`."""

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]
    add_forward: Callable[..., tuple[Tensor, Tensor]]
    add_backward: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]


ALLOWED = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Error allowed to a result, relative to the terms that it is made of. In half precision it is one rounding,
which triton's interpreter does by cutting off."""

COVERED = ("layernorm", "rmsnorm", "prmsnorm", "l2norm", "scalenorm", "llama_rmsnorm", "gemma_rmsnorm")
DISTINCT = ("layernorm", "rmsnorm", "prmsnorm", "l2norm")
"""One norm for each form of the statistic."""
WIDTHS = (1, 2, 3, 17, 64, 100, 257, 1025)
LAYOUTS = ("dense", "transposed", "sliced", "expanded")


@dataclass(frozen=True)
class Case:
    """One call forward and one backward, of rows of Gaussian numbers of which the first is 0 throughout."""

    norm: str
    n: int
    dtype: torch.dtype = torch.float32
    rows: int = 5
    scale: float = 1.0
    params: tuple[tuple[str, Any], ...] = ()
    """Parameters of the norm beside its defaults."""
    layout: str = "dense"
    residual: bool = False
    affine: str = "gain+bias"
    """Which of gain and bias there are, whatever the norm has: all kernels take both."""

    def __str__(self) -> str:
        parts = [self.norm, f"{self.rows}x{self.n}", str(self.dtype).removeprefix("torch.")]
        parts += [f"{name}={value}" for name, value in self.params]
        parts += [f"times {self.scale:g}"] * (self.scale != 1) + [self.layout] * (self.layout != "dense")
        parts += ["residual"] * self.residual + [self.affine] * (self.affine != "gain+bias")
        return " ".join(parts)

    def made(self) -> NormParams:
        """Return the norm's parameters."""
        return BUILTIN_PARAMS[self.norm](**dict(self.params))


def cases() -> dict[str, list[Case]]:
    """Return what a device is checked with, by what varies."""
    positions = [
        (("eps", eps), ("eps_position", position))
        for position, eps in product(("inside", "outside"), (0.0, 1e-8, 0.2, 1e-100))
    ]
    rounded = (("casting", "before_gain"), ("p", 0.25))
    return {
        "widths": [Case(norm, n, dtype) for norm, dtype, n in product(COVERED, ALLOWED, WIDTHS)],
        "eps": [
            Case(norm, 17, dtype, params=params)
            for norm, params, dtype in product(DISTINCT, positions, (torch.float32, torch.float64))
        ],
        "scales": [
            Case(norm, 257, dtype, params=params, scale=scale)
            for norm, params, (dtype, scale) in product(
                DISTINCT,
                positions,
                [(torch.float32, scale) for scale in (1e-18, 1e-9, 1e9, 1e18)]
                + [(torch.float64, scale) for scale in (1e-150, 1e150)],
            )
        ],
        "layouts": [
            Case(norm, 100, rows=6, layout=layout, residual=residual)
            for norm, layout, residual in product(DISTINCT, LAYOUTS, (False, True))
        ],
        "residuals": [
            Case(norm, 64, dtype, residual=True)
            for norm, dtype in product((*DISTINCT, "llama_rmsnorm"), ALLOWED)
        ],
        "many rows": [Case(norm, 100, dtype, rows=150) for norm, dtype in product(DISTINCT, ALLOWED)],
        "wide rows": [
            Case(norm, 16400, dtype, residual=dtype is torch.float32)
            for norm, dtype in product((*DISTINCT, "llama_rmsnorm"), ALLOWED)
        ],
        "parameters": [Case(norm, 17, affine=one) for one, norm in product(AFFINE, DISTINCT)]
        + [Case("prmsnorm", 100, torch.bfloat16, affine=one, params=rounded) for one in AFFINE],
    }


AFFINE = ("gain", "bias", "neither")


def errors(case: Case, kernels: Launchers, device: str, seed: int = 0) -> dict[str, float]:
    """Return the largest error of each result, in units of what is allowed; inf where one is not finite."""
    generator = torch.Generator().manual_seed(seed)
    rule = Rule.of(case.made(), case.n)
    assert rule is not None
    x, residual = (_arrange(case, case.scale, generator).to(device) for _ in range(2))
    dy, ds = (_arrange(case, 1.0, generator).to(device) for _ in range(2))
    gain, bias = (_parameter(case, name, generator, device) for name in ("gain", "bias"))
    rest = (gain, bias is not None, rule, None if bias is None else bias.dtype)
    found = {}
    if case.residual:
        total, y = kernels.add_forward(x, residual, gain, bias, rule)
        gradients = kernels.add_backward(ds, dy, total, *rest)
        exact = x.double() + residual.double()
        found["sum"] = _worst(total, exact, exact.abs(), ALLOWED[case.dtype])
    else:
        total, y = x, kernels.forward(x, gain, bias, rule)
        gradients = kernels.backward(dy, total, *rest)
    expected, sizes = reference(case, total, gain, bias, dy)
    if case.residual:
        expected["dx"] = expected["dx"] + ds.double()
        sizes["dx"] = sizes["dx"] + ds.double().abs().amax(-1, keepdim=True)
    got = {"y": y, **dict(zip(("dx", "dgain", "dbias"), gradients, strict=True))}
    assert {name for name, one in got.items() if one is not None} == set(expected)
    for name, wanted in expected.items():
        result = got[name]
        assert result is not None
        allowed = ALLOWED[result.dtype]
        if rule.rounded:
            # Three roundings to y; the gain's gradient is of rounded numbers, in whatever dtype it is.
            allowed = max(3 * allowed, ALLOWED[case.dtype])
        found[name] = _worst(result, wanted, sizes[name], allowed)
    return found


def reference(
    case: Case, x: Tensor, gain: Tensor | None, bias: Tensor | None, dy: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return output and gradients in float64, and for each the size of the terms that it is made of."""
    params = case.made()
    if case.dtype is not torch.float64 and getattr(params, "eps", 1.0) < 1e-50:
        params = replace(params, eps=0.0)  # type: ignore[call-arg]
    f = equation(params, case.n)
    leaves = {
        name: one.detach().double().clone().requires_grad_()
        for name, one in (("dx", x), ("dgain", gain), ("dbias", bias))
        if one is not None
    }
    wide, g, b = leaves["dx"], leaves.get("dgain"), leaves.get("dbias")
    stored = g - 1 if g is not None and isinstance(params, GemmaRMSNormParams) else g
    y, dy = f(wide, stored, b), dy.double()
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    with torch.no_grad():
        t = f(wide, None, None)
        centred = case.norm.startswith("layernorm")
        c = wide - wide.mean(-1, keepdim=True) if centred else wide
        # 1/denominator of each row, from its largest entry.
        largest = c.abs().amax(-1, keepdim=True)
        inverse = torch.where(largest > 0, t.abs().amax(-1, keepdim=True) / largest, 0.0)
        h = dy if g is None else dy * g
        size_y = t.abs() * (1.0 if g is None else g.abs()) + (0.0 if b is None else b.abs())
        # The gradient is a difference of h and its part along t, over the denominator.
        size_dx = torch.maximum(h.abs() * inverse, gradients[0].abs())
        sizes = {
            "y": size_y.amax(-1, keepdim=True),
            "dx": size_dx.amax(-1, keepdim=True),
            # An entry near the mean is no more exact than the largest.
            "dgain": (dy * (t.abs().amax(-1, keepdim=True) if centred else t)).abs().flatten(0, -2).sum(0),
            "dbias": dy.abs().flatten(0, -2).sum(0),
        }
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}, sizes


def _worst(result: Tensor, expected: Tensor, size: Tensor, allowed: float) -> float:
    if not result.isfinite().all():
        return math.inf
    # Below the dtype's normal numbers a result may come out as 0.
    room = allowed * size + 2 * torch.finfo(result.dtype).tiny
    return ((result.double() - expected).abs() / room).max().item()


def _parameter(case: Case, name: str, generator: torch.Generator, device: str) -> Tensor | None:
    # bf16 with parameters in fp32, as mixed precision has it; fp16 with its own.
    dtype = torch.float32 if case.dtype is torch.bfloat16 else case.dtype
    # scalenorm's one gain takes part as n equal ones.
    count = 1 if case.norm == "scalenorm" else case.n
    made = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype).to(device)
    return made.expand(case.n) if name in case.affine else None


def _arrange(case: Case, scale: float, generator: torch.Generator) -> Tensor:
    """Return random rows (..., n) in the case's layout, the first of them 0 unless it is repeated."""
    rows = scale * torch.randn(case.rows, case.n, generator=generator, dtype=torch.float64)
    if case.layout != "expanded":
        rows[0] = 0
    x = rows.to(case.dtype)
    if case.layout == "transposed":
        return x.t().contiguous().t()
    if case.layout == "sliced":
        return torch.cat((x, x), -1)[:, case.n :]
    return x[0].expand(2, case.rows, case.n) if case.layout == "expanded" else x
