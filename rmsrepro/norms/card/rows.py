"""Checks of shapes, of rows beside each other, and of evaluation beside training."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from rmsrepro.norms.card.drawing import EPS, normal, rows_of
from rmsrepro.norms.card.numerics import Result, distances, run
from rmsrepro.norms.card.result import Check, Findings, first_line, judged, not_applicable
from rmsrepro.norms.card.subject import Subject
from rmsrepro.norms.trial import ROWS_TOLERANCE, influence

ALLOWED = 16 * EPS[torch.float32]
"""How far two ways to the same fp32 numbers may be apart, relative to the largest: sums in another order."""


def last_dimension(subject: Subject) -> Check:
    """A last dimension of another size is refused, and nothing is broadcast."""
    if subject.of_weights:
        return not_applicable("the linear map refuses it")
    findings, measured = Findings(), {}
    dim = subject.dim
    # One entry, and a gain of one entry, go with any number of others where nobody looks.
    pairs = [(dim, given) for given in (1, dim - 1, dim + 1) if given not in (0, dim)]
    for built, given in dict.fromkeys([*pairs, (1, 4)]):
        try:
            module = subject.build(built)
        except Exception:
            continue  # a norm may have reasons not to be one wide
        label = f"{built}_given_{given}"
        try:
            y = module(torch.ones(2, given))
        except ValueError:
            measured[label] = "ValueError"
        except Exception as error:
            measured[label] = type(error).__name__
            findings.expect(
                not subject.built_in, f"{given} entries for {built}: {first_line(error)}, not ValueError"
            )
        else:
            measured[label] = f"shape {tuple(y.shape)}"
            findings.expect(
                False,
                f"built for {built} and given {given} entries it returns the shape {tuple(y.shape)}; "
                "raise ValueError where x.shape[-1] is not dim",
            )
    kinds = " or ".join(dict.fromkeys(measured.values()))
    return findings.check(f"another last dimension raises {kinds}", measured, "ValueError")


LEADING = {"(B, d)": (12,), "(B, T, d)": (3, 4), "(B, H, T, d)": (2, 2, 3)}


def leading_dimensions(subject: Subject) -> Check:
    """Rows give the same, with their gradients, however many dimensions they are arranged in."""
    findings, measured = Findings(), {}
    dim = subject.dim
    x, upstream = rows_of(12, dim, number=8).float(), normal(12, dim, number=9).float()
    for mode in ("training", "evaluation"):
        module = subject.lively().train(mode == "training")
        cases: list[tuple[str, Tensor, Tensor, tuple[int, ...]]] = [("(d,)", x[:1], upstream[:1], (dim,))]
        cases += [(name, x, upstream, (*shape, dim)) for name, shape in LEADING.items()]
        for name, rows, above, shape in cases:
            try:
                flat = _arranged(module, rows, above, rows.shape)
            except Exception:
                if subject.info.takes_mask and len(rows) == 1:
                    continue  # one row has no statistics
                raise
            try:
                got = _arranged(module, rows, above, shape)
            except Exception as error:
                findings.expect(False, f"the shape {name} raises {first_line(error)}")
                continue
            off = max(distances(got, flat, rows, above).values())
            measured[f"{name} in {mode}"] = off
            findings.expect(
                off <= ALLOWED, f"rows of the shape {name} differ by {off:.2g} from themselves as (rows, d)"
            )
    shapes = ", ".join(["(d,)", *LEADING])
    return findings.check(f"rows give the same as {shapes}", measured, ALLOWED)


def _arranged(module: nn.Module, x: Tensor, upstream: Tensor, shape: tuple[int, ...]) -> Result:
    """Return what a copy of the module gives for the rows in another shape, as rows again."""
    with torch.random.fork_rng(devices=[]):
        y, (slope, *others) = run(copy.deepcopy(module), x.reshape(shape), upstream.reshape(shape))
    if y.shape != shape:
        raise ValueError(f"the output has the shape {tuple(y.shape)}")
    return y.reshape(x.shape), [slope.reshape(x.shape), *others]


def rows_independent(subject: Subject) -> Check:
    """In training, a row's output does not change with the other rows, before it or after it."""
    if subject.of_weights:
        return not_applicable("it normalises weights, whatever the rows")
    if subject.info.takes_mask:
        return not_applicable("its statistics are over rows, and it is given their mask")
    moved = 0.0
    for shape in ((6,), (2, 3)):
        x = normal(*shape, subject.dim).float()
        for make in (subject.lively, lambda: _Backwards(subject.lively())):
            found = influence(make, x)
            if found is None:
                return not_applicable("the same input gives other values each time")
            moved = max(moved, found)
    text = (
        "a row's output does not change with the other rows"
        if moved <= ROWS_TOLERANCE
        else f"a row's output moves by {moved:.2g} when other rows change; a norm over rows takes a `mask`"
    )
    return judged(moved <= ROWS_TOLERANCE, text, moved, ROWS_TOLERANCE)


class _Backwards(nn.Module):
    """A norm that is given the rows in reverse order: its last row comes out first."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        leading = tuple(range(x.dim() - 1))
        y: Tensor = self.norm(x.flip(leading))
        return y.flip(leading)


def evaluation(subject: Subject) -> Check:
    """A norm without statistics over rows gives in evaluation what it gives in training."""
    if subject.info.takes_mask:
        return not_applicable("its statistics are over rows; in evaluation, those of training")
    x, upstream = rows_of(3, 4, subject.dim, number=8).float(), normal(3, 4, subject.dim, number=9).float()
    module = subject.lively().train()
    with torch.no_grad():
        module(3 * normal(3, 4, subject.dim, number=10).float())  # something to remember, for those that do
    trained, again, evaluated = (
        run(copy.deepcopy(module).train(mode), x, upstream) for mode in (True, True, False)
    )
    if not torch.equal(trained[0].nan_to_num(), again[0].nan_to_num()):
        return not_applicable("the same input gives other values each time")
    off = distances(evaluated, trained, x, upstream)
    good = max(off.values()) <= ALLOWED
    text = (
        "evaluation gives what training gives"
        if good
        else f"evaluation differs from training by {off['output']:.2g}, gradients by {off['gradient']:.2g}"
    )
    return judged(good, text, off, ALLOWED)
