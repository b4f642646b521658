"""Loss curves and time to target, as plotly figures without the colours of a theme (the page adds those)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import plotly.graph_objects as go

from rmsrepro.report import formatting
from rmsrepro.report.cells import Arm, Cell
from rmsrepro.report.curves import LoneCurves, MeanCurve, lone_curves, mean_curves, value_range
from rmsrepro.report.drawing import Figure, blank, narrow, safe, style_of, translucent
from rmsrepro.report.scorecard import Scorecard
from rmsrepro.report.statistics import median
from rmsrepro.report.timing import Reaching, StepSeconds

Curve = TypeVar("Curve", MeanCurve, LoneCurves)

LONE_BUDGET = 40_000
"""Points spent on unfinished runs in the whole report, so that the page stays small."""


def loss_figures(
    cells: Sequence[Cell], step_seconds: Mapping[str, StepSeconds] | None = None
) -> list[tuple[Figure, Figure]]:
    """Two figures a cell: training and validation loss against steps, and against seconds.

    Traces carry `meta.metric`; the page shows one metric at a time. A cell without rows has none.

    Args:
        step_seconds: by the cell's label what a bench says of the time of a step. The seconds of such a cell
            are steps times that, for the arms that were timed; those of any other are the runs' own.
    """
    known = step_seconds or {}
    unfinished = sum(not run.finished for cell in cells for arm in cell.arms for run in arm.runs.values())
    points = max(10, min(200, LONE_BUDGET // max(1, unfinished)))
    figures = []
    for place, cell in enumerate(cells):
        curves = [
            _Curves(
                metric=metric,
                means=[(arm, curve) for arm in cell.arms for curve in mean_curves(arm, metric)],
                lone=[(arm, curve) for arm in cell.arms for curve in lone_curves(arm, metric, points=points)],
            )
            for metric in ("val_loss", "train_loss")
        ]
        if any(found.means or found.lone for found in curves):
            timed = known.get(cell.label)
            figures.append(
                (
                    _loss_figure(cell, curves, "step", place),
                    _loss_figure(cell, curves, "seconds", place, timed),
                )
            )
    return figures


@dataclass(frozen=True, eq=False)
class _Curves:
    """The curves of one metric in a cell."""

    metric: str
    means: list[tuple[Arm, MeanCurve]]
    lone: list[tuple[Arm, LoneCurves]]


def _loss_figure(
    cell: Cell, curves: Sequence[_Curves], axis: str, place: int, timed: StepSeconds | None = None
) -> Figure:
    """One figure; `timed` puts the steps of its arms on the bench's clock, and leaves out the others."""
    figure = blank(height=360)
    ranges: dict[str, tuple[float, float]] = {}
    for found in curves:
        machines = {curve.machine for _, curve in found.means}
        for arm, mean in found.means:
            if timed is None or arm.label in timed.by_arm:
                on_clock = _on_clock(mean, timed, arm)
                several = len(machines) > 1
                figure.add_traces(_mean_traces(cell, arm, on_clock, axis, found.metric, several=several))
        for arm, lone in found.lone:
            if timed is None or arm.label in timed.by_arm:
                figure.add_trace(_lone_trace(cell, arm, _on_clock(lone, timed, arm), axis, found.metric))
        span = value_range([curve for _, curve in found.means], [curve for _, curve in found.lone])
        if span is not None:
            ranges[found.metric] = span
    shown = "train_loss" if "val_loss" not in ranges and "train_loss" in ranges else "val_loss"
    for trace in figure.data:
        trace.visible = trace.meta["metric"] == shown
    figure.update_layout(meta={"ranges": ranges})
    shared = any(run.contended for arm in cell.arms for run in arm.runs.values())
    seconds = f"training seconds, unpaired{', contended' if shared else ''}"
    clock = {"step": "steps", "seconds": seconds}[axis]
    if timed is not None:
        left_out = [arm.label for arm in cell.arms if arm.runs and arm.label not in timed.by_arm]
        clock = "seconds, each step as the bench timed it"
        clock += "" if timed.trusted else " (not trusted)"
        clock += f"; not timed: {', '.join(left_out)}" if left_out else ""
    figure.update_xaxes(title_text="step" if axis == "step" else "seconds", rangemode="tozero")
    figure.update_yaxes(title_text="loss (nats a token)", range=ranges.get(shown))
    return Figure(f"loss-{axis}-{place}", f"{cell.label}, against {clock}", figure, 360)


def _on_clock(curve: Curve, timed: StepSeconds | None, arm: Arm) -> Curve:
    """The curve with its steps at the seconds that the bench measured."""
    return curve if timed is None else replace(curve, seconds=curve.step * timed.by_arm[arm.label])


