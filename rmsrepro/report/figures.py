"""The interactive figures, as plotly objects without colours of a theme (the page adds those).

Every text that comes from a record goes through `safe`, since plotly reads labels and hover texts
as a small HTML.
"""

from __future__ import annotations

import hashlib
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from rmsrepro.report import formatting
from rmsrepro.report.cells import Arm, Cell
from rmsrepro.report.curves import LoneCurve, MeanCurve, lone_curves, mean_curves, value_range
from rmsrepro.report.scorecard import Row, Scorecard
from rmsrepro.report.statistics import median
from rmsrepro.report.timing import StepTime

COLOURS = {
    "layernorm": "#0072B2",
    "rmsnorm": "#D55E00",
    "prmsnorm": "#009E73",
    "none": "#808080",
    "layernorm_nobias": "#56B4E9",
    "l2norm": "#CC79A7",
    "batchnorm": "#E69F00",
    "weightnorm": "#8C6BB1",
}
"""Okabe and Ito's colours, which stay apart for colour-blind readers; one a norm, in every figure."""

SPARE_COLOURS = ("#A6761D", "#66A61E", "#E7298A", "#1B9E9E", "#7570B3", "#B15928")
SYMBOLS = {"layernorm": "circle", "rmsnorm": "square", "prmsnorm": "diamond", "none": "x"}
DASHES = ("solid", "dash", "dot", "dashdot")

LONE_BUDGET = 40_000
"""Points spent on unfinished runs in the whole report, so that the page stays small."""


@dataclass(frozen=True, eq=False)
class Figure:
    """A figure with the words around it."""

    key: str
    """Unique in the page; letters, digits and dashes."""
    title: str
    figure: go.Figure
    height: int
    """CSS pixels."""


def safe(text: object) -> str:
    """Escape a record's text for plotly's labels."""
    return html.escape(str(text), quote=True)


def colour(norm: str) -> str:
    """A norm's colour, the same in every report; a plug-in's is drawn from its name."""
    if norm in COLOURS:
        return COLOURS[norm]
    digest = hashlib.sha256(norm.encode()).digest()
    return SPARE_COLOURS[digest[0] % len(SPARE_COLOURS)]


