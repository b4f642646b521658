"""Forest plots: quality differences with the margin, and step-time ratios with the A/A control."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from rmsrepro.report import formatting
from rmsrepro.report.cells import Cell
from rmsrepro.report.drawing import Figure, blank, safe, style_of
from rmsrepro.report.scorecard import Row, Scorecard
from rmsrepro.report.timing import StepTime


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
    style = style_of(row.cell, row.arm)
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
    style = style_of(row.cell, row.arm)
    ends = formatting.interval(timed.ratio_low, timed.ratio_high, 3)
    words = (
        f"<b>{safe(row.arm.label)}</b>, {safe(row.cell.label)}, {safe(timed.backend)}<br>"
        f"ratio {timed.ratio:.3f} {safe(ends)}: {safe(time.words)} time<br>"
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
    figure = blank(height=height)
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


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
