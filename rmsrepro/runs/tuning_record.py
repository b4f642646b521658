"""What is kept of a tuning: one file in `out_dir/tunings` for each cell, so that its runs are known."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rmsrepro.runs.files import to_json, write_atomic
from rmsrepro.runs.identity import slug

SCHEMA_VERSION = 1
Point = Mapping[str, float]
"""Key of `optim` -> its value."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of a tuning: what its own record must say for it to be that run."""

    run_id: str
    norm: str
    seed: int
    point: Point


@dataclass(frozen=True)
class TunedNorm:
    """One norm of a tuning."""

    norm: str
    overrides: tuple[str, ...]
    """What chooses it on the command line."""
    trials: tuple[str, ...]
    """Run ids, a point each, in the order of the points."""
    best: int | None = None
    """Place of the best point; None while it is not chosen, or where there is none."""
    why_none: str = ""
    """Why there is none; empty while it is not chosen."""
    finals: tuple[str, ...] = ()
    """Run ids, in the order of the fresh seeds."""

    @property
    def undecided(self) -> bool:
        """Whether its best point is still to be chosen."""
        return self.best is None and not self.why_none


@dataclass(frozen=True)
class TuningRecord:
    """A tuning of some norms in one cell: equal points for all of them."""

    tuning_id: str
    model: str
    task: str
    data: str
    metric: str
    margin: float | None
    seed: int
    """Of all trials."""
    final_seeds: tuple[int, ...]
    ranges: Mapping[str, tuple[float, float]]
    """Key of `optim` -> from and to; what is not there was fixed."""
    points: tuple[Point, ...]
    norms: tuple[TunedNorm, ...]
    superseded: tuple[PlannedRun, ...] = ()
    """Runs of an earlier state of the same tuning, such as the final ones of a choice among fewer points."""
    command: str = ""

    def trial_runs(self) -> list[PlannedRun]:
        """All trials, norm by norm."""
        return [
            PlannedRun(run_id, one.norm, self.seed, point)
            for one in self.norms
            for run_id, point in zip(one.trials, self.points, strict=True)
        ]

    def final_runs(self) -> list[PlannedRun]:
        """All final runs, norm by norm."""
        return [
            PlannedRun(run_id, one.norm, seed, self.points[one.best])
            for one in self.norms
            if one.best is not None
            for run_id, seed in zip(one.finals, self.final_seeds, strict=True)
        ]


def tunings_dir(out_dir: Path) -> Path:
    """Return the folder of an output folder's tunings."""
    return out_dir / "tunings"


def tuning_id(model: str, task: str, data: str, first_trials: Collection[str]) -> str:
    """Return a name that is the same for the same norms, settings, ranges and seed, however many points.

    Args:
        first_trials: each norm's run at the first point, whose id is a hash of all that.
    """
    digest = hashlib.sha256(to_json(sorted(set(first_trials)), indent=None).encode()).hexdigest()[:10]
    return "-".join(slug(part) for part in (task, data, model, digest))


def write_tuning(out_dir: Path, record: TuningRecord) -> Path:
    """Write a tuning's file; what an earlier state of it wanted, and this one does not, is remembered."""
    path = tunings_dir(out_dir) / f"{record.tuning_id}.json"
    try:
        before = read_tuning(path)
    except (OSError, ValueError):
        before = None
    if before is not None:
        earlier = [*before.superseded, *before.trial_runs(), *before.final_runs()]
        wanted = {run.run_id for run in (*record.trial_runs(), *record.final_runs())}
        left = {run.run_id: run for run in earlier if run.run_id not in wanted}
        record = replace(record, superseded=tuple(left.values()))
    write_atomic(path, to_json(_plain(record)))
    return path


def give_up_tuning(out_dir: Path, record: TuningRecord) -> None:
    """Say in a tuning's file that norms whose final runs are not all there will have none."""
    runs = out_dir / "runs"
    norms = [
        replace(one, best=None, why_none="given up", finals=())
        if one.undecided or not all((runs / run_id).exists() for run_id in one.finals)
        else one
        for one in record.norms
    ]
    write_tuning(out_dir, replace(record, norms=tuple(norms)))


