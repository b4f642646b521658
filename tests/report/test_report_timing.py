"""Step times from benches, and times taken while training."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.report import build_report, formatting
from rmsrepro.report.cells import build_cells
from rmsrepro.report.load import load_records
from rmsrepro.report.scorecard import Scorecard, build_scorecard
from rmsrepro.report.timing import StepTime, newest, step_time_of, step_times

Made = Callable[..., Any]


@pytest.fixture
def card(tmp_path: Path, made: Made) -> Callable[..., Scorecard]:
    """A study's scorecard over three arms of three seeds and whatever benches there are."""
    for norm in ("layernorm", "rmsnorm", "prmsnorm"):
        made("arm", tmp_path, norm, [2.0, 2.0, 2.0])

    def build(**study: Any) -> Scorecard:
        records = load_records(tmp_path)
        config = made("study", **study)
        return build_scorecard(build_cells(records.runs, config)[0], step_times(records.benches), config)

    return build


def _saved(card: Scorecard, norm: str = "rmsnorm") -> str | None:
    row = next(row for row in card.rows if row.arm.norm == norm)
    return row.step_time.text if row.step_time else None


def test_the_time_saved_is_shown_with_its_interval(
    tmp_path: Path, made: Made, card: Callable[..., Scorecard]
) -> None:
    made("bench", tmp_path, [made("comparison", ratio=0.877)])
    built = card()
    assert _saved(built) == "12.3 % [10.3, 14.3]"
    assert _saved(built, "prmsnorm") is None
    assert "a step took 12.3 % less time (composite backend)" in built.reading[0]
    assert "not benchmarked" in built.reading[1]


def test_a_slower_step_reads_more(tmp_path: Path, made: Made, card: Callable[..., Scorecard]) -> None:
    made("bench", tmp_path, [made("comparison", ratio=1.04)])
    built = card()
    assert _saved(built) == "-4.0 % [-6.0, -2.0]"
    assert "a step took 4.0 % more time" in built.reading[0]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "transformer"},
        {"task": "translation"},
        {"level": "layer"},
        {"arm": "rmsnorm/torch", "baseline": "layernorm/torch"},
        {"arm": "rmsnorm/composite", "baseline": "layernorm/torch"},
    ],
)
def test_a_timing_of_something_else_is_not_quoted(
    tmp_path: Path, made: Made, card: Callable[..., Scorecard], change: dict[str, Any]
) -> None:
    made("bench", tmp_path, [made("comparison", **change)])
    assert _saved(card()) is None


@pytest.mark.parametrize(("size", "quoted"), [(64, True), (512, False), (None, True)])
def test_a_timing_of_another_size_is_not_quoted(
    tmp_path: Path, made: Made, card: Callable[..., Scorecard], size: int | None, quoted: bool
) -> None:
    made("bench", tmp_path, [made("comparison")], config={"model": {"name": "gru", "d_model": size}})
    assert (_saved(card()) is not None) is quoted


def test_the_newest_bench_counts_trusted_or_not(
    tmp_path: Path, made: Made, card: Callable[..., Scorecard]
) -> None:
    old = made("bench", tmp_path, [made("comparison", ratio=0.8)], "z-old")
    os.utime(old / "result.json", (1e9, 1e9))
    made("bench", tmp_path, [made("comparison", ratio=0.9, trusted=False)], "a-new")
    built = card()
    assert _saved(built) == "10.0 % [8.0, 12.0]"
    assert "the bench does not trust its timing)" in built.reading[0]


def test_machines_are_never_pooled(tmp_path: Path, made: Made) -> None:
    for name in ("one", "two"):
        for number in (1, 2):
            made("bench", tmp_path, [made("comparison")], f"{name}{number}", machine={"host": name})
    times = newest(step_times(load_records(tmp_path).benches))
    assert sorted(time.machine for time in times) == ["one", "two"]


def test_an_interval_over_no_change_is_said(
    tmp_path: Path, made: Made, card: Callable[..., Scorecard]
) -> None:
    made("bench", tmp_path, [made("comparison", ratio=0.99)])
    assert "the interval includes no change)" in card().reading[0]


def test_a_missing_backend_reads_unavailable(
    tmp_path: Path, made: Made, card: Callable[..., Scorecard]
) -> None:
    facts = {"level": "step", "model": "gru", "task": "lm"}
    arm = facts | {"arm": "rmsnorm/composite", "status": "unavailable", "reason": "no compiler"}
    made("bench", tmp_path, [], arms=[arm])
    assert _saved(card()) == "unavailable"


