"""Reads what runs and benches left behind, without trust: a damaged file is listed, never fatal."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rmsrepro.report.records import BenchRecord, Comparison, Problem, Records, RunRecord, State
from rmsrepro.runs.files import alive

SCHEMA_VERSION = 1
FINAL_STATES = ("completed", "failed", "diverged", "interrupted")


def load_records(out_dir: Path, *, run_ids: Collection[str] | None = None) -> Records:
    """Read all runs and benches under `out_dir` (or the runs of `run_ids` alone).

    Missing folders mean no records. Nothing here raises for the content of a file.
    """
    problems: list[Problem] = []
    runs = [
        _load_run(folder, problems)
        for folder in _folders(Path(out_dir) / "runs")
        if run_ids is None or folder.name in run_ids
    ]
    benches = [
        bench
        for folder in _folders(Path(out_dir) / "bench")
        if (bench := _load_bench(folder, problems)) is not None
    ]
    return Records(runs=tuple(runs), benches=tuple(benches), problems=tuple(problems))


# --------------------------------------------------------------------------------------------- runs


def _load_run(folder: Path, problems: list[Problem]) -> RunRecord:
    """Read one run's folder; the state of a run without a (whole) result is worked out from the rest."""
    result = _read_mapping(folder / "result.json", problems)
    owner = _read_mapping(folder / "lock.json", [])
    running = _read_mapping(folder / "running.json", problems)
    env = _read_mapping(folder / "env.json", problems) or {}
    data = _read_mapping(folder / "data.json", problems) or {}
    config = _mapping(result, "config") if result else {}
    if not config:
        config = _read_mapping(folder / "config.yaml", problems) or {}
    state, error = _state(folder, result, [node for node in (owner, running) if node], problems)
    source: Mapping[str, Any] = result or {}
    norm_node = config.get("norm")
    norm = _text(source, "norm") or (
        _text(norm_node, "name") if isinstance(norm_node, Mapping) else str(norm_node or "")
    )
    curve, skipped = load_curve(folder / "metrics.jsonl")
    for reason in skipped:
        problems.append(Problem(folder / "metrics.jsonl", reason))
    steps = _number(source.get("steps"))
    if math.isnan(steps) and running:
        steps = _number(running.get("step"))
    if math.isnan(steps) and not curve.empty:
        steps = float(curve["step"].iloc[-1])
    return RunRecord(
        run_id=_text(source, "run_id") or folder.name,
        folder=folder,
        state=state,
        norm=norm,
        norm_params=_norm_params(norm_node) or _mapping(source, "norm_params"),
        model=_text(source, "model") or _named(config, "model"),
        task=_text(source, "task") or _named(config, "task"),
        data=_text(source, "data") or _named(config, "data"),
        backend=_text(source, "backend_used") or _text(source, "backend") or _text(config, "backend"),
        placement=_text(source, "placement") or _text(config, "placement"),
        precision=_text(source, "precision") or _text(config, "precision"),
        seed=_integer(source.get("seed", config.get("seed"))),
        study=_text(source, "study") or _text(config, "study_name"),
        steps=_integer(steps),
        max_steps=_integer(_mapping(config, "trainer").get("max_steps", (running or {}).get("max_steps"))),
        n_parameters=_integer(source.get("n_parameters")),
        metrics={
            str(key): _number(value) for key, value in _mapping(source, "metrics").items() if _numeric(value)
        },
        clocks={str(key): _number(value) for key, value in _mapping(source, "clocks").items()},
        error=error,
        flags=_texts(source.get("flags")),
        parent=_text(source, "parent"),
        machine=_mapping(source, "machine") or _mapping(env, "machine"),
        env=env,
        fingerprint=_text(source, "data_hash") or _text(data, "fingerprint"),
        config=config,
        curve=curve,
        written=_modified(folder / "result.json") or _modified(folder),
    )


