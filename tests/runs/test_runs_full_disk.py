"""A full disk, at each kind of file: one message, the last good checkpoint, and the same command goes on."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rmsrepro.cli import main
from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs import callbacks, disk, locks, records
from rmsrepro.runs.disk import check_writable, disk_full, explain_full
from rmsrepro.runs.interruption import Interrupted
from rmsrepro.runs.records import MetricsLog, read_metrics
from rmsrepro.runs.train import train

Make = Callable[..., TrainConfig]
QUIET = Console(quiet=True)


def full(name: str | None = None) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


def fill(patch: pytest.MonkeyPatch, kind: str) -> None:
    """Let the disk be full for files of one kind."""
    if kind == "metrics.jsonl":

        class Full(io.FileIO):
            def write(self, content: Any) -> int:
                super().write(content[: len(content) // 2])
                raise full()

        patch.setattr(records.io, "FileIO", Full)
    elif kind == "lock.json":

        def write(descriptor: int, content: bytes) -> int:
            raise full()

        patch.setattr(locks.os, "write", write)
    elif kind == "checkpoint":

        def save(content: Any, file: Any) -> None:
            file.write(b"half")
            try:
                raise full()
            except OSError:
                raise RuntimeError("unexpected pos 704 vs 598") from None  # as torch says it

        patch.setattr(torch, "save", save)
    else:
        replace = Path.replace

        def moved(self: Path, target: Path) -> Path:
            if Path(target).name == kind:
                raise full()
            return replace(self, target)

        patch.setattr(Path, "replace", moved)


def begin(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Train up to `step`, where SIGTERM comes."""
    original = callbacks.RunCallback.on_train_batch_end

    def stop(this: Any, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == step and this._last_step < step:
            os.kill(os.getpid(), signal.SIGTERM)
        original(this, trainer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.RunCallback, "on_train_batch_end", stop)
        with pytest.raises(Interrupted):
            train(config, console=QUIET)


STRAIGHT: list[tuple[dict[str, torch.Tensor], list[dict[str, Any]]]] = []
"""The end of the run that meets no full disk, once it is known."""


def state(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    rows = read_metrics(folder / "metrics.jsonl")
    weights = torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"]
    return weights, [{key: value for key, value in row.items() if key != "train_seconds"} for row in rows]


KINDS = [
    "checkpoint", "last.ckpt", "metrics.jsonl", "result.json", "config.yaml", "running.json", "lock.json",
    "metrics.csv", "env.json", "data.json",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file(make_config: Make, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    options = ("model.dropout=0.1", "trainer.accumulate=2", "trainer.checkpoint_every=2")
    if not STRAIGHT:
        STRAIGHT.append(
            state(train(make_config("gru", "lm", *options, "out_dir=straight"), console=QUIET).path)
        )
    config = make_config("gru", "lm", *options)
    begin(config, monkeypatch, 2)
    [checkpoint] = Path("outputs/runs").glob("*/checkpoints/last.ckpt")
    before = torch.load(checkpoint)["state_dict"]
    with monkeypatch.context() as patch:
        fill(patch, kind)
        failed = train(config, console=QUIET)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.startswith("No space left on device: the disk of ")
    assert "Make room there" in failed.error
    assert "the same command goes on from the last checkpoint" in failed.error
    kept = torch.load(checkpoint)["state_dict"]  # whole, and not older
    if kind in ("checkpoint", "last.ckpt", "config.yaml", "env.json", "data.json", "lock.json"):
        assert all(torch.equal(before[name], kept[name]) for name in before)
    folder = checkpoint.parent.parent
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]
    assert not (folder / "lock.json").exists()
    assert not (folder / "error.txt").exists()
    resumed = train(config, console=QUIET)
    assert resumed.status == "completed"
    expected, found = STRAIGHT[0], state(resumed.path)
    assert all(torch.equal(expected[0][name], found[0][name]) for name in expected[0])
    assert expected[1] == found[1]


def test_the_command_line_says_it_once(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    short = ["train", "debug=fast", "model.d_model=16", "trainer.max_steps=2", "tracker=none"]
    with monkeypatch.context() as patch:
        fill(patch, "checkpoint")
        assert main(short) == 1
    out, err = capsys.readouterr()
    assert (out + err).count("No space left on device") == 1
    assert "Traceback" not in out + err
    assert main(short) == 0


def test_another_command_says_it_too(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    Path("outputs").mkdir()
    fill(monkeypatch, "results.csv")
    assert main(["report"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: No space left on device: the disk of ")
    assert err.rstrip().endswith("then give the same command again")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        pytest.skip("there is no mount")
    if done.returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full_indeed(make_config: Make, small_disk: Path) -> None:
    """Room for one checkpoint, and not for a second."""
    config = make_config("gru", "lm", f"out_dir={small_disk / 'out'}", "trainer.checkpoint_every=2")
    filler = small_disk / "filler"
    first = train(config, console=QUIET)
    assert first.status == "completed"
    size = (first.path / "checkpoints" / "last.ckpt").stat().st_size
    files = [path for path in (small_disk / "out").rglob("*") if path.is_file()]
    others = sum(path.stat().st_size for path in files) - 2 * size
    again = make_config(
        "gru", "lm", f"out_dir={small_disk / 'out'}", "trainer.checkpoint_every=2", "rerun=true", "seed=2"
    )
    with filler.open("wb") as file:
        file.truncate(0)
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        file.write(bytes(max(0, free - size * 3 // 2 - others)))
    failed = train(again, console=QUIET)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.startswith("No space left on device: the disk of ")
    saved = failed.path / "checkpoints" / "last.ckpt"
    assert torch.load(saved)["rmsrepro"]["step"] == 2
    filler.unlink()
    resumed = train(
        make_config("gru", "lm", f"out_dir={small_disk / 'out'}", "trainer.checkpoint_every=2", "seed=2"),
        console=QUIET,
    )
    assert resumed.status == "completed"
    assert [row["step"] for row in read_metrics(resumed.path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_half_a_row_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.add(1, {"train_loss": 1.0})
    log.add(2, {"train_loss": 2.0})
    with monkeypatch.context():
        write = io.FileIO.write

        class Full(io.FileIO):
            def write(self, content: Any) -> int:
                write(self, content[:5])
                raise full()

        log._file = Full(log.path, "a")
        with pytest.raises(OSError, match="No space"):
            log.add(3, {"train_loss": 3.0})
    assert (tmp_path / "m.jsonl").read_text() == json.dumps({"step": 1, "train_loss": 1.0}) + "\n"
    log._file = None
    log.flush()
    assert [row["step"] for row in read_metrics(log.path)] == [1, 2]


def test_what_a_full_disk_is() -> None:
    assert disk_full(full()) is not None
    try:
        try:
            raise full("x/y")
        except OSError:
            raise RuntimeError("torch") from None
    except RuntimeError as error:
        found = disk_full(error)
    assert found is not None
    assert found.filename == "x/y"
    for other in (OSError(errno.EACCES, "no"), RuntimeError("no space left"), ValueError()):
        assert disk_full(other) is None
        assert explain_full(other, Path()) is None
    quota = explain_full(OSError(errno.EDQUOT, "Disk quota exceeded"), Path("there"))
    assert quota is not None
    assert "as your quota allows. Make room there, or move the outputs" in quota
    limit = explain_full(OSError(errno.EFBIG, "File too large"), Path())
    assert limit is not None
    assert "ulimit -f). Raise the limit (ulimit -f unlimited), or" in limit
    assert "Make room" not in limit
    assert "MB free" not in limit


@pytest.mark.parametrize("place", ["file/outputs", "file", "long/" + "x" * 300, "/proc/nothing/outputs"])
def test_a_folder_that_cannot_be_written(place: str) -> None:
    Path("file").touch()
    with pytest.raises(UserError, match=r"out_dir=.*name a folder that you may write to: out_dir=DIR"):
        check_writable(place)
    assert list(Path().iterdir()) == [Path("file")]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("nothing", "nothing is a link to nothing (gone is not there)"),
        ("nothing/outputs", "nothing is a link to nothing (gone is not there)"),
        ("itself", "itself is a link that leads back to itself"),
        ("itself/outputs", "itself is a link that leads back to itself"),
        ("file/outputs", "file is a file, not a folder"),
    ],
)
def test_what_stands_in_the_way_is_named(place: str, reason: str, capsys: Any) -> None:
    Path("file").touch()
    Path("nothing").symlink_to("gone")
    Path("itself").symlink_to("itself")
    with pytest.raises(UserError) as refused:
        check_writable(place)
    again = "name a folder that you may write to: out_dir=DIR"
    assert str(refused.value) == f"out_dir={place}: {reason}; {again}"
    assert main(["status", f"out_dir={place}"]) == 2
    assert f"out_dir={place}: {reason}; name the folder that holds runs/" in capsys.readouterr().err
    assert len(list(Path().iterdir())) == 3


def test_a_folder_that_can_be_written_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_writable("a/b") == Path("a/b")
    assert list(Path().iterdir()) == []

    def no_room(**named: Any) -> None:
        raise full()

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", no_room)
    check_writable("a/b")  # a full disk is not the command's fault
    assert list(Path().iterdir()) == []


LM = ["debug=fast", "model.d_model=16", "tracker=none"]


@pytest.mark.parametrize(
    "command",
    [
        ["train", *LM],
        ["sweep", *LM, "norm=rmsnorm,layernorm"],
        ["bench", "bench=layer", "bench.shapes=[8x16]"],
        ["report"],
        ["export", "wandb"],
        ["convert", "ckpt=nothing"],
    ],
    ids=lambda command: command[0],
)
def test_each_verb_says_it_in_one_message(command: list[str], capsys: Any) -> None:
    Path("file").touch()
    assert main([*command, "out_dir=file/outputs"]) == 2
    out, err = capsys.readouterr()
    assert [line[:7] for line in err.splitlines()].count("error: ") == 1
    assert "Traceback" not in out + err
    assert list(Path().iterdir()) == [Path("file")]