def _mean_traces(
    cell: Cell, arm: Arm, curve: MeanCurve, axis: str, metric: str, *, several: bool
) -> list[go.Scatter]:
    """The band (of more than one seed) and the mean."""
    x = curve.step if axis == "step" else curve.seconds
    name = safe(f"{arm.label} ({curve.machine})" if several else arm.label)
    style = style_of(cell, arm)
    common: dict[str, Any] = {"legendgroup": name, "meta": {"metric": metric, "arm": name}}
    unit = "step %{x:.0f}" if axis == "step" else "%{x:.2f} s"
    mean = go.Scatter(
        x=narrow(x),
        y=narrow(curve.mean),
        customdata=narrow(np.stack([curve.low, curve.high], axis=1)),
        name=name,
        mode="lines+markers" if len(x) <= 25 else "lines",
        line={"color": style["color"], "width": 2, "dash": style["dash"]},
        marker={"symbol": style["symbol"], "size": 6},
        hovertemplate=f"<b>{name}</b>, {unit}<br>%{{y:.4f}} (%{{customdata[0]:.4f}} to "
        f"%{{customdata[1]:.4f}}, {formatting.count(curve.n, 'seed')})<extra></extra>",
        **common,
    )
    if curve.n == 1:
        return [mean]
    band = go.Scatter(
        x=narrow(np.concatenate([x, x[::-1]])),
        y=narrow(np.concatenate([curve.high, curve.low[::-1]])),
        fill="toself",
        fillcolor=translucent(style["color"], 0.18),
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        **common,
    )
    return [band, mean]


def _lone_trace(cell: Cell, arm: Arm, curve: LoneCurves, axis: str, metric: str) -> go.Scatter:
    style = style_of(cell, arm)
    name = safe(f"{arm.label}, {curve.state.value}")
    return go.Scatter(
        x=narrow(curve.step if axis == "step" else curve.seconds),
        y=narrow(curve.value),
        customdata=narrow(curve.seed),
        name=name,
        mode="lines",
        line={"color": style["color"], "width": 1.2, "dash": "dot"},
        opacity=0.85,
        hovertemplate=f"<b>{name}</b>, seed %{{customdata:.0f}}<br>%{{y:.4f}}<extra></extra>",
        meta={"metric": metric, "arm": name},
    )


def target_figures(card: Scorecard) -> list[Figure]:
    """One figure a cell with a target: each seed's training seconds until it, and their median.

    A cell in which no run reached its target has no figure; the table says so.
    """
    figures = []
    for place, cell in enumerate(card.cells):
        base = [(row.arm, row.reaching) for row in card.baselines if row.cell is cell]
        others = [(row.arm, row.reaching) for row in card.rows_of(cell)]
        known = [(arm, reached) for arm, reached in (*base, *others) if arm and reached and reached.n]
        times = [value for _, reached in known for value in reached.seconds]
        finite = [value for value in times if math.isfinite(value)]
        if not finite:
            continue
        never = 1.15 * max(finite)
        height = 110 + 34 * len(known)
        figure = blank(height=height)
        for arm, reached in known:
            figure.add_traces(_reaching_traces(cell, arm, reached, never))
        if len(finite) < len(times):
            figure.add_annotation(
                x=never, y=0.5, yref="paper", text="not reached", textangle=-90, xshift=14, showarrow=False
            )
        shared = any(reached.contended for _, reached in known)
        title = f"training seconds{' (contended)' if shared else ''}"
        figure.update_xaxes(title_text=title, rangemode="tozero")
        figure.update_yaxes(autorange="reversed", type="category")
        figures.append(Figure(f"target-{place}", cell.label, figure, height))
    return figures


def _reaching_traces(cell: Cell, arm: Arm, reached: Reaching, never: float) -> list[go.Scatter]:
    """A mark for each seed, at `never` if it did not reach the target, and a line at the median."""
    style = style_of(cell, arm)
    common: dict[str, Any] = {"mode": "markers", "showlegend": False}
    symbols = [style["symbol"] if math.isfinite(time) else "triangle-right-open" for time in reached.seconds]
    seeds = go.Scatter(
        x=[time if math.isfinite(time) else never for time in reached.seconds],
        y=[safe(arm.label)] * reached.n,
        customdata=[formatting.seconds(time) for time in reached.seconds],
        marker={"color": style["color"], "size": 10, "opacity": 0.75, "symbol": symbols},
        hovertemplate=f"<b>{safe(arm.label)}</b>: %{{customdata}}<extra></extra>",
        **common,
    )
    middle = median(reached.seconds)
    if not math.isfinite(middle):
        return [seeds]
    mark = go.Scatter(
        x=[middle],
        y=[safe(arm.label)],
        marker={"symbol": "line-ns-open", "size": 24, "color": style["color"], "line": {"width": 2}},
        hovertemplate=f"<b>{safe(arm.label)}</b>: median {formatting.seconds(middle)}<extra></extra>",
        **common,
    )
    return [seeds, mark]
