"""Locks: one owner at a time, dead owners, owners on other machines."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.runs import locks, owners
from rmsrepro.runs.files import number
from rmsrepro.runs.locks import Locked, lock
from rmsrepro.runs.owners import alive, owner_record, touch_lock

DEAD = {"pid": 2**22 + 1, "host": socket.gethostname(), "start": "1", "updated": 0.0}
"""No process can have this number: it is above the kernel's highest."""

RACER = Path(__file__).with_name("lock_racer.py")


@pytest.mark.parametrize("mode", ["posix", "nfs", "local"])
def test_of_many_that_find_a_dead_owner_one_at_a_time_takes_over(tmp_path: Path, mode: str) -> None:
    """Also where flock fails, or holds on one machine only."""
    path = tmp_path / "lock.json"
    path.write_text(json.dumps(DEAD))
    command = [sys.executable, str(RACER), str(path), json.dumps(DEAD), "25", mode]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [racer.communicate(timeout=100)[0].split() for racer in racers] == [["25", "0"]] * 4
    assert [item.name for item in tmp_path.iterdir()] == ["lock.json"]
    with lock(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_replaced_since_it_was_judged_dead_stays(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    living = owner_record()
    path.write_text(json.dumps(living))
    locks._bury(path, DEAD)
    assert json.loads(path.read_text()) == living
    assert [item.name for item in tmp_path.iterdir()] == ["lock.json"]
    path.write_text(json.dumps(DEAD))
    locks._bury(path, DEAD)
    assert list(tmp_path.iterdir()) == []
    locks._bury(path, DEAD)  # another was faster


def test_without_a_guard_the_slower_of_two_finds_it_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock.json"
    path.write_text(json.dumps(DEAD))
    living, judge = owner_record() | {"updated": 1.0}, alive

    def overtaken(owner: dict[str, Any], file: Path | None = None) -> bool:
        found = judge(owner, file)
        if not found:
            path.write_text(json.dumps(living))  # between the judgement and the take-over
        return found

    monkeypatch.setattr(locks, "alive", overtaken)
    monkeypatch.setattr(locks, "_guard", lambda folder: contextlib.nullcontext(False))
    with pytest.raises(Locked) as busy, lock(path):
        pass
    assert busy.value.owner == living
    assert json.loads(path.read_text()) == living


def test_the_end_leaves_anothers_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    other = owner_record() | {"host": "elsewhere"}
    with lock(path):
        path.write_text(json.dumps(other))
    assert json.loads(path.read_text()) == other
    with pytest.raises(Locked, match=f"process {os.getpid()} on elsewhere"), lock(path):
        pass


@pytest.mark.parametrize("left", ["", "{", "[1]", "[" * 100_000])
def test_a_file_that_a_crash_left_is_no_lock(tmp_path: Path, left: str) -> None:
    path = tmp_path / "deep" / "lock.json"
    path.parent.mkdir()
    path.write_text(left)
    with lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert list(path.parent.iterdir()) == []


def test_a_lock_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock.json"
    monkeypatch.setattr(locks, "owner_record", lambda: {"pid": object()})
    with pytest.raises(TypeError), lock(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_another_machines_owner_lives_while_it_gives_signs(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    long_ago = time.time() - 3600
    owner = {"pid": 1, "host": "elsewhere", "start": "1", "updated": long_ago}
    path.write_text(json.dumps(owner))
    running = tmp_path / "running.json"
    running.write_text("{}")
    for file in (path, running):
        os.utime(file, (long_ago, long_ago))
    assert not alive(owner)
    assert not alive(owner, path)
    os.utime(running)
    assert alive(owner, path)
    running.unlink()
    assert not alive(owner, path)
    touch_lock(tmp_path)
    assert path.stat().st_mtime == pytest.approx(time.time(), abs=60)
    assert alive(owner, path)
    assert not alive(owner)
    with pytest.raises(Locked, match="process 1 on elsewhere"), lock(path):
        pass
    os.utime(path, (long_ago, long_ago))
    with lock(path):
        assert json.loads(path.read_text())["host"] == socket.gethostname()
    touch_lock(tmp_path)  # no lock, no matter
    assert not path.exists()


@pytest.mark.parametrize("pid", [None, "x", [], {}, -1, 0, 2**80, float("inf"), float("nan")])
@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere", None])
def test_a_damaged_owner_is_dead(pid: Any, host: Any) -> None:
    assert not alive({"pid": pid, "host": host, "start": {}, "updated": pid if pid != 2**80 else None})


def test_numbers_of_records() -> None:
    values: list[Any] = [1, "2.5", None, "nan", float("inf"), [1], {}]
    assert [number(value) for value in values] == [1, 2.5, 0, 0, 0, 0, 0]
    assert number(None, 7.0) == 7.0


# ------------------------------------------------------------------- owners that are not what they seem


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let this process run elsewhere: `place(boot="b2")`."""

    def move(**changes: str | None) -> None:
        here = {"boot": "b1", "machine": "m1", "namespace": "pid:[1]"} | changes
        monkeypatch.setattr(owners, "_place", lambda: here)

    move()
    return move


def test_what_was_before_a_restart_is_dead(place: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text(json.dumps(owner_record()))
    owner = json.loads(path.read_text())
    assert alive(owner, path)
    # The number and the start may come again: both count from the restart.
    place(boot="b2")
    assert not alive(owner, path)
    # Another machine of the same name: it cannot be asked, and its file is new.
    place(boot="b2", machine="m2")
    assert alive(owner, path)
    place(boot="b2", machine=None)
    assert alive(owner, path)


def test_another_containers_process_is_not_asked_for_by_its_number(
    place: Callable[..., None], tmp_path: Path
) -> None:
    path = tmp_path / "lock.json"
    owner = owner_record() | {"pid": DEAD["pid"]}
    path.write_text(json.dumps(owner))
    assert not alive(owner, path)
    place(namespace="pid:[2]")
    assert alive(owner, path)
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))
    assert not alive(owner, path)
    # One that held the system's lock, as all of this kernel do, and holds it no more, is dead at once.
    os.utime(path)
    assert not alive(owner | {"flock": True}, path)


def test_a_renamed_machine_still_knows_its_processes(
    place: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock.json"
    owner = owner_record() | {"host": "before"}
    path.write_text(json.dumps(owner))
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))
    assert alive(owner, path)
    assert not alive(owner | {"pid": DEAD["pid"]}, path)


def test_the_systems_lock_is_proof_of_life(tmp_path: Path) -> None:
    """Whatever else is wrong with the record, or no longer there."""
    path = tmp_path / "lock.json"
    with lock(path):
        assert json.loads(path.read_text())["flock"] is True
        assert alive(DEAD, path)
        path.write_text(json.dumps(DEAD))
        with pytest.raises(Locked), lock(path):
            pass
    assert not alive(DEAD, path)


def test_a_reused_number_without_a_start_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not tell when a process began, its lock does."""
    monkeypatch.setattr(owners, "process_start", lambda pid: None)
    path = tmp_path / "lock.json"
    owner = owner_record() | {"flock": True}
    assert owner["start"] is None
    path.write_text(json.dumps(owner))
    assert not alive(owner, path)
    assert alive(owner | {"flock": False}, path)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        owner = owner_record() | {"pid": process.pid, "start": owners.process_start(process.pid)}
        deadline = time.monotonic() + 30
        while owners._state(process.pid) != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, 0)  # its number is still taken
        assert not alive(owner)
    finally:
        process.wait()


@pytest.mark.parametrize("jump", [-7200, 7200])
def test_clocks_that_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """Signs of life are held against the clock of the file system, not against this machine's."""
    path = tmp_path / "lock.json"
    owner = owner_record() | {"host": "elsewhere", "boot": "other", "updated": time.time() + jump}
    path.write_text(json.dumps(owner))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump)
    assert alive(owner, path)
    # A time to come is what a clock leaves that was set back; it does not keep the lock for ever.
    os.utime(path, (now + 3600, now + 3600))
    assert not alive(owner, path)


def test_a_turn_that_a_crash_left_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    ticket = tmp_path / "lock.json.turn"
    ticket.touch()
    with locks._turn(path) as mine:
        assert not mine
    assert ticket.exists()
    long_ago = time.time() - 60
    os.utime(ticket, (long_ago, long_ago))
    with lock(path):
        assert not ticket.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock.json"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, content: len(content) // 2)
        with pytest.raises(OSError, match="No space left"), lock(path):
            pass
    assert list(tmp_path.iterdir()) == []
    with lock(path):
        pass
