"""Sweeps on each launcher: the same runs, no process left behind, and a cluster's way to stop and go on."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmsrepro.runs.files import read_json
from rmsrepro.runs.owners import alive
from tests.cli import fake_slurm
from tests.cli.running import LM, Ran, Start, records, slow_norm, wait_for

Run = Callable[..., Ran]
needs_submitit = pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="hydra-submitit-launcher is not installed"
)
STEPS = 150
LONG = [
    *LM, "model.num_layers=1", f"trainer.max_steps={STEPS}", "trainer.val_every=100",
    "trainer.checkpoint_every=1000", "norm=slow_norm:Slow", "seed=1,2,3",
]  # fmt: skip


@pytest.fixture
def _slow_norm() -> Iterator[None]:
    with slow_norm(0.02):
        yield


def at_work() -> dict[str, int]:
    """Run id -> process of the runs that have made some steps."""
    found = {}
    for file in Path("outputs/runs").glob("*/running.json"):
        running, owner = read_json(file), read_json(file.with_name("lock.json"))
        if running and owner and running.get("step", 0) >= 5:
            found[file.parent.name] = int(owner["pid"])
    return found


def processes() -> list[str]:
    """The command lines of all processes that work in this directory."""
    here, found = Path.cwd(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cwd").resolve() == here and int(folder.name) != os.getpid():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return [text for text in found if text]


@pytest.mark.slow
@needs_submitit
def test_each_launcher_trains_the_same(cli: Run) -> None:
    losses = {}
    for launcher in ("basic", "joblib", "submitit_local"):
        sweep = ["sweep", *LM, "norm=rmsnorm", "backend=composite", "seed=1,2", f"launcher={launcher}"]
        ran = cli(*sweep, f"out_dir={launcher}")
        assert ran.code == 0, ran.out + ran.err
        assert "2 completed (0 of them before)" in ran.out
        found = records(launcher)
        assert {record["status"] for record in found.values()} == {"completed"}
        losses[launcher] = {name: record["metrics"]["val_loss"] for name, record in found.items()}
        contended = [any("contended" in flag for flag in record["flags"]) for record in found.values()]
        assert contended == [launcher != "basic"] * 2
        assert not list(Path(launcher, "sweeps").glob("submitit-*/*"))
        again = cli(*sweep, f"out_dir={launcher}")
        assert "2 done already, 0 to do" in again.out
    assert losses["basic"] == losses["joblib"] == losses["submitit_local"]


@pytest.mark.slow
@pytest.mark.usefixtures("_slow_norm")
@needs_submitit
@pytest.mark.parametrize("to", ["the program", "the whole terminal"])
def test_an_interrupted_sweep_of_local_jobs(start: Start, cli: Run, to: str) -> None:
    process = start("sweep", *LONG, "launcher=submitit_local", "n_jobs=2")
    wait_for(lambda: len(at_work()) == 2, process)
    if to == "the program":
        process.send_signal(signal.SIGTERM)
    else:
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == (143 if to == "the program" else 130), (out, err)
    assert "Traceback" not in out + err
    wait_for(lambda: processes() == [], None, 20)
    found = records()
    assert [record["status"] for record in found.values()] == ["interrupted"] * 2
    assert all(record["steps"] >= 5 for record in found.values())
    assert all(Path("outputs/runs", name, "checkpoints/last.ckpt").exists() for name in found)
    assert "2 interrupted, 2 left, 1 of abandoned sweeps" in cli("status").out
    again = cli("sweep", *LONG)
    assert again.code == 0, again.out
    assert [record["status"] for record in records().values()] == ["completed"] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("_slow_norm")
@needs_submitit
def test_local_jobs_outlive_a_killed_sweep(start: Start, cli: Run) -> None:
    # Long enough for another command to begin meanwhile.
    sweep = ["sweep", *LONG, "seed=1", "trainer.max_steps=500"]
    process = start(*sweep, "launcher=submitit_local")
    wait_for(lambda: len(at_work()) == 1, process)
    [owner] = [read_json(file) for file in Path("outputs/runs").glob("*/lock.json")]
    process.kill()
    process.wait()
    assert owner is not None
    assert alive(owner)
    again = cli(*sweep)
    assert again.code == 0
    assert f": process {owner['pid']} is at work on it" in again.out
    assert "1 completed (0 of them before)" in again.out
    wait_for(lambda: not alive(owner), None)
    wait_for(lambda: processes() == [], None, 20)
    assert [record["status"] for record in records().values()] == ["completed"]


@pytest.mark.slow
@pytest.mark.usefixtures("_slow_norm")
@needs_submitit
def test_a_cluster(start: Start, tmp_path_factory: pytest.TempPathFactory, cli: Run) -> None:
    folder = tmp_path_factory.mktemp("slurm") / "slurm"
    cluster: dict[str, str | None] = {**fake_slurm.install(folder)}
    process = start(
        "sweep", *LONG, "seed=1,2", "launcher=submitit_slurm", "launcher.partition=p", env=cluster
    )
    wait_for(lambda: len(at_work()) == 2, process)
    first, second = at_work().items()
    names = {read_json(Path("outputs/runs", run, "lock.json"))["job"]: run for run, _ in (first, second)}  # type: ignore[index]
    # One is preempted: Slurm tells it to stop, and starts it again. The other one runs out of time.
    for number, job in enumerate(sorted(names)):
        owner = dict([first, second])[names[job]]
        if number == 0:
            (folder / f"100_{number}.requeue").touch()
            os.kill(owner, signal.SIGTERM)
        else:
            os.kill(owner, signal.SIGUSR2)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, (out, err)
    assert "2 completed (0 of them before)" in out
    logs = "".join(file.read_text() for file in folder.parent.rglob("*.err"))
    assert logs == ""
    for record in records().values():
        assert (record["status"], record["steps"]) == ("completed", STEPS)
    wait_for(lambda: processes() == [], None, 20)


@pytest.mark.slow
@pytest.mark.usefixtures("_slow_norm")
@needs_submitit
def test_a_sweep_that_no_longer_waits_for_a_cluster(
    start: Start, tmp_path_factory: pytest.TempPathFactory, cli: Run
) -> None:
    cluster: dict[str, str | None] = {**fake_slurm.install(tmp_path_factory.mktemp("slurm") / "slurm")}
    sweep = ["sweep", *LONG, "seed=1", "trainer.max_steps=500"]
    process = start(*sweep, "launcher=submitit_slurm", env=cluster)
    wait_for(lambda: len(at_work()) == 1, process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert "interrupted: the jobs that were submitted go on" in out
    assert "1 running" in cli("status").out
    again = cli(*sweep)  # here, where it waits for what the cluster is at work on
    assert again.code == 0
    assert " is at work on it" in again.out
    assert "1 completed (0 of them before)" in again.out
    wait_for(lambda: processes() == [], None)
    assert [record["status"] for record in records().values()] == ["completed"]
    assert "1 done already, 0 to do" in cli(*sweep).out


def test_what_a_launcher_refuses(cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (
        "there is no such launcher; did you mean submitit_slurm"
        in cli("sweep", "launcher=submit_slurm").error
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    if importlib.util.find_spec("submitit") is not None:
        refused = cli("sweep", *LM, "seed=1,2", "launcher=submitit_slurm").error
        assert refused.startswith(
            "launcher=submitit_slurm: sbatch, srun, sacct of Slurm cannot be found here"
        )
        planned = cli("sweep", *LM, "seed=1,2", "launcher=submitit_slurm", "dry_run=true")
        assert planned.code == 0
    refused = cli("sweep", *LM, "seed=1,2", "trainer=ddp").error
    assert refused.startswith("trainer=ddp: a sweep gives each job one process, so nothing was started; ")
    assert cli("bench", "trainer=ddp", "model=gru").error.startswith(
        "trainer=ddp: a bench times the step of one"
    )
    assert cli("train", *LM, "trainer.devices=2").error.startswith(
        "trainer.devices=2: a process uses one device"
    )
    assert not Path("outputs").exists()
