"""Large packages are imported with the garbage collector off, and only then."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmsrepro.config.imports import importing


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that is not imported yet."""
    (tmp_path / "large_package.py").write_text(
        "import gc\nWATCHED = gc.isenabled()\nKEPT = [[] for _ in range(5)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "large_package", raising=False)
    return "large_package"


def test_the_collector_rests_while_a_package_is_imported(large: str) -> None:
    gc.unfreeze()
    with importing(large):
        module = __import__(large)
    assert module.WATCHED is False
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0, "what was imported is gone through again"
    assert all(item is not module.KEPT for item in gc.get_objects())


def test_nothing_changes_where_the_package_is_there(large: str) -> None:
    __import__(large)
    gc.unfreeze()
    with importing(large):
        assert gc.isenabled()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_a_collector_that_is_off_stays_off(large: str) -> None:
    gc.unfreeze()
    gc.disable()
    with importing(large):
        pass
    assert (gc.isenabled(), gc.get_freeze_count()) == (False, 0)


def test_a_package_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), importing("no_such_package"):
        __import__("no_such_package")
    assert gc.isenabled()


def test_torch_and_lightning_are_imported_so() -> None:
    # A full collection while they are imported is what takes the time.
    code = """\
import gc, sys
from rmsrepro.cli import main

full = []

def watch(phase, info):
    if info["generation"] == 2 and "torch" in sys.modules and "rmsrepro.runs.train" not in sys.modules:
        full.append(phase)

gc.callbacks.append(watch)
code = main(["train", "debug=fast", "tracker=none", "norm=rmsnorm"])
print(code, len(full), "rmsrepro.runs.train" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 0 True"
