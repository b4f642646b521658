from __future__ import annotations

import math
import random
import statistics

import pytest

from rmsrepro.bench.statistics import (
    BlockSample,
    Interval,
    PairedSamples,
    aa_control,
    estimate_ratio,
    spread,
    t_interval,
    time_reduction,
)

T_975_2DF = 4.302652729911275
T_975_1DF = 12.706204736174694


def samples_of(table: dict[int, list[dict[str, float]]]) -> list[BlockSample]:
    """Samples from process -> rounds -> arm -> seconds."""
    return [
        BlockSample(process, number, position, arm, seconds, 1)
        for process, rounds in table.items()
        for number, arms in enumerate(rounds)
        for position, (arm, seconds) in enumerate(arms.items())
    ]


def test_t_interval_by_hand() -> None:
    found = t_interval([0.1, 0.2, 0.3])
    half = T_975_2DF * 0.1 / math.sqrt(3)
    assert found.estimate == pytest.approx(0.2)
    assert found.low == pytest.approx(0.2 - half)
    assert found.high == pytest.approx(0.2 + half)


def test_t_interval_of_equal_values_has_no_width() -> None:
    assert t_interval([0.5, 0.5]) == Interval(0.5, 0.5, 0.5)


def test_t_interval_refuses_one_value() -> None:
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        t_interval([1.0])


def test_ratio_and_interval_by_hand() -> None:
    # Baseline: geometric mean of the twins, 2 (= sqrt(1 * 4)) everywhere. Median ratios: .5 and 1.
    table = {
        0: [
            {"a": 1.0, "b1": 1.0, "b2": 4.0},
            {"a": 0.9, "b1": 4.0, "b2": 1.0},
            {"a": 50.0, "b1": 2.0, "b2": 2.0},
        ],
        1: [{"a": 2.0, "b1": 1.0, "b2": 4.0}],
    }
    found = estimate_ratio(PairedSamples(samples_of(table)), ["a"], ["b1", "b2"])
    assert found.process_ratios == pytest.approx({0: 0.5, 1: 1.0})
    assert found.ratio.estimate == pytest.approx(math.sqrt(0.5))
    half = T_975_1DF * (math.log(2) / math.sqrt(2)) / math.sqrt(2)
    assert found.ratio.low == pytest.approx(math.sqrt(0.5) * math.exp(-half))
    assert found.ratio.high == pytest.approx(math.sqrt(0.5) * math.exp(half))
    assert (found.num_rounds, found.num_processes) == (4, 2)


def test_what_all_arms_of_a_round_share_cancels() -> None:
    noise = random.Random(3)
    table = {
        process: [
            {name: base * shared for name, base in {"a": 0.9, "b1": 1.0, "b2": 1.0}.items()}
            for shared in (noise.lognormvariate(0, 0.8) for _ in range(9))
        ]
        for process in range(3)
    }
    found = estimate_ratio(PairedSamples(samples_of(table)), ["a"], ["b1", "b2"])
    assert found.ratio.estimate == pytest.approx(0.9)
    assert found.ratio.high - found.ratio.low == pytest.approx(0, abs=1e-9)


def simulated(noise: random.Random, ratio: float, processes: int, rounds: int) -> list[BlockSample]:
    """A machine with a process effect, slow drift that all arms share, and noise of each block."""
    table: dict[int, list[dict[str, float]]] = {}
    for process in range(processes):
        layout = {arm: noise.gauss(0, 0.01) for arm in ("a", "b1", "b2")}
        drift = 0.0
        table[process] = []
        for _ in range(rounds):
            drift = 0.9 * drift + noise.gauss(0, 0.05)
            table[process].append(
                {
                    arm: math.exp(drift + layout[arm] + noise.gauss(0, 0.02) + math.log(scale))
                    for arm, scale in {"a": ratio, "b1": 1.0, "b2": 1.0}.items()
                }
            )
    return samples_of(table)


def test_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    noise = random.Random(20)
    hits, estimates = 0, []
    repeats = 200
    for _ in range(repeats):
        found = estimate_ratio(PairedSamples(simulated(noise, 0.93, 6, 9)), ["a"], ["b1", "b2"])
        hits += not found.ratio.excludes(0.93)
        estimates.append(found.ratio.estimate)
    # 95 % of 200 is 190, with a standard deviation of 3.1.
    assert 180 <= hits <= 199
    assert statistics.fmean(estimates) == pytest.approx(0.93, abs=0.002)


