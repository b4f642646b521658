"""Reads what a bench left behind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rmsrepro.config.study import parameter_value
from rmsrepro.report import fields
from rmsrepro.report.records import BenchRecord, Comparison, Problem, TimedArm

CELL_KEYS = ("level", "model", "task", "shape", "mode", "dtype")
"""What a bench's rows share when they were timed side by side."""


def load_bench(folder: Path, problems: list[Problem]) -> BenchRecord | None:
    """Read one bench's folder; None without a readable result. What is amiss joins `problems`."""
    path = folder / "result.json"
    result = fields.read_mapping(path, problems)
    if result is None:
        if not path.exists():
            problems.append(Problem(folder, "no result.json: the bench did not finish, or runs still"))
        return None
    tables: dict[str, list[Comparison]] = {"comparisons": [], "across": []}
    for table, word in (("comparisons", "comparison"), ("across", "row of across")):
        for number, entry in enumerate(_entries(result, table)):
            if fields.text(entry, "arm"):
                tables[table].append(_comparison(entry, result))
            else:
                problems.append(Problem(path, f"{word} {number} names no arm"))
    comparisons = tables["comparisons"]
    config = fields.mapping(result, "config")
    return BenchRecord(
        bench_id=folder.name,
        folder=folder,
        study=fields.text(result, "study") or fields.text(config, "study_name"),
        machine=fields.mapping(result, "machine"),
        config=config,
        written=_when(result, path),
        comparisons=(*comparisons, *_unmeasured(result, comparisons)),
        across=tuple(tables["across"]),
        arms=tuple(_arm(entry) for entry in _entries(result, "arms") if fields.text(entry, "arm")),
    )


def _when(result: Mapping[str, Any], path: Path) -> float:
    """When a bench was made, in seconds since 1970: as it says itself, since files are copied."""
    try:
        return datetime.fromisoformat(fields.text(result, "created")).timestamp()
    except (ValueError, OverflowError, OSError):
        return fields.modified(path)


def _entries(result: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    listed = result.get(key)
    entries = listed if isinstance(listed, list) else []
    return [entry if isinstance(entry, Mapping) else {} for entry in entries]


def _unmeasured(result: Mapping[str, Any], measured: list[Comparison]) -> list[Comparison]:
    """Arms that could not be timed, as comparisons without a ratio whose flag is the reason."""
    known = {_arm_in_cell(comparison) for comparison in measured}
    missing = []
    for entry in _entries(result, "arms"):
        if fields.text(entry, "status") not in ("unavailable", "failed"):
            continue
        flags = [
            fields.text(entry, "reason") or fields.text(entry, "status"),
            *fields.texts(entry.get("flags")),
        ]
        comparison = _comparison({**entry, "baseline": "", "ratio": None, "flags": flags}, result)
        if _arm_in_cell(comparison) not in known:
            missing.append(comparison)
    return missing


def _arm_in_cell(one: Comparison) -> tuple[str, ...]:
    """What an arm is and what it was timed on: a norm may be measured at one shape and not at another."""
    return one.norm, one.backend, one.level, one.shape, one.mode, one.dtype


def _arm(entry: Mapping[str, Any]) -> TimedArm:
    name = fields.text(entry, "arm").rpartition("/")[0]
    norm = fields.text(entry, "norm")
    if not norm and not fields.text(entry, "role"):  # a record of the first schema names the arm alone
        norm = name.split("(", 1)[0]
    return TimedArm(
        level=fields.text(entry, "level"),
        shape=fields.shape_text(entry.get("shape")),
        mode=fields.text(entry, "mode"),
        dtype=fields.text(entry, "dtype"),
        device=fields.text(entry, "device"),
        threads=fields.integer(entry.get("threads")),
        norm=norm,
        params=_params(name, entry),
        backend=fields.text(entry, "backend") or fields.text(entry, "arm").rpartition("/")[2],
        role=fields.text(entry, "role") or "norm",
        median_s=fields.number(entry.get("median_s")),
        gb_per_s=fields.number(entry.get("gb_per_s")),
        copy_share=fields.number(entry.get("copy_share")),
        peak_bytes=fields.number(entry.get("peak_bytes")),
    )


def _params(name: str, *rows: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that the first row with any states; else those in a name like `prmsnorm(p=0.25)`."""
    for row in rows:
        if found := fields.mapping(row, "norm_params"):
            return found
    inside = name.partition("(")[2].rpartition(")")[0]
    pairs = (part.partition("=") for part in inside.split(",") if "=" in part)
    return {key.strip(): parameter_value(value) for key, _, value in pairs}


def _arms_of(result: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The arms that were timed together with a comparison, by name."""
    there = [
        one
        for one in reversed(_entries(result, "arms"))
        if all(one.get(key, entry.get(key)) == entry.get(key) for key in CELL_KEYS)
    ]
    return {fields.text(one, "arm"): one for one in there}


def _comparison(entry: Mapping[str, Any], result: Mapping[str, Any]) -> Comparison:
    ratio = fields.number(entry.get("ratio"))
    low, high = fields.pair(entry.get("ratio_ci"))
    reduction = fields.number(entry.get("time_reduction_pct"))
    reduction_low, reduction_high = fields.sorted_pair(entry.get("time_reduction_ci"))
    if not math.isfinite(reduction):
        reduction = 100 * (1 - ratio)
    if not math.isfinite(reduction_low) or not math.isfinite(reduction_high):
        reduction_low, reduction_high = 100 * (1 - high), 100 * (1 - low)
    share_low, share_high = fields.sorted_pair(entry.get("norm_share_ci"))
    norm, _, backend = fields.text(entry, "arm").rpartition("/")
    arms = _arms_of(result, entry)
    arm = arms.get(fields.text(entry, "arm"), entry)
    baseline = arms.get(fields.text(entry, "baseline"), {})
    base_norm, _, base_backend = fields.text(entry, "baseline").rpartition("/")
    aa_low, aa_high = fields.pair(entry.get("aa_ci"))
    return Comparison(
        level=fields.text(entry, "level"),
        model=fields.text(entry, "model"),
        task=fields.named(entry, "task") or fields.named(result, "task"),
        shape=fields.shape_text(entry.get("shape")),
        mode=fields.text(entry, "mode"),
        dtype=fields.text(entry, "dtype"),
        device=fields.text(entry, "device"),
        threads=fields.integer(entry.get("threads")),
        norm=norm or backend,
        params=_params(norm or backend, entry, arm),
        backend=backend if norm else "",
        baseline_norm=base_norm or base_backend,
        baseline_backend=base_backend if base_norm else "",
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        reduction=reduction,
        reduction_low=reduction_low,
        reduction_high=reduction_high,
        aa_ratio=fields.number(entry.get("aa_ratio")),
        aa_low=aa_low,
        aa_high=aa_high,
        n_rounds=fields.integer(entry.get("n_rounds")),
        n_processes=fields.integer(entry.get("n_processes")),
        trusted=entry.get("trusted") is True,
        flags=fields.texts(entry.get("flags")),
        baseline_params=_params(base_norm or base_backend, baseline),
        baseline_s=fields.number(baseline.get("median_s")),
        share=fields.number(entry.get("norm_share_pct")),
        share_low=share_low,
        share_high=share_high,
    )
