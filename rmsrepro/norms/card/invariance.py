"""Table 1 of the paper by measurement: which changes of weights and data leave y = n(W x) as it is.

    weight_matrix_rescaling    W -> c W
    weight_matrix_recentering  W -> W + 1 mu^T, the same vector added to each row
    weight_vector_rescaling    one row of W -> c times it
    dataset_rescaling          all x -> c x
    dataset_recentering        all x -> x + delta, the same vector
    single_case_rescaling      one x -> c x

with c > 0, in float64, at eps = 0, on `normed_linear`, at inputs of size 1e-4, 1 and 1e4; statistics of
batches are those of training. A norm whose eps cannot be 0 is measured at inputs of size 1, where a fixed eps
shows a little, and of size 1e4, where it must not show; a function that saturates does the opposite, so that
all must hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rmsrepro.norms.card.drawing import normal
from rmsrepro.norms.card.result import Check, judged, not_applicable
from rmsrepro.norms.card.subject import Subject

INVARIANCES = (
    "weight_matrix_rescaling",
    "weight_matrix_recentering",
    "weight_vector_rescaling",
    "dataset_rescaling",
    "dataset_recentering",
    "single_case_rescaling",
)

PAPER: Mapping[str, tuple[bool, ...]] = {
    "batchnorm": (True, False, True, True, True, False),
    "weightnorm": (True, False, True, False, False, False),
    "layernorm": (True, True, False, True, False, True),
    "rmsnorm": (True, False, False, True, False, True),
    "prmsnorm": (True, False, False, True, False, True),
}
"""Zhang & Sennrich 2019, table 1."""

FACTORS = (0.25, 8.0)
EXACT_SCALES = (1e-4, 1.0, 1e4)
"""Sizes of the inputs where no eps shows: small ones too, for norms with a smallest divisor."""
LOOSE = 1e-2
"""What an eps of 1e-4 may change in rows of size 1/4."""
CASES, INPUTS = 32, 24
"""Rows of the data set, and entries of x."""


@dataclass(frozen=True)
class Setting:
    """How the table is measured.

    Attributes:
        subject: the norm, at eps = 0 where it can be.
        scales: sizes of the inputs.
        tolerances: for each, the largest relative difference that counts as none.
        method: the same in words.
    """

    subject: Subject
    scales: tuple[float, ...]
    tolerances: tuple[float, ...]
    method: str

    @property
    def width(self) -> int:
        """Rows of W: a narrow layernorm, of two or three entries, has invariances of its own."""
        dim = self.subject.dim
        return dim * math.ceil(16 / dim)


def choose_setting(subject: Subject) -> Setting:
    """Return how the norm is measured: at eps = 0 where it gives numbers there."""
    tight = 1e-9 if subject.keeps_float64 else 1e-4
    if not subject.has("eps"):
        if subject.built_in:
            return Setting(subject, EXACT_SCALES, (tight,) * 3, "it has no eps")
        return Setting(subject, (1.0, 1e4), (LOOSE, tight), "it has no parameter eps")
    try:
        exact = subject.at(eps=0.0)
        module, _ = exact.normed(INPUTS, Setting(exact, (), (), "").width)
        works = bool(module(normal(4, INPUTS)).isfinite().all())
    except Exception:
        works = False
    if works:
        return Setting(exact, EXACT_SCALES, (tight,) * 3, "eps = 0")
    return Setting(subject, (1.0, 1e4), (LOOSE, tight), "its eps cannot be 0")


Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(W, x) -> (W', x')."""


def changes(width: int, scale: float) -> dict[str, list[Change]]:
    """Return the changes behind each name, for inputs of size `scale`."""
    mu = normal(INPUTS, number=11) / INPUTS**0.5
    delta = scale * normal(INPUTS, number=12)
    row = min(1, width - 1)
    return {
        "weight_matrix_rescaling": [partial(_rescale, of_weights=factor) for factor in FACTORS],
        "weight_matrix_recentering": [partial(_recentre, of_weights=mu)],
        "weight_vector_rescaling": [partial(_rescale, of_weights=_at(row, width, one)) for one in FACTORS],
        "dataset_rescaling": [partial(_rescale, of_data=factor) for factor in FACTORS],
        "dataset_recentering": [partial(_recentre, of_data=delta)],
        "single_case_rescaling": [partial(_rescale, of_data=_at(1, CASES, one)) for one in FACTORS],
    }


def _rescale(
    w: Tensor, x: Tensor, *, of_weights: Tensor | float = 1.0, of_data: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    return of_weights * w, of_data * x


def _recentre(
    w: Tensor, x: Tensor, *, of_weights: Tensor | float = 0.0, of_data: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    return w + of_weights, x + of_data


def _at(index: int, size: int, factor: float) -> Tensor:
    """Return factors (size, 1): one of them `factor`, the others 1."""
    factors = torch.ones(size, 1, dtype=torch.float64)
    factors[index] = factor
    return factors


def measure(setting: Setting) -> dict[str, list[float]]:
    """Return for each invariance, at each scale, the largest |y' - y| relative to the largest |y|."""
    module, linear = setting.subject.normed(INPUTS, setting.width)
    module.train()
    weight = linear.weight.detach().clone()
    found: dict[str, list[float]] = {name: [] for name in INVARIANCES}
    restore = remembered(module)

    def output(w: Tensor, x: Tensor) -> Tensor:
        restore()
        linear.weight.copy_(w)
        y: Tensor = module(x)
        return y

    with torch.no_grad():
        for scale in setting.scales:
            x = scale * normal(CASES, INPUTS, number=10)
            y = output(weight, x)
            for name, ways in changes(setting.width, scale).items():
                off = max(_relative(output(*way(weight, x)), y) for way in ways)
                found[name].append(off)
    return found


def remembered(module: nn.Module) -> Callable[[], None]:
    """Return what sets a module's buffers back to what they are now: a call in training may move them."""
    kept = {name: one.clone() for name, one in module.named_buffers()}

    def restore() -> None:
        with torch.no_grad():
            for name, one in module.named_buffers():
                one.copy_(kept[name])

    return restore


def _relative(changed: Tensor, y: Tensor) -> float:
    off = float((changed - y).abs().max() / y.abs().max())
    return off if math.isfinite(off) else math.inf


def judge(setting: Setting, deviations: Mapping[str, list[float]]) -> dict[str, bool]:
    """Return which invariances hold: at all scales."""
    return {
        name: all(off <= limit for off, limit in zip(offs, setting.tolerances, strict=True))
        for name, offs in deviations.items()
    }


def details(setting: Setting, deviations: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return how it was measured, for the JSON."""
    return {
        "method": setting.method,
        "input_scales": list(setting.scales),
        "tolerances": list(setting.tolerances),
        "deviations": dict(deviations),
    }


def against_paper(name: str, held: Mapping[str, bool]) -> Check:
    """Compare a measured row with the paper's, for the five norms that have one."""
    row = PAPER.get(name)
    if row is None:
        return not_applicable("the paper's table 1 has no row for it")
    wrong = [one for one, told in zip(INVARIANCES, row, strict=True) if held.get(one) is not told]
    text = (
        f"measured otherwise than printed: {', '.join(wrong)}" if wrong else "the measured row is the paper's"
    )
    return judged(not wrong, text, dict(held), dict(zip(INVARIANCES, row, strict=True)))
