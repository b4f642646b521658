"""How time is taken inside one process: first calls, warm-up, then paired interleaved rounds.

An arm is a function of no arguments that does one step. In a round every arm runs once, in a random
order: whatever the machine does (frequency, other load, memory) meets all arms alike, and the ratio
formed within the round is free of it. Where steps walk through batches of different size, every arm does the
same number of steps in each phase, so that in one round all arms are on the same batches.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from rmsrepro.bench.planning import Plan
from rmsrepro.bench.statistics import BlockSample

Step = Callable[[], object]
Synchronize = Callable[[], None]

EVENT_RESOLUTION_S = 1e-6
"""CUDA states half a microsecond for its events; there are two of them."""
RESOLUTION_SHARE = 1e-3
"""A block is so long that the clock's resolution is below this share of it."""
MOST_STEPS = 2**20
"""Steps in a block that the search for a long enough one ends with."""
LEAD_IN_BELOW_S = 0.05
"""Steps shorter than this get one untimed step at the start of a block, which brings the arm's own
data back into the caches; for longer steps the caches make no difference."""
STABLE_WITHIN = 0.05
"""Warm-up is over when no arm's share of a window moves by more than this, relatively, ..."""
NOISE_FACTOR = 3.0
"""... or by more than so many standard deviations of that movement, as the windows' own noise has them."""
WARMUP_WINDOWS = 8
"""Windows that the least warm-up is divided into, as far as they hold a step each. The later half of so many
is compared with the earlier."""
FEWEST_WINDOWS = 4


def no_synchronize() -> None:
    """For devices that finish before the call returns."""


class Clock:
    """Takes times in seconds, from and to moments at which everything asked of the device is done.

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

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long `work` takes."""
        start = self.read()
        work()
        return self.read() - start


class EventClock(Clock):
    """Takes times on a GPU with a pair of events at the edges of the work.

    Both are recorded in the stream, so that what is timed begins and ends on the device: the wait of the
    processor for it is not part. The device is waited for once before and once after.

    Args:
        synchronize: waits for the device.
        new_event: makes an event with `record`, `synchronize` and `elapsed_time` (in milliseconds), as
            torch.cuda.Event(enable_timing=True) does.
    """

    def __init__(self, synchronize: Synchronize, new_event: Callable[[], Any]) -> None:
        super().__init__(synchronize, resolution=EVENT_RESOLUTION_S)
        self._new_event = new_event

    def seconds(self, work: Callable[[], object]) -> float:
        start, end = self._new_event(), self._new_event()
        self._synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


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
    """Seconds that `count` calls of `step` take together, or one call of its `repeat` where it has one."""
    repeat: Callable[[int], object] | None = getattr(step, "repeat", None)

    def work() -> None:
        if repeat is not None:
            repeat(count)
            return
        for _ in range(count):
            step()

    with _no_collection():
        return clock.seconds(work)


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
        equal_steps: whether all arms do the same number of steps in a block.
        twins: lists of names that are one arm: they do the same number of steps in any case.
    """

    def __init__(
        self,
        arms: Mapping[str, Step],
        clock: Clock,
        *,
        seed: int,
        on_round: Callable[[int], None] | None = None,
        equal_steps: bool = True,
        twins: Sequence[Sequence[str]] = (),
    ) -> None:
        if not arms:
            raise ValueError("there is no arm to time")
        self._arms = dict(arms)
        self._clock = clock
        self._order = random.Random(seed)
        self._on_round = on_round
        self._equal_steps = equal_steps
        self._twins = [list(names) for names in twins]

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
            if len(shares) >= FEWEST_WINDOWS and total_steps >= least_steps and spent >= least_s:
                stable = _is_stable(shares)
                if stable or spent >= most_s:
                    return WarmUp(steps=total_steps, seconds=seconds, stable=stable)

    def block_plan(self, *, least_block_s: float, multiple: int = 1) -> tuple[dict[str, int], int]:
        """Steps of each arm in a block, and untimed steps before it.

        A block lasts at least `least_block_s`, and so long that the clock resolves it. Where all arms do the
        same number of steps, the fastest one sets it. The steps are a multiple of `multiple`.
        """
        least = max(least_block_s, self._clock.resolution / RESOLUTION_SHARE)
        seconds = {name: self._step_seconds(step, least) for name, step in self._arms.items()}
        fastest = min(seconds.values())
        for names in [list(self._arms)] if self._equal_steps else self._twins:
            seconds.update(dict.fromkeys(names, min(seconds[name] for name in names)))
        steps = {
            name: multiple * max(1, math.ceil(least / one / multiple - 1e-9)) for name, one in seconds.items()
        }
        return steps, 1 if fastest < LEAD_IN_BELOW_S else 0

    def _step_seconds(self, step: Step, least_block_s: float) -> float:
        """Seconds of one step: from a single one where all arms must keep pace, else from enough of them."""
        count = 1
        while True:
            seconds = timed_block(step, count, self._clock)
            if self._equal_steps or seconds >= least_block_s / 4 or count >= MOST_STEPS:
                return max(seconds, self._clock.resolution) / count
            count *= 2

    def rounds(self, plan: Plan, *, process: int = 0, cell: str = "") -> list[BlockSample]:
        """Measure `plan.rounds` rounds."""
        samples = []
        names = list(self._arms)
        for number in range(plan.rounds):
            for position, name in enumerate(self._shuffled(names)):
                step, count = self._arms[name], plan.steps_in_block[name]
                for _ in range(plan.lead_in):
                    step()
                seconds = timed_block(step, count, self._clock)
                samples.append(
                    BlockSample(
                        process=process,
                        round=number,
                        position=position,
                        arm=name,
                        seconds_per_step=seconds / count,
                        steps_in_block=count,
                        cell=cell,
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
    """Whether no arm's mean share of the last windows, at most four, differs from that of as many before.

    Where windows differ by more than the limit as it is, only a movement that their noise does not explain
    counts. The noise is that of the steps from window to window around each arm's median step, which a steady
    drift and a single jump leave alone.
    """
    half = min(len(shares), WARMUP_WINDOWS) // 2
    early, late = shares[-2 * half : -half], shares[-half:]
    steps = {name: [b[name] - a[name] for a, b in pairwise(early + late)] for name in shares[-1]}
    apart = [abs(step - median(own)) for own in steps.values() for step in own]
    noise = 1.4826 * median(apart) / math.sqrt(2)  # a step is a difference of two windows
    limit = max(STABLE_WITHIN, NOISE_FACTOR * noise * math.sqrt(2 / half))
    return all(
        abs(fmean(share[name] for share in late) - fmean(share[name] for share in early)) <= limit
        for name in shares[-1]
    )
