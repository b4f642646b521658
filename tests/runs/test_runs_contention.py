"""Runs that share the machine say so, and nobody quotes their times."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs import workers
from rmsrepro.runs.contention import CONTENDED, Neighbours, is_contended
from rmsrepro.runs.estimate import estimate_seconds
from rmsrepro.runs.interruption import Interrupted
from rmsrepro.runs.locks import lock
from rmsrepro.runs.owners import owner_record, process_start
from rmsrepro.runs.result import RunResult
from rmsrepro.runs.status import read_status
from rmsrepro.runs.train import train
from tests.runs.test_runs_train import StopAfter

Make = Callable[..., TrainConfig]
OTHER = os.getppid()


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def owner(**changes: Any) -> dict[str, Any]:
    """Of a process that lives and is not this one."""
    return {**owner_record(), "pid": OTHER, "start": process_start(OTHER), **changes}


def ended(ago_s: float, **changes: Any) -> dict[str, Any]:
    told = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - ago_s))
    machine = {"host": socket.gethostname()}
    return {"finished": told, "machine": machine, "clocks": {"total_s": 3.0}, **changes}


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("lock.json", owner(), True),
        ("lock.json", owner(host="elsewhere"), False),
        ("lock.json", owner(start="another process of this number"), False),
        ("lock.json", owner_record(), False),
        ("running.json", owner(updated=time.time() + 5000), True),
        ("running.json", owner(updated=0), False),
        ("running.json", owner(host="elsewhere", updated=time.time() + 5000), False),
        # Collected long before it runs.
        ("result.json", ended(-5000), True),
        ("result.json", ended(5), False),
        ("result.json", ended(-5000, machine={"host": "elsewhere"}), False),
        ("result.json", ended(-5000, clocks={"total_s": 0.0}), False),
        ("result.json", {"finished": "?", "machine": None, "clocks": 3}, False),
    ],
)
def test_what_a_neighbour_is(name: str, content: dict[str, Any], found: bool) -> None:
    neighbours = Neighbours(Path("runs/own"))
    write(Path("runs/own"), "lock.json", owner())
    assert not neighbours.look()
    write(Path("runs/other"), name, content)
    assert neighbours.look() is found
    if found:
        (Path("runs/other") / name).unlink()
        assert neighbours.look()


def test_jobs_of_a_sweep_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSREPRO_SWEEP_PROCESS", "another:1")
    monkeypatch.setenv("RMSREPRO_SWEEP_JOBS", "2")
    assert Neighbours(Path("runs/own")).look()
    monkeypatch.setenv("RMSREPRO_SWEEP_JOBS", "1")
    assert not Neighbours(Path("runs/own")).look()
    monkeypatch.setenv("RMSREPRO_SWEEP_JOBS", "2")
    monkeypatch.setenv("RMSREPRO_SWEEP_PROCESS", workers._this_process())
    assert not Neighbours(Path("runs/own")).look()


def record(result: RunResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((result.path / "result.json").read_text())
    return found


def test_a_run_beside_another(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Console(quiet=True)
    make = ["norm=rmsnorm", "backend=composite"]
    alone = train(make_config("transformer", "lm", *make), console=quiet)
    assert record(alone)["flags"] == []
    estimate = estimate_seconds(make_config("transformer", "lm", *make))
    assert estimate is not None
    assert not estimate.contended
    with lock(Path("outputs/runs/lm-pydoc-transformer-other/lock.json")):
        path = Path("outputs/runs/lm-pydoc-transformer-other/lock.json")
        path.write_text(json.dumps(owner()))
        beside = train(make_config("transformer", "lm", *make, "seed=2"), console=quiet)
        path.unlink()
    path.parent.rmdir()
    assert record(beside)["flags"] == [CONTENDED]
    assert is_contended(record(beside))
    # Another one that comes later does not change what the first one says of itself.
    after = train(make_config("transformer", "lm", *make, "seed=3"), console=quiet)
    assert record(after)["flags"] == []
    write(alone.path, "result.json", {**record(alone), "clocks": {"total_s": 1.0}})
    write(beside.path, "result.json", {**record(beside), "clocks": {"total_s": 600.0}})
    write(after.path, "result.json", {**record(after), "clocks": {"total_s": 1.0}})
    estimate = estimate_seconds(make_config("transformer", "lm", *make, "seed=4"))
    assert estimate is not None
    assert (round(estimate.seconds, 3), estimate.contended) == (1.0, False)
    write(Path("outputs/sweeps"), "a.json", {"jobs": [{"run_id": "wanted"}], "owner": owner()})
    assert read_status(Path("outputs")).headline.endswith(" 1 left, about 1 s to go")
    for result in (alone, after):
        write(result.path, "result.json", {**record(result), "status": "failed"})
    estimate = estimate_seconds(make_config("transformer", "lm", *make, "seed=4"))
    assert estimate is not None
    assert (round(estimate.seconds, 3), estimate.contended) == (600.0, True)
    assert read_status(Path("outputs")).headline.endswith("about 600 s to go (by contended runs)")


def test_a_resumed_run_remembers(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Console(quiet=True)
    config = make_config(
        "transformer", "lm", "norm=rmsnorm", "backend=composite", "trainer.checkpoint_every=1"
    )
    other = Path("outputs/runs/other")
    write(other, "lock.json", owner())
    with monkeypatch.context() as patch:
        StopAfter(patch, 4)
        with pytest.raises(Interrupted):
            train(config, console=quiet)
    (other / "lock.json").unlink()
    [folder] = [path for path in Path("outputs/runs").iterdir() if path != other]
    interrupted = json.loads((folder / "result.json").read_text())
    assert (interrupted["status"], interrupted["flags"]) == ("interrupted", [CONTENDED])
    (folder / "result.json").unlink()  # as after a kill: the checkpoint knows
    assert record(train(config, console=quiet))["flags"] == [CONTENDED]
