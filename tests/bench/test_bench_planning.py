from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rmsrepro.bench.planning import (
    MAX_PROCESSES,
    MAX_ROUNDS,
    MIN_ROUNDS,
    BenchPlan,
    Pilot,
    decide_plan,
    robust_sd,
)
from rmsrepro.config.bench import BenchConfig

CONFIG = BenchConfig(processes=8, budget_s=400, precision=0.02)


def pilot(noise: float, round_s: float = 0.1, setup_s: float = 1.0) -> Pilot:
    return Pilot({"a": 3}, 1, round_s, setup_s, {"x": noise / 2, "y": noise})


def planned(*pilots: Pilot, config: BenchConfig = CONFIG, spent_s: float = 0.0) -> BenchPlan:
    return decide_plan(
        {f"c{number}": one for number, one in enumerate(pilots)}, config, start_s=2.0, spent_s=spent_s
    )


def seconds(plan: BenchPlan, *pilots: Pilot) -> float:
    rounds = sum(plan.cells[f"c{number}"].rounds * one.round_s for number, one in enumerate(pilots))
    return plan.processes * (2.0 + sum(one.setup_s for one in pilots) + rounds)


def test_enough_rounds_bring_the_median_of_a_process_to_a_quarter_of_the_precision() -> None:
    # (4 * 1.253 * .03 / .02)^2 = 56.5
    plan = planned(pilot(0.03))
    assert plan.seconds == pytest.approx(8 * (2.0 + 1.0 + 57 * 0.1))
    assert (plan.processes, plan.cells["c0"].rounds) == (8, 57)
    assert plan.cells["c0"].steps_in_block == {"a": 3}
    assert plan.cells["c0"].lead_in == 1
    assert plan.reason.startswith("enough for the precision (noise of a round 3.0 %, expected half-width")
    assert plan.half_width is not None
    assert plan.half_width < 0.02


def test_a_quiet_pilot_still_gets_twenty_rounds_and_a_loud_one_not_more_than_the_most() -> None:
    assert planned(pilot(0.0)).cells["c0"].rounds == 20
    assert planned(pilot(0.5, round_s=1e-3)).cells["c0"].rounds == MAX_ROUNDS


def test_more_processes_are_run_where_the_precision_needs_them_and_the_budget_pays() -> None:
    config = replace(CONFIG, precision=0.005, budget_s=10_000)
    plan = planned(pilot(0.001), config=config)
    # With sd .01 between processes: t(.975, 17) .01 / sqrt(18) is .00497; with 17 it is .0051.
    assert plan.processes == 18
    assert "enough for the precision" in plan.reason
    short = planned(pilot(0.001), config=replace(config, budget_s=60))
    assert (short.processes, short.cells["c0"].rounds) == (16, MIN_ROUNDS)
    assert short.reason.startswith("what bench.budget_s pays for")
    assert seconds(short, pilot(0.001)) <= 60
    assert planned(pilot(0.001), config=replace(config, precision=1e-4)).processes == MAX_PROCESSES


def test_rounds_are_cut_to_the_budget_in_all_cells_alike() -> None:
    cells = [pilot(0.03), pilot(0.03, round_s=0.2), pilot(0.0)]
    config = replace(CONFIG, budget_s=160)
    plan = planned(*cells, config=config)
    rounds = [plan.cells[f"c{number}"].rounds for number in range(3)]
    assert seconds(plan, *cells) <= 160
    assert plan.processes == 8
    # 57 x .1 + 57 x .2 + 20 x .1 = 19.1 s are wanted and 15 s there: 78 % of each.
    assert rounds == [44, 44, 15]


def test_a_cell_that_is_down_to_the_fewest_rounds_leaves_the_others_less() -> None:
    cells = [pilot(0.03, round_s=0.05), pilot(0.0, round_s=1.0)]
    config = replace(CONFIG, budget_s=8 * (4 + 7 + 0.6))
    plan = planned(*cells, config=config)
    assert [one.rounds for one in plan.cells.values()] == [12, 7]
    assert seconds(plan, *cells) <= config.budget_s


def test_a_budget_that_pays_for_nothing_still_gives_a_median() -> None:
    plan = planned(pilot(0.03), config=replace(CONFIG, budget_s=10), spent_s=9)
    assert (plan.processes, plan.cells["c0"].rounds) == (8, MIN_ROUNDS)
    assert plan.reason.startswith("the least there is, more than bench.budget_s=10 (noise of")
    assert plan.seconds == pytest.approx(seconds(plan, pilot(0.03)))  # said before it begins


def test_what_the_pilot_took_is_taken_off_the_budget() -> None:
    whole = planned(pilot(0.03), config=replace(CONFIG, budget_s=60))
    later = planned(pilot(0.03), config=replace(CONFIG, budget_s=60), spent_s=8)
    assert later.cells["c0"].rounds == whole.cells["c0"].rounds - 10


def test_rounds_that_are_given_are_kept_and_so_is_the_least_number_of_processes() -> None:
    plan = planned(pilot(0.5), pilot(0.5), config=replace(CONFIG, rounds=3, processes=2, budget_s=1))
    assert plan.processes == 2
    assert [one.rounds for one in plan.cells.values()] == [3, 3]
    assert plan.reason == "bench.rounds was given"
    assert plan.seconds == pytest.approx(2 * (2.0 + 2 * 1.0 + 2 * 3 * 0.1))


def test_the_plan_knows_nothing_of_what_will_be_measured() -> None:
    assert planned(pilot(0.03)) == planned(pilot(0.03))


def test_one_disturbed_round_counts_little() -> None:
    assert robust_sd([0.0, 0.02, -0.02, 0.02, -0.02, 0.5, 0.0]) == pytest.approx(1.4826 * 0.02)
    assert math.isclose(robust_sd([1.0]), 0.0)
