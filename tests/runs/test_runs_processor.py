from __future__ import annotations

import os
from pathlib import Path

import pytest

from rmsrepro.runs import processor
from rmsrepro.runs.environment import machine


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="ascii")


def test_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpu, (package, core) in enumerate([(0, 0), (0, 1), (0, 0), (0, 1), (1, 0)]):
        write(tmp_path, f"cpu{cpu}/topology/physical_package_id", f"{package}\n")
        write(tmp_path, f"cpu{cpu}/topology/core_id", f"{core}\n")
    assert processor.physical_cores([0, 1, 2, 3, 4], tmp_path) == 3
    assert processor.physical_cores([0, 2], tmp_path) == 1
    for cpu in (0, 2):
        write(tmp_path, f"cpu{cpu}/topology/die_id", f"{cpu}\n")
    assert processor.physical_cores([0, 2], tmp_path) == 2
    assert processor.physical_cores([0, 7], tmp_path) is None


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu.max": "nonsense\n"}, None),
    ],
)
def test_the_limit_of_a_container(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        write(tmp_path, name, text)
    assert processor.cpu_quota(tmp_path) == quota


def test_the_compiler_is_asked_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert processor.compiler() is None
    for name, body in (("c++", "exit 1"), ("g++", "echo 'g++ 99.1'; echo more"), ("mine", "echo mine 1.0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="ascii")
        (tmp_path / name).chmod(0o755)
    assert processor.compiler() == "g++: g++ 99.1"
    monkeypatch.setenv("CXX", "mine")
    assert processor.compiler() == "mine: mine 1.0"


def test_what_this_machine_says() -> None:
    assert processor.cpu_model()
    cpus = processor.usable_cpus()
    assert cpus == sorted(set(cpus))
    assert machine()["cores"] == len(cpus) == processor.available_cores()
    cores = processor.physical_cores(cpus)
    assert cores is None or 1 <= cores <= len(cpus)


def test_no_load_average_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getloadavg")
    assert processor.load_average() is None
