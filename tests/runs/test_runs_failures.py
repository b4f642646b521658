"""Why a run failed and what to do; jobs whose worker is gone; what sweeps leave for `status`."""

from __future__ import annotations

import errno
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError

from rmsrepro.config.errors import UserError
from rmsrepro.runs.lost import End, Rounds, lost
from rmsrepro.runs.manifests import read_manifests, release_manifest, runs_of_study, write_manifest
from rmsrepro.runs.owners import owner_record
from rmsrepro.runs.reasons import WorkerLost, explain
from rmsrepro.runs.status import read_status

# ----------------------------------------------------------------------------------------- reasons

SMALLER = "lower data.batch_tokens (and raise trainer.accumulate) or model.size"
DEAD = {"pid": 2**22 - 3, "host": socket.gethostname(), "start": "1"}


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def torchs_own() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    return caught.value


FULL = OSError(errno.ENOSPC, "No space left on device")
THERE = "if that is its name there"


@pytest.mark.parametrize(
    ("error", "begins", "ends"),
    [
        (MemoryError(), "out of memory: MemoryError; ", SMALLER),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory: CUDA out of memory; ", SMALLER),
        (RuntimeError("not enough memory: you\nmore"), "out of memory: not enough memory: you; ", SMALLER),
        (OSError(errno.ENOMEM, "Cannot allocate"), "out of memory: [Errno 12] Cannot allocate; ", SMALLER),
        (
            chained(RuntimeError("unexpected pos 64 vs 0"), FULL),
            "the disk is full: [Errno 28] No space left on device; make room in out_dir",
            "repeat the same command",
        ),
        (
            ModuleNotFoundError("No module named 'sacremoses.x'", name="sacremoses.x"),
            "a package is missing: No module named 'sacremoses.x'; ",
            f"pip install sacremoses, {THERE}",
        ),
        (
            ModuleNotFoundError("No module named 'triton'", name="triton"),
            "a package is missing: No module named 'triton'; ",
            f"pip install 'rmsrepro[gpu]', {THERE}",
        ),
        (
            ImportError("cannot import name 'x' from 'y'", name="y"),
            "an import failed: cannot import name 'x' from 'y'; ",
            "reinstall the package that it names, or leave it out",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "outputs"),
            "not permitted: [Errno 13] Permission denied: 'outputs'; ",
            "change the permissions, or set another out_dir",
        ),
        (UserError("train.txt: damaged\nmore"), "train.txt: damaged\nmore", ""),
        (ZeroDivisionError(), "ZeroDivisionError", ""),
        (AssertionError("  "), "AssertionError", ""),
        (RuntimeError("a \ud800 b"), "RuntimeError: a \\ud800 b", ""),
        (UserError("a \udcff b"), "a \\udcff b", ""),
        (MemoryError("\ud800"), "out of memory: \\ud800; ", SMALLER),
        (RuntimeError("first\nsecond"), "RuntimeError: first", ""),
    ],
)  # fmt: skip
def test_the_reason_says_what_to_do(error: Exception, begins: str, ends: str) -> None:
    text = explain(error)
    assert text.startswith(begins)
    assert text.endswith(ends)
    assert ends or text == begins


def test_torchs_allocator_is_known() -> None:
    assert explain(torchs_own()).startswith("out of memory: ")
    assert explain(torchs_own()).endswith(SMALLER)


@pytest.mark.parametrize(
    ("ends", "begins", "advice"),
    [
        ("SIGKILL", "its worker process was killed (SIGKILL), most likely for want of memory", "n_jobs"),
        ("", "its worker process ended without an answer", "n_jobs"),
        ("SIGTERM", "its worker process was stopped from outside (SIGTERM)", "repeat the same command"),
        ("SIGSEGV", "its worker process crashed (SIGSEGV)", "backend=composite"),
    ],
)
def test_how_a_worker_ended(ends: str, begins: str, advice: str) -> None:
    text = explain(WorkerLost(ends))
    assert text.startswith(begins)
    assert advice in text


def test_which_errors_are_about_a_worker() -> None:
    told = "terminated. The exit codes of the workers are {SIGKILL(-9)}"
    found = lost(TerminatedWorkerError(told))
    assert found is not None
    assert "was killed (SIGKILL)," in str(found)
    assert lost(RuntimeError(told)) is None