def test_rounds_that_miss_an_arm_do_not_count() -> None:
    table = {0: [{"a": 1.0, "b": 2.0}, {"b": 2.0}], 1: [{"a": 1.0, "b": 2.0}], 2: [{"b": 2.0}]}
    found = estimate_ratio(PairedSamples(samples_of(table)), ["a"], ["b"])
    assert (found.num_rounds, found.num_processes) == (2, 2)
    assert found.ratio.estimate == pytest.approx(0.5)


def test_an_arm_twice_in_a_round_is_refused() -> None:
    with pytest.raises(ValueError, match="process 0, round 4 has 'a' more than once"):
        PairedSamples([BlockSample(0, 4, 0, "a", 1.0, 1), BlockSample(0, 4, 1, "a", 1.0, 1)])


def twins(ratios: list[float]) -> PairedSamples:
    table = {process: [{"b1": 1.0, "b2": ratio}] for process, ratio in enumerate(ratios)}
    return PairedSamples(samples_of(table))


def test_quiet_twins_are_trusted() -> None:
    found = aa_control(twins([0.99, 1.01, 1.0, 1.0]), ["b1", "b2"], precision=0.02)
    assert found.trusted
    assert found.flags == []
    assert found.ratio.estimate == pytest.approx((0.99 * 1.01) ** 0.25)


def test_twins_that_differ_by_more_than_the_precision_are_not_trusted() -> None:
    found = aa_control(twins([0.8, 1.3, 1.05]), ["b1", "b2"], precision=0.02)
    assert not found.trusted
    assert found.flags[0] == "A/A: two equal arms differ by +3.0 %, more than the precision of 2 %"
    assert len(found.flags) == 2
    assert "too wide to tell" in found.flags[1]


def test_twins_whose_interval_says_nothing_are_not_trusted() -> None:
    found = aa_control(twins([1.6, 1 / 1.6]), ["b1", "b2"], precision=0.02)
    # log 1.6 = 0.4700; with one degree of freedom the half-width is 12.706 times that: 5.972.
    assert found.ratio.estimate == pytest.approx(1.0)
    assert found.ratio.bounds() == pytest.approx([0.002549, 392.3], rel=1e-3)
    assert not found.trusted
    assert found.flags == [
        "A/A: the control is too wide to tell: [0.002549, 392.3], a half-width of 5.97 on the log scale, "
        "more than 0.05 (2.5 times the precision)"
    ]


@pytest.mark.parametrize(
    ("spread", "precision", "cells", "trusted"),
    [
        # Half-width over four processes at +-s: 3.1824 * s * sqrt(4 / 3) / 2 = 1.8374 s.
        (0.0270, 0.02, 1, True),  # 0.0496
        (0.0275, 0.02, 1, False),  # 0.0505
        (0.0270, 0.02, 1000, True),
        (0.0275, 0.02, 1000, False),
        (0.0275, 0.03, 1, True),
        (0.0270, 0.01, 1, False),
    ],
)
def test_how_wide_the_control_may_be(spread: float, precision: float, cells: int, trusted: bool) -> None:
    ratios = [math.exp(sign * spread) for sign in (1, -1, 1, -1)]
    found = aa_control(twins(ratios), ["b1", "b2"], precision=precision, cells=cells)
    assert math.log(found.ratio.high) == pytest.approx(1.8374 * spread, rel=1e-3)
    assert found.trusted is trusted
    assert ["too wide to tell" in flag for flag in found.flags] == ([] if trusted else [True])


def test_an_interval_that_no_float_holds_is_no_error() -> None:
    found = aa_control(twins([3.0, 1 / 3.0]), ["b1", "b2"], precision=0.02, cells=1000)
    assert not found.trusted
    assert len(found.flags) == 1


def test_a_small_but_sure_difference_of_twins_is_not_trusted_unless_cells_explain_it() -> None:
    ratios = [1.010, 1.011, 1.009, 1.0102]
    found = aa_control(twins(ratios), ["b1", "b2"], precision=0.02)
    assert not found.trusted
    assert len(found.flags) == 1
    assert "excludes 1 at .05 over 1 cell" in found.flags[0]
    # t = 24.2 with 3 degrees of freedom: p = 1.5e-4, which one of 1000 cells may show by chance.
    assert aa_control(twins(ratios), ["b1", "b2"], precision=0.02, cells=1000).trusted


def test_time_reduction_is_the_papers_and_its_interval_is_ordered() -> None:
    found = time_reduction(Interval(0.9, 0.85, 1.02))
    assert found.estimate == pytest.approx(10.0)
    assert found.bounds() == pytest.approx([-2.0, 15.0])


def test_spread_by_hand() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]) == pytest.approx((2.5, 1.5))
    assert spread([7.0]) == (7.0, 0.0)
