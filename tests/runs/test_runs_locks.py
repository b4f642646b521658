"""Locks: one owner at a time, dead owners, owners on other machines."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.runs import files
from rmsrepro.runs.files import Locked, alive, lock, number, owner_record, touch_lock

DEAD = {"pid": 2**22 + 1, "host": socket.gethostname(), "start": "1", "updated": 0.0}
"""No process can have this number: it is above the kernel's highest."""

# Loads the module by itself: without torch a process starts in no time.
RACER = """
import importlib.util, json, os, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("files", sys.argv[1])
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
judge = files.alive
def hesitant(*arguments):  # a pause where one that was judged dead may be replaced
    found = judge(*arguments)
    time.sleep(0.001)
    return found
files.alive = hesitant
path, dead, wanted = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
marker, overlaps, held = path.with_name("marker"), 0, 0
deadline = time.monotonic() + 60
while held < wanted and time.monotonic() < deadline:
    try:
        with files.lock(path):
            held += 1
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                overlaps += 1
            time.sleep(0.0005)
            marker.unlink(missing_ok=True)
            # Die, as far as the others can see: the next of them has to take over.
            corpse = path.with_name(f"corpse{os.getpid()}")
            corpse.write_text(dead)
            corpse.replace(path)
    except files.Locked:
        time.sleep(0.0002)
print(held, overlaps)
"""


def test_of_many_that_find_a_dead_owner_one_at_a_time_takes_over(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text(json.dumps(DEAD))
    command = [sys.executable, "-c", RACER, files.__file__, str(path), json.dumps(DEAD), "25"]
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
    files._bury(path, DEAD)
    assert json.loads(path.read_text()) == living
    assert [item.name for item in tmp_path.iterdir()] == ["lock.json"]
    path.write_text(json.dumps(DEAD))
    files._bury(path, DEAD)
    assert list(tmp_path.iterdir()) == []
    files._bury(path, DEAD)  # another was faster


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

    monkeypatch.setattr(files, "alive", overtaken)
    monkeypatch.setattr(files, "_guard", lambda folder: contextlib.nullcontext(False))
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
    monkeypatch.setattr(files, "owner_record", lambda: {"pid": object()})
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