# -------------------------------------------------------------------------------------- lost workers


@dataclass
class Job:
    run_id: str
    status: str = "planned"
    error: str | None = None
    seconds: float = 0.0


class Pool:
    """Ends jobs by writing their records; breaks as joblib's does, leaving struck jobs with their locks."""

    def __init__(self, folder: Path, killer: str, struck: dict[str, list[str]]) -> None:
        self.folder, self.killer, self.struck = folder, killer, struck
        self.calls: list[tuple[list[str], bool]] = []

    def end(self, run_id: str) -> End:
        place = self.folder / run_id
        place.mkdir(parents=True, exist_ok=True)
        (place / "lock.json").unlink(missing_ok=True)
        (place / "result.json").write_text(
            json.dumps({"status": "completed", "clocks": {"total_s": 2.0}, "error": None})
        )
        return {"run_id": run_id, "status": "completed", "error": None, "seconds": 2.0}

    def __call__(self, jobs: Any, alone: bool) -> list[End]:
        ids = [job.run_id for job in jobs]
        self.calls.append((ids, alone))
        if self.killer not in ids:
            return [self.end(run_id) for run_id in ids]
        for run_id in self.struck.get("before", []):
            if run_id in ids:
                self.end(run_id)
        for run_id in [self.killer, *self.struck.get("with", [])]:
            if run_id in ids:
                (self.folder / run_id).mkdir(parents=True, exist_ok=True)
                (self.folder / run_id / "lock.json").write_text(json.dumps(DEAD))
                (self.folder / run_id / "running.json").write_text(json.dumps({"step": 7}))
        raise TerminatedWorkerError("The exit codes of the workers are {SIGKILL(-9)}")


def test_a_lost_worker_costs_its_own_job_alone(tmp_path: Path) -> None:
    pool = Pool(tmp_path, "c", {"before": ["a", "b"], "with": ["d"]})
    recorded: list[tuple[str, int]] = []

    def record(job: Job, reason: WorkerLost, steps: int) -> End:
        recorded.append((job.run_id, steps))
        return {"run_id": job.run_id, "status": "failed", "error": str(reason), "seconds": 0.0}

    jobs = [Job(name) for name in "abcdef"]
    Rounds(pool, tmp_path, record, print).run(jobs)
    assert pool.calls == [
        (["a", "b", "c", "d", "e", "f"], False), (["e", "f"], False), (["c"], True), (["d"], True),
    ]  # fmt: skip
    assert {job.run_id: job.status for job in jobs} == {**dict.fromkeys("abdef", "completed"), "c": "failed"}
    assert recorded == [("c", 7)]
    assert "SIGKILL" in str(jobs[2].error)
    assert [job.seconds for job in jobs[:2]] == [2.0, 2.0]


def test_workers_that_die_before_any_job_do_not_go_on_for_ever(tmp_path: Path) -> None:
    def broken(jobs: Any, alone: bool) -> list[End]:
        raise TerminatedWorkerError("the workers are {EXIT(1)}")

    def record(job: Job, reason: WorkerLost, steps: int) -> End:
        return {"run_id": job.run_id, "status": "failed", "error": str(reason), "seconds": 0.0}

    jobs = [Job("a"), Job("b")]
    Rounds(broken, tmp_path, record, print).run(jobs)
    assert [job.status for job in jobs] == ["failed", "failed"]


def test_other_errors_of_a_launcher_pass_on(tmp_path: Path) -> None:
    def broken(jobs: Any, alone: bool) -> list[End]:
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        Rounds(broken, tmp_path, lambda *rest: {}, print).run([Job("a")])