def _state(
    folder: Path, result: dict[str, Any] | None, owners: list[dict[str, Any]], problems: list[Problem]
) -> tuple[State, str]:
    """Return a run's state and its error text.

    A living owner (of lock.json or running.json) wins: the run is being resumed or repeated. Then
    result.json; a folder with neither was killed before it could write one.
    """
    if any(is_alive(owner) for owner in owners):
        return State.running, ""
    if result is not None:
        status = _text(result, "status")
        version = result.get("schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            reason = f"schema_version {version!r}; this report reads {SCHEMA_VERSION}"
        elif status not in FINAL_STATES:
            reason = f"unknown status {status!r}"
        else:
            return State(status), _text(result, "error")
        problems.append(Problem(folder / "result.json", reason))
        return State.unreadable, reason
    if (folder / "result.json").exists():
        return State.unreadable, "result.json is damaged"
    if owners or (folder / "running.json").exists():
        return State.interrupted, "ended without a result (its process is gone)"
    if (folder / "config.yaml").exists() or (folder / "metrics.jsonl").exists():
        return State.interrupted, "ended without a result"
    problems.append(Problem(folder, "neither result.json nor config.yaml"))
    return State.unreadable, "neither result.json nor config.yaml"


def is_alive(owner: Mapping[str, Any]) -> bool:
    """Whether the process that wrote this lock or running.json is still at work."""
    try:
        return alive(dict(owner))
    except (TypeError, ValueError):
        return False


def load_curve(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Read metrics.jsonl: one row a step, in order, all columns float, and what had to be skipped.

    A last line without its line end is being written at this moment and is left out silently. Of
    two rows of the same step (a resumed run) the later counts.
    """
    try:
        status = path.stat()
    except OSError:
        return _empty_curve(), []
    return _cached_curve(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2048)
def _cached_curve(path: Path, _modified_ns: int, _size: int) -> tuple[pd.DataFrame, list[str]]:
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        return _empty_curve(), [f"cannot be read: {error.strerror}"]
    rows: dict[float, dict[str, float]] = {}
    broken: list[int] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            step = _number(row["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            if number < len(lines):
                broken.append(number)
            continue
        if math.isnan(step):
            broken.append(number)
            continue
        rows[step] = {str(key): _number(value) for key, value in row.items() if _numeric(value)}
    if not rows:
        curve = _empty_curve()
    else:
        curve = pd.DataFrame.from_records([rows[step] for step in sorted(rows)])
        for column in ("train_seconds", "tokens"):
            if column not in curve:
                curve[column] = math.nan
        curve = curve.astype(float)
    if not broken:
        return curve, []
    shown = ", ".join(str(number) for number in broken[:5]) + (", ..." if len(broken) > 5 else "")
    return curve, [f"{len(broken)} unreadable line(s) skipped: {shown}"]


def _empty_curve() -> pd.DataFrame:
    return pd.DataFrame({"step": [], "train_seconds": [], "tokens": []}, dtype=float)


# ------------------------------------------------------------------------------------------ benches


def _load_bench(folder: Path, problems: list[Problem]) -> BenchRecord | None:
    path = folder / "result.json"
    result = _read_mapping(path, problems)
    if result is None:
        if not path.exists():
            problems.append(Problem(folder, "no result.json: the bench did not finish, or runs still"))
        return None
    comparisons = []
    for number, entry in enumerate(_entries(result, "comparisons")):
        if _text(entry, "arm"):
            comparisons.append(_comparison(entry, result))
        else:
            problems.append(Problem(path, f"comparison {number} names no arm"))
    config = _mapping(result, "config")
    return BenchRecord(
        bench_id=folder.name,
        folder=folder,
        study=_text(result, "study") or _text(config, "study_name"),
        machine=_mapping(result, "machine"),
        config=config,
        written=_modified(path),
        comparisons=(*comparisons, *_unmeasured(result, comparisons)),
    )


def _entries(result: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    listed = result.get(key)
    return (
        [entry if isinstance(entry, Mapping) else {} for entry in listed] if isinstance(listed, list) else []
    )


def _unmeasured(result: Mapping[str, Any], measured: list[Comparison]) -> list[Comparison]:
    """Arms that could not be timed, as comparisons without a ratio whose flag is the reason."""
    known = {(comparison.norm, comparison.backend) for comparison in measured}
    missing = []
    for entry in _entries(result, "arms"):
        if _text(entry, "status") not in ("unavailable", "failed"):
            continue
        flags = [_text(entry, "reason") or _text(entry, "status"), *_texts(entry.get("flags"))]
        comparison = _comparison({**entry, "baseline": "", "ratio": None, "flags": flags}, result)
        if (comparison.norm, comparison.backend) not in known:
            missing.append(comparison)
    return missing


def _comparison(entry: Mapping[str, Any], result: Mapping[str, Any]) -> Comparison:
    ratio = _number(entry.get("ratio"))
    low, high = _pair(entry.get("ratio_ci"))
    reduction = _number(entry.get("time_reduction_pct"))
    reduction_low, reduction_high = sorted_pair(entry.get("time_reduction_ci"))
    if math.isnan(reduction):
        reduction = 100 * (1 - ratio)
    if math.isnan(reduction_low):
        reduction_low, reduction_high = 100 * (1 - high), 100 * (1 - low)
    norm, _, backend = _text(entry, "arm").rpartition("/")
    base_norm, _, base_backend = _text(entry, "baseline").rpartition("/")
    aa_low, aa_high = _pair(entry.get("aa_ci"))
    return Comparison(
        level=_text(entry, "level"),
        model=_text(entry, "model"),
        task=_named(entry, "task") or _named(result, "task"),
        shape=_shape(entry.get("shape")),
        mode=_text(entry, "mode"),
        dtype=_text(entry, "dtype"),
        device=_text(entry, "device"),
        threads=_integer(entry.get("threads")),
        norm=norm or backend,
        backend=backend if norm else "",
        baseline_norm=base_norm or base_backend,
        baseline_backend=base_backend if base_norm else "",
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        reduction=reduction,
        reduction_low=reduction_low,
        reduction_high=reduction_high,
        aa_ratio=_number(entry.get("aa_ratio")),
        aa_low=aa_low,
        aa_high=aa_high,
        n_rounds=_integer(entry.get("n_rounds")),
        n_processes=_integer(entry.get("n_processes")),
        trusted=entry.get("trusted") is True,
        flags=_texts(entry.get("flags")),
    )


# ------------------------------------------------------------------------------------------ helpers


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(
            entry for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError:
        return []


def _read_mapping(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """Read a JSON (or YAML, by suffix) file that holds a mapping; None when missing or damaged."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        value = _yaml(text) if path.suffix == ".yaml" else json.loads(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        problems.append(Problem(path, f"damaged: {first_line}"))
        return None
    if not isinstance(value, dict):
        problems.append(Problem(path, f"holds a {type(value).__name__}, not a mapping"))
        return None
    return value


def _yaml(text: str) -> Any:
    """Parse YAML as the configuration does: `1e-05` is a number here, a text to plain PyYAML."""
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _mapping(node: Any, key: str) -> dict[str, Any]:
    value = node.get(key) if isinstance(node, Mapping) else None
    return {str(name): item for name, item in value.items()} if isinstance(value, Mapping) else {}


def _text(node: Any, key: str) -> str:
    value = node.get(key) if isinstance(node, Mapping) else None
    return "" if value is None or isinstance(value, Mapping | list) else str(value)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def _named(config: Mapping[str, Any], key: str) -> str:
    """The name of a config group: `model: {name: gru}` or plain `model: gru`."""
    value = config.get(key)
    return _text(value, "name") if isinstance(value, Mapping) else str(value or "")


def _norm_params(node: Any) -> dict[str, Any]:
    return {str(k): v for k, v in node.items() if k != "name"} if isinstance(node, Mapping) else {}


def _numeric(value: Any) -> bool:
    """Whether a record's value stands for a number: numbers, null, and how JSON writers spell inf."""
    if isinstance(value, str):
        return value.lower() in ("nan", "inf", "-inf", "infinity", "-infinity")
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: Any) -> float:
    """A record's number; NaN for null and for what is no number."""
    if value is None or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _integer(value: Any) -> int | None:
    number = _number(value)
    return int(number) if math.isfinite(number) else None


def _pair(value: Any) -> tuple[float, float]:
    if isinstance(value, list | tuple) and len(value) == 2:
        return _number(value[0]), _number(value[1])
    return math.nan, math.nan


def sorted_pair(value: Any) -> tuple[float, float]:
    """An interval, smaller end first (a reduction's interval may be written in its ratio's order)."""
    low, high = _pair(value)
    return (high, low) if low > high else (low, high)


def _shape(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " x ".join(str(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "" if value is None else str(value)
