"""What records have to say to the paper's claims: the inputs of `judge_claims`.

The report makes them from runs and timings, as it makes everything else from those; a norm's card is read
here. Whoever hands them over has settled which records belong to the study.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmsrepro.config.paths import expanded


@dataclass(frozen=True)
class Timing:
    """One paired comparison with LayerNorm."""

    level: str
    """layer, model or step."""
    cell: str
    """`model/task`; empty for a layer."""
    norm: str
    """The name that records have."""
    params: Mapping[str, Any]
    """The norm's parameters that the bench was given."""
    backend: str
    """Of the norm and of its LayerNorm: across backends no percentage is formed."""
    reduction: float
    """100 (1 - t / t of LayerNorm); NaN where the arm could not be measured."""
    low: float
    """Ends of its 95 % interval."""
    high: float
    trusted: bool
    flags: tuple[str, ...] = ()
    mode: str = ""
    hardware: str = ""
    """The machine's processor, or its GPU where that is what was timed."""
    bench_id: str = ""


@dataclass(frozen=True)
class Quality:
    """A norm against LayerNorm over paired seeds in one cell, judged by the study's rules."""

    cell: str
    norm: str
    """The study's name of it."""
    metric: str
    outcome: str
    """equivalent, different, undecided, incomplete or none."""
    text: str
    """The verdict in words, such as `undecided (undertrained)`."""
    mean: float
    """Mean difference norm - LayerNorm; NaN without whole pairs."""
    low: float
    """Ends of its 90 % interval."""
    high: float
    n: int
    """Pairs that the study plans."""
    margin: float | None
    direction: str = ""
    """better or worse, where there is a difference."""
    diverged: int = 0
    """Seeds that diverged in this norm and ended in LayerNorm."""
    value: float = math.nan
    """The norm's mean of the metric."""
    learned: float | None = None
    """What LayerNorm has to reach to count as trained."""
    reached: bool = True
    """Whether the norm's mean has reached it."""


@dataclass(frozen=True)
class NormCard:
    """What `rmsrepro check-norm` measured of a norm."""

    name: str
    invariances: Mapping[str, bool]
    deviations: Mapping[str, float]
    """Invariance -> the largest relative change of the output; empty for cards that do not say."""
    gradients: Mapping[str, Mapping[str, Any] | None]


@dataclass(frozen=True)
class Findings:
    """All that was found."""

    timings: tuple[Timing, ...] = ()
    """Newest first."""
    qualities: tuple[Quality, ...] = ()
    cards: Mapping[str, NormCard] = field(default_factory=dict)
    """By name."""


def read_cards(out_dir: Path | str) -> dict[str, NormCard]:
    """Read the cards in out_dir/cards, by the norm's name. One that is damaged is as good as none."""
    cards = (_card(path) for path in sorted((expanded(out_dir) / "cards").glob("*.json")))
    return {card.name: card for card in cards if card is not None}


def _card(path: Path) -> NormCard | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        invariances = {
            str(name): held for name, held in content["invariances"].items() if isinstance(held, bool)
        }
        details = content.get("invariance_details") or {}
        deviations = {str(name): _largest(offs) for name, offs in (details.get("deviations") or {}).items()}
        gradients = {
            str(name): one if isinstance(one, Mapping) else None
            for name, one in (content.get("gradients") or {}).items()
        }
        return NormCard(str(content["name"]), invariances, deviations, gradients)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _largest(offs: Iterable[Any]) -> float:
    return max((float(off) for off in offs), default=math.nan)
