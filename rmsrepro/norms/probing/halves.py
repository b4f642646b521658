"""Half precision and rows of zeros: what a norm does where it often goes wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from rmsrepro.norms.probing.affine import Part, Role
from rmsrepro.norms.probing.subject import NotCallable, Subject

LARGE_IN_FP16 = 300.0
"""Its square, 9e4, is beyond fp16's largest number, 65504."""

MANY_ROWS = 1024
"""Added one by one in bf16, so many ones stop at 256."""


def alternating(rows: int, width: int) -> Tensor:
    """Return rows (R, n) of +1 and -1 whose mean is not zero, float64."""
    place = torch.arange(rows)[:, None] + torch.arange(width)[None]
    return torch.where(place % 3 == 2, -1.0, 1.0).to(torch.float64)


def half_statistics(subject: Subject) -> bool | None:
    """Return whether fp16 rows of +-300 come out wrong; None where the module does not run in fp16.

    Args:
        subject: float64 or float32, gain one, bias zero.
    """
    rows = LARGE_IN_FP16 * alternating(6, subject.width)
    try:
        expected = subject(rows)
        y = subject.again(dtype=torch.float16)(rows)
    except (NotCallable, RuntimeError):
        return None
    return not bool(((y - expected).abs().max() <= 0.02 * expected.abs().max()).item())


def gain_gradient(subject: Subject, parts: list[Part]) -> float | None:
    """Return a bf16 gain's gradient over its true value, the one furthest from 1; None: not measurable.

    1024 equal rows, upstream gradients of the sign of the output, so that every row adds the same amount.
    """
    gains = [part.name for part in parts if part.role is Role.gain]
    if len(gains) != 1:
        return None
    rows = alternating(1, subject.width).expand(MANY_ROWS, -1)
    if (
        subject.training
    ):  # statistics over positions: rows that differ, each sign as often as in the row above
        rows = alternating(MANY_ROWS, subject.width)
    try:
        core = subject(rows)
        half = subject.again(dtype=torch.bfloat16)
        parameter = dict(half.module.named_parameters())[gains[0]].requires_grad_(True)
        y = half.raw(rows.to(half.device, torch.bfloat16))
        y.backward(core.sign().to(y.device, y.dtype))
    except (NotCallable, RuntimeError, KeyError):
        return None
    if parameter.grad is None:
        return None
    true = core.abs().sum(0) if parameter.numel() == subject.width else core.abs().sum()
    ratio = parameter.grad.to("cpu", torch.float64).reshape(-1) / true.reshape(-1)
    return float(ratio[(ratio - 1).abs().argmax()])


def output_dtypes(subject: Subject) -> dict[str, str]:
    """Return the output's dtype by "input/parameters"."""
    found = {}
    for parameters in (torch.float32, torch.bfloat16, torch.float16):
        try:
            copied = subject.again(dtype=parameters)
        except (NotCallable, RuntimeError):
            continue
        if not any(one.is_floating_point() for one in copied.module.parameters()):
            continue
        for given in (
            {torch.bfloat16, torch.float16, parameters} if parameters is torch.float32 else {parameters}
        ):
            key = f"{_short(given)}/{_short(parameters)}"
            try:
                rows = alternating(6, subject.width).to(copied.device, given)
                with torch.no_grad():
                    found[key] = _short(copied.raw(rows).dtype)
            except NotCallable:
                found[key] = "error"
    return dict(sorted(found.items()))


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype)[6:])


def zero_row(subject: Subject) -> str:
    """Return what a row of zeros gives: finite, nan, or nan gradient."""
    rows = torch.zeros(4, subject.width, device=subject.device, dtype=subject.dtype, requires_grad=True)
    try:
        y = subject.raw(rows)
        if not torch.isfinite(y).all():
            return "nan"
        y.sum().backward()
    except (NotCallable, RuntimeError):
        return "finite"  # no gradient to be had, as of a norm that works in place
    return "nan gradient" if rows.grad is not None and not torch.isfinite(rows.grad).all() else "finite"
