"""Writes the page: one HTML file that needs nothing beside it and asks the network for nothing.

Three walls keep a record's text from becoming code: Jinja escapes it in the markup, `embed` escapes
it in the data block, and a content policy lets only the two scripts run whose hashes it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Any

import plotly.offline
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import rmsrepro
from rmsrepro.config.study import StudyConfig
from rmsrepro.report import figures, formatting
from rmsrepro.report.environment import machines
from rmsrepro.report.reading import paper_context
from rmsrepro.report.records import Records, RunRecord, State
from rmsrepro.report.scorecard import BaselineRow, Row, Scorecard, difference_text
from rmsrepro.report.statistics import PairedDifference
from rmsrepro.report.timing import StepTime
from rmsrepro.report.verdict import RULES

MEASURING = (
    "Step times come from paired benches only: all arms run in every round in random order, in several fresh "
    "processes, with the baseline twice as an A/A control. A ratio is t_arm / t_baseline on the same backend; its "
    "95 % interval is taken over processes; time saved is 100 * (1 - ratio) percent. A timing that fails the "
    "bench's own checks is shown and marked as not trusted.",
    "Times taken while training (loss against seconds, time to target, ms a step) are unpaired: arms ran one after "
    "another or side by side. They are shown as they are and never as a percentage. Runs that shared the machine "
    "are marked contended, and their times are not quoted in tables. The clock counts training only: validation, "
    "checkpoints, logging and warm-up are kept apart.",
    "Times of different machines are never pooled.",
    "Curves: the line is the mean over the finished seeds, the band goes from the smallest to the largest. Dotted "
    "lines are single runs that still run, diverged or broke off; no mean contains them.",
    "Time to target: the first validation at which a run has the target's value. Not reached counts as infinity; "
    "the median is over seeds.",
)

STATE_ORDER = tuple(State)


@dataclass(frozen=True)
class PageInput:
    """All that a page shows."""

    report_id: str
    card: Scorecard
    study: StudyConfig | None
    records: Records
    outside: Sequence[RunRecord]
    """Runs that are in no cell of the scorecard."""
    times: Sequence[StepTime]
    watching: bool
    every_s: float


def render(page: PageInput) -> str:
    """Return the whole HTML text."""
    card = page.card
    drawn = {
        "quality": figures.quality_forest(card),
        "time": [figure for figure in [figures.time_forest(card)] if figure],
        "steps": figures.loss_figures(card.cells, "step"),
        "seconds": figures.loss_figures(card.cells, "seconds"),
        "target": figures.target_figures(card),
    }
    data = {figure.key: json.loads(figure.figure.to_json()) for group in drawn.values() for figure in group}
    script, style = _asset("page.js"), _asset("page.css")
    library = _plotly() if data else ""
    template = _environment().get_template("index.html")
    return template.render(
        page=page,
        card=card,
        figures=drawn,
        data=Markup(embed(data)),
        style=Markup(style),
        script=Markup(script),
        library=Markup(library),
        policy=_policy([script, library]),
        version=rmsrepro.__version__,
        built=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        context=paper_context(),
        rules=RULES,
        measuring=MEASURING,
        counts=_counts(page.records.runs),
        runs=_run_rows(page),
        run_metrics=sorted({row.metric for row in card.baselines}),
        machines=machines(page.records),
        num_timing_machines=len({time.machine for time in page.times}),
        spans=_spans(card),
        baseline_of=_baseline_of(card),
    )


def embed(value: object) -> str:
    """Write JSON that is safe inside a `<script>` element: no `<`, `>` or `&`, no line separators."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _policy(scripts: Sequence[str]) -> str:
    """A content policy: these scripts, inline styles, no request of any kind."""
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
        if script
    ]
    return (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def _plotly() -> str:
    return plotly.offline.get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")


@cache
def _asset(name: str) -> str:
    return resources.files("rmsrepro.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("rmsrepro.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "minus": lambda text: str(text).replace("-", "\u2212") if str(text) != "-" else "\u2013",
        "number": formatting.number,
        "metric": formatting.metric_title,
        "norm": formatting.norm_title,
        "colour": figures.colour,
        "seconds": formatting.seconds,
        "count": formatting.count,
        "interval": formatting.interval,
        "difference": _secondary_text,
        "dash": lambda text: text if text not in ("", None) else "\u2013",
        "when": lambda written: datetime.fromtimestamp(written).astimezone().strftime("%Y-%m-%d %H:%M"),
    }
    return environment


def _counts(runs: Sequence[RunRecord]) -> list[tuple[str, int]]:
    """State -> number of runs, in a fixed order, without the empty ones."""
    counts = [(state.value, sum(run.state is state for run in runs)) for state in STATE_ORDER]
    return [(state, number) for state, number in counts if number]


def _run_rows(page: PageInput) -> list[dict[str, Any]]:
    """The table of all runs: those that need a look first, then by cell, norm and seed."""
    outside = {id(run) for run in page.outside}
    metrics = {row.cell.task: row.metric for row in page.card.baselines}
    rows = []
    for run in page.records.runs:
        metric = metrics.get(run.task, "val_loss")
        rows.append(
            {
                "run": run,
                "metric": metric,
                "value": run.metrics.get(metric),
                "outside": id(run) in outside,
                "seconds": run.clocks.get("train_s"),
            }
        )
    calm = (State.completed, State.running)
    rows.sort(
        key=lambda row: (
            row["run"].state in calm,
            row["run"].model,
            row["run"].task,
            row["run"].norm,
            row["run"].seed if row["run"].seed is not None else -1,
        )
    )
    return rows


def _secondary_text(pair: PairedDifference | None, metric: str) -> str:
    return difference_text(pair, formatting.decimals_for(None, metric))


def _spans(card: Scorecard) -> dict[str, float]:
    """Metric -> half the width of the little interval pictures: all rows of a metric share one scale."""
    spans: dict[str, float] = {}
    for row in card.rows:
        ends = [abs(value) for value in _ends(row) if value == value and abs(value) != float("inf")]
        spans[row.metric] = max([spans.get(row.metric, 0.0), *ends])
    return {metric: 1.08 * span or 1.0 for metric, span in spans.items()}


def _ends(row: Row) -> list[float]:
    ends = [row.margin] if row.margin is not None else []
    if row.difference is not None:
        ends += [row.difference.low, row.difference.mean, row.difference.high]
    return ends


def _baseline_of(card: Scorecard) -> dict[int, list[BaselineRow]]:
    """Place of a cell -> its baseline rows (several where a sweep varies the baseline's parameters)."""
    return {
        place: [row for row in card.baselines if row.cell is cell] for place, cell in enumerate(card.cells)
    }
