"""Checks where numbers are coarse, many, zero, very small or very large."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rmsrepro.norms.card.drawing import EPS, NAMES, alternating, generator, normal
from rmsrepro.norms.card.numerics import CONSTANT, errors, gradients, largest, run, small_width
from rmsrepro.norms.card.result import Check, Findings, first_line, judged, not_applicable
from rmsrepro.norms.card.subject import Subject, enliven, learned, linear_of

# -------------------------------------------------------------------------------------------- dtypes


def dtype_rule(subject: Subject) -> Check:
    """The output has the input's dtype: with fp32 parameters, also under autocast, and with half ones."""
    found: dict[str, str] = {}
    wrong: dict[str, list[str]] = {}
    single = torch.float32
    cases = [(dtype, single, autocast) for autocast in (False, True) for dtype in EPS]
    cases += [(dtype, dtype, False) for dtype in (torch.bfloat16, torch.float16)]
    for dtype, parameters, autocast in cases:
        module, x = enliven(subject.direct()).to(parameters), normal(*subject.sheet(4)).to(dtype)
        where = f"{NAMES[dtype]}{' under autocast' if autocast else ''}"
        if parameters is not single:
            where += f" with {NAMES[parameters]} parameters"
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                y = module(x)
            found[where] = NAMES.get(y.dtype, str(y.dtype))
        except Exception as error:
            found[where] = first_line(error)
        if found[where] != NAMES[dtype]:
            wrong.setdefault(found[where], []).append(where)
    told = "; ".join(f"{got} for {', '.join(given)}" for got, given in wrong.items())
    text = told or "the output has the input's dtype, autocast or not"
    return judged(not wrong, text, found, "the input's dtype")


def half_precision_sums(subject: Subject) -> Check:
    """Sums of half-precision numbers are added, and squares held, in fp32."""
    findings, measured = Findings(), {}
    for value in (300.0, 30000.0):
        x = torch.full(subject.sheet(64), value, dtype=torch.float16)
        with torch.no_grad():
            y = subject.direct()(x)
        with subject.in_float64(), torch.no_grad():
            expected, _ = subject.reference(subject.direct())(x.double())
            rounded, _ = subject.reference(subject.direct())(x.double() * _ulps(*x.shape))
        right = float(expected.flatten()[0])
        measured[f"fp16_{value:g}"] = {"output": float(y.flatten()[0]), "exact": right}
        # An output that fp16 does not hold is right when it is beyond what fp16 holds.
        most = torch.finfo(torch.float16).max
        off = float((y.double().clamp(-most, most) - expected.clamp(-most, most)).abs().max())
        findings.expect(
            off <= max(4 * EPS[torch.float16] * abs(right), 0.02) + 2 * largest(rounded - expected),
            f"an fp16 row of {value:g} gives {float(y.flatten()[0]):.4g} instead of {right:.4g}",
        )
    measured["gradients"] = _added_up(subject, findings)
    small = measured["fp16_300"]
    fine = f"an fp16 row of 300 gives {small['output']:.4g}; 65536 rows add up"
    return findings.check(fine, measured, "4 eps of the output, 1 % of the gradients")


def _ulps(rows: int, dim: int) -> Tensor:
    """Return factors that move numbers by an ulp of fp32, in turn up and down.

    A norm that centres may divide what fp32 rounds off a mean of 30000 by the root of a small eps, which no
    norm in fp32 could do better.
    """
    return 1.0 + EPS[torch.float32] * alternating(rows, dim)


def _added_up(subject: Subject, findings: Findings) -> dict[str, Any]:
    """Gradients of parameters over 65536 bf16 rows of ones, with ones from above; and with signs."""
    rows, dim = 65536, small_width(subject)
    signs = alternating(*subject.sheet(rows, dim))
    found: dict[str, Any] = {}
    # Norms that centre give 0 for rows of ones; rows of alternating signs are their own norm.
    for label, x in (("ones", signs.abs()), ("signs", signs)):
        x = x.to(torch.bfloat16)
        for parameters in (torch.float32, torch.bfloat16):
            module = subject.direct(dim).to(parameters)
            exactly = subject.reference(module)  # of the parameters as they were rounded
            _, slopes = run(module, x, x)
            with subject.in_float64():
                exact, moved = (
                    gradients(*exactly(x.double() * factor), x.double())
                    for factor in (1.0, _ulps(1, x.shape[-1]))
                )
            for name, got, right, other in zip(learned(module), slopes[1:], exact, moved, strict=True):
                value, expected = float(got.flatten()[0]), float(right.flatten()[0])
                found[f"{name}_{label}_{NAMES[parameters]}"] = {"gradient": value, "exact": expected}
                findings.expect(
                    largest(got.double() - right)
                    <= 0.01 * max(largest(right), 100.0) + 2 * largest(other - right),
                    f"the gradient of {name} over {rows} bf16 rows is {value:.6g} instead of {expected:.6g}",
                )
    return found


# --------------------------------------------------------------------------------- zero rows and range


