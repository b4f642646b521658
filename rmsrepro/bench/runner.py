"""A whole bench: fresh processes one after another, their samples gathered, one record written."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import rmsrepro
from rmsrepro.bench.arms import Arm, PreparedData, arrange_arms, check_base, prepare_data
from rmsrepro.bench.identity import bench_dir, find_reusable, key_of_arms, thread_setting
from rmsrepro.bench.processes import ProcessFailed, run_worker
from rmsrepro.bench.record import ResultTables, samples_csv
from rmsrepro.bench.statistics import BlockSample
from rmsrepro.config.bench import BenchConfig, check_bench_config
from rmsrepro.config.plain import plain
from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.environment import machine
from rmsrepro.runs.files import Locked, lock, read_json, to_json, write_atomic
from rmsrepro.runs.identity import slug

SCHEMA_VERSION = 1
LEAST_TIMEOUT_S = 180.0

Progress = Callable[[str], None]


class BenchError(RuntimeError):
    """A bench that could not give a result; the message names what failed."""


class NothingToCompare(BenchError):
    """No arm but baselines could be ranked, which is known before anything is measured."""


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
    """Time a training step of `base` with each of `norms`, and write outputs/bench/<id>/.

    Args:
        base: a resolved training config; its own norm and backend are not used.
        norms: the arms as {"name": str, "params": {...}, "backend": str}. A layernorm is added for each
            backend that lacks one: it is the baseline.
        on_progress: takes a line of text now and then.

    Raises:
        UserError: wrong settings, an unknown norm.
        NothingToCompare: every arm but the baselines is unavailable, or its baseline is.
        BenchError: fewer than two processes gave samples, every arm but the baselines failed in the first,
            or another bench would not end.
    """
    check_bench_config(config)
    check_base(base)
    arms, notes = arrange_arms(norms, base.task.name)
    _check_comparable(arms)
    key = key_of_arms(config, base, arms)
    if config.reuse:
        earlier = find_reusable(base.out_dir, key)
        record = read_json(earlier / "result.json") if earlier is not None else None
        if earlier is not None and record is not None:
            on_progress(f"timing reused: {earlier}")
            return BenchResult(earlier, record, reused=True)
    started = time.time()
    with (
        exclusive(machine_lock_path(), config.lock_wait_s, on_progress),
        tempfile.TemporaryDirectory(prefix="rmsrepro-bench-") as scratch,
    ):
        began = time.monotonic()
        on_progress("preparing batches")
        data = prepare_data(base, config.num_batches)
        torch.save(data, Path(scratch) / "data.pt")
        outcomes, failures = _measure(config, base, arms, Path(scratch), on_progress)
    result = _result(config, base, arms, notes, key, data, outcomes, failures)
    result["created"] = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started))
    result["wall_s"] = time.monotonic() - began
    samples = _samples(outcomes)
    path = _write(result, samples, base, started)
    on_progress(f"written: {path}")
    return BenchResult(path, result)


def _check_comparable(arms: list[Arm]) -> None:
    """Raise NothingToCompare where no arm but baselines can be ranked (baselines alone are fine)."""
    others = [arm for arm in arms if not arm.is_baseline]
    held_against = {arm.backend for arm in arms if arm.is_baseline and arm.unavailable is None}
    if not any(arm.unavailable is None and arm.backend in held_against for arm in others or arms):
        reasons = "; ".join(f"{arm.label}: {arm.unavailable}" for arm in arms if arm.unavailable is not None)
        raise NothingToCompare(
            f"there is nothing to compare: no arm beside the baselines can be timed here. {reasons}"
        )


def _check_still_comparable(arms: list[Arm], failed: Mapping[str, str]) -> None:
    """Raise BenchError where every arm but the baselines failed in the first process."""
    others = [arm.label for arm in arms if not arm.is_baseline and arm.unavailable is None]
    if others and all(label in failed for label in others):
        reasons = "; ".join(f"{label}: {failed[label]}" for label in others)
        raise BenchError(f"nothing is left to compare after the first process. {reasons}")


def _measure(
    config: BenchConfig, base: TrainConfig, arms: list[Arm], scratch: Path, on_progress: Progress
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Run the processes; return what they found, and how the others failed, by number."""
    share = config.budget_s / config.processes
    timeout_s = config.timeout_s if config.timeout_s is not None else max(LEAST_TIMEOUT_S, 10 * share)
    threads = thread_setting(config, base)
    plan: dict[str, Any] | None = None
    outcomes: list[dict[str, Any]] = []
    failures: dict[int, str] = {}
    for number in range(config.processes):
        head = f"process {number + 1} of {config.processes}"

        def tell(event: Mapping[str, Any], head: str = head) -> None:
            done = f" {event['done']} of {event['total']}" if event.get("total") else ""
            on_progress(f"{head}: {event.get('phase')}{done}")

        spec = {
            "process": number,
            "threads": threads,
            "bench": asdict(config),
            "base": plain(base) | {"norm": {"name": "layernorm"}},
            "arms": [asdict(arm) for arm in arms if arm.unavailable is None],
            "data": str(scratch / "data.pt"),
            "plan": plan,
        }
        try:
            outcome = run_worker(spec, scratch, timeout_s=timeout_s, on_event=tell)
        except ProcessFailed as error:
            failures[number] = str(error)
            on_progress(f"{head} failed: {error}")
            if config.processes - len(failures) < 2 or (len(failures) == 2 and not outcomes):
                break
            continue
        if not outcomes:
            _check_still_comparable(arms, outcome["failed"])
        outcomes.append({**outcome, "process": number})
        # Whatever the first one found stands for all: plan and number of threads.
        plan = outcome["plan"] or plan
        threads = outcome["threads"]
    if len(outcomes) < 2:
        named = "; ".join(f"process {number + 1}: {reason}" for number, reason in failures.items())
        raise BenchError(
            f"only {len(outcomes)} of {config.processes} measuring processes gave a result, and an interval "
            f"needs 2. {named}"
        )
    return outcomes, failures


