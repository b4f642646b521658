"""What a run goes on from: damaged checkpoints, other data, random states, positions, signals at the end."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from rmsrepro.config.errors import ProgramEnd, UserError
from rmsrepro.config.overrides import split_override
from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs import callbacks, checkpoints, execution
from rmsrepro.runs import train as training
from rmsrepro.runs.checkpoint_files import CheckpointFiles, keep_checkpoint
from rmsrepro.runs.interruption import Interrupted
from rmsrepro.runs.records import read_metrics
from rmsrepro.runs.seeding import rng_state, seed_dropout, set_rng_state
from rmsrepro.runs.train import train
from tests.scripts import load_script

Make = Callable[..., TrainConfig]
QUIET = Console(quiet=True)
OPTIONS = ("model.dropout=0.2", "trainer.accumulate=2", "trainer.checkpoint_every=2")


class Killed(ProgramEnd):
    pass


def killed(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, step: int) -> Path:
    """Train until the process is killed after `step`; return the run's folder."""
    original = callbacks.RunCallback.on_train_batch_end

    def kill(this: Any, trainer: Any, *rest: Any) -> None:
        original(this, trainer, *rest)
        if trainer.global_step >= step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.RunCallback, "on_train_batch_end", kill)
        with pytest.raises(Killed):
            train(config, console=QUIET)
    [folder] = Path(config.out_dir, "runs").iterdir()
    return folder