def loss_figures(cells: Sequence[Cell], axis: str) -> list[Figure]:
    """One figure a cell: training and validation loss against `axis`, `step` or `seconds`.

    Traces carry `meta.metric`; the page shows one metric at a time.
    """
    unfinished = sum(not run.finished for cell in cells for arm in cell.arms for run in arm.runs.values())
    points = max(10, min(200, LONE_BUDGET // max(1, unfinished)))
    return [
        figure
        for place, cell in enumerate(cells)
        if (figure := _loss_figure(cell, axis, f"loss-{axis}-{place}", points)) is not None
    ]


def _loss_figure(cell: Cell, axis: str, key: str, points: int) -> Figure | None:
    figure = _figure(height=360)
    ranges: dict[str, tuple[float, float] | None] = {}
    for metric in ("val_loss", "train_loss"):
        means = [(arm, curve) for arm in cell.arms for curve in mean_curves(arm, metric)]
        lone = [(arm, curve) for arm in cell.arms for curve in lone_curves(arm, metric, points=points)]
        ranges[metric] = value_range([curve for _, curve in means], [curve for _, curve in lone])
        machines = {curve.machine for _, curve in means}
        for arm, mean in means:
            figure.add_traces(_mean_traces(cell, arm, mean, axis, metric, several=len(machines) > 1))
        for arm, curve in lone:
            figure.add_trace(_lone_trace(cell, arm, curve, axis, metric))
    if not figure.data:
        return None
    shown = "val_loss" if ranges["val_loss"] else "train_loss"
    for trace in figure.data:
        trace.visible = trace.meta["metric"] == shown
    figure.update_layout(meta={"ranges": {k: v for k, v in ranges.items() if v}, "shown": shown})
    figure.update_xaxes(title_text="step" if axis == "step" else "training seconds", rangemode="tozero")
    figure.update_yaxes(title_text="loss (nats a token)", range=ranges[shown])
    clock = "steps" if axis == "step" else "training seconds"
    return Figure(key, f"{cell.label}, against {clock}", figure, 360)


def _mean_traces(
    cell: Cell, arm: Arm, curve: MeanCurve, axis: str, metric: str, *, several: bool
) -> list[go.Scatter]:
    x = curve.step if axis == "step" else curve.seconds
    name = f"{arm.label} ({curve.machine})" if several else arm.label
    style = _style(cell, arm)
    common: dict[str, Any] = {"legendgroup": safe(name), "meta": {"metric": metric, "arm": safe(name)}}
    seeds = formatting.count(curve.n, "seed")
    traces = []
    if curve.n > 1:
        traces.append(
            go.Scatter(
                x=_narrow(np.concatenate([x, x[::-1]])),
                y=_narrow(np.concatenate([curve.high, curve.low[::-1]])),
                fill="toself",
                fillcolor=_translucent(style["color"], 0.18),
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
                **common,
            )
        )
    unit = "step %{x:.0f}" if axis == "step" else "%{x:.2f} s"
    traces.append(
        go.Scatter(
            x=_narrow(x),
            y=_narrow(curve.mean),
            customdata=_narrow(np.stack([curve.low, curve.high], axis=1)),
            name=safe(name),
            mode="lines+markers" if len(x) <= 25 else "lines",
            line={"color": style["color"], "width": 2, "dash": style["dash"]},
            marker={"symbol": style["symbol"], "size": 6},
            hovertemplate=f"<b>{safe(name)}</b>, {unit}<br>%{{y:.4f}} (%{{customdata[0]:.4f}} to "
            f"%{{customdata[1]:.4f}}, {seeds})<extra></extra>",
            **common,
        )
    )
    return traces


def _lone_trace(cell: Cell, arm: Arm, curve: LoneCurve, axis: str, metric: str) -> go.Scatter:
    style = _style(cell, arm)
    state = curve.run.state.value
    return go.Scatter(
        x=_narrow(curve.step if axis == "step" else curve.seconds),
        y=_narrow(curve.value),
        name=safe(f"{arm.label}, {state}"),
        legendgroup=safe(f"{arm.label}, {state}"),
        showlegend=curve.run is _first_lone(arm, state, metric),
        mode="lines",
        line={"color": style["color"], "width": 1.2, "dash": "dot"},
        opacity=0.85,
        hovertemplate=f"<b>{safe(arm.label)}</b>, seed {curve.run.seed}: {state}<br>%{{y:.4f}}<extra></extra>",
        meta={"metric": metric, "arm": safe(f"{arm.label}, {state}")},
    )


def _first_lone(arm: Arm, state: str, metric: str) -> object:
    """The run that stands in the legend for all unfinished ones of an arm and state."""
    return next(
        run
        for run in arm.runs.values()
        if not run.finished and run.state.value == state and metric in run.curve
    )


def target_figures(card: Scorecard) -> list[Figure]:
    """One figure a cell with a target: each seed's training seconds until it, and their median."""
    figures = []
    for place, cell in enumerate(card.cells):
        base = [(row.arm, row.reaching) for row in card.baselines if row.cell is cell and row.arm]
        arms = base + [(row.arm, row.reaching) for row in card.rows_of(cell)]
        known = [(arm, reached) for arm, reached in arms if arm and reached and reached.n]
        if not known:
            continue
        finite = [value for _, reached in known for value in reached.seconds if math.isfinite(value)]
        if not finite:
            continue
        never = 1.15 * max(finite)
        figure = _figure(height=110 + 34 * len(known))
        for arm, reached in known:
            style = _style(cell, arm)
            x = [value if math.isfinite(value) else never for value in reached.seconds]
            words = [formatting.seconds(value) for value in reached.seconds]
            figure.add_trace(
                go.Scatter(
                    x=x,
                    y=[safe(arm.label)] * len(x),
                    mode="markers",
                    customdata=words,
                    marker={
                        "color": style["color"],
                        "size": 10,
                        "opacity": 0.75,
                        "symbol": [
                            style["symbol"] if math.isfinite(value) else "triangle-right-open"
                            for value in reached.seconds
                        ],
                    },
                    hovertemplate=f"<b>{safe(arm.label)}</b>: %{{customdata}}<extra></extra>",
                    showlegend=False,
                )
            )
            if math.isfinite(middle := median(reached.seconds)):
                figure.add_trace(_median_mark(arm, middle, style["color"]))
        if len(finite) < sum(reached.n for _, reached in known):
            figure.add_annotation(
                x=never, y=0.5, yref="paper", text="not reached", textangle=-90, xshift=14, showarrow=False
            )
        figure.update_xaxes(title_text="training seconds", rangemode="tozero")
        figure.update_yaxes(autorange="reversed", automargin=True, type="category")
        figures.append(Figure(f"target-{place}", cell.label, figure, 110 + 34 * len(known)))
    return figures


def _median_mark(arm: Arm, middle: float, hue: str) -> go.Scatter:
    return go.Scatter(
        x=[middle],
        y=[safe(arm.label)],
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 24, "color": hue, "line": {"width": 2}},
        hovertemplate=f"<b>{safe(arm.label)}</b>: median {formatting.seconds(middle)}<extra></extra>",
        showlegend=False,
    )


def quality_forest(card: Scorecard) -> list[Figure]:
    """One figure a primary metric: mean paired differences, 90 % intervals and the margin's band."""
    figures = []
    for place, metric in enumerate(dict.fromkeys(row.metric for row in card.rows)):
        rows = [row for row in card.rows if row.metric == metric]
        if not any(row.difference and math.isfinite(row.difference.mean) for row in rows):
            continue
        figure, height = _forest([(row.cell, row) for row in rows])
        for y, row in zip(_places([row.cell for row in rows]), rows, strict=True):
            figure.add_trace(_quality_trace(y, row))
        margin = rows[0].margin
        if margin is not None:
            figure.add_vrect(
                x0=-margin, x1=margin, fillcolor="#7f7f7f", opacity=0.15, line_width=0, layer="below"
            )
            for edge in (-margin, margin):
                figure.add_vline(x=edge, line={"width": 1, "dash": "dot", "color": "#7f7f7f"})
        figure.add_vline(x=0, line={"width": 1, "color": "#7f7f7f"})
        title = f"{formatting.metric_title(metric)}, norm minus {card.baseline}"
        figure.update_xaxes(title_text=safe(title))
        figures.append(Figure(f"quality-{place}", title, figure, height))
    return figures


def _quality_trace(y: float, row: Row) -> go.Scatter:
    difference = row.difference
    style = _style(row.cell, row.arm)
    if difference is None or not math.isfinite(difference.mean):
        text = safe(row.verdict.text or row.pairs.text)
        return go.Scatter(x=[0], y=[y], mode="text", text=[text], hoverinfo="skip", showlegend=False)
    half = difference.high - difference.mean
    return go.Scatter(
        x=[difference.mean],
        y=[y],
        mode="markers",
        marker={"color": style["color"], "size": 10, "symbol": style["symbol"]},
        error_x={"type": "data", "array": [half if math.isfinite(half) else 0.0], "thickness": 2, "width": 5},
        hovertemplate=f"<b>{safe(row.arm.label)}</b>, {safe(row.cell.label)}<br>{safe(row.difference_text)} "
        f"{row.direction}<br>{safe(row.verdict.text or row.pairs.text)}<extra></extra>",
        showlegend=False,
    )


def time_forest(card: Scorecard) -> Figure | None:
    """Step-time ratios to the baseline on the same backend, with intervals and the A/A control."""
    timed = [
        (row, row.step_time) for row in card.rows if row.step_time is not None and row.step_time.measured
    ]
    if not timed:
        return None
    figure, height = _forest([(row.cell, row) for row, _ in timed])
    for y, (row, time) in zip(_places([row.cell for row, _ in timed]), timed, strict=True):
        figure.add_traces(_time_traces(y, row, time))
    figure.add_vline(x=1, line={"width": 1, "color": "#7f7f7f"})
    figure.update_xaxes(title_text=safe(f"time of a step / {card.baseline}'s, 95 % interval"))
    return Figure("time-forest", "Step time against the baseline", figure, height)


def _time_traces(y: float, row: Row, time: StepTime) -> list[go.Scatter]:
    timed = time.comparison
    style = _style(row.cell, row.arm)
    words = (
        f"<b>{safe(row.arm.label)}</b>, {safe(row.cell.label)}, {safe(timed.backend)}<br>ratio {timed.ratio:.3f} "
        f"{safe(formatting.interval(timed.ratio_low, timed.ratio_high, 3))}: {safe(time.words)} time<br>"
        f"{'trusted' if timed.trusted else 'not trusted'} {safe(', '.join(timed.flags))}<extra></extra>"
    )
    traces = []
    if math.isfinite(timed.aa_low) and math.isfinite(timed.aa_high):
        traces.append(
            go.Scatter(
                x=[timed.aa_low, timed.aa_high],
                y=[y, y],
                mode="lines",
                line={"color": "#7f7f7f", "width": 9},
                opacity=0.35,
                hovertemplate=f"A/A control: {timed.aa_ratio:.3f}<extra></extra>",
                showlegend=False,
            )
        )
    open_symbol = style["symbol"] if timed.trusted else f"{style['symbol']}-open"
    traces.append(
        go.Scatter(
            x=[timed.ratio],
            y=[y],
            mode="markers",
            marker={"color": style["color"], "size": 10, "symbol": open_symbol},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [_finite(timed.ratio_high - timed.ratio)],
                "arrayminus": [_finite(timed.ratio - timed.ratio_low)],
                "thickness": 2,
                "width": 5,
            },
            hovertemplate=words,
            showlegend=False,
        )
    )
    return traces


