"""Every level of the C++ kernels that this processor runs: against float64, and against each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from rmsrepro.norms.backends.fused import building, compiling, launch
from rmsrepro.norms.backends.fused.launch import Launcher
from rmsrepro.norms.backends.fused.levels import FORCED, known_levels, processor_flags
from rmsrepro.norms.backends.fused.library import Kernels
from rmsrepro.norms.backends.fused.rule import Rule
from tests.norms.conftest import skip_without

LEVELS = [level.name for level in known_levels() if level.needs <= processor_flags()]
UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""From one number to the next, relative to it."""


@pytest.fixture(autouse=True)
def _kernels() -> None:
    skip_without("fused")


@dataclass(frozen=True)
class Ran:
    worst: dict[str, dict[str, float]]
    results: dict[str, np.ndarray]


@cache
def ran(level: str, folder: Path) -> Ran:
    """Run the worker once a level, on the library of all levels, which is built where it is not there."""
    building.build(known_levels())
    return work(level, folder / f"{level}.npz")


def work(level: str, file: Path, *words: str, **variables: str) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "tests.norms.levels_worker", str(file), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env=os.environ | {FORCED: level} | variables,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert said["level"] == level
    with np.load(file) as results:
        return Ran(said["worst"], dict(results))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("levels")


@pytest.mark.parametrize("level", LEVELS)
def test_values_and_gradients_are_those_of_float64(level: str, folder: Path) -> None:
    worst = ran(level, folder).worst
    assert len(worst) > 350
    assert {case: found for case, found in worst.items() if not max(found.values()) <= 1} == {}
    # The bounds are near what there is: an error of a few units would show.
    for dtype in UNITS:
        assert max(max(found.values()) for case, found in worst.items() if case.startswith(dtype)) > 0.05


@pytest.mark.parametrize("level", LEVELS[1:])
def test_levels_agree(level: str, folder: Path) -> None:
    first, other = ran(LEVELS[0], folder).results, ran(level, folder).results
    assert set(first) == set(other)
    for name, one in first.items():
        result = name.rsplit(" ", 1)[-1]
        dtype = name.split(" ")[0]
        unit = UNITS["float32" if result in ("dgain", "dbias") and dtype != "float64" else dtype]
        room = 8 * unit * np.abs(one).max(initial=1.0)
        assert np.abs(one - other[name]).max() <= room, name


def test_calls_by_way_of_ctypes_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    path, level = building.find_or_build()
    x, dy = torch.randn(7, 33), torch.randn(7, 33)
    gain = torch.randn(33)
    norm = Launcher(Rule(33, True, 1 / 33, 1e-5, False, False), 33)
    found = []
    for fast in (True, False):
        loaded = Kernels(path, level.name, fast=fast)
        monkeypatch.setattr(launch, "kernels", lambda loaded=loaded: loaded)
        # Many times, since what a call is given must live as long as the call.
        found += [[norm.forward(x, gain, None), *norm.backward(dy, x, gain, None)[:2]] for _ in range(50)]
    for results in found:
        for one, other in zip(found[0], results, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


@pytest.mark.slow
def test_without_openmp_and_the_headers_of_python_results_are_the_same(folder: Path, tmp_path: Path) -> None:
    usual = ran("portable", folder)
    cache = tmp_path / "cache"
    bare = work("portable", tmp_path / "bare.npz", "bare", RMSREPRO_CACHE=str(cache))
    (about,) = cache.rglob("*.json")
    told = json.loads(about.read_text())
    assert (told["levels"], told["openmp"], told["python_headers"]) == (["portable"], False, False)
    assert max(max(found.values()) for found in bare.worst.values()) <= 1
    alike = [name for name in usual.results if " 1 threads" in name]
    assert len(alike) > 1000
    assert [name for name in alike if not np.array_equal(usual.results[name], bare.results[name])] == []


def test_code_of_a_level_shares_nothing_with_that_of_others() -> None:
    """The linker keeps one copy of an inline function of the standard library, of whichever level."""
    allowed = {"cstdint", "cstring", "cstdlib", "omp.h", "immintrin.h"}
    files = [path for path in compiling.sources() if path.name != "binding.cpp"]
    assert len(files) > 4
    for path in files:
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        assert set(re.findall(r"#include <(.*)>", text)) <= allowed, path.name
        assert "std::" not in text, path.name
        assert "using namespace" not in text, path.name
