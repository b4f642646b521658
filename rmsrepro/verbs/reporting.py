"""The verbs that show: report and reproduce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, take, unquote
from rmsrepro.config.study import StudyConfig
from rmsrepro.verbs.common import console, label_study, only_options, say
from rmsrepro.verbs.studies import split_all
from rmsrepro.verbs.timing import BenchFailed, PreparedBench, prepare_bench, run_prepared_bench


@dataclass
class ReportVerb:
    watch: bool = False
    out_dir: str = "outputs"
    study: str | None = None
    every_s: float = 10.0


def report(overrides: list[Override]) -> int:
    """Build the page from the records; `watch=true` again and again."""
    from rmsrepro.report import build_report, print_scorecard, watch_report
    from rmsrepro.verbs.studies import load_study

    options = only_options(ReportVerb, overrides, "report")
    study = load_study(options.study) if options.study else None
    folder = Path(options.out_dir).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"out_dir={options.out_dir}: there is no such folder; train something first, or name another"
        )
    if not options.every_s > 0:
        raise UserError(f"every_s={options.every_s}: expected seconds above zero")
    if options.watch:
        say("rebuilding while runs go on; stop with Ctrl-C")
        built = watch_report(
            folder, study=study, every_s=options.every_s, on_build=lambda result: say(f"built: {result.page}")
        )
    else:
        built = build_report(folder, study=study)
    print_scorecard(built.scorecard, console())
    say(f"page: {built.page.resolve()}")
    say(f"table: {built.results.resolve()}")
    return 0


def reproduce(overrides: list[Override]) -> int:
    """A study's runs, its timing, the page and the scorecard."""
    from rmsrepro.report import build_report, print_scorecard
    from rmsrepro.report.formatting import count
    from rmsrepro.verbs.studies import load_study, restricted
    from rmsrepro.verbs.training import SweepVerb, refuse_options_of_sweep, sweep_jobs

    name, rest = take(overrides, "study")
    refuse_options_of_sweep(rest, dry_run=f"rmsrepro sweep study={name} dry_run=true lists its runs")
    if name is None:
        raise UserError("reproduce needs a study: rmsrepro reproduce study=smoke (a minute) or study=quick")
    study, extra = restricted(load_study(unquote(name)), rest)
    sizes = f"{count(len(study.cells()), 'cell')}, {count(len(study.seeds), 'seed')}"
    say(f"== {study.title or study.name}: {sizes}")
    timings = _timings(study, extra)  # composed before anything runs: a mistake in them shows now
    # How to time says nothing to the runs.
    shared = [item for item in extra if not item.key.startswith("bench.")]
    code, run_ids = sweep_jobs(shared, SweepVerb(), study)
    out_dir = _out_dir(extra)
    failed = _time_cells(timings)
    built = build_report(out_dir, study=study, run_ids=run_ids)
    say("")
    print_scorecard(built.scorecard, console())
    say(f"page: {built.page.resolve()}")
    return 1 if code or failed else 0


def _out_dir(overrides: list[Override]) -> Path:
    value, _ = take(overrides, "out_dir")
    return Path(unquote(value) if value else "outputs").expanduser()


def _timings(study: StudyConfig, extra: list[Override]) -> dict[str, PreparedBench]:
    """Return the prepared timing of each of the study's cells that are timed."""
    from rmsrepro.paper.studies import SHAPES_THE_STEP, bench_jobs

    jobs = bench_jobs(study)
    comparisons = max(1, len(jobs) * (len(study.norms) - 1))
    shaping = [
        item
        for item in extra
        if item.key.split(".")[0] in (*SHAPES_THE_STEP, "out_dir", "bench") and item.key != "norm"
    ]
    prepared = {}
    for job in jobs:
        merged = {item.key: item for item in [*split_all(job.overrides, study.name), *shaping]}
        overrides = label_study(list(merged.values()))
        prepared[job.cell] = prepare_bench(overrides, reuse=True, cells=comparisons)
    return prepared


def _time_cells(timings: Mapping[str, PreparedBench]) -> bool:
    """Time the cells, or find them timed; return whether any failed."""
    failed = False
    for number, (cell, prepared) in enumerate(timings.items(), start=1):
        say(f"timing {number}/{len(timings)}: {cell}")
        try:
            run_prepared_bench(prepared)
        except BenchFailed as error:
            say(f"timing of {cell} failed: {error}")
            failed = True
    return failed
