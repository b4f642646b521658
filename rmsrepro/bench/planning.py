"""How much to measure, decided before it is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from rmsrepro.config.bench import BenchConfig

PILOT_ROUNDS = 7
MIN_ROUNDS = 7
"""Fewest rounds of a process: a median of fewer is at the mercy of one disturbance."""
ENOUGH_AT_LEAST = 20
"""A pilot of seven rounds may look quieter than the machine is."""
MAX_ROUNDS = 400


@dataclass(frozen=True)
class Plan:
    """How much is measured. The same in all processes of a bench, fixed before measuring."""

    rounds: int
    steps_in_block: int
    lead_in: int
    """Untimed steps at the start of a block."""


def warm_up_seconds(config: BenchConfig, *, num_arms: int) -> tuple[float, float]:
    """Return the least and the most seconds of warm-up for all arms of a process together.

    Four times what was asked for at most, and never more than a quarter of the process's budget.
    """
    asked = config.warmup_s * num_arms
    most = min(4 * asked, config.budget_s / config.processes / 4)
    return min(asked, most), most


def decide_rounds(
    pilot: Mapping[str, list[float]], *, precision: float, round_s: float, available_s: float
) -> tuple[int, str]:
    """Choose the number of rounds, before any of them is measured.

    Args:
        pilot: log ratios of the pilot's rounds, for each comparison.
        precision: relative precision aimed at.
        round_s: seconds of one round, all arms.
        available_s: seconds left for the rounds of one process.

    Returns:
        The rounds, and in words what decided. Enough rounds are those that bring the standard error
        of a process's median to a quarter of the precision; beyond them only more processes help.
    """
    noise = max((_robust_sd(ratios) for ratios in pilot.values()), default=0.0)
    # 1.253 sd / sqrt(n) is the standard error of a median of n normal values.
    enough = max(ENOUGH_AT_LEAST, math.ceil((4 * 1.253 * noise / precision) ** 2))
    affordable = math.floor(available_s / round_s) if round_s > 0 else MAX_ROUNDS
    if affordable < MIN_ROUNDS:
        return MIN_ROUNDS, f"the fewest allowed: bench.budget_s would pay for {max(affordable, 0)}"
    if min(enough, MAX_ROUNDS) <= affordable:
        return min(enough, MAX_ROUNDS), f"enough for the precision (noise of a round {100 * noise:.1f} %)"
    return affordable, f"what bench.budget_s pays for ({enough} would serve the precision)"


def _robust_sd(values: list[float]) -> float:
    """Standard deviation from the median absolute deviation, so that one disturbed round counts little."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)
