"""A run's records, its resumption, its ends."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rmsrepro.config.errors import ProgramEnd, UserError
from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs import callbacks, execution
from rmsrepro.runs.interruption import Interrupted
from rmsrepro.runs.records import read_metrics
from rmsrepro.runs.result import RunResult
from rmsrepro.runs.train import train

Make = Callable[..., TrainConfig]
QUIET = Console(quiet=True)
CASES = [("gru", "lm"), ("transformer", "lm"), ("gru", "translation"), ("transformer", "translation")]


def record(result: RunResult) -> dict[str, Any]:
    return json.loads((result.path / "result.json").read_text())


def weights(result: RunResult) -> dict[str, torch.Tensor]:
    return torch.load(result.path / "checkpoints" / "last.ckpt")["state_dict"]


def untimed(result: RunResult) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if name != "train_seconds"}
        for row in read_metrics(result.path / "metrics.jsonl")
    ]


class StopAfter:
    """Sends this process SIGTERM when the given update has been made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        original = callbacks.RunCallback.on_train_batch_end

        def stop(this: Any, trainer: Any, *rest: Any) -> None:
            if trainer.global_step == step and this._last_step < step:
                os.kill(os.getpid(), signal.SIGTERM)
            original(this, trainer, *rest)

        monkeypatch.setattr(callbacks.RunCallback, "on_train_batch_end", stop)


@pytest.mark.parametrize(("model", "task"), CASES)
def test_a_run_writes_every_record(make_config: Make, model: str, task: str) -> None:
    result = train(make_config(model, task, "norm=rmsnorm", "seed=3"), console=QUIET)
    assert result.status == "completed"
    assert {item.name for item in result.path.iterdir()} >= {
        "config.yaml", "env.json", "data.json", "metrics.jsonl", "metrics.csv", "result.json", "checkpoints",
    }  # fmt: skip
    assert not (result.path / "running.json").exists()
    assert not (result.path / "lock.json").exists()
    found = record(result)
    assert found["status"] == "completed"
    assert [found[key] for key in ("norm", "model", "task", "seed", "steps")] == [
        "rmsnorm",
        model,
        task,
        3,
        6,
    ]
    assert found["norm_params"]["eps"] == 1e-5
    clocks = found["clocks"]
    parts = sum(clocks[f"{name}_s"] for name in ("train", "eval", "checkpoint", "logging", "other"))
    assert parts == pytest.approx(clocks["total_s"], abs=1e-9)
    assert all(value >= 0 for value in clocks.values())
    assert clocks["eval_s"] > 0
    assert clocks["checkpoint_s"] > 0
    rows = read_metrics(result.path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "val_loss" in row] == [3, 6]
    assert found["metrics"]["val_loss"] == rows[-1]["val_loss"]
    assert found["tokens"] == rows[-1]["tokens"]
    assert not any("/" in name for name in found["metrics"])
    with (result.path / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [int(row["step"]) for row in table] == [1, 2, 3, 4, 5, 6]
    assert table[0]["val_loss"] == ""
    assert float(table[-1]["val_loss"]) == rows[-1]["val_loss"]
    if task == "translation":
        assert 0 <= found["metrics"]["test_bleu"] <= 100
        assert "tok:13a" in found["metric_notes"]["test_bleu_signature"]
        assert len((result.path / "hypotheses_test.txt").read_text().splitlines()) == 20


def test_a_finished_run_is_skipped_and_rerun_keeps_the_old_one(make_config: Make) -> None:
    config = make_config("gru", "lm")
    first = train(config, console=QUIET)
    before = (first.path / "result.json").read_bytes()
    again = train(config, console=QUIET)
    assert again.skipped
    assert (first.path / "result.json").read_bytes() == before
    anew = train(make_config("gru", "lm", "rerun=true"), console=QUIET)
    assert not anew.skipped
    assert anew.run_id == first.run_id
    kept = list(Path("outputs/archive").iterdir())
    assert len(kept) == 1
    assert (kept[0] / "result.json").read_bytes() == before
    assert record(anew)["metrics"] == json.loads(before)["metrics"]


@pytest.mark.parametrize(("model", "task"), CASES)
@pytest.mark.parametrize("step", [2, 3, 4])
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, model: str, task: str, step: int
) -> None:
    options = ("trainer.accumulate=2", "model.dropout=0.2")
    straight = train(make_config(model, task, *options, "out_dir=straight"), console=QUIET)
    config = make_config(model, task, *options, "out_dir=broken")
    with monkeypatch.context() as patch:
        StopAfter(patch, step)
        with pytest.raises(Interrupted) as stopped:
            train(config, console=QUIET)
    assert stopped.value.exit_code == 143
    folder = Path("broken/runs") / straight.run_id
    assert json.loads((folder / "result.json").read_text())["status"] == "interrupted"
    resumed = train(config, console=QUIET)
    assert resumed.status == "completed"
    expected, found = weights(straight), weights(resumed)
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name
    assert untimed(resumed) == untimed(straight)


