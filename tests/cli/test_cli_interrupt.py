"""Ctrl-C and SIGTERM: the exit code says so, the record is true, no process stays, it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmsrepro.runs.files import read_json
from rmsrepro.runs.locks import lock
from rmsrepro.runs.owners import alive
from tests.cli.running import LM, Ran, Start, records, slow_norm, wait_for

Run = Callable[..., Ran]
STEPS = 120
LONG = [
    *LM, "model.num_layers=1", f"trainer.max_steps={STEPS}", "trainer.val_every=100",
    "trainer.checkpoint_every=1", "norm=slow_norm:Slow",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _slow_norm() -> Iterator[None]:
    """A norm that takes its time, so that a signal meets the run on any machine."""
    with slow_norm(0.01):
        yield


def running() -> dict[str, int]:
    """Run id -> step of the runs under way."""
    found = {file.parent.name: read_json(file) for file in Path("outputs/runs").glob("*/running.json")}
    return {name: int(content.get("step", 0)) for name, content in found.items() if content is not None}


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def owners() -> list[dict[str, object]]:
    found = [read_json(file) for file in Path("outputs/runs").glob("*/lock.json")]
    return [content for content in found if content is not None]


def session(leader: int) -> list[int]:
    """The processes of the session that `leader` began, without those that only wait to be buried."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == leader and fields[0] not in ("Z", "X"):
                found.append(int(file.parent.name))
    return found


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_an_interrupted_run(start: Start, cli: Run, number: signal.Signals, code: int) -> None:
    process = start("train", *LONG)
    wait_for(lambda: any(step >= 5 for step in running().values()), process)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, (out, err)
    assert "Traceback" not in out + err
    assert "interrupted; the same command goes on from the last checkpoint" in out
    [(run_id, record)] = records().items()
    folder = Path("outputs/runs", run_id)
    assert record["status"] == "interrupted"
    assert 5 <= record["steps"] < STEPS
    assert not (folder / "running.json").exists()
    assert not (folder / "lock.json").exists()
    assert [row["step"] for row in rows(folder)] == list(range(1, record["steps"] + 1))
    assert "0 completed, 0 running, 0 failed, 1 interrupted, 1 left" in cli("status").out
    again = cli("train", *LONG)
    assert again.code == 0
    assert "resumed at step " in again.out
    [(same, finished)] = records().items()
    assert (same, finished["status"], finished["steps"]) == (run_id, "completed", STEPS)
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    if number is signal.SIGTERM:
        # As if nothing had been.
        assert cli("train", *LONG, "out_dir=straight").code == 0
        [straight] = records("straight").values()
        assert finished["metrics"]["val_loss"] == straight["metrics"]["val_loss"]
        assert finished["metrics"]["test_loss"] == straight["metrics"]["test_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the program", "the whole terminal"])
def test_an_interrupted_sweep_of_workers(start: Start, cli: Run, to: str) -> None:
    jobs = [*LONG, "seed=1,2,3", "launcher=joblib", "n_jobs=2"]
    process = start("sweep", *jobs)
    wait_for(lambda: sum(step >= 5 for step in running().values()) >= 2, process)
    workers = owners()
    assert len(workers) == 2
    if to == "the program":
        process.send_signal(signal.SIGINT)
    else:
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in out + err, err
    wait = time.monotonic() + 30
    while any(alive(worker) for worker in workers) and time.monotonic() < wait:
        time.sleep(0.1)
    assert not any(alive(worker) for worker in workers)
    found = records()
    assert sorted(record["status"] for record in found.values()) == ["interrupted", "interrupted"]
    assert owners() == []
    assert running() == {}
    assert "2 interrupted, 2 left, 1 of abandoned sweeps" in cli("status").out
    again = cli("sweep", *[text for text in jobs if text not in ("launcher=joblib", "n_jobs=2")])
    assert again.code == 0, again.out
    assert {record["status"] for record in records().values()} == {"completed"}
    assert len(records()) == 3
    assert set(found) < set(records())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at /proc")
def test_workers_end_with_a_killed_sweep(start: Start, cli: Run) -> None:
    jobs = ["sweep", *LONG, "trainer.max_steps=400", "seed=1,2,3", "launcher=joblib", "n_jobs=2"]
    process = start(*jobs)
    wait_for(lambda: sum(step >= 5 for step in running().values()) >= 2, process)
    process.kill()
    process.wait()
    wait_for(lambda: session(process.pid) == [], None, 15)
    found = records()
    assert sorted(record["status"] for record in found.values()) == ["interrupted", "interrupted"]
    assert all(5 <= record["steps"] < 400 for record in found.values())
    assert owners() == []
    assert running() == {}
    again = cli("sweep", *LONG, "trainer.max_steps=400", "seed=1,2,3")
    assert again.code == 0, again.out
    ended = records()
    assert [record["status"] for record in ended.values()] == ["completed"] * 3
    for name in found:
        steps = [row["step"] for row in rows(Path("outputs/runs", name))]
        assert steps == list(range(1, 401))


@pytest.mark.slow
def test_an_interrupted_sweep_in_one_process(start: Start, cli: Run) -> None:
    jobs = [*LONG, "seed=1,2"]
    process = start("sweep", *jobs)
    wait_for(lambda: any(step >= 5 for step in running().values()), process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 143, (out, err)
    assert "Traceback" not in out + err
    assert [record["status"] for record in records().values()] == ["interrupted"]
    assert cli("sweep", *jobs).code == 0
    assert [record["status"] for record in records().values()] == ["completed"] * 2


@pytest.mark.slow
def test_a_killed_run_goes_on(start: Start, cli: Run) -> None:
    process = start("train", *LONG)
    wait_for(lambda: any(step >= 5 for step in running().values()), process)
    process.kill()
    process.communicate(timeout=60)
    assert "0 completed, 0 running, 0 failed, 1 interrupted, 1 left" in cli("status").out
    again = cli("train", *LONG)
    assert again.code == 0
    assert "resumed at step " in again.out
    [record] = records().values()
    assert (record["status"], record["steps"]) == ("completed", STEPS)


def test_a_run_that_another_process_is_at(cli: Run) -> None:
    planned = cli("sweep", *LM, "norm=rmsnorm", "backend=composite", "dry_run=true")
    [run_id] = [line.split()[-1] for line in planned.out.splitlines() if line.startswith("  run ")]
    with lock(Path("outputs/runs", run_id, "lock.json")):
        busy = cli("train", *LM, "norm=rmsnorm", "backend=composite")
        assert busy.code == 0
        assert f"another process (pid {os.getpid()}) is at work on it; left to it" in busy.out
        assert cli("status").out.startswith("0 completed, 1 running, 0 failed, 0 left")
        swept = cli("sweep", *LM, "norm=rmsnorm", "backend=composite")
        assert swept.code == 0
        assert "1 left to another process" in swept.out
    assert records() == {}
    assert cli("train", *LM, "norm=rmsnorm", "backend=composite").code == 0
    assert list(records()) == [run_id]
