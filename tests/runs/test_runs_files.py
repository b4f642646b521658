"""Clocks, records, locks and identities."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.clocks import NAMES, Clocks
from rmsrepro.runs.disk import unwritable
from rmsrepro.runs.files import is_file_name, to_json, write_atomic
from rmsrepro.runs.identity import identify, slug
from rmsrepro.runs.locks import Locked, lock
from rmsrepro.runs.owners import owner_record
from rmsrepro.runs.records import MetricsLog, count_rows, read_metrics, write_csv

Make = Callable[..., TrainConfig]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 1e6)), max_size=30))
def test_clocks_sum_to_the_total(steps: list[tuple[str, float]]) -> None:
    moment = [100.0]
    clocks = Clocks(now=lambda: moment[0])
    expected = dict.fromkeys(NAMES, 0.0)
    current = "other"
    for name, seconds in steps:
        moment[0] += seconds
        expected[current] += seconds
        clocks.switch(name)
        current = name
    found = clocks.record()
    assert found["total_s"] == pytest.approx(moment[0] - 100.0, rel=1e-9, abs=1e-6)
    for name in NAMES:
        assert found[f"{name}_s"] == pytest.approx(expected[name], rel=1e-9, abs=1e-6)


def test_clocks_go_on_after_a_checkpoint() -> None:
    moment = [0.0]
    first = Clocks(now=lambda: moment[0])
    first.switch("train")
    moment[0] = 5.0
    second = Clocks(now=lambda: moment[0])
    second.load_state_dict(first.state_dict())
    with second.on("eval"):
        moment[0] = 7.0
    moment[0] = 8.0
    assert second.record() == {
        "train_s": 5.0, "eval_s": 2.0, "checkpoint_s": 0.0, "logging_s": 0.0, "other_s": 1.0, "total_s": 8.0,
    }  # fmt: skip


def test_rows_are_in_the_file_before_the_log_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.add(step, {"train_loss": float(step)})
        # All but the row that is held back: what a run that is killed here leaves behind.
        assert [row["step"] for row in read_metrics(path)] == list(range(1, step))
    log.flush()
    assert log.written == [3, 3]
    log.add(4, {"train_loss": 4.0})
    log.flush()
    log.add(4, {"val_loss": 4.0})
    log.flush()
    assert log.written == count_rows(read_metrics(path)) == [4, 4]
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    assert path.read_text().count("\n") == 5


def test_rows_of_one_step_are_one_row(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    for step in range(1, 6):
        log.add(step, {"train_loss": float(step)})
        if step == 5:
            log.add(step, {"val_loss": math.inf})
    log.flush()
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1] == {"step": 5, "train_loss": 5.0, "val_loss": math.inf}
    with pytest.raises(ValueError, match="no slash"):
        log.add(6, {"val/loss": 1.0})
    again = MetricsLog(tmp_path / "m.jsonl", keep_to_step=3, pending={"step": 3, "train_loss": 3.0})
    assert again.pending == {"step": 3, "train_loss": 3.0}
    assert again.written == [2, 2]
    again.add(3, {"val_loss": 0.5})
    again.add(4, {"train_loss": 9.0})
    assert again.written == [3, 3]
    again.flush()
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [(row["step"], row["train_loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 9.0)]
    assert rows[2]["val_loss"] == 0.5
    write_csv(rows, tmp_path / "m.csv")
    lines = (tmp_path / "m.csv").read_text().splitlines()
    assert lines[0] == "step,train_loss,val_loss"
    assert lines[1] == "1,1.0,"
    assert len(lines) == 5


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "train_loss": 2.0}\n{"step": 2, "trai')
    assert read_metrics(path) == [{"step": 1, "train_loss": 2.0}]


def test_json_is_strict_about_floats() -> None:
    text = to_json({"a": math.nan, "b": [math.inf, -math.inf], "c": 1.5})
    assert json.loads(text) == {"a": "nan", "b": ["inf", "-inf"], "c": 1.5}


def test_what_is_no_text_is_written_as_its_escape(tmp_path: Path) -> None:
    odd = {"a": "\ud800x", "\udcff": ["ü \\ud800"]}
    write_atomic(tmp_path / "a.json", to_json(odd))
    assert (tmp_path / "a.json").read_bytes().decode().splitlines()[1] == r'  "a": "\ud800x",'
    assert json.loads((tmp_path / "a.json").read_text()) == odd
    write_atomic(tmp_path / "a.txt", "no \udcff, ü")
    assert (tmp_path / "a.txt").read_bytes() == "no \\udcff, ü".encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a-b.c", True), ("..a", True), ("ü" * 127, True), ("ü" * 128, False), ("", False), (".", False),
     ("..", False), ("../a", False), ("a/b", False), ("a\\b", False), ("a\0", False), ("\ud800", False)],
)  # fmt: skip
def test_what_is_the_name_of_a_file(text: str, expected: bool) -> None:
    assert is_file_name(text) is expected


def test_a_folder_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.mkdir()
    for _ in range(2):
        with pytest.raises(IsADirectoryError) as refused, lock(path):
            pass
        assert refused.value.filename == str(path)
    assert list(tmp_path.iterdir()) == [path]
    words = str(unwritable(tmp_path, refused.value))
    assert words == f"out_dir={tmp_path}: {path} is a folder, where a file has to be; move it away"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["result.json"]
    write_atomic(path, "newer", durable=False)  # waits for no disk
    assert path.read_text() == "newer"


def test_a_lock_is_exclusive_and_survives_no_owner(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    with lock(path):
        with pytest.raises(Locked) as busy, lock(path):
            pass
        assert busy.value.owner["pid"] == os.getpid()
    assert not path.exists()
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    path.write_text(json.dumps({**owner_record(), "pid": int(dead.stdout), "start": None}))
    with lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    # The same number, but another process: the start mark tells.
    path.write_text(json.dumps({**owner_record(), "start": "1"}))
    with lock(path):
        assert json.loads(path.read_text())["start"] == owner_record()["start"]


def test_identity_is_what_changes_the_result(make_config: Make) -> None:
    base = make_config("gru", "lm", "norm=rmsnorm")
    identity = identify(base, data_hash="d")

    def same(*overrides: str) -> bool:
        return (
            identify(make_config("gru", "lm", "norm=rmsnorm", *overrides), data_hash="d").run_id
            == identity.run_id
        )

    assert same("out_dir=elsewhere")
    assert same("tracker=wandb")
    assert same("norm.eps=1e-5")
    assert same("model.size=small", "model.num_layers=1", "model.d_embed=64", "model.dropout=0.0")
    assert same("trainer.log_every=3", "trainer.val_every=2", "trainer.progress=false")
    assert same("study_name=quick")
    other = "composite" if identity.content["backend"] == "torch" else "torch"
    assert same(f"backend={identity.content['backend']}")
    for changed in (
        f"backend={other}", "norm.eps=1e-6", "norm.gain=false", "seed=2", "trainer.max_steps=7",
        "optim.lr=0.1", "trainer.divergence_factor=2.0",
        "precision=bf16-mixed", "sites=[gates_x]", "model.d_model=32", "trainer.accumulate=2",
    ):  # fmt: skip
        assert not same(changed), changed
    assert identify(base, data_hash="e").run_id != identity.run_id
    assert identity.run_id.startswith("lm-pydoc-gru-rmsnorm-s1-")
    assert len(identity.run_id) < 255


def test_settings_that_do_not_apply_do_not_split_runs(make_config: Make) -> None:
    def run_id(*overrides: str) -> str:
        return identify(make_config(*overrides), data_hash="d").run_id

    assert run_id("transformer", "lm", "norm=none", "placement=post") == run_id(
        "transformer", "lm", "norm=none"
    )
    assert run_id("transformer", "lm", "sites=[gates_x]") == run_id("transformer", "lm")
    assert run_id("transformer", "lm", "placement=post") != run_id("transformer", "lm")
    assert run_id("gru", "lm", "norm=none", "sites=[gates_x]") == run_id("gru", "lm", "norm=none")


@given(st.text(max_size=400))
def test_slugs_need_no_quotes(text: str) -> None:
    found = slug(text)
    assert found
    assert len(found) <= 60
    assert all(char.isascii() and (char.isalnum() or char == "_") for char in found)


def test_config_survives_its_record(make_config: Make) -> None:
    from rmsrepro.config.plain import from_plain, plain

    for model, task in [("gru", "translation"), ("transformer", "lm")]:
        config = make_config(model, task, "norm=prmsnorm", "norm.p=0.5")
        assert from_plain(json.loads(to_json(plain(config)))) == config
        newer = plain(config) | {"unknown_key": 1}
        assert dataclasses.asdict(from_plain(newer)) == dataclasses.asdict(config)