def test_time_to_target_is_a_median_over_seeds(card: Callable[..., Scorecard]) -> None:
    # Losses fall below 2.4 at step 180; training seconds at step n of seed s are .05 n (1 + .02 s).
    row = next(row for row in card().rows if row.arm.norm == "rmsnorm")
    assert row.reaching is not None
    assert row.reaching.steps == (180.0, 180.0, 180.0)
    assert row.reaching.seconds == pytest.approx((9.18, 9.36, 9.54))
    assert row.reaching.steps_text == "180"
    assert row.reaching.seconds_text == "9.36 s"


def test_an_unreached_target_is_infinite_and_counted(card: Callable[..., Scorecard]) -> None:
    row = card(target={"gru/lm": 1.0}).rows[0]
    assert row.reaching is not None
    assert row.reaching.seconds == (math.inf,) * 3
    assert row.reaching.seconds_text == "not reached (3 of 3)"


def test_a_median_over_some_unreached_says_so(
    tmp_path: Path, made: Made, card: Callable[..., Scorecard]
) -> None:
    made("run", tmp_path, "none", seed=1, val_loss=2.0)
    made("run", tmp_path, "none", seed=2, val_loss=2.0)
    made("run", tmp_path, "none", seed=3, status="diverged", val_loss=2.0)
    row = next(row for row in card(norms=["layernorm", "none"]).rows if row.arm.norm == "none")
    assert row.reaching is not None
    assert row.reaching.steps_text == "180 (1 of 3 not reached)"


def test_contended_or_mixed_times_are_not_quoted(
    tmp_path: Path, made: Made, card: Callable[..., Scorecard]
) -> None:
    made("run", tmp_path, "none", seed=1, flags=["contended"])
    made("run", tmp_path, "l2norm", seed=1, machine={"host": "one"})
    made("run", tmp_path, "l2norm", seed=2, machine={"host": "two"})
    rows = {row.arm.norm: row for row in card(norms=["layernorm", "none", "l2norm"]).rows}
    assert rows["none"].unpaired_ms == "contended"
    assert rows["l2norm"].unpaired_ms == "several machines"
    assert rows["none"].reaching is not None
    assert rows["none"].reaching.seconds_text == "contended"
    assert rows["none"].reaching.steps_text == "180"


def test_a_step_in_training_has_a_time_and_no_percentage(card: Callable[..., Scorecard]) -> None:
    built = card()
    assert built.baselines[0].unpaired_ms == "50 ms"
    assert "%" not in built.rows[0].unpaired_ms


def test_a_timing_is_of_the_arms_own_parameters(tmp_path: Path, made: Made) -> None:
    made("arm", tmp_path, "layernorm", [2.0])
    for p in (0.25, 0.0625):
        given = {"norm": {"name": "prmsnorm"} | ({"p": p} if p != 0.0625 else {})}
        made("arm", tmp_path, "prmsnorm", [2.0], run_id=f"run-{p}", config=given, norm_params={"p": p})
    labels: dict[str, dict[str, float]] = {
        "prmsnorm/composite": {},
        "prmsnorm(p=0.25)/composite": {"p": 0.25},
    }
    made(
        "bench",
        tmp_path,
        [made("comparison", arm=label, ratio=ratio) for label, ratio in zip(labels, (0.9, 0.6), strict=True)],
        arms=[{"arm": label, "norm": "prmsnorm", "norm_params": params} for label, params in labels.items()],
    )
    records = load_records(tmp_path)
    (cell,) = build_cells(records.runs, None)[0]
    times = step_times(records.benches)
    arms = {arm.params["p"]: arm for arm in cell.arms if arm.norm == "prmsnorm"}
    found = {p: step_time_of(cell, arm, times) for p, arm in arms.items()}
    ratios = {p: time.comparison.ratio for p, time in found.items() if time is not None}
    assert ratios == {0.25: 0.6, 0.0625: 0.9}
    # A timing of other parameters says nothing of an arm.
    of_others = [time for time in times if time.comparison.params]
    assert step_time_of(cell, arms[0.0625], of_others) is None


def _timed(tmp_path: Path, norm: str) -> StepTime | None:
    records = load_records(tmp_path)
    (cell,) = build_cells(records.runs, None)[0]
    (arm,) = [arm for arm in cell.arms if arm.norm == norm]
    return step_time_of(cell, arm, step_times(records.benches))


