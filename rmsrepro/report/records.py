"""What the report knows about runs and benches, as read from their folders."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class State(Enum):
    """What became of a run."""

    completed = "completed"
    running = "running"
    diverged = "diverged"
    interrupted = "interrupted"
    failed = "failed"
    unreadable = "unreadable"


@dataclass(frozen=True)
class Problem:
    """A file or folder that could not be read, wholly or in part."""

    path: Path
    reason: str


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One training run. Texts are empty and numbers None or NaN where the records do not say."""

    run_id: str
    folder: Path
    state: State
    norm: str
    norm_params: Mapping[str, Any]
    """The parameters that were given; the others are the norm's own."""
    model: str
    task: str
    data: str
    backend: str
    """The backend that ran (`backend_used`)."""
    placement: str
    precision: str
    seed: int | None
    study: str
    steps: int | None
    max_steps: int | None
    n_parameters: int | None
    metrics: Mapping[str, float]
    """Metrics at the last step."""
    clocks: Mapping[str, float]
    """Seconds by purpose: `train_s`, `eval_s`, ..., `total_s`."""
    error: str
    flags: tuple[str, ...]
    parent: str
    machine: Mapping[str, Any]
    env: Mapping[str, Any]
    fingerprint: str
    """Content hash of the data; empty if unknown."""
    config: Mapping[str, Any]
    curve: Mapping[str, FloatArray]
    """metrics.jsonl by column: `step` (rising), `train_seconds` and one a metric; NaN where not logged."""
    written: float
    """When its result was written, in seconds since 1970."""
    norm_recorded: Mapping[str, Any] = field(default_factory=dict)
    """The parameters as the run recorded them: all of them, if it came to build its norm."""
    backend_note: str = ""
    """Why `auto` took a slower backend than the norm has."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """How metrics were made: `test_bleu_signature`, and `test_sentences` where not all were scored."""
    num_pairs: Mapping[str, int] = field(default_factory=dict)
    """Split -> its pairs of sentences, for translation."""

    @property
    def finished(self) -> bool:
        """Whether the run trained to its fixed last step."""
        whole = self.steps is None or self.max_steps is None or self.steps >= self.max_steps
        return self.state is State.completed and whole

    @property
    def contended(self) -> bool:
        """Whether other jobs shared the machine, so that its times are not to be quoted."""
        return any("contended" in flag for flag in self.flags)

    def diverged(self, metric: str) -> bool:
        """Whether training diverged, or ended with a value of `metric` that is not finite."""
        if self.state is State.diverged:
            return True
        return self.finished and metric in self.metrics and not math.isfinite(self.metrics[metric])

    def value(self, metric: str) -> float | None:
        """`metric` at the fixed last step; None if the run did not get there or has no such number."""
        value = self.metrics.get(metric)
        return value if self.finished and value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Comparison:
    """One paired timing of an arm against its baseline. A ratio is t_arm / t_baseline."""

    level: str
    model: str
    task: str
    """Empty where the bench does not say."""
    shape: str
    mode: str
    dtype: str
    device: str
    threads: int | None
    norm: str
    params: Mapping[str, Any]
    """The norm's parameters that the bench was given; the others are the norm's own."""
    backend: str
    baseline_norm: str
    baseline_backend: str
    ratio: float
    """NaN where the arm could not run (an unavailable backend)."""
    ratio_low: float
    ratio_high: float
    reduction: float
    """100 * (1 - ratio), in percent: positive when the arm takes less time."""
    reduction_low: float
    reduction_high: float
    aa_ratio: float
    """The same ratio of the baseline's two twins: the noise that the instrument itself has."""
    aa_low: float
    aa_high: float
    n_rounds: int | None
    n_processes: int | None
    trusted: bool
    flags: tuple[str, ...]
    baseline_params: Mapping[str, Any] = field(default_factory=dict)
    """As `params`, of the baseline."""
    baseline_s: float = math.nan
    """Median seconds of a step of the baseline; NaN where the bench does not say."""
    share: float = math.nan
    """The part of the time, in per cent, that goes when this norm is taken out; NaN where nothing was timed
    without a norm beside it."""
    share_low: float = math.nan
    share_high: float = math.nan

    @property
    def plain_norm(self) -> str:
        """The norm's name, without the parameters that a bench may add to it."""
        return self.norm.split("(", 1)[0]

    @property
    def plain_baseline(self) -> str:
        """As `plain_norm`, of the baseline."""
        return self.baseline_norm.split("(", 1)[0]

    @property
    def like_for_like(self) -> bool:
        """Whether arm and baseline ran on the same backend, without which no percentage is quoted."""
        return self.backend == self.baseline_backend


@dataclass(frozen=True)
class TimedArm:
    """What a bench measured of one arm by itself. Numbers are NaN where it does not say."""

    level: str
    shape: str
    mode: str
    dtype: str
    device: str
    threads: int | None
    norm: str
    """Empty for what is no norm, such as a copy."""
    params: Mapping[str, Any]
    backend: str
    role: str
    median_s: float
    """Seconds of a step."""
    gb_per_s: float
    """Bytes that the equation needs, in 1e9 a second."""
    copy_share: float
    """Of the speed of a copy of the same input in the same rounds; 1 is as fast."""
    peak_bytes: float
    """What the tensors of one step take at once."""


@dataclass(frozen=True)
class BenchRecord:
    """One finished bench."""

    bench_id: str
    folder: Path
    study: str
    machine: Mapping[str, Any]
    config: Mapping[str, Any]
    """The training settings whose step was timed; empty if the bench does not say."""
    written: float
    comparisons: tuple[Comparison, ...]
    arms: tuple[TimedArm, ...] = ()
    across: tuple[Comparison, ...] = ()
    """Arms against those of a slower backend: ratios, of which no percentage is quoted."""


@dataclass(frozen=True)
class Records:
    """Everything that was read."""

    runs: tuple[RunRecord, ...]
    benches: tuple[BenchRecord, ...]
    problems: tuple[Problem, ...]


def count_states(runs: Sequence[RunRecord]) -> list[tuple[str, int]]:
    """State -> number of runs, in a fixed order, without the empty ones."""
    counts = [(state.value, sum(run.state is state for run in runs)) for state in State]
    return [(state, number) for state, number in counts if number]


_HARDWARE = (
    "hostname",
    "host",
    "node",
    "cpu",
    "cpu_model",
    "processor",
    "gpu",
    "gpus",
    "device",
    "accelerator",
)


def machine_name(machine: Mapping[str, Any]) -> str:
    """A short name of a machine by its host and hardware; equal names are one machine.

    What changes between two runs on one machine (load, time, process) stays out.
    """
    parts = []
    for key in _HARDWARE:
        value = machine.get(key)
        if value in (None, "", [], {}):
            continue
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
        if text not in parts:
            parts.append(text)
    return ", ".join(parts) if parts else "unnamed machine"
