"""One fresh process of a bench: `python -m rmsrepro.bench.worker spec.json out.json`.

Goes through the cells one after another, builds and times their arms, and writes what it found to out.json.
Lines on standard output that begin with `EVENT_MARK` tell the parent how far it is.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch

from rmsrepro.bench.arms import contestants
from rmsrepro.bench.cells import Arm, Cell
from rmsrepro.bench.devices import choose_clock, choose_device, device_clock_mhz
from rmsrepro.bench.levels import get_level
from rmsrepro.bench.load import peak_rss_bytes
from rmsrepro.bench.memory import keep_large_blocks, peak_bytes
from rmsrepro.bench.planning import Plan
from rmsrepro.bench.processes import EVENT_MARK
from rmsrepro.bench.session import CellOutcome, Task, run_session
from rmsrepro.bench.settings import machine_settings
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.plain import from_plain
from rmsrepro.config.plugins import load_plugins
from rmsrepro.norms.backends.fused.library import loaded_kernels
from rmsrepro.runs.files import to_json, write_atomic

EVENT_EVERY_S = 0.5


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
    keeps = keep_large_blocks() if spec["keep_blocks"] else False
    if spec["threads"] is not None:
        torch.set_num_threads(spec["threads"])
    base = from_plain(spec["base"])
    load_plugins(base.plugins)
    config = BenchConfig(**spec["bench"])
    level = get_level(config.name)
    arms = [Arm(**arm) for arm in spec["arms"]]
    cells = [Cell(**cell) for cell in spec["cells"]]
    device = choose_device(base.trainer.accelerator)
    prepared: Any = torch.load(spec["data"], weights_only=False)
    workbench = level.workbench(config, base, prepared, device)
    clock, events = choose_clock(device), Events()
    plans = spec["plans"]
    if plans is not None:
        # No cell always comes after the same other one.
        random.Random(f"cells:{config.seed}:{spec['process']}").shuffle(cells)
    result: dict[str, Any] = {
        "start_s": time.time() - spec["spawned_at"],
        "threads": torch.get_num_threads(),
        "device": device.type,
        "clock_resolution_s": clock.resolution,
    }
    outcomes: dict[str, dict[str, Any]] = {}
    for cell in cells:
        if plans is not None and cell.name not in plans:
            continue
        task = Task(
            build={name: workbench.builder(arm, cell) for arm in arms for name in arm.twins},
            contestants=contestants(arms),
            cell=cell.name,
            tolerance=workbench.tolerance,
            equal_steps=level.equal_steps,
            least_steps=level.least_warm_up_steps(config),
            steps_multiple=level.steps_multiple(config, base),
            num_cells=len(cells),
            peak_bytes=lambda step: (
                None if step.in_thread and device.type == "cpu" else peak_bytes(step, device)
            ),
        )
        outcome = run_session(
            task,
            config,
            clock,
            process=spec["process"],
            plan=Plan(**plans[cell.name]) if plans is not None else None,
            on_event=events,
        )
        outcomes[cell.name] = {**_plain(outcome), "facts": workbench.facts(cell)}
        workbench.leave(cell)
    result["cells"] = outcomes
    # Read last, when the processor has just been at work.
    result["settings"] = {
        **machine_settings(),
        "keep_blocks": keeps,
        "keep_blocks_asked": spec["keep_blocks"],
        "fused_kernels": loaded_kernels(),
        **({"device_clock_mhz": device_clock_mhz(device)} if device.type != "cpu" else {}),
    }
    result["peak_rss_bytes"] = peak_rss_bytes()
    result["peak_device_bytes"] = torch.accelerator.max_memory_allocated() if device.type == "cuda" else None
    return result


def _plain(outcome: CellOutcome) -> dict[str, Any]:
    found = dict(vars(outcome))
    found["pilot"] = asdict(outcome.pilot) if outcome.pilot is not None else None
    found["samples"] = [astuple(sample) for sample in outcome.samples]
    return found


def main(arguments: list[str]) -> int:
    """Run the worker; errors go to standard error, where the parent reads them."""
    spec_path, out_path = arguments
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    write_atomic(Path(out_path), to_json(measure(spec), indent=None))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # The result is written. Taking torch apart in order would take the better part of a second more.
    os._exit(code)
