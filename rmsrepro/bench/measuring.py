"""The processes of a bench: a pilot that decides how much is measured, then those that measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rmsrepro.bench.cells import Arm, Cell
from rmsrepro.bench.identity import thread_setting
from rmsrepro.bench.planning import BenchPlan, Pilot, decide_plan
from rmsrepro.bench.processes import ProcessFailed, run_worker
from rmsrepro.bench.statistics import BlockSample
from rmsrepro.config.bench import BenchConfig, keeps_blocks
from rmsrepro.config.plain import plain
from rmsrepro.config.schema import TrainConfig

LEAST_TIMEOUT_S = 180.0
PILOT = -1
"""Number of the process that the pilot is."""
PILOT_TRIALS = 2

Progress = Callable[[str], None]


class BenchError(RuntimeError):
    """A bench that could not give a result; the message names what failed."""


@dataclass
class Measured:
    """What all processes of a bench found.

    Attributes:
        pilot: the outcome of the pilot.
        plan: what it led to; None where it found no arm that runs.
        outcomes: of the processes that measured.
        failures: number of a process that gave nothing -> why.
    """

    pilot: dict[str, Any]
    plan: BenchPlan | None
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)

    def samples(self, cell: str | None = None) -> list[BlockSample]:
        """Return all samples, or those of one cell."""
        return [
            BlockSample(*values)
            for outcome in self.outcomes
            for name, found in outcome["cells"].items()
            if cell in (None, name)
            for values in found["samples"]
        ]

    def of_cell(self, cell: str) -> list[dict[str, Any]]:
        """Return what each process found in a cell, with its number."""
        return [
            {**outcome["cells"][cell], "process": outcome["process"]}
            for outcome in self.outcomes
            if cell in outcome["cells"]
        ]


def measure(
    config: BenchConfig,
    base: TrainConfig,
    arms: Sequence[Arm],
    cells: Sequence[Cell],
    scratch: Path,
    on_progress: Progress,
) -> Measured:
    """Run the pilot and, one after another, the processes that it asks for.

    Raises:
        BenchError: no pilot, or fewer than two processes, came to an end, or every arm but the baselines
            failed in the pilot.
    """
    spec = {
        "threads": thread_setting(config, base),
        "bench": asdict(config),
        "keep_blocks": keeps_blocks(config),
        "base": plain(base) | {"norm": {"name": "layernorm"}},
        "arms": [asdict(arm) for arm in arms if arm.unavailable is None],
        "cells": [asdict(cell) for cell in cells],
        "data": str(scratch / "data.pt"),
    }
    pilot, spent_s = _run_pilot(config, spec, scratch, on_progress)
    _check_still_comparable(arms, pilot)
    pilots = {
        name: Pilot(**found["pilot"]) for name, found in pilot["cells"].items() if found["pilot"] is not None
    }
    if not pilots:
        return Measured(pilot, None)
    plan = decide_plan(pilots, config, start_s=pilot["start_s"], spent_s=spent_s)
    on_progress(f"plan: {plan.processes} processes, about {_duration(plan.seconds)}; {plan.reason}")
    measured = Measured(pilot, plan)
    # Whatever the pilot found stands for all: plan and number of threads.
    spec |= {"threads": pilot["threads"], "plans": {name: asdict(one) for name, one in plan.cells.items()}}
    for number in range(plan.processes):
        head = f"process {number + 1} of {plan.processes}"
        try:
            outcome = _run(config, spec, number, scratch, head, on_progress, plan.processes)
        except ProcessFailed as error:
            failures = measured.failures
            failures[number] = str(error)
            on_progress(f"{head} failed: {error}")
            if plan.processes - len(failures) < 2 or (len(failures) == 2 and not measured.outcomes):
                break
            continue
        measured.outcomes.append(outcome)
    if len(measured.outcomes) < 2:
        raise BenchError(
            f"only {len(measured.outcomes)} of {plan.processes} measuring processes gave a result, and an "
            f"interval needs 2. {_named(measured.failures)}"
        )
    return measured


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _check_still_comparable(arms: Sequence[Arm], pilot: Mapping[str, Any]) -> None:
    """Raise BenchError where every arm that has a baseline is out in every cell of the pilot."""
    others = [
        arm.label
        for arm in arms
        if arm.unavailable is None and not arm.is_baseline and (arm.role == "norm" or arm.against)
    ]
    out = [{**found["unavailable"], **found["failed"]} for found in pilot["cells"].values()]
    if others and all(label in found for label in others for found in out):
        reasons = dict.fromkeys(f"{label}: {found[label]}" for label in others for found in out)
        raise BenchError(f"nothing is left to compare after the pilot. {'; '.join(reasons)}")


def _run_pilot(
    config: BenchConfig, spec: Mapping[str, Any], scratch: Path, on_progress: Progress
) -> tuple[dict[str, Any], float]:
    """Return the pilot's outcome, and the seconds it took."""
    failures: dict[int, str] = {}
    for trial in range(PILOT_TRIALS):
        try:
            outcome = _run(config, {**spec, "plans": None}, PILOT, scratch, "pilot", on_progress, 1)
        except ProcessFailed as error:
            failures[trial] = str(error)
            on_progress(f"pilot failed: {error}")
        else:
            return outcome, float(outcome["wall_s"])
    reasons = "; ".join(dict.fromkeys(failures.values()))
    raise BenchError(f"the pilot, which decides how much is measured, gave no result. {reasons}")


def _run(
    config: BenchConfig,
    spec: Mapping[str, Any],
    number: int,
    scratch: Path,
    head: str,
    on_progress: Progress,
    processes: int,
) -> dict[str, Any]:
    def tell(event: Mapping[str, Any]) -> None:
        done = f" {event['done']} of {event['total']}" if event.get("total") else ""
        on_progress(f"{head}: {event.get('phase')}{done}")

    share = config.budget_s / processes
    timeout_s = config.timeout_s if config.timeout_s is not None else max(LEAST_TIMEOUT_S, 10 * share)
    began = time.monotonic()
    outcome = run_worker({**spec, "process": number}, scratch, timeout_s=timeout_s, on_event=tell)
    return {**outcome, "process": number, "wall_s": time.monotonic() - began}


def _named(failures: Mapping[int, str]) -> str:
    return "; ".join(f"process {number + 1}: {reason}" for number, reason in failures.items())