@pytest.mark.parametrize(("model", "task"), CASES)
def test_a_killed_run_loses_no_row(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, model: str, task: str
) -> None:
    """The process ends right after a checkpoint, twice, where logging and saving do not coincide."""
    options = (
        "model.dropout=0.2", "trainer.accumulate=2", "trainer.max_steps=8", "trainer.val_every=4",
        "trainer.log_every=3", "trainer.checkpoint_every=1",
    )  # fmt: skip
    straight = train(make_config(model, task, *options, "out_dir=straight"), console=QUIET)
    config = make_config(model, task, *options, "out_dir=broken")
    original = callbacks.RunCallback.save

    class Killed(ProgramEnd):
        pass

    for last in (2, 4, 5, 8):
        with monkeypatch.context() as patch:

            def save(this: Any, trainer: Any, last: int = last) -> None:
                original(this, trainer)
                if trainer.global_step >= last:
                    raise Killed

            patch.setattr(callbacks.RunCallback, "save", save)
            with pytest.raises(Killed):
                train(config, console=QUIET)
    resumed = train(config, console=QUIET)
    assert [row["step"] for row in untimed(straight)] == [3, 4, 6, 8]
    assert untimed(resumed) == untimed(straight)
    assert record(resumed)["metrics"] == record(straight)["metrics"]
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name
    lines = (resumed.path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4


def test_a_continued_run_equals_a_straight_one(make_config: Make) -> None:
    first = train(make_config("transformer", "lm", "trainer.max_steps=3"), console=QUIET)
    checkpoint = first.path / "checkpoints" / "last.ckpt"
    assert "=" not in checkpoint.name
    longer = train(make_config("transformer", "lm", f"ckpt={checkpoint}"), console=QUIET)
    assert record(longer)["parent"] == first.run_id
    straight = train(make_config("transformer", "lm"), console=QUIET)
    assert longer.run_id != straight.run_id
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(longer)[name]), name
    assert [row["step"] for row in read_metrics(longer.path / "metrics.jsonl")] == [4, 5, 6]


@pytest.mark.parametrize("steps", [4, 6])
def test_nothing_is_left_to_do_after_the_last_step(make_config: Make, steps: int) -> None:
    first = train(make_config("gru", "lm"), console=QUIET)
    checkpoint = first.path / "checkpoints" / "last.ckpt"
    before = checkpoint.read_bytes()
    said = Console(record=True, width=200)
    result = train(make_config("gru", "lm", f"ckpt={checkpoint}", f"trainer.max_steps={steps}"), console=said)
    assert result.skipped
    assert "at step 6 already" in said.export_text()
    assert checkpoint.read_bytes() == before


def test_continuing_with_another_norm_is_refused(make_config: Make) -> None:
    first = train(make_config("gru", "lm", "norm=layernorm"), console=QUIET)
    with pytest.raises(UserError, match=r"layernorm.*rmsnorm"):
        train(
            make_config("gru", "lm", "norm=rmsnorm", f"ckpt={first.path}", "trainer.max_steps=9"),
            console=QUIET,
        )


