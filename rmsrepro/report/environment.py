"""The machines and versions behind the records, each said once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rmsrepro.report.cells import flatten
from rmsrepro.report.records import Records, RunRecord, machine_name

MOST_VALUES = 4
"""A fact with more values than this over the runs of a machine (a start time, an id) tells nothing."""
LEFT_OUT = ("command", "started")
"""Facts about a single run, not about where it ran."""
LONGEST = 160
"""Characters shown of a value."""


@dataclass(frozen=True)
class Machine:
    """One machine: what it is, what ran on it, and with which versions."""

    name: str
    num_runs: int
    num_benches: int
    facts: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str], ...]


def machines(records: Records) -> list[Machine]:
    """All machines, the busiest first. A fact on which runs differ lists its values."""
    runs: dict[str, list[RunRecord]] = defaultdict(list)
    benches: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for run in records.runs:
        if run.machine or run.env:
            runs[machine_name(run.machine)].append(run)
    for bench in records.benches:
        benches[machine_name(bench.machine)].append(bench.machine)
    found = []
    for name in {**runs, **benches}:
        hardware = [run.machine for run in runs[name]] + benches[name]
        software = [{k: v for k, v in run.env.items() if k != "machine"} for run in runs[name]]
        found.append(
            Machine(
                name=name,
                num_runs=len(runs[name]),
                num_benches=len(benches[name]),
                facts=_facts(hardware),
                versions=_facts(software),
            )
        )
    return sorted(found, key=lambda machine: -(machine.num_runs + machine.num_benches))


def _facts(nodes: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    values: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for path, value in flatten(node).items():
            key = path.removeprefix("packages.")
            if key in LEFT_OUT:
                continue
            text = ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
            if value not in (None, "", [], {}) and text not in values[key]:
                values[key].append(text)
    facts = []
    for key, texts in values.items():
        if len(texts) <= MOST_VALUES:
            joined = "; ".join(texts)
            facts.append((key, joined if len(joined) <= LONGEST else joined[: LONGEST - 3] + "..."))
    return tuple(facts)
