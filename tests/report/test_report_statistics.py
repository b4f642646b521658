"""Values of the paired statistics, each worked out apart from the code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsrepro.report.statistics import holm, median, paired_difference, time_to_target

# Quantiles of Student's t at .95, from a printed table: 2 and 4 degrees of freedom.
T95_2 = 2.919986
T95_4 = 2.131847


def test_interval_of_three_pairs_matches_the_formula() -> None:
    arm, baseline = [2.00, 2.10, 2.06], [1.98, 2.05, 2.05]
    values = np.array(arm, dtype=np.float64) - np.array(baseline, dtype=np.float64)
    half = T95_2 * values.std(ddof=1) / np.sqrt(3)
    found = paired_difference(arm, baseline)
    assert found.n == 3
    assert found.mean == pytest.approx(0.0266667, abs=1e-6)
    assert found.low == pytest.approx(values.mean() - half, abs=1e-6)
    assert found.high == pytest.approx(values.mean() + half, abs=1e-6)
    # By hand: differences .02 .05 .01, sd .0208167, half width .0350942.
    assert (found.low, found.high) == pytest.approx((-0.0084275, 0.0617609), abs=1e-6)


def test_two_sided_p_value_of_three_pairs() -> None:
    # With 2 degrees of freedom P(|T| > t) = 1 - t / sqrt(2 + t^2); here t = mean / (sd / sqrt 3) = 2.2188.
    found = paired_difference([2.00, 2.10, 2.06], [1.98, 2.05, 2.05])
    t = 0.0266667 / (0.0208167 / math.sqrt(3))
    assert found.p_different == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-5)
    assert found.p_different == pytest.approx(0.156769, abs=1e-4)


def test_equivalence_is_the_interval_inside_the_margin() -> None:
    found = paired_difference([1.0, 1.01, 0.99, 1.0, 1.02], [1.0, 1.0, 1.0, 1.0, 1.0])
    half = T95_4 * np.std([0, 0.01, -0.01, 0, 0.02], ddof=1) / math.sqrt(5)
    edge = 0.004 + half
    assert found.within(edge + 1e-6)
    assert not found.within(edge - 1e-6)
    assert found.p_equivalent(edge + 1e-6) < 0.05 < found.p_equivalent(edge - 1e-6)


@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=8),
    st.floats(0.001, 5),
)
def test_both_forms_of_the_equivalence_test_agree(differences: list[float], margin: float) -> None:
    found = paired_difference(differences, [0.0] * len(differences))
    edge = max(abs(found.low), abs(found.high))
    if abs(edge - margin) > 1e-9:
        assert found.within(margin) == (found.p_equivalent(margin) < 0.05)


def test_a_single_pair_has_a_mean_and_no_interval() -> None:
    found = paired_difference([1.5], [1.0])
    assert found.mean == 0.5
    assert math.isnan(found.low)
    assert math.isnan(found.p_different)
    assert not found.within(10.0)


@pytest.mark.parametrize(
    ("arm", "mean", "p_different", "inside"),
    [
        ([1.0, 2.0, 3.0], 0.0, 1.0, True),
        ([1.01, 2.01, 3.01], 0.01, 0.0, True),
        ([2.0, 3.0, 4.0], 1.0, 0.0, False),
    ],
)
def test_equal_differences_have_no_spread(
    arm: list[float], mean: float, p_different: float, inside: bool
) -> None:
    found = paired_difference(arm, [1.0, 2.0, 3.0])
    assert found.mean == pytest.approx(mean)
    assert (found.sd, found.low, found.high) == (0.0, found.mean, found.mean)
    assert found.p_different == p_different
    assert found.within(0.05) is inside
    assert found.p_equivalent(0.05) == (0.0 if inside else 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spoils_the_mean_openly(bad: float) -> None:
    found = paired_difference([1.0, bad, 1.0], [1.0, 1.0, 1.0])
    assert math.isnan(found.mean)
    assert math.isnan(found.p_different)
    assert not found.within(100.0)


@pytest.mark.parametrize(("arm", "baseline"), [([], []), ([1.0], [1.0, 2.0])])
def test_pairs_are_needed(arm: list[float], baseline: list[float]) -> None:
    with pytest.raises(ValueError, match="pairs needed"):
        paired_difference(arm, baseline)


def test_holm_multiplies_by_rank_and_stays_monotone() -> None:
    # Sorted: .005*4, .01*3, .03*2, .04*1; the last is raised to the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_counts_untested_comparisons_and_leaves_them_open() -> None:
    adjusted = holm([0.01, math.nan, 0.02, math.nan])
    assert adjusted[0] == pytest.approx(0.04)
    assert adjusted[2] == pytest.approx(0.06)
    assert math.isnan(adjusted[1])
    assert math.isnan(adjusted[3])


def test_holm_is_cut_at_one_and_takes_nothing() -> None:
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_median_knows_never() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([1.0, math.inf, 3.0]) == 3.0
    assert median([1.0, math.inf]) == math.inf
    assert median([math.inf, math.inf]) == math.inf
    assert math.isnan(median([]))
    assert math.isnan(median([1.0, math.nan]))


def test_time_to_target_takes_the_first_row_that_has_it() -> None:
    times, losses = [1.0, 2.0, 3.0, 4.0], [3.0, math.nan, 2.0, 2.5]
    assert time_to_target(times, losses, 2.0, higher=False) == 3.0
    assert time_to_target(times, losses, 1.9, higher=False) == math.inf
    assert time_to_target(times, [10, 20, 30, 40], 25, higher=True) == 3.0
    assert time_to_target([], [], 1.0, higher=False) == math.inf
    assert time_to_target([math.nan, 5.0], [1.0, 1.0], 1.0, higher=False) == 5.0
