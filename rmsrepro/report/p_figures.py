"""pRMSNorm over p, the part of a vector that its statistic reads: the time it saves, and its quality."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from rmsrepro.report import fields, formatting
from rmsrepro.report.drawing import Figure, blank, error_bars, reach, safe
from rmsrepro.report.savings import OverP
from rmsrepro.report.scorecard import Row, Scorecard

LINES = ("#CC79A7", "#56B4E9", "#8C6BB1", "#A05A2C", "#E69F00", "#17A2B8", "#B8336A", "#7A4419")
"""Lines are places here: none has the colour of one of the paper's norms."""
DASHES = {"composite": "solid", "torch": "dash", "compiled": "dot", "fused": "dashdot"}
GREY = "#7f7f7f"
READS = "p, the part of a vector that the statistic reads (hollow square: RMSNorm)"


@dataclass(frozen=True)
class _Point:
    p: float
    value: float
    low: float
    high: float
    words: str
    sure: bool
    """False is drawn hollow."""


def time_over_p(found: Sequence[OverP], *, baseline: str) -> Figure | None:
    """Time saved over p, a line a place and backend; at the right end RMSNorm, which reads all."""
    if not found:
        return None
    figure = _blank([p for one in found for p, _ in one.points], 380 + 20 * len(found))
    shades: dict[tuple[str, int], str] = {}
    drawn = Counter[tuple[str, str]]()
    for one in found:
        # A place has one colour, and its backends differ in their dashes.
        nth = drawn[one.place.title, one.backend]
        drawn[one.place.title, one.backend] += 1
        shade = shades.setdefault((one.place.title, nth), LINES[len(shades) % len(LINES)])
        timed = [(p, time) for p, time in one.points] + ([(1.0, one.whole)] if one.whole else [])
        points = [
            _Point(
                *(
                    p,
                    time.comparison.reduction,
                    time.comparison.reduction_low,
                    time.comparison.reduction_high,
                ),
                *(f"{time.words} time", time.comparison.trusted),
            )
            for p, time in timed
        ]
        line, whole = (points[:-1], points[-1]) if one.whole else (points, None)
        name = f"{one.place.title}, {one.backend}"
        figure.add_traces(_traces(line, whole, name, shade, DASHES.get(one.backend, "solid")))
    figure.update_yaxes(title_text=safe(f"% less time than {baseline}"))
    return Figure("time-over-p", "pRMSNorm over p: time saved", figure, figure.layout.height)


def quality_over_p(card: Scorecard) -> list[Figure]:
    """One figure a metric: the paired difference from the baseline over p, a line a cell."""
    figures = []
    for number, metric in enumerate(dict.fromkeys(row.metric for row in card.rows)):
        lines = []
        for cell in card.cells:
            rows = [row for row in card.rows_of(cell) if row.metric == metric]
            points = sorted(
                (point for row in rows if row.arm.norm == "prmsnorm" and (point := _quality(row))),
                key=lambda point: point.p,
            )
            if len({point.p for point in points}) > 1:
                whole = next(
                    (point for row in rows if row.arm.norm == "rmsnorm" and (point := _quality(row))), None
                )
                lines.append((cell.label, points, whole))
        if not lines:
            continue
        figure = _blank([point.p for _, points, _ in lines for point in points], 380 + 20 * len(lines))
        for place, (name, points, whole) in enumerate(lines):
            figure.add_traces(_traces(points, whole, name, LINES[place % len(LINES)], "solid"))
        title = f"{formatting.metric_title(metric)}, norm minus {card.baseline}"
        figure.update_yaxes(title_text=safe(title))
        figures.append(
            Figure(f"quality-over-p-{number}", f"pRMSNorm over p: {title}", figure, figure.layout.height)
        )
    return figures


def _quality(row: Row) -> _Point | None:
    p = fields.number(row.arm.params.get("p", 1.0))
    if row.difference is None or not math.isfinite(row.difference.mean) or not math.isfinite(p):
        return None
    d = row.difference
    words = f"{row.difference_text} {row.direction}; {row.verdict.text or row.pairs.text}"
    return _Point(p, d.mean, d.low, d.high, words, True)


def _blank(parts: Sequence[float], height: int) -> go.Figure:
    figure = blank(height=height)
    ticks = sorted({*parts, 1.0})
    figure.add_hline(y=0, line={"width": 1, "color": GREY})
    figure.update_xaxes(
        type="log", tickmode="array", tickvals=ticks, ticktext=[f"{p:g}" for p in ticks], title_text=READS
    )
    return figure


def _traces(
    points: Sequence[_Point], whole: _Point | None, name: str, shade: str, dash: str
) -> list[go.Scatter]:
    traces = [
        go.Scatter(
            x=[point.p for point in points],
            y=[point.value for point in points],
            name=safe(name),
            legendgroup=safe(name),
            mode="lines+markers",
            line={"color": shade, "dash": dash},
            marker={"size": 9, "symbol": ["diamond" if point.sure else "diamond-open" for point in points]},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [reach(point.high - point.value) for point in points],
                "arrayminus": [reach(point.value - point.low) for point in points],
                "thickness": 1.5,
                "width": 4,
            },
            customdata=[safe(point.words) for point in points],
            hovertemplate=f"<b>pRMSNorm</b>, p = %{{x:g}}, {safe(name)}<br>%{{customdata}}<extra></extra>",
        )
    ]
    if whole is not None:
        traces.append(
            go.Scatter(
                x=[1.0],
                y=[whole.value],
                mode="markers",
                legendgroup=safe(name),
                marker={"color": shade, "symbol": "square-open", "size": 11, "line": {"width": 2}},
                error_y=error_bars(whole.value, whole.low, whole.high),
                hovertemplate=f"<b>RMSNorm</b>, {safe(name)}<br>{safe(whole.words)}<extra></extra>",
                showlegend=False,
            )
        )
    return traces
