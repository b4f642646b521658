"""The verb that times: bench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from rmsrepro.config.bench import BenchConfig, BenchJobConfig, check_bench_config
from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, chosen_experiment, expand, take, unquote
from rmsrepro.config.schema import Strategy, TrainConfig
from rmsrepro.verbs.bench_text import print_bench
from rmsrepro.verbs.common import composer, console, label_study, say
from rmsrepro.verbs.own_models import take_target, with_target
from rmsrepro.verbs.training import refuse_options_of_sweep


def bench(overrides: list[Override]) -> int:
    """Time norms against LayerNorm and print the comparisons."""
    refuse_options_of_sweep(overrides)
    try:
        prepared = prepare_bench(label_study(overrides))
        if ignored := _ignored(overrides, prepared):
            say(f"bench=layer times norms by themselves; not looked at: {', '.join(ignored)}", stderr=True)
        trained_on = _trained_on(overrides, prepared)
        if trained_on != "composite":
            kernels = "this package's fused kernels" if trained_on == "fused" else "torch's own functions"
            say(
                "backend=composite, since none was named: norms written from primitive operations, as the "
                f"paper's. Training these takes {kernels}, where the answer may be another: "
                f"backend=composite,{trained_on} times both",
                stderr=True,
            )
        result = run_prepared_bench(prepared)
    except BenchFailed as error:
        if error.known_before:
            raise UserError(str(error)) from error
        say(f"failed: {error}", stderr=True)
        return 1
    print_bench(result.result, console())
    say(f"records: {result.path}")
    if result.result.get("status") == "incomplete":
        say("incomplete: no baseline was measured soundly, so nothing is compared", stderr=True)
        return 1
    return 0


_OF_MODELS = ("model", "task", "data", "optim", "precision", "placement", "sites", "seed")
"""First words of the settings that a layer does not have."""


def _ignored(overrides: Sequence[Override], prepared: PreparedBench) -> list[str]:
    if prepared.settings.name != "layer":
        return []
    return list(dict.fromkeys(item.key for item in overrides if item.key.split(".")[0] in _OF_MODELS))


def _trained_on(overrides: Sequence[Override], prepared: PreparedBench) -> str:
    """Return what `backend=auto` takes for these norms, or composite if the command names a backend."""
    from rmsrepro.norms import NormSpec, resolve_backend

    if any(item.key == "backend" for item in overrides):
        return "composite"
    specs = [NormSpec(one["name"], one["params"]) for one in prepared.norms]
    return resolve_backend(specs, "auto")


@dataclass
class PreparedBench:
    """What `run_bench` takes: how to time, what to time, and the arms."""

    settings: BenchConfig
    base: TrainConfig
    norms: list[dict[str, Any]]


def prepare_bench(
    overrides: Sequence[Override], *, reuse: bool = False, variants: Sequence[Sequence[Override]] = ()
) -> PreparedBench:
    """Compose a bench from overrides (`norm` and `backend` may hold several values) and check it.

    Args:
        reuse: an earlier timing with the same key is as good.
        variants: further arms, each by overrides of its own, as for a norm that is there twice.

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
    target, overrides = take_target(overrides)
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
    naming = [Override("norm", ",".join(norm_names)), *(item for own in variants for item in own)]
    with composer([*naming, *rest], "bench") as opened:
        configs = []
        for own in [*([Override("norm", name)] for name in norm_names), *variants]:
            for backend in backends:
                keys = {item.key for item in own}
                chosen = [
                    Override("backend", backend),
                    *(item for item in rest if item.key not in keys),
                    *own,
                ]
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
    if base.trainer.strategy is not Strategy.single:
        raise UserError(
            f"trainer={base.trainer.strategy.value}: a bench times the step of one process; leave it out"
        )
    settings = replace(
        base.bench, norms=norm_names, backends=backends, cells=1, reuse=reuse or base.bench.reuse
    )
    check_bench_config(settings)
    return PreparedBench(settings, with_target(base, target), norms)


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
