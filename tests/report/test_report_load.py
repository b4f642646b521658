"""What is read from damaged, half-written and living records."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmsrepro.report import build_report
from rmsrepro.report.load import load_curve, load_records
from rmsrepro.report.records import Records, RunRecord, State, machine_name

Made = Callable[..., Any]


def _only(records: Records) -> RunRecord:
    (run,) = records.runs
    return run


def test_a_whole_run_is_read_as_it_is(tmp_path: Path, made: Made) -> None:
    made("run", tmp_path, "prmsnorm", seed=4, val_loss=1.75, metrics={"test_bleu": 31.5}, flags=["k = 4"])
    records = load_records(tmp_path)
    run = _only(records)
    assert records.problems == ()
    assert (run.state, run.norm, run.model, run.task, run.data) == (
        State.completed,
        "prmsnorm",
        "gru",
        "lm",
        "pydoc",
    )
    assert (run.seed, run.steps, run.max_steps, run.n_parameters) == (4, 300, 300, 123456)
    assert run.metrics == {"val_loss": 1.75, "test_bleu": 31.5}
    assert run.norm_params == {"eps": 1e-5, "p": 0.25}
    assert run.flags == ("k = 4",)
    assert run.curve["step"].tolist() == list(range(10, 301, 10))
    assert run.curve["val_loss"][-1] == 1.75
    assert math.isnan(run.curve["val_loss"][0])


def test_nothing_at_all_is_no_record(tmp_path: Path) -> None:
    assert load_records(tmp_path / "absent") == Records((), (), ())


@pytest.mark.parametrize(
    "content",
    [b"", b'{"status": "comp', b"[1, 2]", b"\xff\xfe\x00", b'{"status": "completed"}' * 2, b"[" * 100_000],
)
def test_a_damaged_result_is_listed_and_the_rest_stays(tmp_path: Path, made: Made, content: bytes) -> None:
    made("run", tmp_path, seed=1)
    folder = made("run", tmp_path, seed=2)
    (folder / "result.json").write_bytes(content)
    records = load_records(tmp_path)
    assert [run.state for run in records.runs] == [State.completed, State.unreadable]
    assert records.runs[1].norm == "layernorm"
    assert [problem.path for problem in records.problems] == [folder / "result.json"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"status": "great"}, "unknown status 'great'"), ({"schema_version": 2}, "schema_version 2")],
)
def test_a_result_of_another_kind_is_unreadable(
    tmp_path: Path, made: Made, change: dict[str, Any], reason: str
) -> None:
    folder = made("run", tmp_path)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | change))
    records = load_records(tmp_path)
    assert _only(records).state is State.unreadable
    assert reason in records.problems[0].reason


def test_values_of_the_wrong_type_do_not_matter(tmp_path: Path, made: Made) -> None:
    folder = made("run", tmp_path)
    result = json.loads((folder / "result.json").read_text())
    strange = {key: [None, {"a": 1}] for key in result if key not in ("status", "schema_version")}
    (folder / "result.json").write_text(json.dumps(result | strange))
    run = _only(load_records(tmp_path))
    assert run.state is State.completed
    assert run.metrics == {}
    assert run.error == ""
    build_report(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(content=st.one_of(st.binary(max_size=80), st.text(max_size=80).map(lambda text: text.encode())))
def test_any_bytes_in_any_file_are_survived(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True, exist_ok=True)
    bench = tmp_path / "bench" / "b"
    bench.mkdir(parents=True, exist_ok=True)
    names = "result.json running.json lock.json env.json data.json config.yaml metrics.jsonl"
    for name in names.split():
        (folder / name).write_bytes(content)
    (bench / "result.json").write_bytes(content)
    assert len(load_records(tmp_path).runs) == 1


def test_a_line_being_written_is_left_out_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "train_loss": 3.0}\nnot json\n{"step": 2, "train_loss": 2.5}\n{"step": 3, "tra'
    )
    curve, problems = load_curve(path)
    assert curve["step"].tolist() == [1, 2]
    assert problems == ["1 unreadable line(s) skipped: 2"]


def test_of_two_rows_of_a_step_the_later_counts_and_steps_are_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 2, "train_loss": 2.0}, {"step": 1, "train_loss": 3.0}, {"step": 2, "train_loss": 1.5}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve, _ = load_curve(path)
    assert curve["step"].tolist() == [1, 2]
    assert curve["train_loss"].tolist() == [3.0, 1.5]


def test_spelled_out_infinities_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "train_loss": "inf"}\n{"step": 2, "train_loss": "nan"}\n{"step": 3, "note": "hm"}\n'
    )
    curve, problems = load_curve(path)
    assert problems == []
    assert curve["train_loss"][0] == math.inf
    assert math.isnan(curve["train_loss"][1])
    assert "note" not in curve


def test_a_file_that_grew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train_loss": 3.0}\n')
    assert load_curve(path)[0]["step"].tolist() == [1]
    with path.open("a") as file:
        file.write('{"step": 2, "train_loss": 2.0}\n')
    assert load_curve(path)[0]["step"].tolist() == [1, 2]


def test_a_living_process_means_running_even_over_an_old_result(tmp_path: Path, made: Made) -> None:
    made("run", tmp_path, seed=1, status="running")
    again = made("run", tmp_path, seed=2, status="interrupted")
    owner = {"pid": os.getpid(), "host": socket.gethostname()}
    (again / "lock.json").write_text(json.dumps(owner))
    states = [run.state for run in load_records(tmp_path).runs]
    assert states == [State.running, State.running]


def test_a_dead_process_means_interrupted(tmp_path: Path, made: Made) -> None:
    folder = made("run", tmp_path, status="running")
    (folder / "running.json").write_text(json.dumps({"pid": 2**30, "host": socket.gethostname(), "step": 70}))
    run = _only(load_records(tmp_path))
    assert run.state is State.interrupted
    assert run.steps == 70
    assert run.norm == "layernorm"
    assert "process is gone" in run.error


def test_only_the_chosen_runs_are_read(tmp_path: Path, made: Made) -> None:
    made("arm", tmp_path, "layernorm", [1.0, 2.0])
    run = _only(load_records(tmp_path, run_ids={"gru-lm-layernorm-s2"}))
    assert run.seed == 2


def test_a_machine_is_its_host_and_hardware() -> None:
    first = {"host": "a", "cpu": "X", "gpu": None, "cores": 4, "load": 0.3}
    assert machine_name(first) == "a, X"
    assert machine_name(first | {"load": 2.0}) == machine_name(first)
    assert machine_name(first | {"gpu": "H200"}) == "a, X, H200"
    assert machine_name({}) == "unnamed machine"


def test_an_arm_that_could_not_be_timed_is_kept_with_its_reason(tmp_path: Path, made: Made) -> None:
    arms = [
        {"arm": "rmsnorm/torch", "status": "unavailable", "reason": "eps_position=outside", "level": "step"},
        {"arm": "layernorm/torch", "status": "measured"},
    ]
    made("bench", tmp_path, [made("comparison"), {"ratio": 1.0}], arms=arms)
    records = load_records(tmp_path)
    measured, missing = records.benches[0].comparisons
    assert (measured.norm, measured.backend, measured.ratio) == ("rmsnorm", "composite", 0.9)
    assert (missing.norm, missing.backend) == ("rmsnorm", "torch")
    assert math.isnan(missing.ratio)
    assert missing.flags == ("eps_position=outside",)
    assert records.problems[0].reason == "comparison 1 names no arm"


def test_a_reduction_interval_runs_upwards_whatever_the_record_says(tmp_path: Path, made: Made) -> None:
    turned = made("comparison", time_reduction_ci=[12.0, 8.0])
    bare = {key: value for key, value in made("comparison").items() if not key.startswith("time_reduction")}
    made("bench", tmp_path, [turned, bare])
    first, second = load_records(tmp_path).benches[0].comparisons
    assert (first.reduction_low, first.reduction_high) == (8.0, 12.0)
    assert second.reduction == pytest.approx(10.0)
    assert (second.reduction_low, second.reduction_high) == pytest.approx((8.0, 12.0))


def test_a_bench_is_as_old_as_it_says(tmp_path: Path, made: Made) -> None:
    made("bench", tmp_path, [made("comparison")], "said", created="2026-01-02T03:04:05+00:00")
    made("bench", tmp_path, [made("comparison")], "silent", created="yesterday")
    said, silent = sorted(load_records(tmp_path).benches, key=lambda bench: bench.written)
    assert said.written == 1767323045.0  # whenever the file was copied
    assert silent.written == (tmp_path / "bench" / "silent" / "result.json").stat().st_mtime
