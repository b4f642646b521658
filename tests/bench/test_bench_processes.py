from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.bench.processes import ProcessFailed, child_environment, run_worker
from rmsrepro.bench.runner import BenchError, exclusive
from rmsrepro.bench.worker import Events
from rmsrepro.runs.owners import owner_record


def worker(code: str) -> tuple[str, ...]:
    """A stand-in for the measuring process: `spec` and `out` are the paths it is given."""
    return (sys.executable, "-c", f"import json, os, sys, time\nspec, out = sys.argv[1:]\n{code}")


def run(folder: Path, code: str, *, timeout_s: float = 30, threads: int | None = None) -> Any:
    return run_worker(
        {"process": 0, "threads": threads},
        folder,
        timeout_s=timeout_s,
        on_event=lambda event: None,
        command=worker(code),
    )


def test_the_result_comes_back_and_the_spec_goes_in(tmp_path: Path) -> None:
    found = run(tmp_path, "json.dump({**json.load(open(spec)), 'answer': 42}, open(out, 'w'))")
    assert found["answer"] == 42
    assert found["process"] == 0
    assert 0 <= time.time() - found["spawned_at"] < 60


def test_threads_are_set_in_the_environment_of_the_process(tmp_path: Path) -> None:
    code = "json.dump([os.environ[name] for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS')], open(out, 'w'))"
    assert run(tmp_path, code, threads=3) == ["3", "3"]


def test_threads_left_open_leave_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert child_environment(None)["OMP_NUM_THREADS"] == "5"


def test_events_are_told_and_other_output_is_not(tmp_path: Path) -> None:
    events: list[Mapping[str, Any]] = []
    run_worker(
        {"process": 0, "threads": None},
        tmp_path,
        timeout_s=30,
        on_event=events.append,
        command=worker(
            "print('hello')\n"
            "print('@bench ' + json.dumps({'phase': 'rounds', 'done': 1, 'total': 2}))\n"
            "print('@bench {')\n"
            "json.dump({}, open(out, 'w'))"
        ),
    )
    assert events == [{"phase": "rounds", "done": 1, "total": 2}]


def test_a_failing_process_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match=r"exit code 1: .*ValueError: no such norm"):
        run(tmp_path, "raise ValueError('no such norm')")


def test_a_killed_process_is_reported_with_its_signal(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="ended by SIGKILL: it wrote no message"):
        run(tmp_path, "os.kill(os.getpid(), 9)")


def test_a_process_without_a_result_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="without a result"):
        run(tmp_path, "pass")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has collected yet is dead enough.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(pid: int) -> None:
    for _ in range(100):
        if not alive(pid):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} still runs")


PARENT_OF_A_SLEEPER = """
import subprocess
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
open(os.path.join(os.path.dirname(spec), 'pids'), 'w').write(f'{os.getpid()} {child.pid}')
print('@bench {"phase": "ready"}', flush=True)
time.sleep(600)
"""


def test_a_process_that_takes_too_long_is_stopped_with_its_children(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="stopped after 3 s"):
        run(tmp_path, PARENT_OF_A_SLEEPER, timeout_s=3)
    for pid in (tmp_path / "pids").read_text().split():
        assert_gone(int(pid))


def test_an_interrupt_stops_the_process_and_its_children(tmp_path: Path) -> None:
    def interrupt(event: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_worker(
            {"process": 0, "threads": None},
            tmp_path,
            timeout_s=60,
            on_event=interrupt,
            command=worker(PARENT_OF_A_SLEEPER),
        )
    for pid in (tmp_path / "pids").read_text().split():
        assert_gone(int(pid))


def test_a_measuring_process_ends_when_its_parent_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rmsrepro.bench.worker.os.getppid", lambda: 17)
    events = Events()
    events("round", 2, 2)
    assert capsys.readouterr().out == '@bench {"phase": "round", "done": 2, "total": 2}\n'
    monkeypatch.setattr("rmsrepro.bench.worker.os.getppid", lambda: 1)
    with pytest.raises(SystemExit, match="has ended"):
        events("round", 2, 2)


# ------------------------------------------------------------------------------------- lock


def test_the_lock_of_a_living_bench_is_respected(tmp_path: Path) -> None:
    path = tmp_path / "bench.lock"
    path.write_text(json.dumps(owner_record()))
    told: list[str] = []
    with (
        pytest.raises(BenchError, match=rf"another bench \(process {os.getpid()}\) is measuring"),
        exclusive(path, 0.6, told.append),
    ):
        pass
    assert told == [f"waiting for another bench (process {os.getpid()}) to end"]
    assert path.exists()


def test_the_lock_of_a_dead_bench_is_taken_over_and_given_back(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    path = tmp_path / "bench.lock"
    path.write_text(json.dumps({**owner_record(), "pid": dead.pid, "start": None}))
    with exclusive(path, 0, lambda line: None):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()


def test_a_bench_that_ends_lets_the_waiting_one_in(tmp_path: Path) -> None:
    path = tmp_path / "bench.lock"
    path.write_text(json.dumps(owner_record()))
    with exclusive(path, 30, lambda line: path.unlink()):
        assert path.exists()


def test_an_error_gives_the_lock_back(tmp_path: Path) -> None:
    path = tmp_path / "bench.lock"
    with pytest.raises(ZeroDivisionError), exclusive(path, 0, lambda line: None):
        raise ZeroDivisionError
    assert not path.exists()