def test_a_diverging_run_stops_and_says_so(make_config: Make) -> None:
    config = make_config(
        "gru", "lm", "optim.lr=1e30", "optim.warmup_steps=0", "norm=none", "trainer.max_steps=200"
    )
    result = train(config, console=QUIET)
    assert result.status == "diverged"
    found = record(result)
    assert found["steps"] < 200
    assert "loss" in found["error"]
    assert train(config, console=QUIET).skipped


def test_divergence_needs_patience_but_not_for_nan() -> None:
    watch = callbacks.Divergence(3.0)
    assert watch.reason(2.0) is None
    assert all(watch.reason(7.0) is None for _ in range(19))
    assert watch.reason(7.0) is not None
    calm = callbacks.Divergence(3.0)
    assert all(calm.reason(value) is None for value in [2.0, *([7.0] * 19), 5.9, *([7.0] * 19)])
    assert callbacks.Divergence(3.0).reason(math.nan) is not None
    assert callbacks.Divergence(3.0).reason(math.inf) is not None


def test_divergence_is_judged_alike_after_a_resumption() -> None:
    losses = [5.0, *([1.0] * 30), *([4.0] * 25)]
    straight, first = callbacks.Divergence(3.0), callbacks.Divergence(3.0)
    assert all(straight.reason(loss) is None for loss in losses)
    assert all(first.reason(loss) is None for loss in losses[:20])
    second = callbacks.Divergence(3.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert all(second.reason(loss) is None for loss in losses[20:])


def test_an_error_in_training_is_recorded(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(callbacks.RunCallback, "_record_training", fail)
    result = train(make_config("gru", "lm"), console=QUIET)
    assert result.status == "failed"
    assert record(result)["error"] == "RuntimeError: planted"
    assert record(result)["steps"] == 1
    assert "Traceback" in (result.path / "error.txt").read_text()


def test_a_full_disk_ends_a_run_without_a_traceback(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the row, nor error.txt, nor result.json can be written."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*arguments: Any, **named: Any) -> None:
        raise full

    def begin(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(execution, "write_atomic", fail)
        monkeypatch.setattr(execution.MetricsLog, "flush", fail)
        fail()

    monkeypatch.setattr(callbacks.RunCallback, "_record_training", begin)
    config = make_config("gru", "lm")
    result = train(config, console=QUIET)
    assert (result.status, result.metrics) == ("failed", {})
    assert "No space left on device" in (result.error or "")
    assert not (result.path / "result.json").exists()
    assert not (result.path / "running.json").exists()
    monkeypatch.undo()
    assert train(config, console=QUIET).status == "completed"  # the same command does it anew


@pytest.mark.parametrize("folder", ["outputs", "results/of today"])
def test_wrong_data_leaves_nothing_behind(make_config: Make, folder: str) -> None:
    Path("short.txt").write_text("ab\n")
    config = make_config("gru", "lm", "data=text_files", "data.train=short.txt", f"out_dir={folder}")
    with pytest.raises(UserError):
        train(config, console=QUIET)
    assert list(Path().rglob("*")) == [Path("short.txt")]


def test_wrong_data_leaves_the_other_runs(make_config: Make) -> None:
    Path("short.txt").write_text("ab\n")
    config = make_config("gru", "lm", "data=text_files", "data.train=short.txt")
    Path("outputs/runs/other").mkdir(parents=True)
    with pytest.raises(UserError):
        train(config, console=QUIET)
    assert list(Path("outputs/runs").iterdir()) == [Path("outputs/runs/other")]


def test_mixed_precision_trains_both_models(make_config: Make) -> None:
    for model, task in CASES:
        result = train(make_config(model, task, "precision=bf16-mixed", "norm=rmsnorm"), console=QUIET)
        assert result.status == "completed"
        assert math.isfinite(record(result)["metrics"]["val_loss"])
