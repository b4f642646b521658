"""The verb that times: bench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from rmsrepro.config.bench import BenchConfig, BenchJobConfig, check_bench_config
from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, chosen_experiment, expand, take, unquote
from rmsrepro.config.schema import TrainConfig
from rmsrepro.verbs.common import composer, console, label_study, say
from rmsrepro.verbs.training import refuse_options_of_sweep


def bench(overrides: list[Override]) -> int:
    """Time norms against LayerNorm and print the comparisons."""
    refuse_options_of_sweep(overrides)
    try:
        result = run_prepared_bench(prepare_bench(label_study(overrides)))
    except BenchFailed as error:
        if error.known_before:
            raise UserError(str(error)) from error
        say(f"failed: {error}", stderr=True)
        return 1
    console().print(comparison_table(result.result))
    for reason in distrust(result.result):
        say(reason)
    for arm in result.result["arms"]:
        if arm.get("status", "ok") not in ("ok", "measured"):
            say(f"{arm['arm']}: {arm['status']}: {arm.get('reason', '')}")
    say(f"records: {result.path}")
    if result.result.get("status") == "incomplete":
        say("incomplete: no baseline was measured soundly, so nothing is compared", stderr=True)
        return 1
    return 0


@dataclass
class PreparedBench:
    """What `run_bench` takes: how to time, what to time, and the arms."""

    settings: BenchConfig
    base: TrainConfig
    norms: list[dict[str, Any]]


def prepare_bench(overrides: Sequence[Override], *, reuse: bool = False, cells: int = 1) -> PreparedBench:
    """Compose a bench from overrides (`norm` and `backend` may hold several values) and check it.

    Raises:
        UserError: anything wrong with the command.
    """
    from rmsrepro.config.compose import to_train_config
    from rmsrepro.config.resolve import resolve
    from rmsrepro.norms import resolve_params
    from rmsrepro.norms.given import check_norm_parameters

    for item in overrides:
        if item.key in _FOLLOWS:
            raise UserError(f"{item.text}: {_FOLLOWS[item.key]}")
    norm_text, rest = take(overrides, "norm")
    backend_text, rest = take(rest, "backend")
    norm_names = _values("norm", norm_text or "layernorm,rmsnorm,prmsnorm")
    backends = _values("backend", backend_text or "composite")
    for job in expand(rest):
        for item in job:
            if any(other.key == item.key and other.value != item.value for other in rest):
                raise UserError(
                    f"{item.key}: bench times one setting at a time; "
                    "only norm and backend take several values"
                )
    with composer([Override("norm", ",".join(norm_names)), *rest], "bench") as opened:
        configs = []
        for name in norm_names:
            for backend in backends:
                chosen = [Override("norm", name), Override("backend", backend), *rest]
                configs.append(to_train_config(opened.raw(chosen), chosen_experiment(rest)))
        check_norm_parameters(configs)
        norms = [
            {
                "name": config.norm["name"],
                "params": {key: value for key, value in config.norm.items() if key != "name"},
                "backend": config.backend.value,
            }
            for config in configs
        ]
        for norm in norms:
            try:
                resolve_params(norm["name"], **norm["params"])
            except (ValueError, TypeError) as error:
                raise UserError(f"norm={norm['name']}: {error}") from error
        normed = (config for config in configs if config.norm["name"] != "none")
        # norm=none alone is timed against the layernorm that every bench has.
        base = resolve(next(normed, replace(configs[0], norm={"name": "layernorm"})))
    assert isinstance(base, BenchJobConfig)
    settings = replace(
        base.bench, norms=norm_names, backends=backends, cells=cells, reuse=reuse or base.bench.reuse
    )
    check_bench_config(settings)
    return PreparedBench(settings, base, norms)


def run_prepared_bench(prepared: PreparedBench) -> Any:
    """Run a bench, showing what it is at.

    Raises:
        BenchFailed: it gave no result.
    """
    from rmsrepro.bench import BenchError, run_bench
    from rmsrepro.bench.runner import NothingToCompare

    settings, base, norms = prepared.settings, prepared.base, prepared.norms
    screen = console(stderr=True)
    try:
        if screen.is_terminal:
            with screen.status("timing") as spinner:
                return run_bench(
                    settings, base=base, norms=norms, on_progress=lambda line: spinner.update(Text(line))
                )
        return run_bench(settings, base=base, norms=norms, on_progress=lambda line: say(line, stderr=True))
    except BenchError as error:
        raise BenchFailed(str(error), known_before=isinstance(error, NothingToCompare)) from error


_FOLLOWS = {
    "bench.norms": "the arms are named by norm, as in norm=layernorm,rmsnorm",
    "bench.backends": "the arms are named by backend too, as in backend=composite,torch",
    "bench.cells": "it follows from the study: how many comparisons its report holds",
}
"""Settings that the command line does not set, and why."""


class BenchFailed(RuntimeError):
    """A bench that gave no result; the message says why."""

    def __init__(self, message: str, *, known_before: bool = False) -> None:
        super().__init__(message)
        self.known_before = known_before
        """Whether the command could not have given one: nothing was measured."""


def _values(key: str, text: str) -> list[str]:
    return list(dict.fromkeys(unquote(job[0].value) for job in expand([Override(key, text)])))


def comparison_table(result: dict[str, Any]) -> Table:
    """One line a comparison: how much of the baseline's time the arm takes, and how sure that is."""
    # Imported here: the report brings its plotting library along.
    from rmsrepro.report.formatting import folded

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("arm", overflow="fold")
    table.add_column("against", overflow="fold")
    table.add_column("time saved (95 %)", justify="right", no_wrap=True)
    table.add_column("A/A", justify="right", no_wrap=True)
    table.add_column("trust", no_wrap=True)
    for row in result["comparisons"]:
        low, high = row["time_reduction_ci"]
        table.add_row(
            Text(folded(row["arm"], MOST_IN_A_LINE)),
            Text(folded(row["baseline"], MOST_IN_A_LINE)),
            Text(f"{row['time_reduction_pct']:.1f} % [{low:.1f}, {high:.1f}]"),
            f"{row['aa_ratio']:.3f}",
            "yes" if row["trusted"] else "no",
        )
    return table


def distrust(result: dict[str, Any]) -> list[str]:
    """Why comparisons are not trusted, each reason once."""
    flags = [flag for row in result["comparisons"] if not row["trusted"] for flag in row["flags"]]
    kinds = ("A/A: ", "other load: ")
    return [
        f"not trusted: {flag}"
        for flag in dict.fromkeys(flags)
        if flag.startswith(kinds) and not flag.startswith("other load: unknown")
    ]


MOST_IN_A_LINE = 19
"""Characters of a line of an arm's name: two such columns and those of the numbers are 80."""
