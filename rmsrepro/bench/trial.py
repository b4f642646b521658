"""A few seconds of LayerNorm against itself: how small a difference this machine can show.

Pairs of twins are timed one after another, each built anew and measured in interleaved rounds. A pair stands
for a process of a bench: what differs between pairs is where their memory lies. Processes differ in more.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, stdev

import torch

from rmsrepro.bench.cells import Step
from rmsrepro.bench.load import OtherLoad
from rmsrepro.bench.planning import ENOUGH_AT_LEAST, MIN_ROUNDS, PROCESS_SD, Plan, robust_sd
from rmsrepro.bench.protocol import Clock, PairedTimer
from rmsrepro.bench.statistics import (
    BlockSample,
    Interval,
    PairedSamples,
    estimate_ratio,
    t_quantile,
)
from rmsrepro.norms import build_norm

PAIRS = 5
ROWS, WIDTH = 1024, 512
TWINS = ("layernorm#1", "layernorm#2")
WARM_UP = 0.2
"""Part of a pair's time."""
LEAST_BLOCK_S = 0.005
MOST_ROUNDS = 2000


@dataclass(frozen=True)
class Trial:
    """What a trial found."""

    ratio: Interval
    """One twin over the other, with its 95 % interval over the pairs."""
    round_sd: float
    """Standard deviation of the log ratio from round to round."""
    pair_sd: float
    """Standard deviation, between pairs, of the log ratio."""
    num_rounds: int
    step_s: float
    """Seconds of one step."""
    other_load: float | None
    """Cores that other programs kept busy meanwhile; None: unknown."""

    def half_width(self, processes: int, rounds: int = ENOUGH_AT_LEAST) -> float:
        """Return the half-width to hope for of the 95 % interval of a ratio, on the log scale."""
        spread = math.hypot(max(PROCESS_SD, self.pair_sd), 1.253 * self.round_sd / math.sqrt(rounds))
        return t_quantile(0.975, processes - 1) * spread / math.sqrt(processes)


class TrialStep(Step):
    """LayerNorm on (1024, 512), forward and backward, a few inputs in turn."""

    def __init__(self, device: torch.device) -> None:
        self._norm = build_norm("layernorm", WIDTH, backend="composite").to(device)
        self._inputs = [torch.randn(ROWS, WIDTH, device=device, requires_grad=True) for _ in range(4)]
        self._upstream = torch.randn(ROWS, WIDTH, device=device)
        self._next = 0

    def __call__(self) -> None:
        x = self._inputs[self._next]
        self._next = (self._next + 1) % len(self._inputs)
        torch.autograd.grad(self._norm(x), [x, *self._norm.parameters()], self._upstream)


def aa_trial(
    seconds: float,
    clock: Clock,
    build: Callable[[], Step],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    now: Callable[[], float] = time.perf_counter,
) -> Trial:
    """Time pairs of equal steps for about `seconds`.

    Args:
        build: makes a step; each is a twin.
        on_progress: called with the pairs done and the pairs to do.
    """
    samples: list[BlockSample] = []
    other = OtherLoad()
    began = now()
    for pair in range(PAIRS):
        on_progress(pair, PAIRS)
        left = (seconds - (now() - began)) / (PAIRS - pair)
        samples += _pair(pair, max(left, 0.0), clock, build, now)
    on_progress(PAIRS, PAIRS)
    load = other.stop()
    paired = PairedSamples(samples)
    by_pair = paired.log_ratios(TWINS[1:], TWINS[:1])
    found = estimate_ratio(paired, TWINS[1:], TWINS[:1])
    return Trial(
        ratio=found.ratio,
        round_sd=fmean(robust_sd(ratios) for ratios in by_pair.values()),
        pair_sd=stdev(math.log(ratio) for ratio in found.process_ratios.values()),
        num_rounds=found.num_rounds,
        step_s=fmean(paired.times(TWINS)),
        other_load=load,
    )


def _pair(
    number: int, seconds: float, clock: Clock, build: Callable[[], Step], now: Callable[[], float]
) -> list[BlockSample]:
    began = now()
    order = random.Random(number)
    steps = {name: build() for name in order.sample(TWINS, 2)}
    timer = PairedTimer(steps, clock, seed=number)
    timer.warm_up(WARM_UP * seconds, WARM_UP * seconds)
    steps_in_block, lead_in = timer.block_plan(least_block_s=LEAST_BLOCK_S)
    first = now()
    timer.rounds(Plan(1, steps_in_block, lead_in))
    round_s = max(now() - first, clock.resolution)
    rounds = math.floor((seconds - (now() - began)) / round_s)
    plan = Plan(min(max(MIN_ROUNDS, rounds), MOST_ROUNDS), steps_in_block, lead_in)
    samples = timer.rounds(plan, process=number)
    gc.collect()
    return samples
