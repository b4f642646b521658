"""wandb is a view: no account, no prompt, no network by default, and no run is lost with it (B36)."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.cli.running import LM, Ran, records, stopped_at
from tests.cli.wandb_files import history, items, written

Run = Callable[..., Ran]
SHORT = [*LM, "trainer.max_steps=3", "tracker=wandb"]


def complete(record: dict[str, Any], steps: int) -> None:
    """The records of a run are all there, whatever became of the tracker."""
    folder = Path("outputs/runs", record["run_id"])
    assert record["status"] == "completed"
    with (folder / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, steps + 1))
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == steps


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nobody has set anything."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_offline_without_account_home_or_input(program: Run) -> None:
    before = time.monotonic()
    empty = {
        "WANDB_MODE": None, "WANDB_API_KEY": None, "HOME": "", "WANDB_CACHE_DIR": None,
        "WANDB_CONFIG_DIR": None, "WANDB_DATA_DIR": None, "WANDB_SILENT": None, "NETRC": None,
        "HF_HOME": None, "SACREBLEU": None,
    }  # fmt: skip
    ran = program("train", *SHORT, "norm=rmsnorm", "seed=2", "study=trial", env=empty, stdin="")
    assert ran.code == 0, ran.out + ran.err
    assert time.monotonic() - before < 200  # a prompt would wait for ever
    assert "note: wandb" not in ran.out
    assert [item.name for item in Path().iterdir()] == ["outputs"]
    assert "login" not in (ran.out + ran.err).lower()
    [(run_id, record)] = records().items()
    complete(record, 3)
    content = items(written(run_id))
    [run] = [item.run for item in content if item.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.run_group, run.job_type) == (run_id, "trial", "transformer/lm")
    assert list(run.tags) == ["rmsnorm", record["backend_used"]]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["norm.name"] == "rmsnorm"
    assert config["trainer.max_steps"] == 3
    logged = [row for row in history(content) if "train_loss" in row]
    assert [row["step"] for row in logged] == [1, 2, 3]
    assert all(row["train_seconds"] > 0 for row in logged)
    [ended] = [item.exit.exit_code for item in content if item.WhichOneof("record_type") == "exit"]
    assert ended == 0


@pytest.mark.usefixtures("offline")
def test_each_run_of_a_sweep_is_its_own(cli: Run) -> None:
    ran = cli("sweep", *SHORT, "norm=layernorm,rmsnorm")
    assert ran.code == 0, ran.out
    for run_id, record in records().items():
        complete(record, 3)
        assert written(run_id).is_file()
    assert len(list(Path("outputs/wandb").glob("offline-run-*"))) == 2


@pytest.mark.usefixtures("offline")
def test_a_failed_run_ends_failed(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from rmsrepro.runs import callbacks

    def planted(this: callbacks.RunCallback, module: object, step: int, **more: object) -> None:
        if step == 2:
            raise RuntimeError("planted")

    monkeypatch.setattr(callbacks.RunCallback, "_record_training", planted)
    assert cli("train", *SHORT).code == 1
    [(run_id, record)] = records().items()
    assert (record["status"], record["error"]) == ("failed", "RuntimeError: planted")
    content = items(written(run_id))
    [ended] = [item.exit.exit_code for item in content if item.WhichOneof("record_type") == "exit"]
    assert ended == 1


@pytest.mark.parametrize("how", ["environment", "key"])
def test_disabled_writes_nothing(cli: Run, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "key":
        monkeypatch.delenv("WANDB_MODE", raising=False)
    else:
        monkeypatch.setenv("WANDB_MODE", "disabled")
    ran = cli("train", *SHORT, *(["tracker.mode=disabled"] if how == "key" else []))
    assert ran.code == 0
    assert not Path("outputs/wandb").exists()
    assert not Path("wandb").exists()
    [record] = records().values()
    complete(record, 3)


@pytest.mark.usefixtures("offline")
def test_without_wandb_the_records_are_complete(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    ran = cli("train", *SHORT)
    assert ran.code == 0
    assert "note: wandb is not installed: records only (pip install wandb, or tracker=none" in ran.out
    [record] = records().values()
    complete(record, 3)


@pytest.mark.usefixtures("offline")
def test_a_tracker_that_breaks_costs_no_run(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def broken(**settings: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(wandb, "init", broken)
    ran = cli("train", *SHORT)
    assert ran.code == 0
    assert "note: wandb could not start (no space left on device); the records go on without it" in ran.out
    [record] = records().values()
    complete(record, 3)


@pytest.mark.slow
def test_each_run_of_two_workers_is_its_own(program: Run) -> None:
    ran = program(
        "sweep",
        *SHORT,
        "norm=layernorm,rmsnorm",
        "seed=1,2",
        "launcher=joblib",
        "n_jobs=2",
        env={"WANDB_MODE": None},
    )
    assert ran.code == 0, ran.out + ran.err
    assert len(records()) == 4
    for run_id in records():
        content = items(written(run_id))
        [run] = [item.run for item in content if item.WhichOneof("record_type") == "run"]
        assert run.run_id == run_id


def test_these_tests_log_to_no_server() -> None:
    assert os.environ["WANDB_MODE"] == "disabled"


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "names", ["WANDB_MODE", "WANDB_MODE WANDB_BASE_URL WANDB_RUN_ID WANDB_TAGS WANDB_CONSOLE"]
)
def test_a_variable_set_to_nothing_is_as_good_as_none(
    cli: Run, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    for name in names.split():
        monkeypatch.setenv(name, "")
    ran = cli("train", *SHORT)
    assert ran.code == 0
    assert "note: wandb" not in ran.out
    [run_id] = records()
    assert written(run_id).is_file()
    assert all(os.environ[name] == "" for name in names.split())


@pytest.mark.usefixtures("offline")
def test_a_wrong_mode_is_told_in_one_line(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "ofline")
    ran = cli("train", *SHORT)
    assert ran.code == 0
    [note] = [line for line in ran.out.splitlines() if "WANDB_MODE" in line]
    assert note == (
        "note: wandb could not start (WANDB_MODE=ofline: no such mode; did you mean offline, online? "
        "(one of: offline, online, disabled, dryrun, run, shared)); the records go on without it"
    )
    assert "pydantic" not in ran.out
    [record] = records().values()
    complete(record, 3)
    # What is made from the records is always offline.
    exported = cli("export", "wandb")
    assert exported.code == 0, exported.out
    assert written(record["run_id"]).is_file()
    assert os.environ["WANDB_MODE"] == "ofline"


def test_the_modes_are_those_of_wandb() -> None:
    import wandb

    from rmsrepro.runs.trackers import MODES

    assert set(MODES) == set(get_args(wandb.Settings.model_fields["mode"].annotation))


@pytest.mark.usefixtures("offline")
def test_other_complaints_of_wandb_take_one_line(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def broken(**settings: object) -> None:
        raise ValueError("1 validation error\nbase_url\n  is no address")

    monkeypatch.setattr(wandb, "init", broken)
    ran = cli("train", *SHORT)
    assert ran.code == 0
    told = "note: wandb could not start (1 validation error base_url is no address); the records go on"
    assert told in ran.out


class FakeServer:
    """Stands for wandb online: it keeps what is logged, and a run that is there already is resumed."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.resumed = False

    def init(self, **settings: Any) -> FakeServer:
        assert (settings["mode"], settings["resume"]) == ("online", "allow")
        self.resumed = bool(self.rows)
        return self

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.summary |= row

    def define_metric(self, *names: str, **more: str) -> None: ...

    def finish(self, exit_code: int) -> None: ...


