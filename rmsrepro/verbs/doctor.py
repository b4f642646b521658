"""The verb that looks at the machine: doctor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import TextWrapper

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override
from rmsrepro.verbs.common import console, only_options, say

WIDTH = 80
_INDENT = 11


@dataclass
class DoctorVerb:
    trial: bool = True
    trial_s: float = 10.0


def doctor(overrides: list[Override]) -> int:
    """Say what this machine can measure, as it becomes known; builds and writes nothing."""
    options = only_options(DoctorVerb, overrides, "doctor")
    if not (math.isfinite(options.trial_s) and options.trial_s > 0):
        raise UserError(
            f"trial_s={options.trial_s}: expected seconds above zero (trial=false skips the trial)"
        )
    from rmsrepro.bench.doctor import machine_facts, torch_facts, trial, trial_facts

    _print(machine_facts())
    _print(torch_facts())
    if not options.trial:
        return 0
    screen = console(stderr=True)
    about = f"trial: LayerNorm against itself for {options.trial_s:g} s"
    if screen.is_terminal:
        with screen.status(about) as spinner:
            found = trial(
                options.trial_s,
                lambda done, total: spinner.update(f"{about}, pair {min(done + 1, total)} of {total}"),
            )
    else:
        say(about, stderr=True)
        found = trial(options.trial_s)
    _print(trial_facts(found))
    return 0


def _print(facts: Iterable[tuple[str, str]]) -> None:
    width = min(WIDTH, max(40, console().width))
    for word, text in facts:
        wrapped = TextWrapper(
            width,
            initial_indent=f"{word:<{_INDENT}}",
            subsequent_indent=" " * _INDENT,
            break_on_hyphens=False,
        )
        print("\n".join(wrapped.wrap(text)), flush=True)
