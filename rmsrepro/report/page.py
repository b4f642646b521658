"""Writes the page: one HTML file that needs nothing beside it and asks the network for nothing.

Three walls keep a record's text from becoming code: Jinja escapes it in the markup, `embed` escapes
it in the data block, and a content policy lets only the two scripts run whose hashes it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from itertools import groupby
from operator import attrgetter
from typing import Any

import plotly.offline
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import rmsrepro
from rmsrepro.config.study import StudyConfig
from rmsrepro.norms.settings import whole
from rmsrepro.paper import RULES as CLAIM_RULES
from rmsrepro.paper import PrintedTime
from rmsrepro.report import drawing, figures, forests, formatting, p_figures, time_figures
from rmsrepro.report.claim_lines import ClaimLines
from rmsrepro.report.environment import machines
from rmsrepro.report.layers import LayerTime
from rmsrepro.report.parameters import Names, settings_of
from rmsrepro.report.reading import paper_context
from rmsrepro.report.records import Records, RunRecord, State, count_states
from rmsrepro.report.savings import BACKENDS, OverP, Place, Remaining, Share, remaining_text
from rmsrepro.report.scorecard import BaselineRow, Row, Scorecard, difference_text
from rmsrepro.report.scores import score_notes
from rmsrepro.report.statistics import PairedDifference
from rmsrepro.report.timing import StepSeconds, StepTime
from rmsrepro.report.tuning_figures import tuning_figures
from rmsrepro.report.tuning_text import final_text
from rmsrepro.report.tunings import PARAMETERS, Tunings
from rmsrepro.report.verdict import RULES


@dataclass(frozen=True)
class TimeSection:
    """What the section on time shows beside the table of all timings."""

    places: Sequence[Place]
    remaining: Sequence[Remaining]
    shares: Sequence[Share]
    over_p: Sequence[OverP]
    layers: Sequence[LayerTime]
    printed: Sequence[PrintedTime]
    across: Sequence[Place]
    """Arms of one backend against those of another."""


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
    timing: TimeSection
    step_seconds: Mapping[str, StepSeconds]
    """The cell's label -> what a bench says of the time of its steps."""
    claims: ClaimLines
    names: Names
    tunings: Tunings
    watching: bool
    every_s: float


def render(page: PageInput) -> str:
    """Return the whole HTML text."""
    card = page.card
    drawn = {
        "quality": [*forests.quality_forest(card), *p_figures.quality_over_p(card)],
        "time": [
            figure
            for figure in (
                time_figures.reduction_forest(
                    page.timing.places, page.names, page.timing.printed, baseline=card.baseline
                ),
                time_figures.share_figure(page.timing.shares),
            )
            if figure
        ],
        "layers": [
            figure
            for figure in (
                time_figures.layer_figure(page.timing.layers, page.names),
                p_figures.time_over_p(page.timing.over_p, baseline=card.baseline),
            )
            if figure
        ],
        "loss": [figure for both in figures.loss_figures(card.cells, page.step_seconds) for figure in both],
        "target": figures.target_figures(card),
    }
    tuned = [tuning_figures(tuning, place) for place, tuning in enumerate(page.tunings.tunings)]
    groups = (*drawn.values(), *tuned)
    data = {figure.key: json.loads(figure.figure.to_json()) for group in groups for figure in group}
    script, style = _asset("page.js"), _asset("page.css")
    library = _plotly() if data else ""
    template = _environment().get_template("index.html")
    return template.render(
        page=page,
        card=card,
        figures=drawn,
        tuning_figures=tuned,
        parameters=PARAMETERS,
        final_text=final_text,
        data=Markup(embed(data)),
        style=Markup(style),
        script=Markup(script),
        library=Markup(library),
        policy=_policy([script, library]),
        version=rmsrepro.__version__,
        built=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        context=paper_context(),
        rules=RULES,
        claim_rules=CLAIM_RULES,
        remaining_text=remaining_text(page.timing.remaining),
        backends=_backends(page.timing.remaining),
        counts=count_states(page.records.runs),
        runs=_run_rows(page),
        run_metrics=sorted({row.metric for row in card.baselines}),
        machines=machines(page.records),
        timed_norm=lambda norm, params: _timed_norm(page.names, norm, params),
        num_timing_machines=len({time.machine for time in page.times}),
        spans=_spans(card),
        score_notes=score_notes(card),
        no_times=_no_times(page.records.runs),
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
        "colour": drawing.colour,
        "seconds": formatting.seconds,
        "count": formatting.count,
        "interval": formatting.interval,
        "difference": _secondary_text,
        "runs_of": lambda items, path: [
            (value, list(group)) for value, group in groupby(items, key=attrgetter(path))
        ],
        "dash": lambda text: text if text not in ("", None) else "\u2013",
        "when": lambda written: datetime.fromtimestamp(written).astimezone().strftime("%Y-%m-%d %H:%M"),
    }
    return environment


def _no_times(runs: Sequence[RunRecord]) -> bool:
    """Whether no run's times may be quoted, as all shared the machine: that is then said once."""
    timed = [run for run in runs if "train_s" in run.clocks]
    return bool(timed) and all(run.contended for run in timed)


def _backends(rows: Sequence[Remaining]) -> list[str]:
    """The backends of a table, in their order."""
    there = {backend for row in rows for backend in row.by_backend}
    return [*(name for name in BACKENDS if name in there), *sorted(there - set(BACKENDS))]


def _timed_norm(names: Names, norm: str, given: Mapping[str, Any]) -> str:
    """A norm as a bench names it, with the parameters that tell it from its other settings on the page."""
    return norm + names.suffix(norm, whole(norm, given))


@dataclass(frozen=True)
class RunRow:
    """A line of the table of runs."""

    run: RunRecord
    setting: str
    """What tells the norm from its other settings on the page; mostly nothing."""
    metric: str
    value: float | None
    """`metric` at the last step."""
    note: str
    """Why the scorecard leaves the run out; empty if it does not."""
    seconds: float | None


def _run_rows(page: PageInput) -> list[RunRow]:
    """The table of all runs: those that need a look first, then by cell, norm and seed."""
    outside = {id(run) for run in page.outside}
    metrics = {row.cell.task: row.metric for row in page.card.baselines}

    def place(run: RunRecord) -> tuple[bool, str, str, str, int]:
        calm = run.state in (State.completed, State.running)
        return calm, run.model, run.task, run.norm, -1 if run.seed is None else run.seed

    rows = []
    for run in sorted(page.records.runs, key=place):
        metric = metrics.get(run.task, "val_loss")
        seconds = run.clocks.get("train_s")
        setting = page.names.suffix(run.norm, settings_of(run))
        note = "not in the scorecard" if id(run) in outside else page.tunings.roles.get(run.run_id, "")
        rows.append(RunRow(run, setting, metric, run.metrics.get(metric), note, seconds))
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