def test_a_run_that_goes_on_online_sends_no_row_again(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    server = FakeServer()
    monkeypatch.setattr(wandb, "init", server.init)
    monkeypatch.setenv("WANDB_MODE", "online")
    command = ["train", *SHORT, "trainer.max_steps=8", "trainer.checkpoint_every=2", "trainer.val_every=4"]
    with stopped_at(5):
        assert cli(*command).code == 143
    [run_id] = records()
    checkpoints = Path("outputs/runs", run_id, "checkpoints")
    (checkpoints / "last.ckpt").unlink()  # as if it had been killed: it goes on from step 4, or before
    ran = cli(*command)
    assert ran.code == 0
    assert "resumed at step 4" in ran.out
    assert "note: wandb" not in ran.out
    trained = [row["step"] for row in server.rows if "train_loss" in row]
    assert trained == [1, 2, 3, 4, 5, 5, 6, 7, 8]  # of the last one that was sent it is not known if all was
    assert [row["step"] for row in server.rows if "val_loss" in row] == [4, 8]
    # Another attempt from the beginning is another run, under the same name: that is said.
    again = cli(*command, "rerun=true")
    assert f"note: wandb: the online run {run_id} has rows of an earlier attempt, and those" in again.out
    assert [row["step"] for row in server.rows[-len(trained) :] if "train_loss" in row][-3:] == [6, 7, 8]
