"""Checks of values: agreement with float64, and derivatives."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

from rmsrepro.norms.card.drawing import EPS, normal, rows_of
from rmsrepro.norms.card.result import Check, first_line, judged, not_applicable
from rmsrepro.norms.card.subject import Subject, enliven, learned

ALLOWED = {
    torch.float32: {"output": 32.0, "gradient": 64.0},
    torch.bfloat16: {"output": 4.0, "gradient": 8.0},
    torch.float16: {"output": 4.0, "gradient": 8.0},
}
"""Largest errors in units of the dtype's eps. Half precision is rounded a few times at the end, fp32 sums."""

CONSTANT = "of a single entry it leaves nothing: its output is constant"

SCALES = {
    torch.float32: (1e-3, 1.0, 1e3),
    torch.bfloat16: (1e-2, 1.0, 1e2),
    torch.float16: (1e-2, 1.0, 1e2),
}


# ------------------------------------------------------------------------------ errors in units of eps


def run(module: nn.Module, x: Tensor, upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return y and the gradients of x and the learned parameters; 0 for a parameter that took no part."""
    x = x.detach().requires_grad_()
    y = module(x)
    return y.detach(), gradients(y, [x, *learned(module).values()], upstream)


def gradients(y: Tensor, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the gradients of the leaves for an `upstream` one; 0 where a leaf took no part."""
    if not leaves:
        return []
    found = torch.autograd.grad(y, leaves, upstream.to(y.dtype), allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


def errors(subject: Subject, module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, float]:
    """Return how far output and gradients of `module` are off its reference; see `distances`."""
    exactly = subject.reference(module)
    y, slopes = run(module, x, upstream)
    with subject.in_float64():
        wide = x.detach().double().requires_grad_()
        expected, leaves = exactly(wide)
        exact = gradients(expected, [wide, *leaves], upstream.double())
    return distances((y, slopes), (expected, exact), x, upstream)


Result = tuple[Tensor, list[Tensor]]
"""y, and the gradients of x and the parameters."""


def distances(got: Result, right: Result, x: Tensor, upstream: Tensor) -> dict[str, float]:
    """Return how far `got` is off `right`, output and gradients, each relative to its largest entry.

    A gradient may be a difference of large terms: upstream / denominator less its part along the input. It is
    held against those terms where they are larger than what is left of them. The gradient of the sign of x,
    0, is such a difference for each entry by itself: upstream / |x_i| less as much.
    """
    size = largest(right[0])
    terms = largest(upstream) * size
    around = terms / x.detach().double().abs().clamp_min(1e-4 * largest(x) or 1e-300)
    worst = 0.0
    for index, (one, exact) in enumerate(zip(got[1], right[1], strict=True)):
        scale = around.clamp_min(largest(exact)) if index == 0 else max(largest(exact), terms)
        worst = max(worst, _distance(one, exact, scale))
    return {"output": _distance(got[0], right[0], size), "gradient": worst}


def largest(value: Tensor) -> float:
    """Return max |value|, 0 where there is none."""
    return float(value.detach().abs().max()) if value.numel() else 0.0


def _distance(got: Tensor, right: Tensor, scale: Tensor | float) -> float:
    """Return max |got - right| / scale, the scale of all or of each; infinity for another shape and NaN."""
    if got.shape != right.shape or bool(got.isnan().any()):
        return math.inf
    # What is below the smallest number of the dtype may come out as 0, what is above the largest as infinity.
    lost, most = torch.finfo(got.dtype).tiny, torch.finfo(got.dtype).max
    apart = got.double().clamp(-most, most) - right.double().clamp(-most, most)
    off = (apart.abs() - lost).clamp_min(0.0)
    return largest(torch.where(off > 0, off / scale, 0.0))


# ----------------------------------------------------------------------------------------- agreement


def agreement(subject: Subject, dtype: torch.dtype) -> Check:
    """Output and gradients in `dtype` against float64, in both modes, at several scales and off centre."""
    if subject.constant:
        return not_applicable(CONSTANT)
    module = enliven(subject.direct()).train()
    measured = {"output": 0.0, "gradient": 0.0}
    shape = subject.sheet(16)
    upstream = normal(*shape, number=5).to(dtype)
    called = copy.deepcopy(module)  # evaluation is for norms that were trained
    with torch.no_grad():
        called(rows_of(*shape, number=1).float())
    for one in (module, called.eval()):
        for scale, shift in (*((scale, 0.0) for scale in SCALES[dtype]), (1.0, 3.0)):
            x = ((rows_of(*shape) + shift) * scale).to(dtype)
            found = errors(subject, copy.deepcopy(one), x, upstream)
            measured = {part: max(value, found[part] / EPS[dtype]) for part, value in measured.items()}
    bound = ALLOWED[dtype]
    good = all(measured[part] <= bound[part] for part in bound)
    text = (
        f"off by {measured['output']:.2g} eps, gradients by {measured['gradient']:.2g} "
        f"(allowed {bound['output']:g}, {bound['gradient']:g})"
    )
    return judged(good, text, {**measured, "reference": subject.reference_name}, bound)


def float64_precision(subject: Subject) -> Check:
    """Whether a float64 input keeps its precision."""
    found = subject.inner_precision
    measured = {"rounding": found, "kept": subject.keeps_float64}
    if subject.keeps_float64:
        return judged(True, "a float64 input keeps its precision", measured, 1e-11)
    if subject.built_in or found > 1e-6:
        text = f"a float64 input is rounded to {found:.1g} on the way"
        return judged(False, text, measured, 1e-11 if subject.built_in else 1e-6)
    text = "it computes in fp32 inside; gradcheck has the tolerances of fp32"
    return judged(True, text, measured, 1e-6)


# --------------------------------------------------------------------------------------- derivatives


def first_derivatives(subject: Subject) -> Check:
    """torch.autograd.gradcheck in float64."""
    return _derivatives(subject, gradcheck, "first derivatives")


def second_derivatives(subject: Subject) -> Check:
    """torch.autograd.gradgradcheck in float64."""
    return _derivatives(subject, gradgradcheck, "second derivatives")


def _derivatives(subject: Subject, check: Callable[..., bool], what: str) -> Check:
    if not subject.keeps_float64 and subject.inner_precision > 1e-6:
        return not_applicable("it computes in half precision inside, which finite differences cannot follow")
    if subject.keeps_float64:
        settings = {"eps": 1e-6, "atol": 1e-5, "rtol": 1e-3}
    else:
        settings = {"eps": 3e-3, "atol": 1e-2, "rtol": 1e-2}
    if subject.constant:
        return not_applicable(CONSTANT)
    small = small_width(subject)
    # Every entry at a small width, and along a random direction at the width asked for.
    for dim, fast in ((small, False), (subject.dim, True)):
        module = enliven(subject.direct(dim)).double()

        # The steps are taken in the leaves themselves: a norm that computes a part again in its backward
        # must find its parameters as they were.
        def call(x: Tensor, *_: Tensor, module: nn.Module = module) -> Tensor:
            buffers = {name: one.clone() for name, one in module.named_buffers()}
            if not buffers:
                return module(x)
            return torch.func.functional_call(module, buffers, (x,))

        x = rows_of(*subject.sheet(3, dim), number=6).requires_grad_()
        leaves = [x, *learned(module).values()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                check(call, leaves, fast_mode=fast, **settings)
            except GradcheckError as error:
                text = f"{what} are not those of finite differences ({first_line(error)})"
                return judged(False, text, {"width": dim}, settings)
    kind = "" if subject.keeps_float64 else " (fp32)"
    return judged(True, f"{what} equal finite differences{kind}", {"widths": [small, subject.dim]}, settings)


def small_width(subject: Subject, wanted: int = 8) -> int:
    """Return `wanted` where the norm can be built that wide, else the subject's width."""
    try:
        subject.build(wanted)(normal(2, wanted).float())
    except Exception:
        return subject.dim
    return wanted
