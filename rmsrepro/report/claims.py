"""What a report's records have to say to the paper's claims, in the form in which `judge_claims` takes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rmsrepro.config.study import StudyConfig, higher_is_better
from rmsrepro.paper import Findings, NormCard, Quality, Timing
from rmsrepro.report.cells import Cell, flatten
from rmsrepro.report.records import BenchRecord, machine_name
from rmsrepro.report.scorecard import Row, Scorecard
from rmsrepro.report.timing import same_step

MODES: Mapping[str, str] = {"layer": "fwd_bwd", "model": "fwd_bwd", "step": "step"}
"""Of each level the mode that training has: the paper times training."""


def findings_of(
    card: Scorecard,
    benches: Iterable[BenchRecord],
    cards: Mapping[str, NormCard],
    study: StudyConfig | None,
) -> Findings:
    """Return what there is to judge the claims by.

    Args:
        card: the study's comparisons of quality, judged by its rules.
        benches: timings that may belong to the study; what does not time its cells is left out.
        cards: the norms' cards, by name.
        study: None judges no quality and no time.
    """
    if study is None:
        return Findings(cards=cards)
    newest = sorted(benches, key=lambda bench: -bench.written)
    return Findings(
        timings=tuple(timing for bench in newest for timing in _timings(bench, card.cells, study)),
        qualities=tuple(_quality(row, study) for row in card.rows if row.arm in row.cell.arms),
        cards=cards,
    )


def _timings(bench: BenchRecord, cells: Iterable[Cell], study: StudyConfig) -> Iterator[Timing]:
    """The comparisons of one bench that time a cell of the study as its runs are, on one backend."""
    own = bench.study in (study.name, study.name.removesuffix("_modified"))
    settings = flatten(bench.config)
    for timed in bench.comparisons:
        cell = next(
            (cell for cell in cells if (cell.model, cell.task) == (timed.model, timed.task or cell.task)),
            None,
        )
        if cell is None or timed.mode not in ("", MODES.get(timed.level)):
            continue
        fits = same_step(settings, cell.settings) if cell.settings else own
        measured = not math.isnan(timed.ratio)
        against = timed.baseline_norm.split("(", 1)[0] == study.baseline and timed.like_for_like
        if fits and (against or not measured):
            yield Timing(
                level=timed.level,
                cell=cell.name,
                norm=timed.norm,
                params=timed.params,
                backend=timed.backend,
                reduction=timed.reduction if measured else math.nan,
                low=timed.reduction_low,
                high=timed.reduction_high,
                trusted=timed.trusted,
                flags=timed.flags,
                mode=timed.mode,
                hardware=_hardware(bench.machine, timed.device),
                bench_id=bench.bench_id,
            )


def _hardware(machine: Mapping[str, Any], device: str) -> str:
    """The name of what did the timed work: the GPU, or the processor."""
    if not device.startswith("cuda"):
        return machine_name({key: value for key, value in machine.items() if not key.startswith("gpu")})
    return machine_name({key: machine.get(key) for key in ("gpu", "gpus", "accelerator")})


def _quality(row: Row, study: StudyConfig) -> Quality:
    name = dict(zip(map(id, row.cell.arms), study.norms_of(row.cell.name), strict=False)).get(id(row.arm))
    difference = row.difference
    value = math.fsum(row.pairs.arm) / len(row.pairs.arm) if row.pairs.arm else math.nan
    learned = study.learned.get(row.cell.name)
    return Quality(
        cell=row.cell.name,
        norm=name or row.arm.norm,
        metric=row.metric,
        outcome=row.verdict.outcome.value,
        text=row.verdict.text,
        mean=difference.mean if difference else math.nan,
        low=difference.low if difference else math.nan,
        high=difference.high if difference else math.nan,
        n=row.pairs.n,
        margin=row.margin,
        direction=row.direction,
        diverged=row.pairs.arm_diverged,
        value=value,
        learned=learned,
        reached=learned is None or _reaches(value, learned, row.metric),
    )


def _reaches(value: float, learned: float, metric: str) -> bool:
    return value >= learned if higher_is_better(metric) else value <= learned
