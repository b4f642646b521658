"""The figures of a tuning: the expected best after n trials, and the metric over each tuned parameter."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from rmsrepro.config.study import higher_is_better
from rmsrepro.report import formatting
from rmsrepro.report.drawing import Figure, blank, log_ticks, safe, style_of
from rmsrepro.report.tuning_curves import expected_best
from rmsrepro.report.tunings import PARAMETERS, TunedArm, Tuning

HEIGHT = 360


def tuning_figures(tuning: Tuning, place: int) -> list[Figure]:
    """The figures of the tuning at a place of the page; none before a trial has ended with a number."""
    if not any(math.isfinite(value) for arm in tuning.arms for value in arm.values):
        return []
    return [
        _curves(tuning, place),
        *(_over(tuning, key, place) for key in tuning.tuned),
    ]


def _curves(tuning: Tuning, place: int) -> Figure:
    """The expected best after n trials, a line a norm; where all n trials may be lost there is no point."""
    figure = blank(height=HEIGHT)
    metric = tuning.record.metric
    for arm in tuning.arms:
        curve = expected_best(arm.values, higher=higher_is_better(metric))
        points = [(n, value) for n, value in enumerate(curve, start=1) if math.isfinite(value)]
        if points:
            waiting = len(arm.trials) - len(arm.values)
            some = f" ({len(arm.values)} of {len(arm.trials)} trials)" if waiting else ""
            style = style_of(tuning.cell, arm.arm)
            figure.add_trace(
                go.Scatter(
                    x=[n for n, _ in points],
                    y=[value for _, value in points],
                    name=safe(arm.arm.label + some),
                    mode="lines+markers",
                    line={"color": style["color"], "dash": style["dash"]},
                    marker={"symbol": style["symbol"], "size": 7},
                    hovertemplate=f"<b>{safe(arm.arm.label)}</b>, %{{x}} trials<br>%{{y:.4f}}<extra></extra>",
                )
            )
    figure.update_xaxes(
        title_text="trials", rangemode="tozero", dtick=1 if len(tuning.record.points) < 17 else None
    )
    figure.update_yaxes(title_text=safe(f"expected best {formatting.metric_title(metric)}"))
    title = f"{tuning.cell.label}: tuning curves"
    return Figure(f"tuning-{place}-curves", title, figure, HEIGHT)


def _over(tuning: Tuning, key: str, place: int) -> Figure:
    """The metric of each trial over one parameter; lost ones as crosses at the worse end of the axis."""
    figure = blank(height=HEIGHT)
    metric, higher = tuning.record.metric, higher_is_better(tuning.record.metric)
    values = [value for arm in tuning.arms for value in arm.values if math.isfinite(value)]
    low, high = min(values), max(values)
    room = 0.08 * (high - low or abs(high) or 1.0)
    end = low - room if higher else high + room
    for arm in tuning.arms:
        figure.add_traces(_points(tuning, arm, key, end))
    if key == "warmup_steps":
        figure.update_xaxes(title_text=f"{PARAMETERS[key]} (steps)")
    else:
        ticks = log_ticks(*tuning.record.ranges[key])
        # plotly's own labels between the decades are single digits without their power of ten.
        figure.update_xaxes(
            title_text=PARAMETERS[key],
            type="log",
            tickmode="array",
            tickvals=ticks,
            ticktext=[f"{tick:g}" for tick in ticks],
        )
    figure.update_yaxes(title_text=safe(formatting.metric_title(metric)))
    title = f"{tuning.cell.label}: trials over the {PARAMETERS[key]}"
    return Figure(f"tuning-{place}-{key.replace('_', '-')}", title, figure, HEIGHT)


def _points(tuning: Tuning, arm: TunedArm, key: str, end: float) -> list[go.Scatter]:
    style, name = style_of(tuning.cell, arm.arm), safe(arm.arm.label)
    traces: list[go.Scatter] = []
    for lost in (False, True):
        trials = [trial for trial in arm.trials if trial.value is not None and trial.lost is lost]
        if not trials:
            continue
        words = [
            ", ".join(f"{PARAMETERS[other]} {trial.point[other]:g}" for other in tuning.tuned)
            for trial in trials
        ]
        if lost:
            words = [
                f"{trial.run.state.value if trial.run else ''}: {word}"
                for trial, word in zip(trials, words, strict=True)
            ]
        traces.append(
            go.Scatter(
                x=[trial.point[key] for trial in trials],
                y=[end if lost else trial.value for trial in trials],
                name=name,
                legendgroup=name,
                showlegend=not traces,
                mode="markers",
                marker={
                    "color": style["color"],
                    "symbol": "x-thin" if lost else style["symbol"],
                    "size": [13 if trial is arm.best else 9 for trial in trials],
                    "line": {"width": 2 if lost else 0, "color": style["color"]},
                },
                customdata=[safe(word) for word in words],
                hovertemplate=f"<b>{name}</b>{'' if lost else ' %{y:.4f}'}<br>%{{customdata}}<extra></extra>",
            )
        )
    return traces
