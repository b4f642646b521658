"""The mirror for wandb, made from the records: one a run, the rows of metrics.jsonl."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.cli import main
from rmsrepro.runs.locks import lock
from rmsrepro.runs.mirror import mirrors
from rmsrepro.runs.records import read_metrics
from tests.cli.running import LM, Ran, records, stopped_at
from tests.cli.wandb_files import history, items, written

Run = Callable[..., Ran]
SHORT = [*LM, "trainer.max_steps=4", "trainer.log_every=1", "trainer.val_every=2", "norm=rmsnorm"]


def rows(run_id: str) -> list[dict[str, Any]]:
    return read_metrics(Path("outputs/runs", run_id, "metrics.jsonl"))


def mirrored(run_id: str) -> list[dict[str, Any]]:
    """The rows in the one mirror of a run, without what wandb adds."""
    found = history(items(written(run_id)))
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in found]


def test_a_mirror_of_a_run_that_had_none(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the live one: id, group, type, tags, config, axes. Also where the environment says `disabled`."""
    assert cli("train", *SHORT, "tracker=none", "study=trial", "seed=3").code == 0
    [(run_id, record)] = records().items()
    ran = cli("export", "wandb")
    assert ran.code == 0, ran.out + ran.err
    [folder] = mirrors(Path("outputs"), run_id)
    assert ran.out.split() == [f"{run_id}:", str(folder)]
    assert mirrored(run_id) == rows(run_id)
    content = items(written(run_id))
    [run] = [item.run for item in content if item.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.display_name, run.run_group) == (run_id, run_id, "trial")
    assert (run.job_type, list(run.tags)) == ("transformer/lm", ["rmsnorm", record["backend_used"]])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["norm.name"], config["seed"], config["trainer.max_steps"]) == ("rmsnorm", 3, 4)
    defined = {
        item.metric.name or item.metric.glob_name: item.metric.step_metric
        for item in content
        if item.WhichOneof("record_type") == "metric"
    }
    assert {"step", "train_seconds"} <= set(defined)
    assert defined["*"] == "step"
    [ended] = [item.exit.exit_code for item in content if item.WhichOneof("record_type") == "exit"]
    assert ended == 0
    # Again, by the folder: it takes the place of the first, also within a second.
    assert cli("export", "wandb", f"outputs/runs/{run_id}/").code == 0
    assert len(mirrors(Path("outputs"), run_id)) == 1
    assert mirrored(run_id) == rows(run_id)
    assert [path.name for path in Path("outputs/wandb").iterdir() if path.name.startswith(".")] == []


def test_a_resumed_run_ends_with_one_mirror(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    command = ["train", *SHORT, "tracker=wandb", "trainer.checkpoint_every=2"]
    with stopped_at(3):
        assert cli(*command).code == 143
    [run_id] = records()
    Path("outputs/runs", run_id, "checkpoints", "last.ckpt").unlink()  # as if it had been killed
    assert len(mirrors(Path("outputs"), run_id)) == 1
    assert cli(*command).code == 0
    assert len(mirrors(Path("outputs"), run_id)) == 1
    found = mirrored(run_id)
    assert [row["step"] for row in found] == [1, 2, 3, 4]  # the third was made twice
    assert found == rows(run_id)


def test_folders_of_one_second_are_all_of_the_run(tmp_path: Path) -> None:
    """wandb numbers them; those of other runs, whose ids may begin alike, stay out."""
    names = [
        "offline-run-20260101_000000-lm-one-abc",
        *(f"offline-run-20260101_000000-lm-one-abc-{number}" for number in (1, 2, 10)),
        "offline-run-20260101_000001-lm-one-abc",
    ]
    for name in [*names, "offline-run-20260101_000000-lm-one-abcd", "offline-run-20260101_000000-lm-one"]:
        (tmp_path / "wandb" / name).mkdir(parents=True)
    assert [path.name for path in mirrors(tmp_path, "lm-one-abc")] == names


def test_damaged_metrics_are_no_metrics(cli: Run) -> None:
    assert cli("train", *SHORT, "tracker=none").code == 0
    [(run_id, record)] = records().items()
    Path("outputs/runs", run_id, "result.json").write_text(json.dumps({**record, "metrics": [1]}))
    ran = cli("export", "wandb")
    assert ran.code == 0, ran.out + ran.err
    assert mirrored(run_id) == rows(run_id)


def test_what_cannot_be_exported(cli: Run) -> None:
    assert "no runs there" in cli("export", "wandb").error
    folder = Path("outputs/runs/one")
    folder.mkdir(parents=True)
    assert "did you mean wandb" in cli("export", "wanbd").error
    assert "rmsrepro export wandb [RUN ...]" in cli("export").error
    assert "onne: no such run in outputs/runs; did you mean one" in cli("export", "wandb", "onne").error
    damaged = cli("export", "wandb")
    assert (damaged.code, damaged.out) == (
        1,
        "failed: one: neither result.json nor config.yaml can be read\n",
    )
    with lock(folder / "lock.json"):
        busy = cli("export", "wandb", "one")
    assert (busy.code, busy.out) == (0, f"one: running (pid {os.getpid()}); left out\n")
    assert list(folder.iterdir()) == []


def test_sigterm_at_any_time_is_143(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Also before a run has handlers of its own."""
    before = signal.getsignal(signal.SIGTERM)

    def answer(arguments: list[str]) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr("rmsrepro.cli._answer", answer)
    assert main(["train"]) == 143
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGTERM) is before
