"""How much to measure, decided before it is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from rmsrepro.bench.statistics import t_quantile
from rmsrepro.config.bench import BenchConfig

PILOT_ROUNDS = 7
MIN_ROUNDS = 7
"""Fewest rounds of a process: a median of fewer is at the mercy of one disturbance."""
ENOUGH_AT_LEAST = 20
"""A pilot of seven rounds may look quieter than the machine is."""
MAX_ROUNDS = 400
MAX_PROCESSES = 64
PROCESS_SD = 0.01
"""Standard deviation, between processes, that a log ratio is taken to have when a bench is planned. One pilot
cannot tell it; with what the rounds' own noise adds, 1.2 to 4.4 % were seen in docs/results/time.md. It sets
how many processes are run and nothing else: the interval rests on the processes that were measured."""


@dataclass(frozen=True)
class Plan:
    """How much is measured in one cell. The same in all processes of a bench, fixed before measuring."""

    rounds: int
    steps_in_block: Mapping[str, int]
    """By the name under which an arm is sampled."""
    lead_in: int
    """Untimed steps at the start of a block."""


@dataclass(frozen=True)
class Pilot:
    """What a first look at a cell found; its times are thrown away."""

    steps_in_block: Mapping[str, int]
    lead_in: int
    round_s: float
    """Seconds of one round, all arms, with what lies between them."""
    setup_s: float
    """Seconds to build the arms, check them, call them once and warm them up."""
    noise: Mapping[str, float] = field(default_factory=dict)
    """By comparison: standard deviation of the log ratio from round to round."""

    @property
    def worst_noise(self) -> float:
        """The largest of them."""
        return max(self.noise.values(), default=0.0)


@dataclass(frozen=True)
class BenchPlan:
    """How much a bench measures."""

    processes: int
    cells: Mapping[str, Plan]
    """By the cell's name."""
    reason: str
    """What decided, in words."""
    half_width: float | None = None
    """Half-width of the widest interval that is expected, on the log scale."""
    seconds: float = 0.0
    """What the processes are expected to take together."""


def warm_up_seconds(config: BenchConfig, *, num_arms: int, num_cells: int = 1) -> tuple[float, float]:
    """Return the least and the most seconds of warm-up for all arms of a cell together.

    Four times what was asked for at most, and never more than the cell's part of a quarter of the process's
    budget.
    """
    asked = config.warmup_s * num_arms
    most = min(4 * asked, config.budget_s / config.processes / 4 / num_cells)
    return min(asked, most), most


def decide_plan(
    pilots: Mapping[str, Pilot], config: BenchConfig, *, start_s: float, spent_s: float
) -> BenchPlan:
    """Choose the numbers of processes and rounds, before any of them is measured.

    Enough rounds are those that bring the standard error of a process's median to a quarter of the
    precision; beyond them only more processes help. Of the numbers of processes that the budget pays for,
    the smallest is taken whose expected intervals all keep to the precision, and where none does, the one
    that comes nearest: with fewer rounds, if that is what it takes.

    Args:
        pilots: by the cell's name.
        start_s: seconds until a process begins with its first cell.
        spent_s: seconds of the budget that have gone.
    """
    fixed = start_s + sum(pilot.setup_s for pilot in pilots.values())
    if config.rounds is not None:
        rounds = dict.fromkeys(pilots, config.rounds)
        seconds = config.processes * (fixed + _seconds(pilots, rounds))
        return BenchPlan(config.processes, _plans(pilots, rounds), "bench.rounds was given", seconds=seconds)
    available = config.budget_s - spent_s
    enough = {name: _enough_rounds(pilot, config.precision) for name, pilot in pilots.items()}
    best: _Choice | None = None
    for processes in range(config.processes, max(config.processes, MAX_PROCESSES) + 1):
        rounds = _affordable(pilots, enough, available / processes - fixed)
        cost = processes * (fixed + _seconds(pilots, rounds))
        if cost > available and best is not None:
            break
        width = max((_half_width(pilots[name], rounds[name], processes) for name in pilots), default=0.0)
        if best is None or width < best.half_width:
            best = _Choice(width, processes, rounds, within_budget=cost <= available)
        if width <= config.precision or cost > available:
            break
    assert best is not None
    reason = _reason(pilots, enough, best, config)
    seconds = best.processes * (fixed + _seconds(pilots, best.rounds))
    return BenchPlan(best.processes, _plans(pilots, best.rounds), reason, best.half_width, seconds)


@dataclass(frozen=True)
class _Choice:
    half_width: float
    processes: int
    rounds: dict[str, int]
    within_budget: bool


def _plans(pilots: Mapping[str, Pilot], rounds: Mapping[str, int]) -> dict[str, Plan]:
    return {name: Plan(rounds[name], pilot.steps_in_block, pilot.lead_in) for name, pilot in pilots.items()}


def _enough_rounds(pilot: Pilot, precision: float) -> int:
    # 1.253 sd / sqrt(n) is the standard error of a median of n normal values.
    rounds = math.ceil((4 * 1.253 * pilot.worst_noise / precision) ** 2)
    return min(max(ENOUGH_AT_LEAST, rounds), MAX_ROUNDS)


def _affordable(pilots: Mapping[str, Pilot], enough: Mapping[str, int], seconds: float) -> dict[str, int]:
    """Return enough rounds, or the same part of enough in each cell that `seconds` a process pay for."""
    rounds, part = dict(enough), 1.0
    # Cells that are down to the fewest rounds cost more than their part, so the others get less.
    for _ in range(len(pilots) + 1):
        least = {name for name in pilots if math.floor(part * enough[name] + 1e-9) <= MIN_ROUNDS}
        rounds = {
            name: min(enough[name], MIN_ROUNDS) if name in least else math.floor(part * enough[name] + 1e-9)
            for name in pilots
        }
        if _seconds(pilots, rounds) <= seconds:
            break
        free = [name for name in pilots if name not in least]
        if not free:
            break
        left = seconds - sum(rounds[name] * pilots[name].round_s for name in least)
        part = max(0.0, min(part, left / sum(enough[name] * pilots[name].round_s for name in free)))
    return rounds


def _seconds(pilots: Mapping[str, Pilot], rounds: Mapping[str, int]) -> float:
    return sum(rounds[name] * pilot.round_s for name, pilot in pilots.items())


def _half_width(pilot: Pilot, rounds: int, processes: int) -> float:
    """Half-width of the 95 % interval that is expected."""
    spread = math.hypot(PROCESS_SD, 1.253 * pilot.worst_noise / math.sqrt(rounds))
    return t_quantile(0.975, processes - 1) * spread / math.sqrt(processes)


def _reason(
    pilots: Mapping[str, Pilot], enough: Mapping[str, int], best: _Choice, config: BenchConfig
) -> str:
    noise = max((pilot.worst_noise for pilot in pilots.values()), default=0.0)
    seen = f"noise of a round {100 * noise:.1f} %, expected half-width {100 * best.half_width:.1f} %"
    if not best.within_budget:
        return f"the least there is, more than bench.budget_s={config.budget_s:g} ({seen})"
    if best.half_width <= config.precision:
        return f"enough for the precision ({seen})"
    return f"what bench.budget_s pays for ({seen}; {max(enough.values())} rounds would serve a process)"


def robust_sd(values: list[float]) -> float:
    """Standard deviation from the median absolute deviation, so that one disturbed round counts little."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)
