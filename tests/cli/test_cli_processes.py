"""Runs of several processes: told to stop, killed, and what becomes of the processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.running import LM, Ran, Start, records, wait_for
from tests.cli.test_cli_launchers import _slow_norm, at_work, processes

__all__ = ["_slow_norm"]  # a fixture
Run = Callable[..., Ran]
STEPS = 60
DDP = ["trainer=ddp", "trainer.accelerator=cpu", "backend=composite"]
LONG = [
    *LM, *DDP, "model.num_layers=1", f"trainer.max_steps={STEPS}", "trainer.val_every=25",
    "trainer.checkpoint_every=3", "model.dropout=0.1", "norm=slow_norm:Slow",
]  # fmt: skip
linux = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at /proc")
pytestmark = [pytest.mark.slow, linux, pytest.mark.usefixtures("_slow_norm")]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def untimed() -> list[dict[str, float]]:
    [file] = Path("outputs/runs").glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "train_seconds"} for row in rows]


def ends(cli: Run) -> tuple[list[dict[str, float]], bytes]:
    """Finish the run; return its rows and the bytes of its weights."""
    import torch

    again = cli("train", *LONG)
    assert again.code == 0, again.out
    [record] = records().values()
    assert (record["status"], record["steps"]) == ("completed", STEPS)
    [file] = Path("outputs/runs").glob("*/checkpoints/last.ckpt")
    weights = torch.load(file)["state_dict"]
    return untimed(), b"".join(weights[name].numpy().tobytes() for name in sorted(weights))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[dict[str, float]], bytes]]:
    """The ends of a run that nothing happened to, once it was made."""
    return []


def same_as_straight(cli: Run, straight: list[tuple[list[dict[str, float]], bytes]]) -> None:
    found = ends(cli)
    if not straight:
        Path("outputs").rename("interrupted")
        straight.append(ends(cli))
    assert found == straight[0]


@pytest.mark.parametrize("how", ["SIGINT to all", "SIGTERM", "SIGKILL"])
def test_a_run_goes_on_as_if_nothing_had_been(
    start: Start, cli: Run, straight: list[tuple[list[dict[str, float]], bytes]], how: str
) -> None:
    process = start("train", *LONG)
    wait_for(lambda: len(at_work()) == 1, process)
    assert len(processes()) == 2
    if how == "SIGINT to all":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.Signals[how])
    out, err = process.communicate(timeout=100)
    assert "Traceback" not in out + err
    wait_for(lambda: processes() == [], None, 20)
    if how == "SIGKILL":
        assert records() == {}
    else:
        assert process.returncode == (130 if how == "SIGINT to all" else 143), (out, err)
        [record] = records().values()
        assert record["status"] == "interrupted"
        assert len(untimed()) == record["steps"] < STEPS
    same_as_straight(cli, straight)


def test_a_process_that_is_killed_ends_the_run(
    start: Start, cli: Run, straight: list[tuple[list[dict[str, float]], bytes]]
) -> None:
    process = start("train", *LONG)
    wait_for(lambda: len(at_work()) == 1, process)
    [other] = children(process.pid)
    os.kill(other, signal.SIGTERM)  # which is for the first process to heed
    os.kill(other, signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1, (out, err)
    assert "process 1 of 2 (counted from 0) was ended by SIGKILL" in out
    assert "Traceback" not in out + err
    wait_for(lambda: processes() == [], None, 20)
    [record] = records().values()
    assert record["status"] == "failed"
    same_as_straight(cli, straight)


def test_an_error_in_another_process(start: Start, cli: Run) -> None:
    Path("slow_norm.py").write_text(
        Path("slow_norm.py")
        .read_text()
        .replace("        if self.training:", "        if self.training and sys.argv[-1].isdigit():\n"
                 "            raise MemoryError('out of memory on purpose')\n        if self.training:")
        .replace("import time", "import sys\nimport time")
    )  # fmt: skip
    process: subprocess.Popen[str] = start("train", *LONG)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1, (out, err)
    assert "out of memory on purpose" in out
    assert "lower data.batch_tokens" in out
    assert "Traceback" not in out + err
    wait_for(lambda: processes() == [], None, 20)
