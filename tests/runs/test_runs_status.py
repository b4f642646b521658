"""`status`, from files that hold anything; jobs that fail before their run begins; texts in tables."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from rmsrepro.config.overrides import split_override
from rmsrepro.config.paths import search_path
from rmsrepro.config.schema import TrainConfig
from rmsrepro.norms import norm_info
from rmsrepro.report.load import load_records
from rmsrepro.report.records import State
from rmsrepro.runs.estimate import Estimate, estimate_seconds
from rmsrepro.runs.identity import failed_id
from rmsrepro.runs.owners import owner_record
from rmsrepro.runs.planning import plan_sweep
from rmsrepro.runs.status import Row, Status, read_status
from rmsrepro.runs.sweep import SweepOptions, run_sweep
from rmsrepro.verbs import bench_text, listing
from rmsrepro.verbs.common import composer
from rmsrepro.verbs.watching import _status_table

Make = Callable[..., TrainConfig]
OWNER_FIELDS = ("pid", "host", "start", "updated", "step", "max_steps")


def write(out_dir: Path, name: str, **content: Any) -> Path:
    folder = out_dir / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(content))
    return folder


def test_every_state_is_counted_and_shown(tmp_path: Path) -> None:
    write(tmp_path, "a", status="completed", clocks={"total_s": 10.0})
    write(tmp_path, "b", status="failed", steps=3, error="bad\nworse")
    write(tmp_path, "c", status="diverged", steps=4, error="loss")
    write(tmp_path, "d", status="interrupted", steps=5)
    folder = write(tmp_path, "e", status="interrupted", steps=5)
    (folder / "lock.json").write_text(json.dumps(owner_record()))
    (folder / "running.json").write_text(json.dumps({"step": 6, "max_steps": 9, "updated": time.time()}))
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "s.json").write_text(
        json.dumps({"owner": owner_record(), "jobs": [{"run_id": "a"}, {"run_id": "z"}]})
    )
    now = read_status(tmp_path)
    assert now.rows == [
        Row("failed", "b", "3", "bad"),
        Row("diverged", "c", "4", "loss"),
        Row("interrupted", "d", "5", "the same command goes on"),
        Row("running", "e", "6/9"),
        Row("waiting", "z"),
    ]
    assert now.headline == (
        "1 completed, 1 running, 1 failed, 1 diverged, 1 interrupted, 2 left, about 25 s to go"
    )


def test_damaged_fields_cost_nothing_but_themselves(tmp_path: Path) -> None:
    damaged: list[Any] = [None, [], "x", {"total_s": None}, {"total_s": "x"}, {"total_s": "nan"}]
    for number, clocks in enumerate(damaged):
        write(tmp_path, f"a{number}", status="completed", clocks=clocks)
    write(tmp_path, "b", status="completed", clocks={"total_s": 4.0})
    write(tmp_path, "c", status="failed", steps=None, error=["\n"])
    write(tmp_path, "d", status=None)
    (write(tmp_path, "e") / "result.json").write_text('{"status": "comp')
    folder = write(tmp_path, "f", status="interrupted", steps=1)
    (folder / "lock.json").write_text(json.dumps(owner_record()))
    (folder / "running.json").write_text(json.dumps({"step": None, "max_steps": None, "updated": None}))
    (tmp_path / "sweeps").mkdir()
    for name, content in enumerate(
        [{"jobs": None}, {"owner": owner_record(), "jobs": [None, {}, {"run_id": "w"}]}, []]
    ):
        (tmp_path / "sweeps" / f"{name}.json").write_text(json.dumps(content))
    damaged_sweep = f"a sweep's file, damaged; rmsrepro status forget={{}} out_dir={tmp_path} removes it"
    now = read_status(tmp_path)
    assert (now.completed, now.running, now.failed, now.unreadable) == (7, 1, 1, 1)
    assert (now.interrupted, now.left) == (1, 2)
    assert now.seconds_left == 4.0 * 2.5
    assert now.rows == [
        Row("failed", "c", "", "['\\n']"),
        Row("unreadable", "d", "", "unknown status 'None'"),
        Row("interrupted", "e", "", "result.json is damaged; the same command goes on"),
        Row("running", "f", "/?"),
        Row("waiting", "w"),
        Row("unreadable", "sweeps/0.json", "", damaged_sweep.format("0")),
        Row("unreadable", "sweeps/2.json", "", damaged_sweep.format("2")),
    ]
    assert "1 unreadable" in now.headline


def test_a_sweep_wants_no_run_whose_id_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    jobs = [{"run_id": one} for one in ("a", "../b", "c" * 5000, "d\0", "\ud800")]
    (tmp_path / "sweeps" / "s.json").write_text(json.dumps({"owner": owner_record(), "jobs": jobs}))
    now = read_status(tmp_path)
    assert now.rows == [Row("waiting", "a")]
    assert now.left == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*OWNER_FIELDS, "status", "clocks", "steps", "error", "jobs"]),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([None]),
            st.just({"total_s": None}), st.sampled_from(["completed", "failed", socket.gethostname()]),
        ),
    )
)  # fmt: skip
def test_any_value_of_any_field_is_survived(tmp_path: Path, content: dict[str, Any]) -> None:
    folder = write(tmp_path, "r")
    (tmp_path / "sweeps").mkdir(exist_ok=True)
    for file in ("result.json", "running.json", "lock.json", "../../sweeps/s.json"):
        (folder / file).write_text(json.dumps(content))
    now = read_status(tmp_path)
    assert now.completed + now.running + now.failed + now.unreadable + now.interrupted == 1


def test_an_estimate_passes_over_damaged_records(make_config: Make, tmp_path: Path) -> None:
    from rmsrepro.runs.environment import machine

    config = make_config("gru", "lm", f"out_dir={tmp_path}")
    kind = {"status": "completed", "steps": 3, "machine": machine()}
    write(tmp_path, "lm-pydoc-gru-a", **kind | {"clocks": None})
    write(tmp_path, "lm-pydoc-gru-b", **kind | {"clocks": {"total_s": 9.0}, "machine": None})
    write(tmp_path, "lm-pydoc-gru-c", **kind | {"clocks": {"total_s": 9.0}, "steps": "x"})
    assert estimate_seconds(config) is None
    write(tmp_path, "lm-pydoc-gru-d", **kind | {"clocks": {"total_s": 9.0}})
    assert estimate_seconds(config) == Estimate(9.0 / 3 * config.trainer.max_steps, contended=False)


def test_status_and_report_agree_on_another_machines_run(tmp_path: Path) -> None:
    folder = write(tmp_path, "r", status="interrupted", schema_version=1)
    long_ago = time.time() - 3600
    owner = {"pid": 1, "host": "elsewhere", "start": "1", "updated": long_ago}
    lock = folder / "lock.json"
    lock.write_text(json.dumps(owner))

    def states() -> tuple[int, State]:
        return read_status(tmp_path).running, load_records(tmp_path).runs[0].state

    assert states() == (1, State.running)
    os.utime(lock, (long_ago, long_ago))
    assert states() == (0, State.interrupted)


def rendered(table: Any) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


STRANGE = "expected [B, T], got [/b] and [red]x"


def test_texts_in_tables_are_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = rendered(_status_table(Status(rows=[Row("failed", "run[1]", "[2]", STRANGE)])))
    assert STRANGE in shown
    assert "run[1]" in shown
    comparison = {
        "arm": "plugin:A[/b]", "baseline": "layernorm/composite", "ratio": 0.93, "time_reduction_pct": 7.0,
        "time_reduction_ci": [5.0, 9.0], "trusted": True,
    }  # fmt: skip
    arm = {"arm": "plugin:A[/b]", "status": "measured", "median_s": 0.5}
    shown = rendered(bench_text.cell_table({"comparisons": [comparison], "arms": [arm]}, ""))
    assert "plugin:A[/b]" in shown
    assert "7.0 % [5.0, 9.0]" in shown
    monkeypatch.setenv("COLUMNS", "200")
    info = norm_info
    monkeypatch.setattr("rmsrepro.norms.norm_info", lambda name: replace(info(name), summary=STRANGE))
    assert listing.norms([]) == 0
    assert STRANGE in capsys.readouterr().out


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_a_job_that_fails_before_its_run_leaves_a_record(tmp_path: Path) -> None:
    texts = [
        "model=gru", "task=lm", "data=pydoc", "data.max_len=16", "data.batch_tokens=64", "model.d_model=16",
        "trainer.max_steps=2", "tracker=none", "trainer.accelerator=gpu", f"out_dir={tmp_path}",
    ]  # fmt: skip
    overrides = [split_override(text) for text in texts]
    earlier = ""
    for _ in range(2):  # repeated, it stays one record
        with composer(overrides) as opened:
            plan = plan_sweep(opened, [overrides])
            (job,) = run_sweep(plan, SweepOptions(), base=search_path(), console=Console(quiet=True))
        assert job.status == "failed"
        assert job.error is not None
        assert "torch sees no GPU here" in job.error
        (folder,) = (tmp_path / "runs").iterdir()
        assert folder.name == job.run_id
        record = json.loads((folder / "result.json").read_text())
        assert (record["status"], record["steps"], record["run_id"]) == ("failed", 0, job.run_id)
        assert record["error"] == job.error
        now = read_status(tmp_path)
        assert (now.failed, now.left) == (1, 0)
        assert not earlier or earlier == job.run_id
        earlier = job.run_id
    # The record of a run that got further is not written over.
    write(tmp_path, earlier, status="interrupted", steps=1)
    with composer(overrides) as opened:
        plan = plan_sweep(opened, [overrides])
        run_sweep(plan, SweepOptions(), base=search_path(), console=Console(quiet=True))
    assert json.loads((tmp_path / "runs" / earlier / "result.json").read_text())["steps"] == 1
    (other,) = (item.name for item in (tmp_path / "runs").iterdir() if item.name != earlier)
    assert "-invalid-" in other
    assert other.rsplit("-", 1)[0] == failed_id(plan.jobs[0].config).rsplit("-", 1)[0]
