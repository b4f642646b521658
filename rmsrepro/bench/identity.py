"""When two benches are the same bench, so that an earlier timing may stand for a new one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rmsrepro
from rmsrepro.bench.cells import Arm
from rmsrepro.bench.levels import get_level
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.paths import expanded
from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.environment import machine
from rmsrepro.runs.files import read_json, to_json

_NOT_DECISIVE = ("timeout_s", "lock_wait_s", "reuse", "norms", "backends", "cells", "max_other_load")
"""Fields of BenchConfig that do not touch the numbers (the arms enter by what they resolve to)."""


def thread_setting(config: BenchConfig, base: TrainConfig) -> int | None:
    """Return the number of threads asked for, or None for torch's own choice."""
    return config.num_threads if config.num_threads is not None else base.trainer.num_threads


def bench_key(config: BenchConfig, base: TrainConfig, norms: Iterable[Mapping[str, Any]]) -> str:
    """Return a hash of everything that decides the numbers: what is timed, how, on what, with what."""
    arms, _ = get_level(config.name).arrange(config, base, norms)
    return key_of_arms(config, base, arms)


def key_of_arms(config: BenchConfig, base: TrainConfig, arms: Iterable[Arm]) -> str:
    """`bench_key` for arms that are arranged already."""
    content = {
        "package": rmsrepro.__version__,
        "machine": machine(),
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "threads": thread_setting(config, base) or os.environ.get("OMP_NUM_THREADS", "torch's choice"),
        "bench": {name: value for name, value in asdict(config).items() if name not in _NOT_DECISIVE},
        "arms": [asdict(arm) for arm in arms],
        "accelerator": base.trainer.accelerator,
        **get_level(config.name).identity(base),
    }
    return hashlib.sha256(to_json(content, indent=None).encode()).hexdigest()[:16]


def bench_dir(out_dir: str | Path) -> Path:
    """Return the folder that holds one folder for each bench."""
    return expanded(out_dir) / "bench"


def find_reusable(out_dir: str | Path, key: str) -> Path | None:
    """Return the folder of the newest complete bench with this key, or None."""
    found = []
    for path in bench_dir(out_dir).glob("*/result.json"):
        record = None if path.parent.name.startswith(".") else read_json(path)
        if (
            record is not None
            and record.get("key") == key
            and record.get("status") == "completed"
            and (path.parent / "samples.csv").is_file()
        ):
            found.append((str(record.get("created", "")), path.parent))
    return max(found)[1] if found else None
