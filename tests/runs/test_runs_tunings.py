"""The points of a tuning, the rule for the best, and the record."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from rmsrepro.config.schema import TrainConfig
from rmsrepro.config.tuning import Range, TuningConfig
from rmsrepro.runs.files import to_json
from rmsrepro.runs.planning import Job
from rmsrepro.runs.tuning_record import (
    TunedNorm,
    TuningRecord,
    read_tuning,
    read_tunings,
    tuning_id,
    write_tuning,
)
from rmsrepro.runs.tunings import Contestant, draw_points, trial_value

RANGES = {
    "lr": Range(1e-4, 1e-1),
    "warmup_steps": Range(10, 13, whole=True),
    "weight_decay": Range(1e-3, 1e-1),
}


def test_more_points_begin_with_the_same() -> None:
    many = draw_points(TuningConfig(points=200), RANGES)
    for number in (2, 3, 8, 17, 100):
        assert draw_points(TuningConfig(points=number), RANGES) == many[:number]
    assert draw_points(TuningConfig(points=200, seed=1), RANGES)[0] != many[0]


def test_a_fixed_parameter_leaves_the_others_their_values() -> None:
    whole = draw_points(TuningConfig(points=9), RANGES)
    some = draw_points(TuningConfig(points=9), {key: RANGES[key] for key in ("lr", "weight_decay")})
    assert some == [{key: point[key] for key in ("lr", "weight_decay")} for point in whole]


def test_scales_are_log_uniform_and_steps_are_whole() -> None:
    points = draw_points(TuningConfig(points=600), RANGES)
    for key in ("lr", "weight_decay"):
        one = RANGES[key]
        places = [math.log(point[key] / one.low) / math.log(one.high / one.low) for point in points]
        # A sequence that fills the range evenly is far nearer to uniform than random draws would be.
        assert stats.kstest(places, "uniform").statistic < 0.01, key
        assert all(one.low <= point[key] <= one.high for point in points)
    steps = [point["warmup_steps"] for point in points]
    assert all(isinstance(step, int) for step in steps)
    assert {step: abs(steps.count(step) - 150) < 5 for step in steps} == dict.fromkeys(range(10, 14), True)


def contestant(*statuses: str) -> Contestant:
    config = TrainConfig(norm={"name": "rmsnorm"})
    return Contestant([], trials=[Job([], config, run_id=f"r{n}", status=s) for n, s in enumerate(statuses)])


def test_the_best_is_the_smallest_loss_and_of_equals_the_earlier() -> None:
    one = contestant("completed", "diverged", "failed", "completed", "completed")
    one.choose([2.0, math.inf, math.inf, 1.5, 1.5], "val_loss")
    assert (one.best, one.why_none) == (3, "")
    one.choose([2.0, -math.inf, -math.inf, 1.5, 2.0], "val_bleu")
    assert one.best == 0


def test_there_is_no_best_without_a_number_or_before_all_have_ended() -> None:
    one = contestant("diverged", "failed")
    one.choose([math.inf, math.inf], "val_loss")
    assert (one.best, one.why_none) == (None, "all 2 trials diverged or failed")
    for status in ("busy", "planned", "interrupted"):
        one = contestant("completed", status)
        one.choose([1.0, math.inf], "val_loss")
        assert (one.best, one.why_none) == (None, ""), status


@pytest.mark.parametrize(
    ("record", "value"),
    [
        ({"status": "completed", "steps": 8, "metrics": {"val_loss": 2.5}}, 2.5),
        ({"status": "completed", "steps": 8, "metrics": {"val_loss": "nan"}}, math.inf),
        ({"status": "completed", "steps": 8, "metrics": {}}, math.inf),
        ({"status": "completed", "steps": 8, "metrics": None}, math.inf),
        ({"status": "completed", "steps": 8, "metrics": {"val_loss": 10**400}}, math.inf),
        ({"status": "completed", "steps": 7, "metrics": {"val_loss": 2.5}}, math.inf),
        ({"status": "diverged", "steps": 8, "metrics": {"val_loss": 2.5}}, math.inf),
        ({"status": "failed", "steps": 8, "metrics": {"val_loss": 2.5}}, math.inf),
        (None, math.inf),
    ],
)
def test_the_value_of_a_trial_is_that_of_its_last_step(
    tmp_path: Path, record: dict[str, object] | None, value: float
) -> None:
    if record is not None:
        (tmp_path / "result.json").write_text(to_json(record))
    assert trial_value(tmp_path, "val_loss", 8) == value


RECORD = TuningRecord(
    "lm-pydoc-gru-0", "gru", "lm", "pydoc", metric="val_loss", margin=0.05, seed=0, final_seeds=(1, 2),
    ranges={"lr": (1e-3, 1e-2)}, points=({"lr": 2e-3}, {"lr": 5e-3}),
    norms=(TunedNorm("rmsnorm", ("norm=rmsnorm",), ("a", "b"), best=1, finals=("c", "d")),),
    command="rmsrepro sweep",
)  # fmt: skip


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_tuning(write_tuning(tmp_path, RECORD)) == RECORD
    assert [(run.run_id, run.seed, run.point["lr"]) for run in RECORD.trial_runs()] == [
        ("a", 0, 2e-3), ("b", 0, 5e-3),
    ]  # fmt: skip
    assert [(run.run_id, run.seed, run.point["lr"]) for run in RECORD.final_runs()] == [
        ("c", 1, 5e-3), ("d", 2, 5e-3),
    ]  # fmt: skip


def test_runs_of_an_earlier_choice_are_remembered(tmp_path: Path) -> None:
    write_tuning(tmp_path, RECORD)
    other = replace(RECORD.norms[0], best=0, finals=("e", "f"))
    found = read_tuning(write_tuning(tmp_path, replace(RECORD, norms=(other,))))
    assert [(run.run_id, run.seed, run.point["lr"]) for run in found.superseded] == [
        ("c", 1, 5e-3), ("d", 2, 5e-3),
    ]  # fmt: skip
    back = read_tuning(write_tuning(tmp_path, RECORD))
    assert [run.run_id for run in back.superseded] == ["e", "f"]


def test_a_damaged_record_is_replaced(tmp_path: Path) -> None:
    path = write_tuning(tmp_path, RECORD)
    path.write_text("{")
    assert read_tuning(write_tuning(tmp_path, RECORD)) == RECORD


def test_the_name_does_not_hang_on_the_order_of_the_norms() -> None:
    assert tuning_id("gru", "lm", "pydoc", ["a", "b"]) == tuning_id("gru", "lm", "pydoc", ["b", "a"])
    assert tuning_id("gru", "lm", "pydoc", ["a"]) != tuning_id("gru", "lm", "pydoc", ["a", "b"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version 2"),
        ({"points": []}, "points or ranges are missing"),
        ({"points": [{"lr": "inf"}, {"lr": 1}]}, "no finite number"),
        ({"points": 5}, "points is no list"),
        ({"final_seeds": [1, -2]}, "no whole number"),
        ({"final_seeds": [1]}, "final runs are not those of the seeds"),
        ({"ranges": {"lr": [1]}}, "no pair"),
        ({"norms": [[]]}, "no mapping"),
        ({"norms": [{"norm": 3}]}, "norm is no text"),
        ({"metric": None}, "metric is no text"),
        ({"superseded": ["x"]}, "no mapping"),
        ({"tuning_id": "../x"}, "tuning_id '../x' is not the file's name"),
        ({"tuning_id": "another"}, "tuning_id 'another' is not the file's name"),
        ({"margin": 10**400}, "margin: 10{56}[.]{3} is no finite number"),
        ({"margin": 0}, "margin: 0 is not above zero"),
        ({"points": [{"lr": 10**400}, {"lr": 1}]}, "no finite number"),
        ({"ranges": {"lr": [1, 10**400]}}, "no finite number"),
        ({"ranges": {"lr": [1e-3, 1e-2], "weight_decay": [1e-3, 1e-2]}}, "of lr, weight_decay, and no other"),
        ({"points": [{"lr": 2e-3}, {"lr": 5e-3, "weight_decay": 0.1}]}, "a value of lr, and no other"),
        ({"ranges": {"lr": [1e-2, 1e-3]}}, "lr cannot be from 0.01 to 0.001"),
        ({"ranges": {"lr": [0, 1e-3]}}, "lr cannot be from 0 to 0.001"),
        ({"ranges": {"eps": [1e-3, 1e-2]}}, "'eps' is none of lr, warmup_steps, weight_decay"),
        ({"superseded": [{"run_id": "../a", "norm": "x", "seed": 0, "point": {"lr": 1}}]}, "no run's id"),
    ],
)
def test_a_record_is_not_trusted(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_tuning(tmp_path, RECORD)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        read_tuning(path)


@pytest.mark.parametrize("change", [{"best": 2}, {"trials": ["a"]}, {"finals": ["c"]}, {"best": True}])
def test_a_norm_of_a_record_is_not_trusted(tmp_path: Path, change: dict[str, object]) -> None:
    path = write_tuning(tmp_path, RECORD)
    content = json.loads(path.read_text())
    content["norms"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"norms|best"):
        read_tuning(path)


@pytest.mark.parametrize("run_id", ["", "..", "../a", "a/b", "a\\b", "a\0", "a" * 5000, "\ud800"])
def test_a_run_of_a_record_is_one_folder(tmp_path: Path, run_id: str) -> None:
    path = write_tuning(tmp_path, RECORD)
    whole = json.loads(path.read_text())
    for key in ("trials", "finals"):
        content = json.loads(path.read_text())
        content["norms"][0][key][1] = run_id
        (tmp_path / path.name).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"{key}: .* is no run's id") as refused:
            read_tuning(tmp_path / path.name)
        assert len(str(refused.value)) < 100
    (tmp_path / path.name).write_text(json.dumps(whole))
    assert read_tuning(tmp_path / path.name) == RECORD


def test_damaged_records_are_named(tmp_path: Path) -> None:
    path = write_tuning(tmp_path, RECORD)
    copied, empty = path.with_name("copied.json"), path.with_name("empty.json")
    copied.write_bytes(path.read_bytes())
    empty.write_text("{}")
    found, damaged = read_tunings(tmp_path)
    assert found == [RECORD]
    assert damaged == {
        copied: "tuning_id 'lm-pydoc-gru-0' is not the file's name",
        empty: "schema_version None; 1 is read here",
    }


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_record_is_a_value_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"."):
        read_tuning(tmp_path / "x.json")
