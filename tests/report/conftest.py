"""Made records: run and bench folders as the real ones look, with the values a test wants."""

from __future__ import annotations

import json
import math
import os
import random
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.config.study import StudyConfig

MACHINE = {"hostname": "bench-box", "cpu": "Example CPU 9000", "cores": 2, "memory_gb": 16}
ENV = {
    "python": "3.11.7",
    "platform": "Linux x86_64",
    "packages": {"torch": "2.13.0", "lightning": "2.6.1", "rmsrepro": "0.1.0"},
}


def make_config(
    norm: str, model: str, task: str, seed: int, *, steps: int = 300, **changes: Any
) -> dict[str, Any]:
    """A plain run config, as the records hold it; `changes` replaces top-level entries."""
    config: dict[str, Any] = {
        "norm": {"name": norm, "eps": 1e-5} | ({"p": 0.25} if norm == "prmsnorm" else {}),
        "model": {"name": model, "size": "tiny", "d_model": 64},
        "task": {"name": task},
        "data": {"name": "pydoc" if task == "lm" else "cldr", "max_len": 64},
        "optim": {"lr": 3e-3},
        "trainer": {"max_steps": steps, "log_every": 10},
        "placement": "pre",
        "sites": ["gates_x", "gates_h", "cand_x", "cand_h"],
        "backend": "composite",
        "precision": "32",
        "seed": seed,
        "out_dir": "outputs",
        "study_name": "quick",
    }
    return config | changes


def make_rows(
    final: float, *, steps: int = 300, seed: int = 1, start: float = 5.0, upto: float = 1.0
) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl: losses that fall from `start` to `final` at the last step."""
    noise = random.Random(seed)
    rows = []
    for step in range(10, int(steps * upto) + 1, 10):
        left = math.exp(-4.0 * step / steps)
        level = final + (start - final) * left
        row = {
            "step": step,
            "train_seconds": 0.05 * step * (1 + 0.02 * seed),
            "tokens": 1024 * step,
            "train_loss": level + noise.gauss(0, 0.04),
            "lr": 1e-3,
        }
        if step % 30 == 0:
            row["val_loss"] = final if step == steps else level + noise.gauss(0, 0.01)
        rows.append(row)
    return rows


def make_run(
    out_dir: Path,
    norm: str = "layernorm",
    model: str = "gru",
    task: str = "lm",
    seed: int = 1,
    *,
    val_loss: float | None = 2.0,
    status: str = "completed",
    steps: int = 300,
    metrics: Mapping[str, Any] | None = None,
    machine: Mapping[str, Any] = MACHINE,
    rows: list[dict[str, Any]] | None = None,
    run_id: str | None = None,
    error: str | None = None,
    config: Mapping[str, Any] | None = None,
    **result: Any,
) -> Path:
    """Write one run folder. `status="running"` writes a running.json of this very process instead."""
    settings = make_config(norm, model, task, seed, steps=steps) | dict(config or {})
    folder = out_dir / "runs" / (run_id or f"{model}-{task}-{norm}-s{seed}")
    folder.mkdir(parents=True)
    done = {"completed": 1.0, "diverged": 0.3, "failed": 0.2, "interrupted": 0.5, "running": 0.6}[status]
    if rows is None:
        rows = make_rows(val_loss if val_loss is not None else 2.0, steps=steps, seed=seed, upto=done)
        if status == "diverged":
            rows[-1]["train_loss"] = math.inf
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(json.dumps(settings))
    (folder / "env.json").write_text(json.dumps(ENV))
    (folder / "data.json").write_text(json.dumps({"fingerprint": f"content-of-{task}"}))
    if status == "running":
        running = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "step": rows[-1]["step"],
            "max_steps": steps,
        }
        (folder / "running.json").write_text(json.dumps(running))
        return folder
    values = {"val_loss": val_loss} if val_loss is not None and status == "completed" else {}
    record = {
        "schema_version": 1,
        "run_id": folder.name,
        "status": status,
        "config": settings,
        "metrics": values | dict(metrics or {}),
        "clocks": {"train_s": 0.05 * steps * done, "eval_s": 1.0, "total_s": 20.0},
        "steps": int(steps * done),
        "n_parameters": 123456,
        "norm": norm,
        "norm_params": {"eps": 1e-5},
        "backend": "composite",
        "backend_used": "composite",
        "model": model,
        "task": task,
        "data": settings["data"]["name"],
        "seed": seed,
        "parent": None,
        "error": error,
        "study": settings["study_name"],
        "placement": "pre",
        "precision": "32",
        "flags": [],
        "machine": dict(machine),
    }
    (folder / "result.json").write_text(json.dumps(record | result))
    return folder


def make_comparison(
    norm: str = "rmsnorm", model: str = "gru", ratio: float = 0.9, **changes: Any
) -> dict[str, Any]:
    """One comparison of a bench, as the contract lays it out."""
    comparison: dict[str, Any] = {
        "level": "step",
        "model": model,
        "task": "lm",
        "shape": [16, 64],
        "mode": "step",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "arm": f"{norm}/composite",
        "baseline": "layernorm/composite",
        "ratio": ratio,
        "ratio_ci": [ratio - 0.02, ratio + 0.02],
        "time_reduction_pct": 100 * (1 - ratio),
        "time_reduction_ci": [100 * (1 - ratio - 0.02), 100 * (1 - ratio + 0.02)],
        "aa_ratio": 1.002,
        "aa_ci": [0.996, 1.008],
        "n_rounds": 40,
        "n_processes": 8,
        "trusted": True,
        "flags": [],
    }
    return comparison | changes


def make_bench(out_dir: Path, comparisons: list[dict[str, Any]], bench_id: str = "b1", **result: Any) -> Path:
    """Write one bench folder."""
    folder = out_dir / "bench" / bench_id
    folder.mkdir(parents=True)
    record = {
        "schema_version": 1,
        "arms": [],
        "comparisons": comparisons,
        "machine": MACHINE,
        "study": "quick",
    }
    (folder / "result.json").write_text(json.dumps(record | result))
    return folder


def make_study(**changes: Any) -> StudyConfig:
    """A study of one cell, gru/lm, with two norms beside the baseline and three seeds."""
    settings: dict[str, Any] = {
        "name": "quick",
        "title": "Quick study",
        "norms": ["layernorm", "rmsnorm", "prmsnorm"],
        "models": ["gru"],
        "tasks": ["lm"],
        "seeds": [1, 2, 3],
        "primary": {"lm": "val_loss"},
        "margin": {"val_loss": 0.05},
        "learned": {"gru/lm": 2.5},
        "target": {"gru/lm": 2.4},
    }
    return StudyConfig(**(settings | changes))


def make_arm(out_dir: Path, norm: str, losses: list[float | None], **changes: Any) -> None:
    """One run a seed from 1 on, with these final losses; None leaves the run out."""
    for seed, loss in enumerate(losses, start=1):
        if loss is not None:
            make_run(out_dir, norm, seed=seed, val_loss=loss, **changes)


@pytest.fixture
def made() -> Callable[..., Any]:
    """Access to the makers by name: `made("run", out_dir, ...)`."""
    makers: dict[str, Callable[..., Any]] = {
        "run": make_run,
        "arm": make_arm,
        "bench": make_bench,
        "comparison": make_comparison,
        "study": make_study,
        "rows": make_rows,
        "config": make_config,
    }
    return lambda kind, *args, **kwargs: makers[kind](*args, **kwargs)
