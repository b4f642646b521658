"""Launchers: their options on the command line, and what would be submitted to Slurm."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, split_override
from rmsrepro.runs import launchers, submitted, workers
from rmsrepro.runs.launch import launch
from rmsrepro.runs.launchers import LauncherOptions, check_cluster, check_launcher, check_options
from rmsrepro.runs.owners import alive, owner_record
from rmsrepro.runs.submitted import Lost, Requeue, launch_locally
from rmsrepro.verbs.common import composer

needs_submitit = pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="hydra-submitit-launcher is not installed"
)


def options(*texts: str) -> list[Override]:
    return [split_override(text) for text in texts]


def refused(name: str, *texts: str) -> str:
    def check() -> None:
        check_launcher(name)
        check_options(LauncherOptions(name, options=options(*texts)))

    with pytest.raises(UserError) as error:
        check()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_launchers_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did you mean joblib?" in refused("joblb")
    monkeypatch.setattr(launchers, "_found", lambda module: False)
    for name, package in (
        ("joblib", "joblib"),
        ("submitit_local", "submitit"),
        ("submitit_slurm", "submitit"),
    ):
        assert refused(name) == (
            f"launcher={name}: its package is not installed; pip install hydra-{package}-launcher"
        )
    check_launcher("basic")


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^launcher=submitit_slurm: sbatch, srun, sacct of Slurm cannot be"):
        check_cluster("submitit_slurm")
    check_cluster("submitit_local")


def test_options_of_joblib_and_basic() -> None:
    assert refused("basic", "n_jobs=2").endswith("launcher=basic has no option n_jobs (it has none)")
    assert "it cannot be set here, as the workers are processes" in refused("joblib", "backend=threading")
    assert "did you mean verbose?" in refused("joblib", "verbos=2")
    check_options(LauncherOptions("joblib", 2, options("verbose=5")))
    chosen = LauncherOptions("joblib", 3, options("verbose=5"))
    assert chosen.here == 3
    assert chosen.overrides("folder") == [
        "hydra/launcher=joblib",
        "hydra.launcher.batch_size=1",
        "hydra.launcher.pre_dispatch=all",
        "hydra.launcher.n_jobs=3",
        "hydra.launcher.verbose=5",
    ]


@needs_submitit
def test_options_of_submitit() -> None:
    assert "did you mean partition?" in refused("submitit_slurm", "partitio=a")
    assert refused("submitit_slurm", "timeout_min=soon").startswith("launcher.timeout_min=soon: ")
    assert "takes one value" in refused("submitit_slurm", "partition=a,b")
    assert "a job of a sweep is one process" in refused("submitit_local", "tasks_per_node=2")
    assert "has no option partition.x" in refused("submitit_slurm", "partition.x=2")
    good = options("partition='a,b'", "additional_parameters.requeue=true", "setup=[module load cuda]")
    check_options(LauncherOptions("submitit_slurm", options=good))


@needs_submitit
def test_what_would_be_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    import submitit
    from hydra.core.utils import JobReturn
    from submitit.slurm.test_slurm import mocked_slurm

    asked: list[str] = []

    def results(job: Any) -> list[JobReturn]:
        asked.append(job.job_id)
        return [JobReturn(_return_value={"status": "completed"}, status=_completed())]

    monkeypatch.setattr(submitit.SlurmJob, "results", results)
    kept: list[str] = []
    monkeypatch.setattr(submitted.shutil, "rmtree", lambda folder, **_: kept.append(str(folder)))
    given = options(
        "partition=gpu", "timeout_min=90", "gpus_per_node=1", "mem_gb=16", "qos=low", "cpus_per_task=4",
        "signal_delay_s=60", "additional_parameters.requeue=true", "setup=[module load cuda]",
    )  # fmt: skip
    launcher = LauncherOptions("submitit_slurm", 5, given)
    folder = Path("outputs/sweeps/submitit").resolve()
    with composer([]), mocked_slurm():
        jobs = [["norm=rmsnorm", f"seed={seed}"] for seed in range(1, 9)]
        found = launch(_nothing, jobs, base=[], launcher=launcher, folder=folder)
    assert found == [{"status": "completed"}] * 8
    assert asked == [f"12_{number}" for number in range(8)]
    assert kept == [str(folder)]
    [script] = folder.rglob("*_submission.sh")
    lines = script.read_text().splitlines()
    told = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH")
    )
    for name, value in {
        "partition": "gpu",
        "time": "90",
        "gpus-per-node": "1",
        "mem": "16GB",
        "qos": "low",
        "cpus-per-task": "4",
        "array": "0-7%5",
        "signal": "USR2@60",
        "requeue": "",
        "job-name": "rmsrepro",
        "nodes": "1",
        "ntasks-per-node": "1",
    }.items():
        assert told[name] == value, name
    assert told["output"].startswith(str(folder))
    assert "module load cuda" in lines
    [command] = [line for line in lines if line.startswith("srun ")]
    assert "submitit.core._submit" in command


def _completed() -> Any:
    from hydra.core.utils import JobStatus

    return JobStatus.COMPLETED


def _nothing(config: DictConfig) -> None:
    """A task that nobody runs."""


@pytest.fixture
def _fresh() -> Iterator[None]:
    workers.become_sweep()
    yield
    workers.become_sweep()


@pytest.mark.usefixtures("_fresh")
@needs_submitit
def test_local_jobs_run_a_few_at_a_time() -> None:
    from submitit.core.utils import UncompletedJobError

    at_work, most = set(), []

    def run(jobs: Any, folder: Path) -> list[Any]:
        [[job]] = jobs
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert signal.SIGINT in masked
        assert signal.SIGTERM not in masked
        at_work.add(job)
        most.append(len(at_work))
        time.sleep(0.05)
        at_work.remove(job)
        if job == "2":
            raise UncompletedJobError("Job 7 has no output\nmore\nKilled")
        return [f"{job} in {folder.name}"]

    found = launch_locally(run, [[str(number)] for number in range(5)], 2, Path("files"))
    assert [found[number] for number in (0, 1, 3, 4)] == [f"{number} in {number}" for number in (0, 1, 3, 4)]
    assert found[2] == Lost("Job 7 has no output ... Killed")
    assert max(most) == 2
    assert workers.STOP_FILE not in os.environ
    assert Path("files").is_dir()  # a job was lost, so what submitit wrote is kept


@pytest.mark.usefixtures("_fresh")
@needs_submitit
def test_no_local_job_begins_after_a_stop() -> None:
    begun: list[str] = []

    def run(jobs: Any, folder: Path) -> list[Any]:
        begun.append(jobs[0][0])
        while not workers.told_to_stop():
            time.sleep(0.01)
        until = time.monotonic() + 20
        while not Path(os.environ[workers.STOP_FILE]).exists():  # written right after
            assert time.monotonic() < until
            time.sleep(0.01)
        return ["stopped"]

    timer = threading.Timer(0.3, workers.stop_workers)
    timer.start()
    found = launch_locally(run, [[str(number)] for number in range(4)], 1, Path("files"))
    timer.join()
    assert begun == ["0"]
    assert found == ["stopped", *[Lost("not begun")] * 3]


def test_a_job_that_goes_back_into_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    try:
        signal.signal(signal.SIGUSR2, lambda *_: events.append("requeue"))
        signal.signal(signal.SIGTERM, lambda *_: events.append("save"))
        Requeue()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert events.pop() == "requeue"  # this process is no job
        monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
        job = Requeue()
        job.leave(143)
        assert events == []
        os.kill(os.getpid(), signal.SIGUSR2)
        assert events == ["save"]
        job.leave(143)
        assert events == ["save", "requeue"]
        job.close()
        monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
        with pytest.raises(SystemExit) as left:
            Requeue().leave(143)
        assert left.value.code == 143
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_lock_of_a_job_that_slurm_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    first = {**owner_record(), "host": "a node that failed"}
    assert (first["job"], first["restarts"]) == ("17", 0)
    assert alive(first)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert not alive(first)
    assert alive(owner_record())
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert alive(first)
    assert alive({key: first[key] for key in ("pid", "host", "start", "updated")})


def test_sweep_options_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from rmsrepro.verbs import training

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        training, "sweep_jobs", lambda *given, **named: (seen.append((*given, named)), (0, []))[1]
    )
    assert (
        training.sweep(options("launcher=joblib", "launcher.n_jobs=3", "launcher.verbose=1", "seed=1,2")) == 0
    )
    overrides, read, named = seen.pop()
    assert [item.text for item in overrides] == ["seed=1,2"]
    assert (read.launcher, read.n_jobs) == ("joblib", 3)
    assert [item.text for item in named["launcher_options"]] == ["verbose=1"]
    with pytest.raises(UserError, match=r"launcher.partition=a: name the launcher too"):
        training.sweep(options("launcher.partition=a"))
    with pytest.raises(UserError, match=r"launcher.partition=a: a launcher and its options belong"):
        training.train(options("launcher.partition=a"))
