"""Figures of paired times: reductions beside the paper's, the norm's share of a step, single layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from rmsrepro.paper import PrintedTime
from rmsrepro.report import formatting
from rmsrepro.report.drawing import SYMBOLS, Figure, colour, error_bars, safe
from rmsrepro.report.forests import frame, places
from rmsrepro.report.layers import LayerTime
from rmsrepro.report.parameters import Names
from rmsrepro.report.savings import Place, Share
from rmsrepro.report.timing import StepTime

GREY = "#7f7f7f"
PAPER = "#7B2CBF"
"""The colour of what the paper prints: no norm's."""


def reduction_forest(
    found: Sequence[Place], names: Names, printed: Sequence[PrintedTime], *, baseline: str
) -> Figure | None:
    """Time reductions of steps and models with their intervals, the A/A band, and the paper's values.

    Args:
        found: places; single layers are left out.
        printed: what the paper has, drawn in the row of the timing that is held against it.
        baseline: its title.
    """
    rows = [(place, time) for place in found if place.level != "layer" for time in place.times]
    if not rows:
        return None
    figure, height = frame([(place.title, _label(names, time)) for place, time in rows])
    height += 20  # for the legend
    printed_pct: list[float] = []
    for y, (place, time) in zip(places([place.title for place, _ in rows]), rows, strict=True):
        figure.add_traces(_row(y, names, time, place.title))
        own = [one for one in printed if _is_of(one, time)]
        printed_pct += [one.reduction.pct for one in own]
        figure.add_traces([_printed(y + 0.24, one) for one in own])
    for name, trace in _legend(baseline, with_paper=bool(printed_pct)):
        figure.add_trace(trace.update(name=name, showlegend=True, x=[None], y=[None]))
    figure.add_vline(x=0, line={"width": 1, "color": GREY})
    figure.update_layout(height=height)
    figure.update_xaxes(
        title_text=safe(f"% less time than {baseline}, same backend (95 %)"),
        range=_range(printed_pct, [time for _, time in rows]),
    )
    return Figure("time-forest", f"Time saved against {baseline}", figure, height)


def _range(centres: Sequence[float], times: Sequence[StepTime]) -> list[float]:
    # One wild timing that nobody trusts shall not make the others unreadable.
    shown = [time for time in times if time.comparison.trusted] or times
    centres = [*centres, *(time.comparison.reduction for time in shown)]
    ends = [
        end
        for time in shown
        for end in (time.comparison.reduction_low, time.comparison.reduction_high)
        if math.isfinite(end) and abs(end) < 1000
    ]
    low, high = min([0.0, *centres, *ends]), max([0.0, *centres, *ends])
    room = 0.05 * (high - low) or 1.0
    return [low - room, high + room]


def _legend(baseline: str, *, with_paper: bool) -> list[tuple[str, go.Scatter]]:
    marks = [
        (
            f"{safe(baseline)} against itself (A/A)",
            {"mode": "lines", "line": {"color": GREY, "width": 9}, "opacity": 0.35},
        ),
        ("hollow: the bench does not trust it", _marks(GREY, "circle-open")),
    ]
    if with_paper:
        marks.append(("printed in the paper, two sd to each side", _marks(PAPER, "line-ns-open")))
    return [(name, go.Scatter(**look)) for name, look in marks]


def _marks(shade: str, symbol: str) -> dict[str, Any]:
    return {"mode": "markers", "marker": {"color": shade, "symbol": symbol, "size": 10, "line": {"width": 2}}}


def _label(names: Names, time: StepTime) -> str:
    c = time.comparison
    return f"{names.given(c.plain_norm, c.params)}, {c.backend}"


def _is_of(one: PrintedTime, time: StepTime) -> bool:
    """Whether this is the very timing that the printed value was held against."""
    c, used = time.comparison, one.timing
    return (time.bench_id, c.level, c.mode, c.norm, c.backend) == (
        *(used.bench_id, used.level, used.mode, used.norm, used.backend),
    ) and c.params == used.params