def test_a_run_of_another_process_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a"
    place.mkdir()
    (place / "lock.json").write_text(json.dumps({**owner_record(), "pid": os.getppid(), "start": None}))
    told: list[str] = []
    calls: list[list[str]] = []

    def launch(jobs: Any, alone: bool) -> list[End]:
        calls.append([job.run_id for job in jobs])
        status = "busy" if (place / "lock.json").exists() else "completed"
        return [{"run_id": "a", "status": status, "error": None, "seconds": 0.0}]

    monkeypatch.setattr("rmsrepro.runs.lost.time.sleep", lambda seconds: (place / "lock.json").unlink())
    (job,) = jobs = [Job("a")]
    Rounds(launch, tmp_path, lambda *rest: {}, told.append).run(jobs)
    assert (job.status, calls) == ("completed", [["a"], ["a"]])
    assert told == [f"waiting for a: process {os.getppid()} is at work on it"]


@pytest.mark.parametrize("owner", [None, DEAD])
def test_a_run_that_another_process_has_left_is_not_waited_for(tmp_path: Path, owner: Any) -> None:
    (tmp_path / "a").mkdir()
    if owner:
        (tmp_path / "a" / "lock.json").write_text(json.dumps(owner))
    told: list[str] = []
    ends = ["completed", "busy"]

    def launch(jobs: Any, alone: bool) -> list[End]:
        return [{"run_id": "a", "status": ends.pop(), "error": None, "seconds": 0.0}]

    (job,) = jobs = [Job("a")]
    Rounds(launch, tmp_path, lambda *rest: {}, told.append).run(jobs)
    assert (job.status, told) == ("completed", [])


# ----------------------------------------------------------------------------------------- sweeps


def run(out_dir: Path, name: str, **content: Any) -> None:
    folder = out_dir / "runs" / name
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(content))


def test_status_tells_live_sweeps_from_abandoned_ones(tmp_path: Path) -> None:
    run(tmp_path, "a", status="completed")
    run(tmp_path, "b", status="failed", error="x")
    run(tmp_path, "c", status="interrupted")
    command = "rmsrepro sweep seed=1,2"
    live = write_manifest(tmp_path, [("a", []), ("z", [])], study=None, command=command)
    gone = write_manifest(tmp_path, [(name, []) for name in "abcy"], study="quick", command=command)
    done = write_manifest(tmp_path, [("a", []), ("b", [])], study=None, command=command)
    release_manifest(gone)
    release_manifest(done)
    old = tmp_path / "sweeps" / "old.json"  # as earlier versions wrote it
    old.write_text(json.dumps({"started": 1, "study": None, "jobs": [{"run_id": "x"}]}))
    (tmp_path / "sweeps" / "bad.json").write_text("{")
    now = read_status(tmp_path)
    told = {row.sweep_id: (row.state, row.counts, row.left) for row in now.sweeps}
    assert told == {
        live.stem: ("live", "1 completed, 1 left", 1),
        gone.stem: ("abandoned", "study quick: 1 completed, 1 failed, 2 left", 2),
        "old": ("abandoned", "1 left", 1),
    }
    advice = {row.sweep_id: row.advice for row in now.sweeps}
    assert advice[live.stem] == ""
    up = f"given up by: rmsrepro status forget={gone.stem} out_dir={tmp_path}"
    assert advice[gone.stem] == f"goes on with: {command}; {up}"
    assert "goes on with the command that began it" in advice["old"]
    assert (now.left, now.abandoned) == (2, 2)
    assert "2 left, 2 of abandoned sweeps" in now.headline
    rows = [(row.state, row.run_id) for row in now.rows]
    assert ("waiting", "z") in rows
    assert ("waiting", "y") not in rows
    assert ("unreadable", "sweeps/bad.json") in rows


def test_an_abandoned_sweep_that_another_takes_up_is_not_named(tmp_path: Path) -> None:
    gone = write_manifest(tmp_path, [("a", [])], study=None)
    release_manifest(gone)
    live = write_manifest(tmp_path, [("a", []), ("b", [])], study=None)
    assert [row.sweep_id for row in read_status(tmp_path).sweeps] == [live.stem]


def test_a_manifest_of_a_dead_process_is_not_live(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, [("a", [])], study="s")
    (one,), _ = read_manifests(tmp_path)
    assert one.live
    path.write_text(json.dumps({**json.loads(path.read_text()), "owner": DEAD}))
    (one,), _ = read_manifests(tmp_path)
    assert not one.live
    assert runs_of_study(tmp_path, "s") == {"a"}
    assert runs_of_study(tmp_path, "t") == frozenset()
