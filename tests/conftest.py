"""What every test starts from: quiet trackers, no network, one thread, an empty directory."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Set while this file is imported: torch, datasets and wandb read these when they are imported, which the test
# modules do. Programs that the tests start inherit them.
_SCRATCH = tempfile.TemporaryDirectory(prefix="rmsrepro-tests-")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
for _name in _THREADS:
    os.environ.setdefault(_name, "1")
os.environ.update(
    {
        # Caches and settings that would otherwise be read from and written to the home directory.
        "HF_HOME": f"{_SCRATCH.name}/huggingface",
        "SACREBLEU": f"{_SCRATCH.name}/sacrebleu",
        "WANDB_CACHE_DIR": f"{_SCRATCH.name}/wandb-cache",
        "WANDB_CONFIG_DIR": f"{_SCRATCH.name}/wandb-config",
        "WANDB_DATA_DIR": f"{_SCRATCH.name}/wandb-data",
        # A test of the tracker sets its own mode with monkeypatch.
        "WANDB_MODE": "disabled",
        "WANDB_SILENT": "true",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
for _name in ("WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_ID"):
    os.environ.pop(_name, None)

# Built kernels are kept: what they are built from is in their name. Programs with another home find them too.
_caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
os.environ.setdefault("RMSREPRO_CACHE", f"{_caches}/rmsrepro")

# Programs that tests start elsewhere find the package even when the checkout is not installed.
try:
    importlib.metadata.version("rmsrepro")
except importlib.metadata.PackageNotFoundError:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        skip = pytest.mark.skip(reason="slow: run with --all")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)
    if "network" not in (config.getoption("-m") or ""):
        skip = pytest.mark.skip(reason="downloads: run with -m network")
        for item in items:
            if "network" in item.keywords:
                item.add_marker(skip)


def pytest_unconfigure() -> None:
    _SCRATCH.cleanup()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout's top folder."""
    return ROOT


@pytest.fixture(autouse=True)
def _scratch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty directory of its own, since outputs/ and ./conf are relative to it."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def _built_kernels() -> None:
    """The fused kernels, where they can be had, are built before a test reads what a command prints."""
    from rmsrepro.norms.backends.toolchain import why_no_kernels

    why_no_kernels()


@pytest.fixture
def no_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the fused kernels cannot be built, as this process sees it."""
    monkeypatch.setattr("rmsrepro.norms.backends.why_no_kernels", lambda: "no kernels in this test")


@pytest.fixture
def fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has the fused kernels, for tests that choose a backend and run nothing in it."""
    monkeypatch.setattr("rmsrepro.norms.backends.why_no_kernels", lambda: None)
