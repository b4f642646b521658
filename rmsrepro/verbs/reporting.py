"""The verbs that show: report and reproduce."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, take, unquote
from rmsrepro.config.paths import expanded
from rmsrepro.config.shell import command
from rmsrepro.config.study import StudyConfig
from rmsrepro.verbs.common import command_line, console, label_study, only_options, say
from rmsrepro.verbs.studies import split_all
from rmsrepro.verbs.timing import BenchFailed, PreparedBench, prepare_bench, run_prepared_bench

if TYPE_CHECKING:
    from rmsrepro.paper.studies import BenchJob
    from rmsrepro.report.build import ReportResult


@dataclass
class ReportVerb:
    watch: bool = False
    out_dir: str = "outputs"
    study: str | None = None
    every_s: float = 10.0


def report(overrides: list[Override]) -> int:
    """Build the page from the records; `watch=true` again and again."""
    from rmsrepro.report import build_report, print_scorecard, watch_report
    from rmsrepro.report.tuning_text import print_tunings
    from rmsrepro.verbs.studies import load_study

    options = only_options(ReportVerb, overrides, "report")
    study = load_study(options.study) if options.study else None
    folder = expanded(options.out_dir)
    if not folder.is_dir():
        raise UserError(
            f"out_dir={options.out_dir}: there is no such folder; train something first, or name another"
        )
    if not options.every_s > 0:
        raise UserError(f"every_s={options.every_s}: expected seconds above zero")
    from rmsrepro.runs.disk import check_writable

    check_writable(folder)
    if options.watch:
        say("rebuilding while runs go on; stop with Ctrl-C")
        built = watch_report(
            folder, study=study, every_s=options.every_s, on_build=lambda result: say(f"built: {result.page}")
        )
    else:
        built = build_report(folder, study=study)
    print_scorecard(built.scorecard, console())
    if built.tunings:
        say("")
        print_tunings(built.tunings, console())
    _say_remaining(built)
    _say_claims(built)
    say(f"runs: {built.runs}")
    say(f"page: {built.page.resolve()}")
    say(f"tables: {built.results.resolve()}")
    for name in ("claims.csv", "across.csv"):
        say(f"        {built.page.with_name(name).resolve()}")
    return 0


def reproduce(overrides: list[Override]) -> int:
    """A study's runs, its timing, the page and the scorecard."""
    from rmsrepro.report import build_report, print_scorecard
    from rmsrepro.report.formatting import count
    from rmsrepro.verbs.studies import load_study, restricted
    from rmsrepro.verbs.training import SweepVerb, refuse_options_of_sweep, sweep_jobs

    name, rest = take(overrides, "study")
    instead = command("sweep", study=unquote(name or "NAME"), dry_run=True)
    refuse_options_of_sweep(rest, dry_run=f"{instead} lists its runs")
    if name is None:
        raise UserError("reproduce needs a study: rmsrepro reproduce study=smoke (a minute) or study=quick")
    study, extra = restricted(load_study(unquote(name)), rest)
    sizes = f"{count(len(study.cells()), 'cell')}, {count(len(study.seeds), 'seed')}"
    say(f"== {study.title or study.name}: {sizes}")
    timings = _timings(study, extra)  # composed before anything runs: a mistake in them shows now
    # How to time says nothing to the runs.
    shared = [item for item in extra if not item.key.startswith("bench.")]
    code, run_ids = sweep_jobs(shared, SweepVerb(), study, command=command_line("reproduce", overrides))
    out_dir = _out_dir(extra)
    failed = _time_all(timings)
    built = build_report(out_dir, study=study, run_ids=run_ids)
    say("")
    print_scorecard(built.scorecard, console())
    _say_remaining(built)
    _say_claims(built)
    say(f"runs: {built.runs}")
    say(f"page: {built.page.resolve()}")
    return 1 if code or failed else 0


def _say_remaining(built: ReportResult) -> None:
    """Say what is left of RMSNorm's saving on other backends, where that was timed."""
    if built.remaining:
        say("")
        say("What remains of it on other backends:")
        for sentence in built.remaining:
            say(textwrap.fill(sentence, 79, initial_indent="  ", subsequent_indent="    "))


def _say_claims(built: ReportResult) -> None:
    """Say what becomes of the paper's claims, where there is something to say."""
    from rmsrepro.paper import ClaimOutcome, claims_text

    if any(one.verdict is not ClaimOutcome.not_run for one in built.claims):
        say("")
        for line in claims_text(built.claims):
            say(line)


def _out_dir(overrides: list[Override]) -> Path:
    value, _ = take(overrides, "out_dir")
    return expanded(unquote(value) if value else "outputs")


def _timings(study: StudyConfig, extra: list[Override]) -> list[tuple[BenchJob, PreparedBench]]:
    """Return the study's timings, each with what prepares it."""
    from rmsrepro.paper.studies import SHAPES_A_LAYER, SHAPES_BY_NAME, SHAPES_THE_STEP, bench_jobs

    prepared = []
    for job in bench_jobs(study):
        shapes = SHAPES_THE_STEP if job.cell else SHAPES_A_LAYER
        shaping = [
            item
            for item in extra
            if (item.key.split(".")[0] in (*shapes, "out_dir", "bench") and item.key != "norm")
            or (job.cell and item.key in SHAPES_BY_NAME)
        ]
        merged = {item.key: item for item in [*split_all(job.overrides, study.name), *shaping]}
        variants = [split_all(texts, study.name) for texts in job.variants]
        bench = prepare_bench(label_study(list(merged.values())), reuse=True, variants=variants)
        prepared.append((job, bench))
    # The A/A control of each is held against the comparisons of the whole page.
    comparisons = max(1, sum(_comparisons(bench) for _, bench in prepared))
    for _, bench in prepared:
        bench.settings.cells = comparisons
    return prepared


def _comparisons(prepared: PreparedBench) -> int:
    """How many comparisons a timing holds at most: its arms but the baseline, in each of its cells."""
    settings = prepared.settings
    cells = math.prod(max(1, len(axis)) for axis in (settings.shapes, settings.modes, settings.dtypes))
    return cells * sum(norm["name"] != "layernorm" for norm in prepared.norms)


def _time_all(timings: Sequence[tuple[BenchJob, PreparedBench]]) -> bool:
    """Measure the timings, or find them measured; return whether any failed."""
    failed = False
    for number, (job, prepared) in enumerate(timings, start=1):
        say(f"timing {number}/{len(timings)}: {job.label}")
        try:
            run_prepared_bench(prepared)
        except BenchFailed as error:
            say(f"timing of {job.label} failed: {error}")
            failed = True
    return failed
