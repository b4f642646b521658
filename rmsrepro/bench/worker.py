"""One fresh process of a bench: `python -m rmsrepro.bench.worker spec.json out.json`.

Builds all arms, times them, and writes what it found to out.json. Lines on standard output that begin
with `EVENT_MARK` tell the parent how far it is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch

from rmsrepro.bench.arms import Arm, PreparedData, TrainingStep, arm_config
from rmsrepro.bench.load import peak_rss_bytes
from rmsrepro.bench.planning import Plan
from rmsrepro.bench.processes import EVENT_MARK
from rmsrepro.bench.protocol import Clock, no_synchronize
from rmsrepro.bench.session import Contestant, run_session
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.plain import from_plain
from rmsrepro.config.plugins import load_plugins
from rmsrepro.runs.files import to_json, write_atomic

EVENT_EVERY_S = 0.5
LOSS_TOLERANCE = {"32": 1e-4, "bf16-mixed": 2e-2}
"""Relative difference of first losses between two backends of a norm, by precision."""
REFERENCE_BACKEND = "composite"


def choose_device(accelerator: str) -> torch.device:
    """Return the device that `trainer.accelerator` (auto, cpu, gpu) means."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator == "cpu" or found is None else found


def contestants(arms: list[Arm]) -> list[Contestant]:
    """Say of each arm what it is compared with, and which loss it must reproduce."""
    baselines = {arm.backend: arm.label for arm in arms if arm.is_baseline}
    references = {
        (arm.norm, repr(sorted(arm.params.items()))): arm.label
        for arm in arms
        if arm.backend == REFERENCE_BACKEND
    }
    found = []
    for arm in arms:
        reference = references.get((arm.norm, repr(sorted(arm.params.items()))))
        found.append(
            Contestant(
                label=arm.label,
                twins=arm.twins,
                baseline=baselines.get(arm.backend, arm.label),
                reference=None if reference == arm.label else reference,
            )
        )
    return found


class Events:
    """Tells the parent how far we are, and ends this process when the parent is gone."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._last = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        if os.getppid() != self._parent:
            raise SystemExit("the bench that started this process has ended")
        now = time.monotonic()
        if now - self._last >= EVENT_EVERY_S or done == total:
            self._last = now
            print(EVENT_MARK + json.dumps({"phase": phase, "done": done, "total": total}), flush=True)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Do what `spec` (written by `rmsrepro.bench.runner`) says; return the content of out.json."""
    if spec["threads"] is not None:
        torch.set_num_threads(spec["threads"])
    base = from_plain(spec["base"])
    load_plugins(base.plugins)
    config = BenchConfig(**spec["bench"])
    arms = [Arm(**arm) for arm in spec["arms"]]
    device = choose_device(base.trainer.accelerator)
    data: PreparedData = torch.load(spec["data"], weights_only=False)
    clock = Clock(no_synchronize if device.type == "cpu" else torch.accelerator.synchronize)

    def builder(arm: Arm) -> Callable[[], TrainingStep]:
        return lambda: TrainingStep(arm_config(base, arm), data, device)

    outcome = run_session(
        {name: builder(arm) for arm in arms for name in arm.twins},
        contestants(arms),
        config,
        clock,
        process=spec["process"],
        plan=Plan(**spec["plan"]) if spec["plan"] is not None else None,
        spent_s=lambda: time.time() - spec["spawned_at"],
        tolerance=LOSS_TOLERANCE[base.precision],
        on_event=Events(),
    )
    result = {name: value for name, value in vars(outcome).items() if name != "samples"}
    result["plan"] = asdict(outcome.plan) if outcome.plan is not None else None
    result["samples"] = [astuple(sample) for sample in outcome.samples]
    result["threads"] = torch.get_num_threads()
    result["device"] = device.type
    result["peak_rss_bytes"] = peak_rss_bytes()
    result["peak_device_bytes"] = torch.accelerator.max_memory_allocated() if device.type == "cuda" else None
    return result


def main(arguments: list[str]) -> int:
    """Run the worker; errors go to standard error, where the parent reads them."""
    spec_path, out_path = arguments
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    write_atomic(Path(out_path), to_json(measure(spec), indent=None))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
