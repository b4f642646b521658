"""What is said of a model's layers: remarks, and the words for findings in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rmsrepro.norms.inspecting.grouping import collapse
from rmsrepro.norms.inspecting.report import Call, Layer
from rmsrepro.norms.probing import EpsPosition, Finding, Gain


@dataclass(frozen=True)
class Remark:
    """Something about one or several places of a model."""

    paths: tuple[str, ...]
    """Empty where it is about the whole model."""
    text: str
    """Goes on after the name of one place: "subtracts a mean"."""

    def __str__(self) -> str:
        if not self.paths:
            return self.text
        where = join([path or "the module itself" for path in collapse(self.paths)])
        return f"{where} {plural(self.text) if len(self.paths) > 1 else self.text}"


def gather(found: Iterable[tuple[Layer | Call, str]]) -> list[Remark]:
    """Draw the places together of which the same is said, in the order in which it is first said."""
    places: dict[str, list[str]] = {}
    for one, text in found:
        places.setdefault(text, []).append(one.path)
    return [Remark(tuple(dict.fromkeys(paths)), text) for text, paths in places.items()]


def plural(text: str) -> str:
    """Return a phrase that begins with a verb as it follows several things: "subtract a mean"."""
    verb = re.match(r"\w+", text)
    if verb is None:
        return text
    irregular = {"is": "are", "has": "have", "carries": "carry", "multiplies": "multiply"}
    return irregular.get(verb[0], verb[0].removesuffix("s")) + text[verb.end() :]


def join(names: Sequence[str], *, most: int = 4, last: str = "and") -> str:
    """Return names as "a, b and c"; what goes beyond `most` of them is counted."""
    shown = list(names)
    if len(shown) > most:
        shown = [*shown[: most - 1], f"{len(shown) - most + 1} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} {last} {shown[-1]}"


# ------------------------------------------------------------------------------------------- phrases


def mean_phrase(one: Finding) -> str:
    """What becomes of a row's mean."""
    if not one.subtracts_mean:
        return "keeps the mean"
    if one.mean_share is None:
        return "subtracts something that is not its mean"
    return "subtracts a mean" if subtracts_whole_mean(one) else f"subtracts {one.mean_share:.3g} of its mean"


def subtracts_whole_mean(one: Finding) -> bool:
    """Whether just the mean is subtracted."""
    return one.mean_share is not None and abs(one.mean_share - 1) < 0.01


def bias_phrase(one: Finding) -> str:
    """Whether it carries a bias, and under which name."""
    names = ", ".join(one.bias_names) or "no parameter"
    return f"carries a bias ({names})" if one.has_bias else "carries no bias"


def gain_phrase(one: Finding) -> str:
    """Which gain it has."""
    if one.gain is Gain.none:
        return "has no gain"
    if one.gain is Gain.other:
        return f"has a gain in another form ({', '.join(one.gain_names)})"
    size = "one gain for all entries" if one.gain is Gain.scalar else "a gain for each entry"
    stored = f", stored as its difference from {one.gain_offset:.3g}" if one.gain_offset else ""
    return f"has {size}{stored}"


def divisor_phrase(one: Finding) -> str:
    """What it divides by."""
    statistic, rest = one.divisor[: len(one.statistic)], one.divisor[len(one.statistic) :]
    if statistic == "other":
        return f"divides by a statistic of no known kind{rest}"
    return f"divides by {one.divisor}"


def dimensions_phrase(one: Finding) -> str:
    """Which dimensions share a statistic."""
    return f"normalises over {one.over_dimensions}"


def eps_phrase(one: Finding) -> str:
    """Where its eps stands."""
    if one.eps.position is EpsPosition.other:
        return "damps small rows in a way that is no eps in or outside the root"
    return f"has eps {one.eps}"


def gain_cell(one: Finding) -> str:
    """Return the gain as it is stored: weight, 1 + weight, weight (scalar), or -."""
    if one.gain is Gain.none:
        return "-"
    offset = f"{one.gain_offset:.3g} + " if one.gain_offset else ""
    form = {Gain.scalar: " (scalar)", Gain.other: " (other form)"}.get(one.gain, "")
    return f"{offset}{' * '.join(one.gain_names)}{form}"


def call_phrase(call: Call, *, eps: bool = True) -> str:
    """Return where a forward normalises by itself: "normalises in its forward by F.layer_norm, eps 1e-05"."""
    shown = "" if call.eps is None or not eps else f", eps {call.eps:.3g} {call.eps_position}"
    modes = f", in {call.modes[0]} only" if len(call.modes) == 1 else ""
    how = "primitive operations" if call.function == "written out" else call.function
    over = "" if call.over is None else f" over {call.over}"
    return f"normalises in forward by {how}{over}{shown}{modes}"


def call_mean(call: Call) -> str:
    """What becomes of the mean there."""
    return "subtracting a mean" if call.subtracts_mean else "keeping the mean"