def _plain(record: TuningRecord) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        **{key: getattr(record, key) for key in _TEXTS},
        "margin": record.margin,
        "seed": record.seed,
        "final_seeds": record.final_seeds,
        "ranges": dict(record.ranges),
        "points": record.points,
        "norms": [dict(vars(one)) for one in record.norms],
        "superseded": [dict(vars(one)) for one in record.superseded],
    }


_TEXTS = ("tuning_id", "model", "task", "data", "metric", "command")


def read_tunings(out_dir: Path) -> list[TuningRecord]:
    """Return all tunings of an output folder; what is damaged is left out."""
    found = []
    for path in sorted(tunings_dir(out_dir).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(read_tuning(path))
    return found


def read_tuning(path: Path) -> TuningRecord:
    """Read a tuning's file.

    Raises:
        OSError: it cannot be read.
        ValueError: what is wrong with its content.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, not a mapping")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema_version {content.get('schema_version')!r}; {SCHEMA_VERSION} is read here")
    points = tuple(_point(node, "points") for node in _list(content, "points"))
    seeds = tuple(_whole(seed, "final_seeds") for seed in _list(content, "final_seeds"))
    ranges = content.get("ranges")
    if not points or not isinstance(ranges, dict):
        raise ValueError("points or ranges are missing")
    margin = content.get("margin")
    return TuningRecord(
        **{key: _text(content, key) for key in _TEXTS},
        margin=None if margin is None else _number(margin, "margin"),
        seed=_whole(content.get("seed"), "seed"),
        final_seeds=seeds,
        ranges={str(key): _pair(ends, "ranges") for key, ends in ranges.items()},
        points=points,
        norms=tuple(_norm(node, len(points), len(seeds)) for node in _list(content, "norms")),
        superseded=tuple(_planned(node) for node in _list(content, "superseded")),
    )


def _norm(node: Any, points: int, seeds: int) -> TunedNorm:
    if not isinstance(node, dict):
        raise ValueError("norms: an entry is no mapping")
    best = node.get("best")
    found = TunedNorm(
        norm=_text(node, "norm"),
        overrides=_texts(node, "overrides"),
        trials=_texts(node, "trials"),
        best=None if best is None else _whole(best, "best"),
        why_none=_text(node, "why_none"),
        finals=_texts(node, "finals"),
    )
    if len(found.trials) != points:
        raise ValueError(f"norms: {len(found.trials)} trials of {points} points")
    if found.best is not None and (found.best >= points or len(found.finals) != seeds):
        raise ValueError("norms: the best is no point, or its final runs are not those of the seeds")
    return found


def _planned(node: Any) -> PlannedRun:
    if not isinstance(node, dict):
        raise ValueError("superseded: an entry is no mapping")
    point = _point(node.get("point"), "superseded")
    return PlannedRun(_text(node, "run_id"), _text(node, "norm"), _whole(node.get("seed"), "seed"), point)


def _list(node: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = node.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{key} is no list")
    return value


def _text(node: Mapping[str, Any], key: str) -> str:
    value = node.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is no text")
    return value


def _texts(node: Mapping[str, Any], key: str) -> tuple[str, ...]:
    if not all(isinstance(value, str) for value in _list(node, key)):
        raise ValueError(f"{key} holds what is no text")
    return tuple(_list(node, key))


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key}: {value!r} is no finite number")
    return value


def _whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{key}: {value!r} is no whole number")
    return value


def _pair(value: Any, key: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{key}: {value!r} is no pair of numbers")
    return _number(value[0], key), _number(value[1], key)


def _point(value: Any, key: str) -> Point:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{key}: {value!r} is no point")
    return {str(name): _number(one, key) for name, one in value.items()}
