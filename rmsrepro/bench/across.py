"""Arms of one bench on different backends: the table `across`.

What changing the implementation does to a norm's time, and what a norm on a fast backend takes beside
LayerNorm, or no norm, on another. Ratios only: a percentage saved compares equations, so it is quoted between
equal backends alone (the table `comparisons`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rmsrepro.bench.cells import Arm
from rmsrepro.norms.backends import BACKENDS


def pairs_across(arms: Sequence[Arm]) -> Iterator[tuple[Arm, Arm]]:
    """Yield each norm of a faster backend with the same norm, the baseline and `none` of every slower one.

    `arms` are those that were measured. Faster is what stands earlier in `BACKENDS`.
    """
    norms = [arm for arm in arms if arm.role == "norm"]
    for arm in norms:
        for other in norms:
            same = (arm.norm, arm.params) == (other.norm, other.params)
            if _rank(arm) < _rank(other) and (same or other.is_baseline or other.norm == "none"):
                yield arm, other


def in_order(pairs: Iterable[tuple[Arm, Arm]]) -> list[tuple[Arm, Arm]]:
    """Return the pairs by what they are set against, then as they came."""
    found = list(pairs)
    others = list(dict.fromkeys(other.label for _, other in found))
    return sorted(found, key=lambda pair: others.index(pair[1].label))


def _rank(arm: Arm) -> int:
    return BACKENDS.index(arm.backend) if arm.backend in BACKENDS else len(BACKENDS)