def _samples(outcomes: Iterable[Mapping[str, Any]]) -> list[BlockSample]:
    return [BlockSample(*values) for outcome in outcomes for values in outcome["samples"]]


def _result(
    config: BenchConfig,
    base: TrainConfig,
    arms: list[Arm],
    notes: list[str],
    key: str,
    data: PreparedData,
    outcomes: list[dict[str, Any]],
    failures: Mapping[int, str],
) -> dict[str, Any]:
    facts = {
        "level": config.name,
        "model": base.model.name,
        "size": base.model.size.value,
        "task": base.task.name,
        "data": base.data.name,
        "placement": base.placement.value,
        "shape": data.shape,
        "mode": "step",
        "dtype": {"32": "float32"}.get(base.precision, base.precision),
        "device": outcomes[0]["device"],
        "threads": outcomes[0]["threads"],
    }
    tables = ResultTables(arms, _samples(outcomes), outcomes, config, facts)
    flags = [f"process {number + 1} failed: {reason}" for number, reason in failures.items()]
    if len({outcome["threads"] for outcome in outcomes}) > 1:
        flags.append("the processes did not all use the same number of threads")
    flags += [f"{arm.label}: {why}" for arm in arms if (why := tables.why_not_ranked(arm)) is not None]
    comparisons, controls = tables.comparisons(), tables.aa()
    return {
        "schema_version": SCHEMA_VERSION,
        "key": key,
        "status": "completed" if controls else "incomplete",
        "study": base.study_name,
        **facts,
        "arms": tables.arms(),
        "comparisons": comparisons,
        "aa": controls,
        "flags": flags,
        "notes": notes,
        "processes": [
            *({name: value for name, value in outcome.items() if name != "samples"} for outcome in outcomes),
            *({"process": number, "error": reason} for number, reason in failures.items()),
        ],
        "plan": outcomes[0]["plan"],
        "plan_reason": outcomes[0]["plan_reason"],
        "bench": asdict(config),
        "config": plain(base),
        "machine": machine(),
        "rmsrepro": rmsrepro.__version__,
    }


def _write(result: dict[str, Any], samples: list[BlockSample], base: TrainConfig, started: float) -> Path:
    """Write the folder whole or not at all."""
    parent = bench_dir(base.out_dir)
    parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
    name = f"{stamp}-{result['level']}-{slug(base.model.name)}-{slug(base.task.name)}-{result['key'][:6]}"
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
