"""What is kept of a tuning: one file in `out_dir/tunings` for each cell, so that its runs are known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rmsrepro.config.errors import first_line
from rmsrepro.runs import tuning_fields as fields
from rmsrepro.runs.files import to_json, write_atomic
from rmsrepro.runs.identity import slug
from rmsrepro.runs.tuning_fields import Point

SCHEMA_VERSION = 1


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
    given_up: bool = False
    """Whether somebody has said that nothing more is to come of it, until the command is given again."""

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
    """Say in a tuning's file that nothing more is to come of it; what it has come to stays."""
    write_tuning(out_dir, replace(record, given_up=True))


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
        "given_up": record.given_up,
    }


_TEXTS = ("tuning_id", "model", "task", "data", "metric", "command")


def read_tunings(out_dir: Path) -> tuple[list[TuningRecord], dict[Path, str]]:
    """Return all tunings of an output folder, and the files that are damaged with what is wrong in each.

    Nothing here raises for the content of a file.
    """
    found, damaged = [], {}
    for path in sorted(tunings_dir(out_dir).glob("*.json")):
        try:
            found.append(read_tuning(path))
        except (OSError, ValueError) as error:
            damaged[path] = first_line(error)
    return found, damaged


def read_tuning(path: Path) -> TuningRecord:
    """Read a tuning's file: one that was copied, or that names anything outside of its folder, is damaged.

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
        found = fields.shown(content.get("schema_version"))
        raise ValueError(f"schema_version {found}; {SCHEMA_VERSION} is read here")
    if (name := fields.text(content, "tuning_id")) != path.stem:
        raise ValueError(f"tuning_id {fields.shown(name)} is not the file's name")
    points = tuple(fields.point(node, "points") for node in fields.listed(content, "points"))
    seeds = tuple(fields.whole(seed, "final_seeds") for seed in fields.listed(content, "final_seeds"))
    ranges = content.get("ranges")
    if not points or not isinstance(ranges, dict):
        raise ValueError("points or ranges are missing")
    ends = fields.ranges(ranges)
    if any(point.keys() != ends.keys() for point in points):
        raise ValueError(f"points: each has a value of {', '.join(ends)}, and no other")
    margin = content.get("margin")
    if margin is not None and fields.finite(margin, "margin") <= 0:
        raise ValueError(f"margin: {fields.shown(margin)} is not above zero")
    return TuningRecord(
        **{key: fields.text(content, key) for key in _TEXTS},
        margin=margin,
        seed=fields.whole(content.get("seed"), "seed"),
        final_seeds=seeds,
        ranges=ends,
        points=points,
        norms=tuple(_norm(node, len(points), len(seeds)) for node in fields.listed(content, "norms")),
        superseded=tuple(_planned(node) for node in fields.listed(content, "superseded")),
        given_up=content.get("given_up") is True,
    )


def _norm(node: Any, points: int, seeds: int) -> TunedNorm:
    if not isinstance(node, dict):
        raise ValueError("norms: an entry is no mapping")
    best = node.get("best")
    found = TunedNorm(
        norm=fields.text(node, "norm"),
        overrides=fields.texts(node, "overrides"),
        trials=fields.run_ids(node, "trials"),
        best=None if best is None else fields.whole(best, "best"),
        why_none=fields.text(node, "why_none"),
        finals=fields.run_ids(node, "finals"),
    )
    if len(found.trials) != points:
        raise ValueError(f"norms: {len(found.trials)} trials of {points} points")
    if found.best is not None and (found.best >= points or len(found.finals) != seeds):
        raise ValueError("norms: the best is no point, or its final runs are not those of the seeds")
    return found


def _planned(node: Any) -> PlannedRun:
    if not isinstance(node, dict):
        raise ValueError("superseded: an entry is no mapping")
    point = fields.point(node.get("point"), "superseded")
    seed = fields.whole(node.get("seed"), "seed")
    return PlannedRun(fields.run_id(node.get("run_id"), "superseded"), fields.text(node, "norm"), seed, point)