def end(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    rows = read_metrics(folder / "metrics.jsonl")
    weights = torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"]
    return weights, [{key: value for key, value in row.items() if key != "train_seconds"} for row in rows]


def flip_a_byte(file: Path) -> None:
    """Change one byte in the middle of the largest tensor."""
    with zipfile.ZipFile(file) as archive:
        tensors = [one for one in archive.infolist() if "/data/" in one.filename]
        part = max(tensors, key=lambda one: one.file_size)
        tensor = archive.read(part)
    content = bytearray(file.read_bytes())
    place = content.index(tensor) + len(tensor) // 2
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", ["newest", "both", "a byte"])
def test_a_damaged_checkpoint(make_config: Make, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    straight = train(make_config("gru", "translation", *OPTIONS, "out_dir=straight"), console=QUIET)
    config = make_config("gru", "translation", *OPTIONS)
    folder = killed(config, monkeypatch, 5) / "checkpoints"
    assert [torch.load(folder / name)["rmsrepro"]["step"] for name in ("last.ckpt", "previous.ckpt")] == [
        4,
        2,
    ]
    content = (folder / "last.ckpt").read_bytes()
    if damage == "a byte":
        flip_a_byte(folder / "last.ckpt")
        torch.load(folder / "last.ckpt")  # does not notice it
    else:
        (folder / "last.ckpt").write_bytes(content[: len(content) // 2])
    damaged = (folder / "last.ckpt").read_bytes()
    if damage == "both":
        (folder / "previous.ckpt").write_bytes(b"")
    (folder / "last.ckpt.tmp").write_bytes(b"half")  # what a kill leaves
    (folder.parent / ".result.json.1.tmp").write_bytes(b"half")
    said = Console(record=True, width=400)
    resumed = train(config, console=said)
    text = said.export_text()
    reason = (
        "damaged: the checksum of its part" if damage == "a byte" else "it is cut off: its end is missing)"
    )
    assert f"last.ckpt: cannot be read as a checkpoint ({reason}" in text
    both = damage == "both"
    assert "it is kept as damaged-last.ckpt; going on from previous.ckpt" in text
    assert ("it is kept as damaged-previous.ckpt; starting anew" in text) == both
    assert ("resumed at step 2" in text) == (not both)
    assert resumed.status == "completed"
    found, expected = end(resumed.path), end(straight.path)
    assert all(torch.equal(value, found[0][name]) for name, value in expected[0].items())
    assert found[1] == expected[1]
    names = {path.name for path in folder.iterdir()}
    assert names - {"damaged-previous.ckpt"} == {"last.ckpt", "previous.ckpt", "damaged-last.ckpt"}
    assert ("damaged-previous.ckpt" in names) == both
    assert (folder / "damaged-last.ckpt").read_bytes() == damaged
    assert not list(resumed.path.glob(".*"))


@pytest.mark.parametrize("lost", ["the file", "first", "last", "middle"])
def test_rows_that_are_gone(make_config: Make, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The newest checkpoint that the rows fit is gone on from; the end has all rows in any case."""
    straight = train(make_config("gru", "translation", *OPTIONS, "out_dir=straight"), console=QUIET)
    config = make_config("gru", "translation", *OPTIONS)
    folder = killed(config, monkeypatch, 5)
    names = ("last.ckpt", "previous.ckpt")
    states = [torch.load(folder / "checkpoints" / name)["rmsrepro"] for name in names]
    # The row of the checkpoint's own step is in the checkpoint.
    assert [(state["step"], state["rows"]) for state in states] == [(4, [3, 3]), (2, [1, 1])]
    metrics = folder / "metrics.jsonl"
    rows = metrics.read_text().splitlines(keepends=True)
    assert len(rows) == 4
    if lost == "the file":
        metrics.unlink()
    else:
        del rows[{"first": 0, "middle": 1, "last": 3}[lost]]
        metrics.write_text("".join(rows))
    said = Console(record=True, width=600)
    resumed = train(config, console=said)
    text = said.export_text()
    notes = [line for line in text.splitlines() if "metrics.jsonl has other rows" in line]
    has = {"the file": "none", "first": "2 (the last of step 3)", "middle": "2 (the last of step 3)"}
    if lost == "last":  # that of the step of the checkpoint, which holds it
        assert notes == []
    else:
        assert "there were 3 (the last of step 3), and there are " + has[lost] in notes[0]
        assert notes[0].endswith("it is kept as unused-last.ckpt; going on from previous.ckpt")
    if lost in ("the file", "first"):
        assert "there were 1 (the last of step 1), and there are none" in notes[1]
        assert notes[1].endswith("it is kept as unused-previous.ckpt; starting anew")
    begin = {"last": "resumed at step 4", "middle": "resumed at step 2"}.get(lost, "training")
    assert f"{folder.name}: {begin}" in text
    found, expected = end(resumed.path), end(straight.path)
    assert all(torch.equal(value, found[0][name]) for name, value in expected[0].items())
    assert found[1] == expected[1]
    assert torch.load(folder / "checkpoints" / "last.ckpt")["rmsrepro"]["rows"] == [5, 5]


def test_a_checkpoint_that_counts_no_rows(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of older versions."""
    config = make_config("gru", "lm", *OPTIONS)
    folder = killed(config, monkeypatch, 5)
    file = folder / "checkpoints" / "last.ckpt"
    content = torch.load(file)
    del content["rmsrepro"]["rows"]
    torch.save(content, file)
    (folder / "metrics.jsonl").unlink()
    said = Console(record=True, width=400)
    assert train(config, console=said).status == "completed"
    assert "resumed at step 4" in said.export_text()


def test_a_good_checkpoint_is_there_at_each_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever call a kill comes before."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()

    def write(number: int) -> None:
        CheckpointFiles().save_checkpoint({"number": number}, folder / "last.ckpt.tmp")
        keep_checkpoint(tmp_path)

    write(1)
    write(2)
    calls: list[str] = []
    for name in ("link", "replace", "unlink"):
        original = getattr(os, name)

        def checked(*arguments: Any, original: Any = original, name: str = name, **named: Any) -> None:
            calls.append(name)
            assert torch.load(folder / "last.ckpt")["number"] in (2, 3)
            original(*arguments, **named)
            assert torch.load(folder / "last.ckpt")["number"] in (2, 3)

        monkeypatch.setattr(os, name, checked)
    write(3)
    assert {"link", "replace"} <= set(calls)
    assert [torch.load(folder / name)["number"] for name in ("last.ckpt", "previous.ckpt")] == [3, 2]

    def none(*arguments: Any) -> None:
        raise PermissionError

    monkeypatch.undo()
    monkeypatch.setattr(os, "link", none)
    write(4)
    assert [torch.load(folder / name)["number"] for name in ("last.ckpt", "previous.ckpt")] == [4, 3]


def test_what_a_checkpoint_holds(make_config: Make) -> None:
    result = train(make_config("transformer", "translation", *OPTIONS), console=QUIET)
    file = result.path / "checkpoints" / "last.ckpt"
    assert shlex.quote(str(file)) == str(file)
    assert split_override(f"ckpt={file}").value == f"'{file}'"
    content = torch.load(file)  # the safe default
    state = content["rmsrepro"]
    assert state["data"] == {"batches": 12, "updates": 6}
    assert set(state["rng"]) >= {"cpu", "python", "numpy"}
    assert content["optimizer_states"]
    assert content["lr_schedulers"]


def test_all_random_states_are_kept() -> None:
    seed_dropout(3)
    state = rng_state()

    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            float(torch.rand(1)),
        ]

    torch.save(state, "state.pt")
    first = draw()
    draw()
    set_rng_state(torch.load("state.pt"))
    assert draw() == first
    seed_dropout(3)
    assert draw() == first


def test_a_checkpoint_and_the_data_are_read_once(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from rmsrepro.data import fingerprint, lm

    config = make_config("gru", "lm", *OPTIONS)
    killed(config, monkeypatch, 3)
    loads, prints = [], []
    load, find = torch.load, fingerprint.data_fingerprint
    monkeypatch.setattr(torch, "load", lambda *a, **k: (loads.append(a), load(*a, **k))[1])
    for module in (training, lm):
        monkeypatch.setattr(module, "data_fingerprint", lambda *a: (prints.append(a), find(*a))[1])
    assert train(config, console=QUIET).status == "completed"
    assert (len(loads), len(prints)) == (1, 1)


@pytest.mark.parametrize("text", ["other letters: xyz\n", "abcdefgh"])
def test_other_tokens_are_refused_early(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    Path("one.txt").write_text("abcdefgh \n" * 300)
    Path("two.txt").write_text((text + " \n") * 300)
    options = ("data=text_files", "data.tokenizer=char", "trainer.max_steps=2")
    first = train(make_config("gru", "lm", *options, "data.train=one.txt"), console=QUIET)
    again = make_config(
        "gru", "lm", *options, f"ckpt={first.path}", "trainer.max_steps=4", "data.train=two.txt"
    )
    before = {str(path) for path in Path().rglob("*")}
    if text == "abcdefgh":
        assert train(again, console=QUIET).status == "completed"
        return
    with pytest.raises(UserError, match=r"its model knows \d+ tokens \(char\).*as configured has \d+"):
        train(again, console=QUIET)
    assert {str(path) for path in Path().rglob("*")} == before


def test_a_signal_while_the_end_is_written(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record stays what it was to be, and the command ends as it was told."""
    write = execution.write_csv

    def interrupted(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(*arguments)

    config = make_config("gru", "lm")
    with monkeypatch.context() as patch:
        patch.setattr(execution, "write_csv", interrupted)
        with pytest.raises(Interrupted) as stopped:
            train(config, console=QUIET)
    assert stopped.value.exit_code == 143
    [folder] = Path("outputs/runs").iterdir()
    assert json.loads((folder / "result.json").read_text())["status"] == "completed"
    assert not (folder / "lock.json").exists()
    assert not (folder / "running.json").exists()
    assert train(config, console=QUIET).skipped


def test_more_accumulation_begins_with_a_whole_update(make_config: Make) -> None:
    """A run that continues one with other accumulation trains on the batches that come next."""
    first = train(make_config("gru", "lm", "trainer.accumulate=1", "trainer.max_steps=3"), console=QUIET)
    more = make_config("gru", "lm", "trainer.accumulate=2", f"ckpt={first.path}", "trainer.max_steps=5")
    saved = checkpoints.load_checkpoint(train(more, console=QUIET).path)
    assert saved.position == {"batches": 8, "updates": 5}  # 4, where an update of two begins, and 2 * 2


# ------------------------------------------------------------------------------------ scripts/kill_test


def test_the_kill_test_sees_other_batches(repo_root: Path) -> None:
    found = load_script("kill_test").batch_differences
    Path("straight").write_text("1 0 a\n1 0 b\n1 1 c\n1 1 d\n")
    cases = {
        "1 0 a\n1 0 b\n1 1 c\n1 1 d\n": [],
        "1 0 a\n1 0 b\n1 1 c\n2 1 c\n2 1 d\n": [],  # killed in the middle of an update, which was made again
        "1 0 a\n1 0 b\n2 1 d\n2 1 c\n": ["the batches of update 2 differ"],
        "1 0 a\n1 0 b\n1 1 c\n": ["no batches of update 2"],
    }
    for text, expected in cases.items():
        Path("log").write_text(text)
        assert found(Path("straight"), Path("log"), 2, 2) == expected


def test_two_kills(repo_root: Path) -> None:
    command = [sys.executable, str(repo_root / "scripts" / "kill_test"), "--warm", "--kills", "2"]
    done = subprocess.run(
        [*command, "--cases", "lm-gru", "trainer.max_steps=20", "trainer.val_every=5"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "2 of 2"
    assert "lm-gru: the same weights, rows and batches" in done.stdout
