"""A whole bench: fresh processes one after another, their samples gathered, one record written."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rmsrepro.bench.cells import Arm
from rmsrepro.bench.identity import bench_dir, find_reusable, key_of_arms
from rmsrepro.bench.levels import get_level
from rmsrepro.bench.measuring import BenchError, measure
from rmsrepro.bench.record import samples_csv
from rmsrepro.bench.result import bench_result
from rmsrepro.bench.statistics import BlockSample
from rmsrepro.config.bench import BenchConfig, check_bench_config
from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.disk import check_writable
from rmsrepro.runs.files import read_json, to_json, write_atomic
from rmsrepro.runs.identity import slug
from rmsrepro.runs.locks import Locked, lock

Progress = Callable[[str], None]


class NothingToCompare(BenchError):
    """No norm but baselines could be ranked, which is known before anything is measured."""


@dataclass(frozen=True)
class BenchResult:
    """A bench's folder and the content of its result.json."""

    path: Path
    result: dict[str, Any]
    reused: bool = False


def machine_lock_path() -> Path:
    """Return the lock that all benches of this user on this machine share, wherever they write."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"rmsrepro-bench-{user}.lock"


@contextlib.contextmanager
def exclusive(path: Path, wait_s: float, on_progress: Progress) -> Iterator[None]:
    """Hold the lock at `path`; wait for a living owner, take over from a dead one.

    Raises:
        BenchError: another bench still ran after `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    told = False
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock(path))
                break
            except Locked as busy:
                if time.monotonic() >= deadline:
                    raise BenchError(
                        f"another bench (process {busy.owner.get('pid')}) is measuring on this machine, and "
                        "two at once would disturb each other; wait for it, or raise "
                        f"bench.lock_wait_s={wait_s:g}"
                    ) from None
                if not told:
                    on_progress(f"waiting for another bench (process {busy.owner.get('pid')}) to end")
                    told = True
                time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
        yield


def run_bench(
    config: BenchConfig,
    *,
    base: TrainConfig,
    norms: Iterable[Mapping[str, Any]],
    on_progress: Progress = lambda line: None,
) -> BenchResult:
    """Time each of `norms` at the level `config.name`, and write outputs/bench/<id>/.

    Args:
        base: a resolved training config; its own norm and backend are not used.
        norms: the arms as {"name": str, "params": {...}, "backend": str}. A layernorm is added for each
            backend that lacks one: it is the baseline.
        on_progress: takes a line of text now and then.

    Raises:
        UserError: wrong settings, an unknown norm, an `out_dir` that nothing can be written to.
        NothingToCompare: every arm but the baselines is unavailable, or its baseline is.
        BenchError: fewer than two processes gave samples, every arm but the baselines failed in the pilot,
            or another bench would not end.
    """
    check_bench_config(config)
    level = get_level(config.name)
    arms, notes = level.arrange(config, base, norms)
    level.check(config, base, arms)
    _check_comparable(arms)
    key = key_of_arms(config, base, arms)
    if config.reuse:
        earlier = find_reusable(base.out_dir, key)
        record = read_json(earlier / "result.json") if earlier is not None else None
        if earlier is not None and record is not None:
            on_progress(f"timing reused: {earlier}")
            return BenchResult(earlier, record, reused=True)
    check_writable(base.out_dir)
    started = time.time()
    with (
        exclusive(machine_lock_path(), config.lock_wait_s, on_progress),
        tempfile.TemporaryDirectory(prefix="rmsrepro-bench-") as scratch,
    ):
        began = time.monotonic()
        on_progress("preparing")
        prepared = level.prepare(config, base)
        torch.save(prepared, Path(scratch) / "data.pt")
        cells = level.cells(config, base, prepared)
        measured = measure(config, base, arms, cells, Path(scratch), on_progress)
    result = bench_result(level, config, base, arms, cells, measured)
    result["key"] = key
    result["notes"] = notes
    result["created"] = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started))
    result["wall_s"] = time.monotonic() - began
    path = _write(result, measured.samples(), base, started)
    on_progress(f"written: {path}")
    return BenchResult(path, result)


def _check_comparable(arms: Sequence[Arm]) -> None:
    """Raise NothingToCompare where no norm but baselines can be ranked (baselines alone are fine)."""
    norms = [arm for arm in arms if arm.role == "norm"]
    others = [arm for arm in norms if not arm.is_baseline]
    held_against = {arm.backend for arm in norms if arm.is_baseline and arm.unavailable is None}
    if not any(arm.unavailable is None and arm.backend in held_against for arm in others or norms):
        reasons = "; ".join(f"{arm.label}: {arm.unavailable}" for arm in arms if arm.unavailable is not None)
        raise NothingToCompare(
            f"there is nothing to compare: no arm beside the baselines can be timed here. {reasons}"
        )


def _write(result: dict[str, Any], samples: list[BlockSample], base: TrainConfig, started: float) -> Path:
    """Write the folder whole or not at all."""
    parent = bench_dir(base.out_dir)
    parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
    about = [slug(str(result[key])) for key in ("model", "task") if result.get(key)]
    name = "-".join([stamp, result["level"], *about, result["key"][:6]])
    unfinished = Path(tempfile.mkdtemp(prefix=".", dir=parent))
    try:
        unfinished.chmod(0o755)
        write_atomic(unfinished / "samples.csv", samples_csv(samples))
        for attempt in range(100):
            path = parent / (f"{name}-{attempt + 1}" if attempt else name)
            result["bench_id"] = path.name
            write_atomic(unfinished / "result.json", to_json(result))
            if not path.exists():
                unfinished.rename(path)
                break
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    # What a reader of the file sees, so that callers and readers cannot differ.
    result.clear()
    result.update(json.loads((path / "result.json").read_text(encoding="utf-8")))
    return path