def zero_rows(subject: Subject) -> Check:
    """Rows of zeros, whole or in part, give finite outputs and gradients."""
    findings, measured = Findings(), {}
    subjects = {"": subject}
    if subject.built_in and subject.has("eps") and not subject.of_weights and subject.backend != "torch":
        subjects = {"": subject, " at eps=0": subject.at(eps=0.0), " at eps=1e-8": subject.at(eps=1e-8)}
    for label, one in subjects.items():
        for zeros in sorted({subject.dim, subject.dim // 2, 1, subject.dim - 1}, reverse=True):
            x = normal(4, subject.dim).float()
            x[:2, :zeros] = 0.0
            if zeros == subject.dim:
                x[2:] = 0.0
            y, slopes = run(_with_zero_weights(one, zeros), x, torch.ones_like(x))
            where = (
                f"{'rows of zeros' if zeros == subject.dim else f'rows that begin with {zeros} zeros'}{label}"
            )
            findings.expect(bool(y.isfinite().all()), f"{where}: the output is not finite")
            names = ["the input", *learned(one.build())]
            for name, gradient in zip(names, slopes, strict=True):
                findings.expect(
                    bool(gradient.isfinite().all()), f"{where}: the gradient of {name} is not finite"
                )
            if zeros == subject.dim:
                measured[f"output{label}"] = largest(y)
                measured[f"input_gradient{label}"] = largest(slopes[0])
    fine = (
        f"zero rows give {measured['output']:.3g}, the input's gradient is {measured['input_gradient']:.3g}"
    )
    return findings.check(fine, measured, "finite")


def _with_zero_weights(subject: Subject, zeros: int) -> nn.Module:
    """A fresh module; of a norm of weights, the rows that are zero are those of the matrix."""
    module = subject.build()
    if subject.of_weights:
        with torch.no_grad():
            linear_of(module).weight[:2, :zeros] = 0.0
    return module


EXPONENTS = range(-18, 19, 3)
"""Of ten: where results must be finite, and this package's own accurate."""
OTHERS = (-12, 12)
"""Where those of torch's functions and of users' norms must be accurate: some square what they divide by."""


def value_range(subject: Subject) -> Check:
    """Where fp32 holds, for values from 1e-18 to 1e18."""
    if subject.constant:
        return not_applicable(CONSTANT)
    module = subject.lively()
    good: dict[str, list[int]] = {"output": [], "gradient": []}
    findings = Findings()
    allowed = 256 * EPS[torch.float32]
    size = 0.1 + 0.9 * torch.rand(4, subject.dim, generator=generator(7), dtype=torch.float64)
    unit = normal(4, subject.dim, number=7).sign() * size
    upstream = normal(4, subject.dim, number=8).float()
    for exponent in EXPONENTS:
        # |a| from a tenth of the scale to the scale, or above 1e-18 from the scale to ten times it.
        x = (unit * 10.0 ** (exponent if exponent > 0 else exponent + 1)).float()
        fresh = copy.deepcopy(module)
        if subject.of_weights:
            with torch.no_grad():
                weight = linear_of(fresh).weight
                weight.copy_(weight.sign() * x.abs().max())
            x = unit.float()
        y, slopes = run(fresh, x, upstream)
        finite = all(bool(one.isfinite().all()) for one in (y, *slopes))
        findings.expect(finite, f"not finite at |a| about 1e{exponent}")
        found = errors(subject, fresh, x, upstream)
        for part, exponents in good.items():
            if found[part] <= allowed:
                exponents.append(exponent)
    measured = {part: _stretch(exponents) for part, exponents in good.items()}
    whole = {part: ends == [EXPONENTS[0], EXPONENTS[-1]] for part, ends in measured.items()}
    # Kernels that are not this package's have a range of their own, which the card tells.
    needed = (EXPONENTS[0], EXPONENTS[-1]) if subject.built_in and subject.backend != "torch" else OTHERS
    for part, ends in measured.items():
        if not ends or ends[0] > needed[0] or ends[1] < needed[1]:
            told = f"from 1e{ends[0]} to 1e{ends[1]} only" if ends else "nowhere"
            findings.expect(False, f"in fp32 the {part} is accurate {told}")
    if all(whole.values()):
        fine = "fp32 holds for |a| from 1e-18 to 1e18"
    else:
        fine = "finite for |a| from 1e-18 to 1e18; accurate " + ", ".join(
            f"{part} from 1e{ends[0]} to 1e{ends[1]}" for part, ends in measured.items() if ends
        )
    bound = {"exponents": list(needed), "finite": [EXPONENTS[0], EXPONENTS[-1]], "error": allowed}
    return findings.check(fine, measured, bound)


def _stretch(exponents: list[int]) -> list[int]:
    """Return the ends of the longest run of `exponents` around 0, or nothing."""
    if 0 not in exponents:
        return []
    low = high = 0
    while low - 3 in exponents:
        low -= 3
    while high + 3 in exponents:
        high += 3
    return [low, high]
