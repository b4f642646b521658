"""Forest plots: what they share, and the one of quality differences with the study's margin."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from rmsrepro.report import formatting
from rmsrepro.report.drawing import Figure, blank, safe, style_of
from rmsrepro.report.scorecard import Row, Scorecard


def quality_forest(card: Scorecard) -> list[Figure]:
    """One figure a primary metric: mean paired differences, 90 % intervals and the margin's band."""
    figures = []
    for place, metric in enumerate(dict.fromkeys(row.metric for row in card.rows)):
        rows = [row for row in card.rows if row.metric == metric]
        if not any(row.difference and math.isfinite(row.difference.mean) for row in rows):
            continue
        figure, height = frame([(row.cell.label, row.arm.label) for row in rows])
        for y, row in zip(places([row.cell.label for row in rows]), rows, strict=True):
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


def places(groups: Sequence[str]) -> list[float]:
    """Vertical places of a forest's rows: one line each, and one before each group for its name."""
    found, place, previous = [], 0.0, ""
    for number, group in enumerate(groups):
        place += 2.0 if number == 0 or group != previous else 1.0
        previous = group
        found.append(place)
    return found


def frame(rows: Sequence[tuple[str, str]]) -> tuple[go.Figure, int]:
    """An empty forest plot and its height: rows (group, label), under the name of their group."""
    groups = [group for group, _ in rows]
    rows_at = places(groups)
    height = 90 + 26 * round(rows_at[-1] + 1)
    figure = blank(height=height)
    figure.update_yaxes(
        tickmode="array",
        tickvals=rows_at,
        ticktext=[safe(label) for _, label in rows],
        range=[rows_at[-1] + 0.7, 0.4],
        showgrid=False,
        automargin=True,
        zeroline=False,
    )
    previous = None
    for place, group in zip(rows_at, groups, strict=True):
        if group != previous:
            figure.add_annotation(
                x=0,
                xref="paper",
                y=place - 1,
                text=f"<b>{safe(group)}</b>",
                showarrow=False,
                xanchor="left",
            )
        previous = group
    return figure, height