def _row(y: float, names: Names, time: StepTime, where: str) -> list[go.Scatter]:
    c = time.comparison
    ends = formatting.interval(c.reduction_low, c.reduction_high, 1)
    words = (
        f"<b>{safe(_label(names, time))}</b>, {safe(where)}<br>{safe(time.words)} time {safe(ends)}<br>"
        f"{'trusted' if c.trusted else 'not trusted'}<br>{'<br>'.join(map(safe, c.flags))}<extra></extra>"
    )
    traces = []
    if math.isfinite(c.aa_low) and math.isfinite(c.aa_high):
        traces.append(
            go.Scatter(
                x=[100 * (1 - c.aa_high), 100 * (1 - c.aa_low)],
                y=[y, y],
                mode="lines",
                line={"color": GREY, "width": 9},
                opacity=0.35,
                hovertemplate=f"A/A control: {c.aa_ratio:.3f}<extra></extra>",
                showlegend=False,
            )
        )
    symbol = SYMBOLS.get(c.plain_norm, "circle")
    traces.append(
        go.Scatter(
            x=[c.reduction],
            y=[y],
            mode="markers",
            marker={
                "color": colour(c.plain_norm),
                "size": 10,
                "symbol": symbol if c.trusted else f"{symbol}-open",
            },
            error_x=error_bars(c.reduction, c.reduction_low, c.reduction_high),
            hovertemplate=words,
            showlegend=False,
        )
    )
    return traces


def _printed(y: float, one: PrintedTime) -> go.Scatter:
    low, high = one.reduction.band
    claim = one.claim
    words = (
        f"<b>{safe(claim.table)}</b>, {safe(claim.norm)}: {safe(one.reduction.text)} less time<br>"
        f"{safe(', '.join(filter(None, (claim.model, claim.framework, claim.hardware))))}<extra></extra>"
    )
    return go.Scatter(
        x=[one.reduction.pct],
        y=[y],
        mode="markers+text",
        text=[safe(claim.framework.split(" ")[0].replace("TensorFlow", "TF"))],
        textposition="bottom center",
        textfont={"size": 8, "color": PAPER},
        marker={"color": PAPER, "symbol": "line-ns-open", "size": 11, "line": {"width": 2}},
        error_x=error_bars(one.reduction.pct, low, high) | {"thickness": 1, "width": 0},
        hovertemplate=words,
        showlegend=False,
    )


# -------------------------------------------------------------------------------------------- the share


def share_figure(found: Sequence[Share]) -> Figure | None:
    """The norm's share of a step, in per cent, with its interval."""
    shown = [share for share in found if math.isfinite(share.share)]
    if not shown:
        return None
    groups = [share.place.title for share in shown]
    figure, height = frame(
        [(group, f"{share.label}, {share.backend}") for group, share in zip(groups, shown, strict=True)]
    )
    for y, share in zip(places(groups), shown, strict=True):
        ends = formatting.interval(share.low, share.high, 1)
        figure.add_trace(
            go.Bar(
                x=[share.share],
                y=[y],
                orientation="h",
                width=0.62,
                marker={"color": colour(share.norm), "opacity": 0.85 if share.trusted else 0.4},
                error_x=error_bars(share.share, share.low, share.high) | {"color": GREY},
                hovertemplate=f"<b>{safe(share.label)}</b>, {safe(share.backend)}, "
                f"{safe(share.place.title)}<br>{share.share:.1f} % of the time {safe(ends)}<extra></extra>",
                showlegend=False,
            )
        )
    figure.add_vline(x=0, line={"width": 1, "color": GREY})
    figure.update_xaxes(title_text="% of the time that goes when the norm is taken out, 95 % interval")
    return Figure("norm-share", "The norm's share", figure, height)


# ------------------------------------------------------------------------------------------------ layers


def layer_figure(found: Sequence[LayerTime], names: Names) -> Figure | None:
    """The speed of single layers, as a part of what a copy of the same input reaches."""
    shown = [one for one in found if math.isfinite(one.arm.copy_share)]
    if not shown:
        return None
    groups = [one.title for one in shown]
    figure, height = frame([(one.title, one.label(names)) for one in shown])
    for y, one in zip(places(groups), shown, strict=True):
        arm = one.arm
        figure.add_trace(
            go.Bar(
                x=[100 * arm.copy_share],
                y=[y],
                orientation="h",
                width=0.62,
                marker={"color": colour(arm.norm)},
                hovertemplate=f"<b>{safe(one.label(names))}</b>, {safe(one.title)}<br>"
                f"{100 * arm.copy_share:.0f} % of a copy, {arm.gb_per_s:.1f} GB/s, "
                f"{formatting.seconds(arm.median_s)}<extra></extra>",
                showlegend=False,
            )
        )
    figure.add_vline(x=100, line={"width": 2, "color": GREY, "dash": "dot"})
    figure.update_xaxes(
        title_text="% of the speed of a copy (dotted: moves no more than it must)", rangemode="tozero"
    )
    return Figure("layer-copy", "How far a layer is from the machine's limit", figure, height)
