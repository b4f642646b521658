"""What a run ran on: versions, processor, git commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

import rmsrepro
from rmsrepro.norms.backends.fused.library import kernels, loaded_kernels
from rmsrepro.runs.processor import available_cores, cpu_model

_PACKAGES = (
    "torch", "lightning", "hydra-core", "omegaconf", "datasets", "tokenizers", "sacrebleu", "torchmetrics",
    "wandb", "numpy", "scipy", "pandas", "Babel", "num2words",
)  # fmt: skip


@cache
def machine() -> dict[str, Any]:
    """Return what identifies the machine for timing: processor, cores, GPU, system."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": available_cores(),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
    }


def environment(backend: str) -> dict[str, Any]:
    """Return the content of the env.json of a run on `backend`."""
    if backend == "fused":
        kernels()
    return {
        "rmsrepro": rmsrepro.__version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "packages": versions(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "fused_kernels": loaded_kernels() if backend == "fused" else None,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


@cache
def versions() -> dict[str, str | None]:
    """Return the installed version of each package that matters here (None: not installed)."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


@cache
def _git_commit() -> str | None:
    """Return the commit of the checkout this package runs from, with a mark when files differ from it."""
    folder = Path(rmsrepro.__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder, capture_output=True, text=True, timeout=10, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("-dirty" if dirty else "")
