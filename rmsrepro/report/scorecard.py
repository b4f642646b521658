"""The scorecard: each norm against the baseline, in quality and in time, one row a cell and norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rmsrepro.config.study import StudyConfig
from rmsrepro.report import formatting
from rmsrepro.report.cells import Arm, Cell
from rmsrepro.report.reading import read
from rmsrepro.report.statistics import PairedDifference, holm
from rmsrepro.report.timing import Reaching, StepTime, reaching, step_time_of, unpaired_step
from rmsrepro.report.verdict import Outcome, Pairs, Verdict, better_or_worse, judge, pair_up

NO_VERDICT = Verdict(Outcome.none, "")


@dataclass(frozen=True)
class Row:
    """One norm in one cell against the cell's baseline."""

    cell: Cell
    arm: Arm
    metric: str
    pairs: Pairs
    margin: float | None
    decimals: int
    difference: PairedDifference | None
    """None unless all planned pairs have ended with a finite metric: no mean over survivors."""
    adjusted_p: float
    verdict: Verdict
    secondary: tuple[tuple[str, PairedDifference | None], ...]
    """Further metrics, without a verdict."""
    step_time: StepTime | None
    reaching: Reaching | None
    unpaired_ms: str

    @property
    def direction(self) -> str:
        """`better`, `worse`, `the same`, or nothing."""
        return better_or_worse(self.difference.mean, self.metric) if self.difference else ""

    @property
    def difference_text(self) -> str:
        """`+0.012 [-0.003, 0.027]`, or `-`."""
        return difference_text(self.difference, self.decimals)


@dataclass(frozen=True)
class BaselineRow:
    """The baseline of a cell: what the differences of its rows are taken from."""

    cell: Cell
    arm: Arm | None
    metric: str
    mean: float
    """Mean over finished seeds; NaN if none has finished."""
    n: int
    reaching: Reaching | None
    unpaired_ms: str


@dataclass(frozen=True)
class Scorecard:
    """All comparisons of a report."""

    title: str
    description: str
    baseline: str
    """Title of the baseline norm."""
    judged: bool
    """Whether verdicts are given: a study with `verdict=true`."""
    why_not: str
    """Why no verdict is given; empty if one is."""
    cells: tuple[Cell, ...]
    baselines: tuple[BaselineRow, ...]
    rows: tuple[Row, ...]
    targets: tuple[tuple[str, str, float], ...]
    """(cell label, metric, value) of each target."""
    reading: tuple[str, ...]
    """The scorecard in plain sentences, one a norm."""

    def rows_of(self, cell: Cell) -> list[Row]:
        """The rows of one cell."""
        return [row for row in self.rows if row.cell is cell]


def difference_text(difference: PairedDifference | None, decimals: int) -> str:
    """`+0.012 [-0.003, 0.027]`: the mean difference and its 90 % interval (if there are two pairs)."""
    if difference is None or math.isnan(difference.mean):
        return "-"
    ends = formatting.interval(difference.low, difference.high, decimals)
    return f"{formatting.signed(difference.mean, decimals)} {ends}".rstrip()


