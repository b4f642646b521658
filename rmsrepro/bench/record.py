"""From what the processes found to `samples.csv` and `result.json`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

from rmsrepro.bench.arms import Arm
from rmsrepro.bench.statistics import (
    AAControl,
    BlockSample,
    Interval,
    PairedSamples,
    aa_control,
    estimate_ratio,
    spread,
    time_reduction,
)
from rmsrepro.config.bench import BenchConfig


def samples_csv(samples: Sequence[BlockSample]) -> str:
    """One line a block: process, round, position, arm, seconds_per_step, steps_in_block."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(BlockSample)])
    writer.writerows(astuple(sample) for sample in samples)
    return text.getvalue()


def load_flags(processes: Sequence[Mapping[str, Any]], limit: float) -> tuple[bool, list[str]]:
    """Whether other programs left the processor alone, as far as is known, and what to say of it.

    Load that the system does not tell is flagged as unknown and takes no trust: the A/A control, which
    must be conclusive, has met that load as well.
    """
    known = {
        process["process"]: process["other_load"]
        for process in processes
        if process.get("other_load") is not None
    }
    loud = {number: load for number, load in known.items() if load > limit}
    flags = []
    if loud:
        flags.append(
            f"other load: in {len(loud)} of {len(processes)} processes other programs kept up to "
            f"{max(loud.values()):.2f} cores busy (bench.max_other_load={limit:g})"
        )
    if len(known) < len(processes):
        flags.append("other load: unknown, the system does not tell")
    return not loud, flags


class ResultTables:
    """The tables `arms`, `comparisons` and `aa` of a result.

    Args:
        facts: what each row states: level, model, shape, mode, dtype, device, threads, ...
        processes: the records of the processes that gave samples.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        samples: Sequence[BlockSample],
        processes: Sequence[Mapping[str, Any]],
        config: BenchConfig,
        facts: Mapping[str, Any],
    ) -> None:
        self._arms = arms
        self._samples = PairedSamples(samples)
        self._processes = processes
        self._config = config
        self._facts = dict(facts)
        self._quiet, self._load_flags = load_flags(processes, config.max_other_load)
        self._controls: dict[str, AAControl] = {
            arm.backend: aa_control(self._samples, arm.twins, precision=config.precision, cells=config.cells)
            for arm in arms
            if arm.is_baseline and self.why_not_ranked(arm) is None
        }

    def why_not_ranked(self, arm: Arm) -> str | None:
        """The reason an arm is shown without a rank, or None. One failure in one process is enough."""
        if arm.unavailable is not None:
            return arm.unavailable
        for process in self._processes:
            if arm.label in process["failed"]:
                return f"process {process['process'] + 1}: {process['failed'][arm.label]}"
        return None

    def arms(self) -> list[dict[str, Any]]:
        """One row an arm; the two twins of the baseline are one, their geometric mean in each round."""
        return [self._arm_row(arm) for arm in self._arms]

    def _arm_row(self, arm: Arm) -> dict[str, Any]:
        reason = self.why_not_ranked(arm)
        times = self._samples.times(arm.twins)
        median, iqr = spread(times) if times else (None, None)
        status = "unavailable" if arm.unavailable is not None else "failed" if reason else "measured"
        first_calls = [
            seconds
            for process in self._processes
            for name, seconds in process["first_call_s"].items()
            if name in arm.twins
        ]
        return {
            **self._facts,
            "arm": arm.label,
            "norm": arm.norm,
            "norm_params": arm.params,
            "backend": arm.backend,
            "is_baseline": arm.is_baseline,
            "status": status,
            "reason": reason,
            "median_s": median,
            "iqr_s": iqr,
            "rounds": len(times),
            "first_call_s": max(first_calls, default=None),
            "flags": self._arm_flags(arm),
        }

    def _arm_flags(self, arm: Arm) -> list[str]:
        """Each remark once, with the processes that made it, counted from 1 as the progress lines do."""
        made_by: dict[str, list[int]] = {}
        for process in self._processes:
            for flag in process["flags"].get(arm.label, []):
                made_by.setdefault(flag, []).append(process["process"] + 1)
        return [f"{flag} (process {', '.join(map(str, numbers))})" for flag, numbers in made_by.items()]

    def comparisons(self) -> list[dict[str, Any]]:
        """One row for each measured arm against the baseline of its backend."""
        baselines = {arm.backend: arm for arm in self._arms if arm.is_baseline}
        return [
            self._comparison(arm, baselines[arm.backend])
            for arm in self._arms
            if not arm.is_baseline and arm.backend in self._controls and self.why_not_ranked(arm) is None
        ]

    def _comparison(self, arm: Arm, baseline: Arm) -> dict[str, Any]:
        control = self._controls[arm.backend]
        found = estimate_ratio(self._samples, arm.twins, baseline.twins)
        reduction = time_reduction(found.ratio)
        return {
            **self._facts,
            "arm": arm.label,
            "baseline": baseline.label,
            "ratio": found.ratio.estimate,
            "ratio_ci": found.ratio.bounds(),
            "time_reduction_pct": reduction.estimate,
            "time_reduction_ci": reduction.bounds(),
            "aa_ratio": control.ratio.estimate,
            "aa_ci": control.ratio.bounds(),
            "n_rounds": found.num_rounds,
            "n_processes": found.num_processes,
            "process_ratios": found.process_ratios,
            "trusted": control.trusted and self._quiet,
            "flags": [
                *control.flags,
                *self._load_flags,
                *self._noise_flags(found.ratio, control),
                *self._arm_flags(arm),
            ],
        }

    def _noise_flags(self, ratio: Interval, control: AAControl) -> list[str]:
        flags = []
        if not ratio.excludes(1.0):
            flags.append("within the noise: the interval of the ratio contains 1")
        elif not control.ratio.excludes(ratio.estimate):
            flags.append("within the noise: two equal arms differ as much")
        half_width = (ratio.high - ratio.low) / 2
        if half_width > self._config.precision:
            flags.append(
                f"imprecise: the interval reaches {100 * half_width:.1f} % to either side, "
                f"bench.precision asks for {100 * self._config.precision:g} %"
            )
        return flags

    def aa(self) -> list[dict[str, Any]]:
        """One row a backend: its baseline against itself."""
        return [
            {
                **self._facts,
                "arm": arm.label,
                "aa_ratio": control.ratio.estimate,
                "aa_ci": control.ratio.bounds(),
                "trusted": control.trusted and self._quiet,
                "flags": [*control.flags, *self._load_flags],
            }
            for arm in self._arms
            if arm.is_baseline and (control := self._controls.get(arm.backend)) is not None
        ]