@pytest.mark.parametrize(
    ("norm", "trained", "timed", "quoted"),
    [
        ("prmsnorm", {"p": 0.25}, {}, False),
        ("prmsnorm", {"p": 0.25}, {"p": 0.25}, True),
        ("prmsnorm", {}, {"p": 0.0625}, True),
        ("rmsnorm", {"eps": 1e-3}, {}, False),
        ("gone:Norm", {"scale": 2.0}, {}, False),
        ("gone:Norm", {"scale": 2.0}, {"scale": 2}, True),
        ("gone:Norm", {}, {}, True),
    ],
)
def test_a_timing_is_quoted_for_the_same_norm_only(
    tmp_path: Path, made: Made, norm: str, trained: dict[str, Any], timed: dict[str, Any], quoted: bool
) -> None:
    made("run", tmp_path, "layernorm")
    # A run records all parameters of its norm, whatever it was given.
    made(
        "run", tmp_path, norm, config={"norm": {"name": norm} | trained}, norm_params={"bias": True} | trained
    )
    arms = [{"arm": f"{norm}/composite", "norm": norm, "norm_params": timed}]
    made("bench", tmp_path, [made("comparison", norm)], arms=arms)
    assert (_timed(tmp_path, norm) is not None) is quoted


@pytest.mark.parametrize(("eps", "quoted"), [(None, True), (1e-5, True), (1e-2, False)])
def test_the_baseline_was_timed_as_it_was_trained(
    tmp_path: Path, made: Made, eps: float | None, quoted: bool
) -> None:
    for norm in ("layernorm", "rmsnorm"):
        made("run", tmp_path, norm, config={"norm": {"name": norm}})
    given = {} if eps is None else {"eps": eps}
    arms = [
        {"arm": "layernorm/composite", "norm": "layernorm", "norm_params": given},
        {"arm": "rmsnorm/composite", "norm": "rmsnorm", "norm_params": {}},
    ]
    made("bench", tmp_path, [made("comparison")], arms=arms)
    assert (_timed(tmp_path, "rmsnorm") is not None) is quoted


def test_timings_of_two_settings_of_a_norm_are_two(tmp_path: Path, made: Made) -> None:
    for number, params in enumerate(({}, {"p": 0.0625}, {"p": 0.5})):
        arms = [{"arm": "prmsnorm/composite", "norm": "prmsnorm", "norm_params": params}]
        made("bench", tmp_path, [made("comparison", "prmsnorm")], f"b{number}", arms=arms)
    shown = newest(step_times(load_records(tmp_path).benches))
    assert sorted(time.comparison.params.get("p", 0.0625) for time in shown) == [0.0625, 0.5]


def test_another_studys_timings_are_not_this_ones(tmp_path: Path, made: Made) -> None:
    """A page of a study that nothing was timed for shows none; a bench of no study may be of its steps."""
    made("bench", tmp_path, [made("comparison", ratio=0.7)], "other", study="large")
    study = made("study")
    assert _saved(build_report(tmp_path, study=study).scorecard) is None
    made("bench", tmp_path, [made("comparison", ratio=0.8)], "free", study=None)
    assert _saved(build_report(tmp_path, study=study).scorecard) is None  # of what size it is, nobody knows
    made("arm", tmp_path, "layernorm", [2.0])
    made("arm", tmp_path, "rmsnorm", [2.0])
    assert _saved(build_report(tmp_path, study=study).scorecard) is not None


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("pRMSNorm (p=0.25), composite", ["pRMSNorm", "(p=0.25),", "composite"]),
        ("my_norms:MaxNorm", ["my_norms:", "MaxNorm"]),
        ("a.module.of.mine", ["a.module.", "of.mine"]),
    ],
)
def test_names_break_between_words_and_never_in_numbers(name: str, lines: list[str]) -> None:
    assert formatting.folded(name, 10).split("\n") == lines


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"data": {"name": "wmt14"}}},
        {"config": {"data": {"vocab_size": 32000}}},
        {"config": {"trainer": {"accumulate": 4}}},
        {"machine": {"hostname": "gpubox", "cpu": "Example CPU 9000"}},
    ],
)
def test_a_step_of_other_data_or_of_another_machine_is_not_this_one(
    tmp_path: Path, made: Made, other: dict[str, Any]
) -> None:
    data = {"name": "pydoc", "vocab_size": 512, "max_len": 64}
    config = made("config", "layernorm", "gru", "lm", 1, data=data)
    config["trainer"] = {"accumulate": 1, "max_steps": 300}
    for norm in ("layernorm", "rmsnorm"):
        own = config | {"norm": {"name": norm}}
        made("run", tmp_path, norm, config=own)
    made("bench", tmp_path, [made("comparison", ratio=0.9)], "own", config=config, created="2026-01-01")
    strange = config | {"data": data} | other.get("config", {})
    strange["data"] = data | strange["data"]
    extra = {"machine": other["machine"]} if "machine" in other else {}
    made(
        "bench",
        tmp_path,
        [made("comparison", ratio=0.5)],
        "new",
        config=strange,
        created="2026-02-02",
        **extra,
    )
    built = build_report(tmp_path)
    assert _saved(built.scorecard) == "10.0 % [8.0, 12.0]"
    assert len(newest(step_times(load_records(tmp_path).benches))) == 2