def build_scorecard(
    cells: Sequence[Cell], times: Sequence[StepTime], study: StudyConfig | None, *, title: str = ""
) -> Scorecard:
    """Compare every arm of every cell with its baseline and judge what the study allows to judge."""
    rows: list[Row] = []
    baselines: list[BaselineRow] = []
    targets: list[tuple[str, str, float]] = []
    for cell in cells:
        metric = study.primary_metric(cell.task) if study else "val_loss"
        target = study.target.get(cell.name) if study else None
        target_metric = study.target_metric if study else "val_loss"
        if target is not None:
            targets.append((cell.label, target_metric, target))
        rows += [
            _row(cell, arm, metric, study, times, target, target_metric)
            for arm in cell.arms
            if arm.norm != cell.baseline
        ]
        references: list[Arm | None] = [arm for arm in cell.arms if arm.norm == cell.baseline]
        baselines += [
            _baseline_row(cell, reference, metric, target, target_metric)
            for reference in references or [None]
        ]
    adjusted = holm([_p_value(row) for row in rows])
    judged = study is not None and study.verdict
    if study is not None and judged:
        rows = [
            replace(row, adjusted_p=p, verdict=_verdict(row, p, study))
            for row, p in zip(rows, adjusted, strict=True)
        ]
    card = Scorecard(
        title=title or (study.title or study.name if study else "All runs"),
        description=study.description if study else "",
        baseline=formatting.norm_title(cells[0].baseline if cells else "layernorm"),
        judged=judged,
        why_not=_why_not(study),
        cells=tuple(cells),
        baselines=tuple(baselines),
        rows=tuple(rows),
        targets=tuple(targets),
        reading=(),
    )
    return replace(card, reading=read(card))


def _row(
    cell: Cell,
    arm: Arm,
    metric: str,
    study: StudyConfig | None,
    times: Sequence[StepTime],
    target: float | None,
    target_metric: str,
) -> Row:
    baseline = cell.baseline_of(arm)
    seeds = _seeds(cell, arm, baseline, study)
    pairs = pair_up(arm, baseline, seeds, metric)
    secondary = tuple(
        (other, pair_up(arm, baseline, seeds, other).difference)
        for other in (study.secondary.get(cell.task, []) if study else _others(arm, metric))
    )
    margin = study.margin.get(metric) if study else None
    return Row(
        cell=cell,
        arm=arm,
        metric=metric,
        pairs=pairs,
        margin=margin,
        decimals=formatting.decimals_for(margin, metric),
        difference=pairs.difference,
        adjusted_p=math.nan,
        verdict=NO_VERDICT,
        secondary=secondary,
        step_time=step_time_of(cell, arm, times),
        reaching=reaching(arm, target_metric, target) if target is not None else None,
        unpaired_ms=unpaired_step(arm),
    )


def _seeds(cell: Cell, arm: Arm, baseline: Arm | None, study: StudyConfig | None) -> tuple[int, ...]:
    """The planned seeds; without a plan, those that either arm has."""
    if study is not None:
        return cell.seeds
    return tuple(sorted({*arm.runs, *(baseline.runs if baseline else ())}))


def _others(arm: Arm, metric: str) -> list[str]:
    """Without a study: translation scores, when runs have them, beside the loss."""
    known = {name for run in arm.runs.values() for name in run.metrics}
    return [name for name in ("test_bleu", "test_chrf") if name in known and name != metric]


def _baseline_row(
    cell: Cell, arm: Arm | None, metric: str, target: float | None, target_metric: str
) -> BaselineRow:
    values = [value for run in arm.runs.values() if (value := run.value(metric)) is not None] if arm else []
    return BaselineRow(
        cell=cell,
        arm=arm,
        metric=metric,
        mean=math.fsum(values) / len(values) if values else math.nan,
        n=len(values),
        reaching=reaching(arm, target_metric, target) if arm and target is not None else None,
        unpaired_ms=unpaired_step(arm) if arm else "-",
    )


def _p_value(row: Row) -> float:
    """The p-value that enters Holm's adjustment; NaN (which counts as 1) where there is no test."""
    return row.difference.p_different if row.difference else math.nan


def _verdict(row: Row, adjusted_p: float, study: StudyConfig) -> Verdict:
    return judge(
        row.pairs,
        margin=row.margin,
        adjusted_p=adjusted_p,
        learned=study.learned.get(row.cell.name),
        baseline=formatting.norm_title(study.baseline),
    )


def _why_not(study: StudyConfig | None) -> str:
    if study is None:
        return "no verdicts: no study fixed a margin before these runs"
    return "" if study.verdict else f"no verdicts: the study {study.name!r} shows numbers only"
