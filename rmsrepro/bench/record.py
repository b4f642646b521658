"""From what the processes found to `samples.csv` and `result.json`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

from rmsrepro.bench.across import in_order, pairs_across
from rmsrepro.bench.cells import Arm, Cost
from rmsrepro.bench.load import load_flags
from rmsrepro.bench.statistics import (
    AAControl,
    BlockSample,
    Interval,
    PairedSamples,
    RatioEstimate,
    aa_control,
    estimate_difference,
    estimate_ratio,
    spread,
    time_reduction,
)
from rmsrepro.config.bench import BenchConfig


def samples_csv(samples: Sequence[BlockSample]) -> str:
    """One line a block: process, round, position, arm, seconds_per_step, steps_in_block, cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(BlockSample)])
    writer.writerows(astuple(sample) for sample in samples)
    return text.getvalue()


class ResultTables:
    """The tables `arms`, `comparisons`, `across`, `extras` and `aa` of one cell.

    Args:
        facts: what each row states: level, model, shape, mode, dtype, device, threads, ...
        processes: what the processes found in this cell; each has its number under `process`.
        pilot: what the pilot found in it.
        tests: A/A controls in the whole report.
        costs: bytes and operations of a step, by label; absent where they were not counted.
        settings_flags: what is not known of the machine.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        samples: Sequence[BlockSample],
        processes: Sequence[Mapping[str, Any]],
        config: BenchConfig,
        facts: Mapping[str, Any],
        *,
        pilot: Mapping[str, Any] | None = None,
        tests: int = 1,
        costs: Mapping[str, Cost] | None = None,
        settings_flags: Sequence[str] = (),
    ) -> None:
        self._arms = arms
        self._samples = PairedSamples(samples)
        self._processes = processes
        self._seen = [*([{**pilot, "process": "pilot"}] if pilot is not None else []), *processes]
        self._peak = dict((pilot or {}).get("peak_bytes") or {})
        self._config = config
        self._facts = dict(facts)
        self._costs = dict(costs or {})
        self._quiet, load = load_flags(processes, config.max_other_load) if processes else (True, [])
        self._machine_flags = [*load, *settings_flags]
        self._controls: dict[str, AAControl] = {
            arm.backend: aa_control(self._samples, arm.twins, precision=config.precision, cells=tests)
            for arm in arms
            if arm.is_baseline and self.why_not_ranked(arm) is None
        }
        self._copy = next((arm for arm in arms if arm.role == "copy"), None)

    def why_unavailable(self, arm: Arm) -> str | None:
        """The reason an arm does not exist in this cell, or None."""
        if arm.unavailable is not None:
            return arm.unavailable
        return next(
            (
                process["unavailable"][arm.label]
                for process in self._seen
                if arm.label in process.get("unavailable", {})
            ),
            None,
        )

    def why_not_ranked(self, arm: Arm) -> str | None:
        """The reason an arm is shown without a rank, or None. One failure in one process is enough."""
        absent = self.why_unavailable(arm)
        if absent is not None:
            return absent
        for process in self._seen:
            if arm.label in process["failed"]:
                where = process["process"]
                name = where if where == "pilot" else f"process {where + 1}"
                return f"{name}: {process['failed'][arm.label]}"
        if len(self._samples.log_ratios(arm.twins, arm.twins)) < 2:
            return "it was not measured"
        return None

    def arms(self) -> list[dict[str, Any]]:
        """One row an arm; the two twins of the baseline are one, their geometric mean in each round."""
        return [self._arm_row(arm) for arm in self._arms]

    def _arm_row(self, arm: Arm) -> dict[str, Any]:
        reason = self.why_not_ranked(arm)
        times = self._samples.times(arm.twins)
        median, iqr = spread(times) if times else (None, None)
        absent = self.why_unavailable(arm) is not None
        first_calls = [
            seconds
            for process in self._seen
            for name, seconds in process["first_call_s"].items()
            if name in arm.twins
        ]
        cost = self._costs.get(arm.label, Cost())
        rate = cost.bytes / median / 1e9 if cost.bytes is not None and median else None
        return {
            **self._facts,
            "arm": arm.label,
            "role": arm.role,
            "norm": arm.norm,
            "norm_params": arm.params,
            "backend": arm.backend,
            "is_baseline": arm.is_baseline,
            "status": "unavailable" if absent else "failed" if reason else "measured",
            "reason": reason,
            "median_s": median,
            "iqr_s": iqr,
            "rounds": len(times),
            "first_call_s": max(first_calls, default=None),
            "bytes": cost.bytes,
            "flops": cost.flops,
            "gb_per_s": rate,
            "copy_share": self._copy_share(arm, cost),
            "peak_bytes": self._peak.get(arm.label),
            "flags": self._arm_flags(arm),
        }

    def _copy_share(self, arm: Arm, cost: Cost) -> float | None:
        """Bytes a second of the arm over those of the copy, from the rounds that have both."""
        copy = self._copy
        if copy is None or cost.bytes is None or self.why_not_ranked(copy) or self.why_not_ranked(arm):
            return None
        copied = self._costs.get(copy.label, Cost()).bytes
        if not copied:
            return None
        return cost.bytes / copied / estimate_ratio(self._samples, arm.twins, copy.twins).ratio.estimate

    def _arm_flags(self, arm: Arm) -> list[str]:
        """Each remark once, with the processes that made it, counted from 1 as the progress lines do."""
        made_by: dict[str, list[int]] = {}
        for process in self._processes:
            for flag in process["flags"].get(arm.label, []):
                made_by.setdefault(flag, []).append(process["process"] + 1)
        return [f"{flag} (process {', '.join(map(str, numbers))})" for flag, numbers in made_by.items()]

    def comparisons(self) -> list[dict[str, Any]]:
        """One row for each measured norm against the baseline of its backend."""
        baselines = {arm.backend: arm for arm in self._arms if arm.is_baseline}
        return [
            self._comparison(arm, baselines[arm.backend])
            for arm in self._arms
            if arm.role == "norm"
            and not arm.is_baseline
            and arm.backend in self._controls
            and self.why_not_ranked(arm) is None
        ]

    def across(self) -> list[dict[str, Any]]:
        """One row for each pair of measured norms on different backends that `pairs_across` names."""
        measured = [arm for arm in self._arms if self.why_not_ranked(arm) is None]
        rows = []
        for arm, other in in_order(pairs_across(measured)):
            controls = [self._controls.get(one.backend) for one in (arm, other)]
            columns = _ratio_columns(estimate_ratio(self._samples, arm.twins, other.twins))
            for percentage in ("time_reduction_pct", "time_reduction_ci"):
                del columns[percentage]
            rows.append(
                {
                    **self._facts,
                    "arm": arm.label,
                    "baseline": other.label,
                    **columns,
                    "trusted": self._quiet and all(one is not None and one.trusted for one in controls),
                    "flags": [
                        *dict.fromkeys(flag for one in controls if one is not None for flag in one.flags),
                        *self._machine_flags,
                        *self._arm_flags(arm),
                    ],
                }
            )
        return rows

    def extras(self) -> list[dict[str, Any]]:
        """One row for each measured arm that is no norm against each of the arms that it names."""
        by_label = {arm.label: arm for arm in self._arms}
        rows = []
        pairs = [(arm, by_label[label]) for arm in self._arms for label in arm.against]
        for arm, other in pairs:
            if any(self.why_not_ranked(one) is not None for one in (arm, other)):
                continue
            difference = estimate_difference(self._samples, arm.twins, other.twins)
            rows.append(
                {
                    **self._facts,
                    "arm": arm.label,
                    "role": arm.role,
                    "baseline": other.label,
                    **_ratio_columns(estimate_ratio(self._samples, arm.twins, other.twins)),
                    "difference_s": difference.estimate,
                    "difference_ci": difference.bounds(),
                    "flags": [*self._machine_flags, *self._arm_flags(arm)],
                }
            )
        return rows

    def _comparison(self, arm: Arm, baseline: Arm) -> dict[str, Any]:
        control = self._controls[arm.backend]
        found = estimate_ratio(self._samples, arm.twins, baseline.twins)
        return {
            **self._facts,
            "arm": arm.label,
            "norm": arm.norm,
            "norm_params": arm.params,
            "backend": arm.backend,
            "baseline": baseline.label,
            **_ratio_columns(found),
            **self._share_columns(arm),
            "aa_ratio": control.ratio.estimate,
            "aa_ci": control.ratio.bounds(),
            "trusted": control.trusted and self._quiet,
            "flags": [
                *control.flags,
                *self._machine_flags,
                *self._noise_flags(found.ratio, control),
                *self._arm_flags(arm),
            ],
        }

    def _share_columns(self, arm: Arm) -> dict[str, Any]:
        """What taking the norm out would save, by the rounds that timed `none` on the same backend too."""
        bare = next((one for one in self._arms if (one.norm, one.backend) == ("none", arm.backend)), None)
        if bare is None or arm.norm == "none" or self.why_not_ranked(bare) is not None:
            return {"norm_share_pct": None, "norm_share_ci": None}
        share = time_reduction(estimate_ratio(self._samples, bare.twins, arm.twins).ratio)
        return {"norm_share_pct": share.estimate, "norm_share_ci": share.bounds()}

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
                "backend": arm.backend,
                "aa_ratio": control.ratio.estimate,
                "aa_ci": control.ratio.bounds(),
                "trusted": control.trusted and self._quiet,
                "flags": [*control.flags, *self._machine_flags],
            }
            for arm in self._arms
            if arm.is_baseline and (control := self._controls.get(arm.backend)) is not None
        ]


def _ratio_columns(found: RatioEstimate) -> dict[str, Any]:
    reduction = time_reduction(found.ratio)
    return {
        "ratio": found.ratio.estimate,
        "ratio_ci": found.ratio.bounds(),
        "time_reduction_pct": reduction.estimate,
        "time_reduction_ci": reduction.bounds(),
        "n_rounds": found.num_rounds,
        "n_processes": found.num_processes,
        "process_ratios": found.process_ratios,
    }
