"""Builds a report from whatever records exist, once or again and again while runs go on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from rmsrepro.config.study import StudyConfig
from rmsrepro.paper import ClaimVerdict, judge_claims, printed_times, read_cards, timings_used
from rmsrepro.report.cells import build_cells
from rmsrepro.report.claim_lines import claim_lines, claims_table
from rmsrepro.report.claims import findings_of
from rmsrepro.report.layers import layer_times
from rmsrepro.report.load import load_records
from rmsrepro.report.page import PageInput, TimeSection, render
from rmsrepro.report.parameters import names_of
from rmsrepro.report.records import BenchRecord, Records, RunRecord, count_states
from rmsrepro.report.savings import over_p, places_of, remaining, remaining_text, shares
from rmsrepro.report.scorecard import Scorecard, build_scorecard
from rmsrepro.report.table import across_table, results_table
from rmsrepro.report.timing import newest, step_seconds, step_times
from rmsrepro.report.tunings import Tuning, Tunings, find_tunings, without_tunings
from rmsrepro.runs.files import write_atomic
from rmsrepro.runs.manifests import runs_of_study


@dataclass(frozen=True)
class ReportResult:
    """Where the page and the table lie, and what they say."""

    page: Path
    results: Path
    scorecard: Scorecard
    claims: tuple[ClaimVerdict, ...]
    """A verdict for each claim of the paper; most are not run."""
    remaining: tuple[str, ...] = ()
    """What RMSNorm saves on the backends that were timed beside each other, a sentence a place."""
    tunings: tuple[Tuning, ...] = ()
    """What `sweep tune=true` came to, a tuning a cell."""
    runs: str = ""
    """How many runs ended how, as in `35 completed, 5 failed`."""


def build_report(
    out_dir: Path | str,
    *,
    study: StudyConfig | None = None,
    report_id: str | None = None,
    run_ids: Collection[str] | None = None,
    watching: bool = False,
    every_s: float = 10.0,
) -> ReportResult:
    """Write `<out_dir>/reports/<id>/{index.html, results.csv, claims.csv, across.csv}`; return where.

    Args:
        out_dir: the folder that holds `runs/` and `bench/`.
        study: judge by this study's rules. Without it all runs are shown, with no verdict.
        report_id: the folder's name; by default the study's name, else `all`. Rebuilt in place.
        run_ids: exactly these runs make the report. By default a study takes the runs that carry
            its name; give them where a run may have been made under another name and skipped since.
        watching: the page reloads itself every `every_s` seconds.
    """
    root = Path(out_dir)
    name = folder_name(report_id or (study.name if study else "all"))
    wanted = runs_of_study(root, study.name) if study else frozenset[str]()
    records = _select(load_records(root, run_ids=run_ids), study, wanted, chosen=run_ids is not None)
    # A study's runs are its own, whoever made them; a tuning's are compared among themselves.
    tunings = find_tunings(root, records.runs) if study is None and run_ids is None else Tunings()
    records = replace(records, problems=(*records.problems, *tunings.problems))
    times = step_times(records.benches)
    between = newest(step_times(records.benches, across=True))
    names = names_of(records.runs, [time.comparison for time in (*times, *between)])
    cells, outside = build_cells(without_tunings(records.runs, tunings), study, names)
    card = build_scorecard(cells, times, study)
    findings = findings_of(card, records.benches, read_cards(root), study)
    claims = judge_claims(study, findings)
    kept = newest(times)
    places = places_of(kept)
    left = remaining(places, names)
    page = PageInput(
        report_id=name,
        card=card,
        study=study,
        records=records,
        outside=outside if study else (),
        times=kept,
        timing=TimeSection(
            places=places,
            remaining=left,
            shares=shares(places, names),
            over_p=over_p(places),
            layers=layer_times(records.benches, times),
            printed=printed_times(timings_used(study, findings)) if study else [],
            across=places_of(between, across=True),
        ),
        step_seconds={cell.label: found for cell in cells if (found := step_seconds(cell, times))},
        claims=claim_lines(claims),
        names=names,
        tunings=tunings,
        watching=watching,
        every_s=every_s,
    )
    folder = root / "reports" / name
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "results.csv", results_table(records.runs, tunings.roles).to_csv(index=False))
    write_atomic(folder / "claims.csv", claims_table(claims).to_csv(index=False, float_format="%.6g"))
    write_atomic(folder / "across.csv", across_table(between).to_csv(index=False, float_format="%.6g"))
    write_atomic(folder / "index.html", render(page))
    return ReportResult(
        page=folder / "index.html",
        results=folder / "results.csv",
        scorecard=card,
        claims=tuple(claims),
        remaining=tuple(remaining_text(left)),
        tunings=tunings.tunings,
        runs=", ".join(f"{number} {state}" for state, number in count_states(records.runs)) or "none",
    )


def watch_report(
    out_dir: Path | str,
    *,
    study: StudyConfig | None = None,
    report_id: str | None = None,
    run_ids: Collection[str] | None = None,
    every_s: float = 10.0,
    on_build: Callable[[ReportResult], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> ReportResult:
    """Rebuild the report every `every_s` seconds until `stop()` or Ctrl-C, then once more for good.

    The last page no longer reloads itself. `on_build` is called after each build.
    """
    try:
        while True:
            result = build_report(
                out_dir, study=study, report_id=report_id, run_ids=run_ids, watching=True, every_s=every_s
            )
            if on_build is not None:
                on_build(result)
            if stop():
                break
            time.sleep(every_s)
    except KeyboardInterrupt:
        pass
    return build_report(out_dir, study=study, report_id=report_id, run_ids=run_ids)


def folder_name(text: str) -> str:
    """A report's id as a folder name: letters, digits, `.`, `_` and `-`, never hidden, never empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")[:100] or "report"


def _select(records: Records, study: StudyConfig | None, wanted: Collection[str], *, chosen: bool) -> Records:
    """Keep what belongs to the study: its runs, and its benches, or all benches if it has none.

    Args:
        wanted: runs that a sweep of the study wanted: one that another study made is this one's, too.
        chosen: all runs were chosen beforehand.
    """
    if study is None:
        return records

    def belongs(run: RunRecord) -> bool:
        return chosen or run.study == study.name or run.run_id in wanted

    own: list[BenchRecord] = [bench for bench in records.benches if bench.study == study.name]
    return Records(
        runs=tuple(run for run in records.runs if belongs(run)),
        # Another study's timings are of other models: they are never this one's.
        benches=tuple(own) or tuple(bench for bench in records.benches if not bench.study),
        problems=records.problems,
    )
