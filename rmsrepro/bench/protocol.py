"""How time is taken inside one process: first calls, warm-up, then paired interleaved rounds.

An arm is a function of no arguments that does one step. In a round every arm runs once, in a random
order: whatever the machine does (frequency, other load, memory) meets all arms alike, and the ratio
formed within the round is free of it. Every arm does the same number of steps in each phase, so arms
that walk through the same batches are on the same batches in the same round.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median

from rmsrepro.bench.planning import Plan
from rmsrepro.bench.statistics import BlockSample

Step = Callable[[], object]
Synchronize = Callable[[], None]

RESOLUTION_SHARE = 1e-3
"""A block is so long that the clock's resolution is below this share of it."""
LEAD_IN_BELOW_S = 0.05
"""Steps shorter than this get one untimed step at the start of a block, which brings the arm's own
data back into the caches; for longer steps the caches make no difference."""
STABLE_WITHIN = 0.05
"""Warm-up is over when no arm's share of a window moves by more than this, relatively."""
WARMUP_WINDOWS = 4
"""Windows that the least warm-up is divided into; the last two are compared with the two before."""


def no_synchronize() -> None:
    """For devices that finish before the call returns."""


class Clock:
    """Reads the time in seconds, after everything asked of the device is done.

    Args:
        synchronize: waits for the device; called before each reading.
        now: the clock to read.
        resolution: in seconds; None: measured.
    """

    def __init__(
        self,
        synchronize: Synchronize = no_synchronize,
        now: Callable[[], float] = time.perf_counter,
        resolution: float | None = None,
    ) -> None:
        self._synchronize = synchronize
        self._now = now
        self.resolution = _measured_resolution(now) if resolution is None else resolution

    def read(self) -> float:
        self._synchronize()
        return self._now()


def _measured_resolution(now: Callable[[], float]) -> float:
    """The median smallest step between two readings, which includes the cost of reading."""
    steps = []
    for _ in range(50):
        start = later = now()
        while later <= start:
            later = now()
        steps.append(later - start)
    return max(median(steps), time.get_clock_info("perf_counter").resolution)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out of a timed block: it would strike one arm at random."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def timed_block(step: Step, count: int, clock: Clock) -> float:
    """Seconds that `count` calls of `step` take together."""
    with _no_collection():
        start = clock.read()
        for _ in range(count):
            step()
        return clock.read() - start


@dataclass(frozen=True)
class WarmUp:
    """What happened before anything counted."""

    steps: int
    """Steps of each arm, its first call apart."""
    seconds: dict[str, float]
    """By arm."""
    stable: bool
    """False when arms still moved against each other when the time was up."""


class PairedTimer:
    """Times a set of arms in interleaved rounds.

    Args:
        arms: name -> step.
        clock: reads the time.
        seed: of the order of the arms in each round.
        on_round: called between rounds, outside the clock, with the number of rounds done.
    """

    def __init__(
        self,
        arms: Mapping[str, Step],
        clock: Clock,
        *,
        seed: int,
        on_round: Callable[[int], None] | None = None,
    ) -> None:
        if not arms:
            raise ValueError("there is no arm to time")
        self._arms = dict(arms)
        self._clock = clock
        self._order = random.Random(seed)
        self._on_round = on_round

    def warm_up(self, least_s: float, most_s: float, *, least_steps: int = 1) -> WarmUp:
        """Run the arms in windows for `least_s` in all and `least_steps` each, and on until stable.

        Stable means stable against each other: what all arms have in common cancels in the ratios. When
        `most_s` seconds have gone it ends all the same.
        """
        names = list(self._arms)
        seconds = {name: timed_block(self._arms[name], 1, self._clock) for name in names}
        total_steps = 1
        once = max(sum(seconds.values()), self._clock.resolution)
        window_steps = max(1, math.floor(least_s / WARMUP_WINDOWS / once))
        shares: list[dict[str, float]] = []
        while True:
            window = {
                name: timed_block(self._arms[name], window_steps, self._clock)
                for name in self._shuffled(names)
            }
            total_steps += window_steps
            centre = fmean(_log(window[name]) for name in names)
            shares.append({name: _log(window[name]) - centre for name in names})
            for name in names:
                seconds[name] += window[name]
            spent = sum(seconds.values())
            if len(shares) >= WARMUP_WINDOWS and total_steps >= least_steps and spent >= least_s:
                stable = _is_stable(shares)
                if stable or spent >= most_s:
                    return WarmUp(steps=total_steps, seconds=seconds, stable=stable)

    def block_plan(self, *, least_block_s: float) -> tuple[int, int]:
        """Steps in a block, and untimed steps before it, from one more step of each arm.

        All arms get the same number, set by the fastest one.
        """
        fastest = min(timed_block(step, 1, self._clock) for step in self._arms.values())
        fastest = max(fastest, self._clock.resolution)
        least = max(least_block_s, self._clock.resolution / RESOLUTION_SHARE)
        return max(1, math.ceil(least / fastest)), 1 if fastest < LEAD_IN_BELOW_S else 0

    def rounds(self, plan: Plan, *, process: int = 0) -> list[BlockSample]:
        """Measure `plan.rounds` rounds."""
        samples = []
        names = list(self._arms)
        for number in range(plan.rounds):
            for position, name in enumerate(self._shuffled(names)):
                step = self._arms[name]
                for _ in range(plan.lead_in):
                    step()
                seconds = timed_block(step, plan.steps_in_block, self._clock)
                samples.append(
                    BlockSample(
                        process=process,
                        round=number,
                        position=position,
                        arm=name,
                        seconds_per_step=seconds / plan.steps_in_block,
                        steps_in_block=plan.steps_in_block,
                    )
                )
            gc.collect(1)
            if self._on_round is not None:
                self._on_round(number + 1)
        return samples

    def _shuffled(self, names: list[str]) -> list[str]:
        return self._order.sample(names, len(names))


def _log(seconds: float) -> float:
    return math.log(max(seconds, 1e-12))


def _is_stable(shares: list[dict[str, float]]) -> bool:
    """Whether no arm's mean share of the last two windows differs from that of the two before."""
    for name in shares[-1]:
        late = fmean(share[name] for share in shares[-2:])
        early = fmean(share[name] for share in shares[-4:-2])
        if abs(late - early) > STABLE_WITHIN:
            return False
    return True