# ------------------------------------------------------------------------------------------ helpers


def _places(cells: Sequence[Cell]) -> list[float]:
    """Vertical places of a forest's rows: one line each, and one before each cell for its name."""
    places, place, previous = [], 0.0, None
    for cell in cells:
        place += 1.0 if cell is previous else 2.0
        previous = cell
        places.append(place)
    return places


def _forest(rows: Sequence[tuple[Cell, Row]]) -> tuple[go.Figure, int]:
    """An empty forest plot: rows named by norm, under the name of their cell."""
    cells = [cell for cell, _ in rows]
    places = _places(cells)
    height = 90 + 26 * round(places[-1] + 1)
    figure = _figure(height=height)
    figure.update_yaxes(
        tickmode="array",
        tickvals=places,
        ticktext=[safe(row.arm.label) for _, row in rows],
        range=[places[-1] + 0.7, 0.4],
        showgrid=False,
        automargin=True,
        zeroline=False,
    )
    for place, cell, previous in zip(places, cells, [None, *cells[:-1]], strict=True):
        if cell is not previous:
            figure.add_annotation(
                x=0,
                xref="paper",
                y=place - 1,
                text=f"<b>{safe(cell.label)}</b>",
                showarrow=False,
                xanchor="left",
            )
    return figure, height


def _figure(*, height: int) -> go.Figure:
    return go.Figure(
        layout={
            "template": {},
            "height": height,
            "margin": {"l": 56, "r": 16, "t": 26, "b": 48},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"size": 12},
            "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
            "xaxis": {"title": {"font": {"size": 12}, "standoff": 8}, "automargin": True},
            "yaxis": {"title": {"font": {"size": 12}, "standoff": 8}, "automargin": True},
            "hovermode": "closest",
            "dragmode": "zoom",
        }
    )


def _style(cell: Cell, arm: Arm) -> dict[str, str]:
    """Colour and symbol by norm; siblings of one norm (other parameters) differ in their dash."""
    siblings = [other.label for other in cell.arms if other.norm == arm.norm]
    place = siblings.index(arm.label) if arm.label in siblings else 0
    return {
        "color": colour(arm.norm),
        "symbol": SYMBOLS.get(arm.norm, "circle"),
        "dash": DASHES[place % len(DASHES)],
    }


def _translucent(hex_colour: str, alpha: float) -> str:
    red, green, blue = (int(hex_colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _narrow(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Single precision: enough for a pixel, half the size of the page."""
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(values), values, np.nan).astype(np.float32)


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
