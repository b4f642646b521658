"""A model's layers against a norm of the package, and against each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from rmsrepro.config.errors import first_line
from rmsrepro.norms.factory import NormSpec
from rmsrepro.norms.inspecting.report import Call, Inspection, Layer
from rmsrepro.norms.inspecting.wording import (
    Remark,
    bias_phrase,
    call_mean,
    call_phrase,
    dimensions_phrase,
    divisor_phrase,
    eps_phrase,
    gain_phrase,
    gather,
    join,
    mean_phrase,
    plural,
)
from rmsrepro.norms.probing import EpsPosition, Finding, Kind, NotANorm, Over, probe

EPS_TOLERANCE = 0.01
"""Two eps are the same within one per cent."""

SOME_WIDTH = 64
"""At which a norm is probed for a comparison with a function, whose width does not matter."""


# ------------------------------------------------------------------------- against a norm of the package


def compare(inspection: Inspection, spec: NormSpec) -> list[Remark]:
    """Return where the model differs from having `spec` as its norm; empty where it does not.

    Each layer is compared with what the same probe says of the norm that `spec` builds at its width.

    Raises:
        ValueError: it cannot be built at that width.
    """
    if not inspection.layers and not inspection.calls:
        return (
            [] if _leaves_activations(spec) else [Remark((), f"nothing is normalised; {spec.name} is a norm")]
        )
    expected: dict[int, Finding | NotANorm] = {}

    def at(width: int) -> Finding | NotANorm:
        if width not in expected:
            try:
                norm = spec.build(width)
            except Exception as error:  # a user's norm may raise anything
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise ValueError(f"norm={spec.name} cannot be built at width {width} ({reason})") from error
            expected[width] = probe(norm, width)
        return expected[width]

    found: list[tuple[Layer | Call, str]] = []
    if _leaves_activations(spec):
        why = "normalises the weights of linear maps" if spec.scope == "weight" else "does not"
        found += [(layer, f"normalises; {spec.name} {why}") for layer in inspection.layers]
        found += [(call, f"{call_phrase(call)}; {spec.name} {why}") for call in inspection.calls]
        return gather(found)
    for layer in inspection.layers:
        wanted = at(layer.finding.width)
        texts = differences(layer.finding, wanted, spec.name)
        if layer.finding.in_training is not None:
            trained = differences(layer.finding.in_training, wanted, spec.name)
            texts += [f"{text} (in training)" for text in trained if text not in texts]
        found += [(layer, text) for text in texts]
    for call in inspection.calls:
        found += [(call, text) for text in _call_differences(call, at(SOME_WIDTH), spec.name)]
    return gather(found)


def _leaves_activations(spec: NormSpec) -> bool:
    return spec.is_none or spec.scope == "weight"


def differences(found: Finding, expected: Finding | NotANorm, name: str) -> list[str]:
    """Return how a layer differs from the norm `name`, one phrase for each way."""
    if isinstance(expected, NotANorm):
        return [f"normalises; {name} does not ({expected.reason})"]
    if found.kind is not expected.kind:
        return [f"{_KINDS[found.kind]}; {name} {_KINDS[expected.kind]}"]
    mean_differs = found.subtracts_mean != expected.subtracts_mean
    texts = []
    if mean_differs or not _same_share(found, expected):
        texts.append(_against(mean_phrase(found), mean_phrase(expected), name))
    if found.has_bias != expected.has_bias:
        texts.append(_against(bias_phrase(found), bias_phrase(expected), name))
    if (found.gain, found.gain_offset) != (expected.gain, expected.gain_offset):
        texts.append(f"{gain_phrase(found)}; {name} {gain_phrase(expected)}")
    if not _same_dimensions(found, expected):
        texts.append(f"{dimensions_phrase(found)}; {name} over {expected.over_dimensions}")
    one, other = replace(found, dimensions=()), replace(expected, dimensions=())
    if divisor_kind(one) != divisor_kind(other) or (
        found.entries != expected.entries and not found.dimensions
    ):
        texts.append(f"{divisor_phrase(one)}; {name} {divisor_phrase(other)}")
    if not same_eps(found, expected):
        texts.append(f"{eps_phrase(found)}; {name} {eps_phrase(expected)}")
    return texts


def _same_dimensions(found: Finding, expected: Finding) -> bool:
    """Whether both are of the same dimensions; of a matrix, the second is the last, whatever is meant."""
    if len(found.input_shape) <= 2 or Over.positions in (found.over, expected.over):
        return found.dimensions in ((), expected.dimensions)
    return found.dimensions == expected.dimensions


_KINDS = {Kind.norm: "is scale-invariant", Kind.bounded: "is bounded, not scale-invariant"}


def _against(found: str, expected: str, name: str) -> str:
    """Set two phrases against each other, the second shortened where it only denies the first."""
    denials = {
        "keeps the mean": "does not",
        "carries no bias": "has none",
    }
    return f"{found}; {name} {denials.get(expected, expected)}"


def _same_share(one: Finding, other: Finding) -> bool:
    if one.mean_share is None or other.mean_share is None:
        return one.mean_share is other.mean_share
    return abs(one.mean_share - other.mean_share) < 0.01


def divisor_kind(one: Finding) -> str:
    """What a row is divided by, the std of a row counting as the rms of a row whose mean was subtracted."""
    return one.divisor.replace("std", "rms").split(" of first")[0]


def same_eps(one: Finding, other: Finding) -> bool:
    """Whether two findings have eps at the same place and of the same size."""
    return one.eps.position is other.eps.position and _close(one.eps.value, other.eps.value)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=EPS_TOLERANCE)


def _call_differences(call: Call, expected: Finding | NotANorm, name: str) -> list[str]:
    what = call_phrase(call, eps=False)
    if isinstance(expected, NotANorm) or expected.kind is Kind.bounded:
        return [f"{what}; {name} does not"]
    pairs = []
    if call.over is not None and expected.over is not Over.positions:
        pairs.append(("", f"normalises over {expected.over_dimensions}"))
    if call.subtracts_mean != expected.subtracts_mean:
        pairs.append((call_mean(call), mean_phrase(expected)))
    if call.has_bias and not expected.has_bias:
        pairs.append(("adding a bias", bias_phrase(expected)))
    divisor = None if call.divided_by is None else call.divided_by.replace("std", "rms")
    if divisor is not None and divisor != divisor_kind(expected).partition(" of ")[0]:
        pairs.append((f"dividing by {call.divided_by}", divisor_phrase(expected)))
    if call.eps is not None and call.eps_position is not None:
        position = EpsPosition(call.eps_position)
        if position is not expected.eps.position or not _close(call.eps, expected.eps.value):
            pairs.append((f"with eps {call.eps:.3g} {position.value}", eps_phrase(expected)))
    if not pairs:
        return []
    ours, theirs = zip(*pairs, strict=True)
    return [f"{', '.join(filter(None, (what, *ours)))}; {name} {join(theirs)}"]


# ---------------------------------------------------------------------------------- among themselves


def mixtures(inspection: Inspection) -> list[Remark]:
    """Return where layers of one model differ: the few against the many."""
    layers = inspection.layers
    norms = [layer for layer in layers if layer.finding.kind is Kind.norm]
    mixed = [
        *_mixed(layers, lambda one: one.kind, lambda one: _KINDS[one.kind]),
        *_mixed(norms, mean_phrase, mean_phrase),
        *_mixed(layers, lambda one: one.has_bias, bias_phrase),
        *_mixed(layers, gain_phrase, gain_phrase),
        *_mixed(norms, divisor_kind, divisor_phrase),
        *_mixed(norms, eps_phrase, eps_phrase),
    ]
    means = {layer.finding.subtracts_mean for layer in norms}
    others = "every layer keeps it" if means == {False} else "every layer subtracts it"
    odd = [call for call in inspection.calls if len(means) == 1 and call.subtracts_mean not in means]
    return gather((call, f"{call_phrase(call)}, {call_mean(call)}; {others}") for call in odd) + mixed


def _mixed(
    layers: Sequence[Layer], key: Callable[[Finding], object], phrase: Callable[[Finding], str]
) -> list[Remark]:
    counts = Counter(key(layer.finding) for layer in layers)
    if len(counts) < 2:
        return []
    usual, number = counts.most_common(1)[0]
    text = phrase(next(layer.finding for layer in layers if key(layer.finding) == usual))
    others = f"{number} other layers {plural(text)}" if number > 1 else f"another layer {text}"
    return gather(
        (layer, f"{phrase(layer.finding)}; {others}") for layer in layers if key(layer.finding) != usual
    )
