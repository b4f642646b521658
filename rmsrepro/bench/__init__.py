"""Paired timing: what a norm costs by itself, in a model and in training, against its backend's LayerNorm.

A bench times cells (shape, mode, dtype) of a level, each with the same arms (norm and backend):

    cells.py       what a cell, an arm and a step are
    levels.py      what a level has to say; layer.py, model_step.py and step.py are the levels
    task_step.py   what steps of the package's models share; user_model.py, user_step.py: the user's own
    trainer_step.py   the training step inside Lightning's Trainer
    arms.py        which norms are timed, and against which baseline
    runner.py      a whole bench: lock, processes, record
    measuring.py   its processes: a pilot that plans (planning.py), then those that measure
    worker.py      one process; session.py does one cell in it, protocol.py takes the times
    statistics.py  from samples to ratios with intervals
    record.py      the tables of a cell; result.py all of result.json
    gate.py, model_gate.py   what arms compute, held against float64
    counting.py, memory.py, settings.py, load.py   what stands beside the times
    doctor.py      what this machine can measure; trial.py tries it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmsrepro.bench.identity import bench_key, find_reusable
    from rmsrepro.bench.measuring import BenchError
    from rmsrepro.bench.runner import BenchResult, run_bench

__all__ = ["BenchError", "BenchResult", "bench_key", "find_reusable", "run_bench"]

_HOMES = {
    "BenchError": "measuring",
    "BenchResult": "runner",
    "bench_key": "identity",
    "find_reusable": "identity",
    "run_bench": "runner",
}
"""Fetched when first asked for: a measuring process should not wait for what only its parent needs."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
