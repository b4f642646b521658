"""What each verb of the command line does, from its overrides to its exit code."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmsrepro.config.overrides import Override

FUNCTIONS = {
    "train": "training.train",
    "eval": "using.evaluate",
    "translate": "using.translate",
    "sample": "using.sample",
    "convert": "converting.convert",
    "sweep": "training.sweep",
    "status": "watching.status",
    "bench": "timing.bench",
    "reproduce": "reporting.reproduce",
    "report": "reporting.report",
    "export": "exporting.export",
    "norms": "listing.norms",
    "check-norm": "cards.check_norm",
    "inspect": "inspecting.inspect",
    "doctor": "doctor.doctor",
    "build-kernels": "kernels.build_kernels",
}
"""The module and function of each verb."""


def find(verb: str) -> Callable[[list[Override]], int]:
    """Return what a verb does; of the verbs' modules only its own is imported."""
    module, _, name = FUNCTIONS[verb].partition(".")
    function: Callable[[list[Override]], int] = getattr(import_module(f"{__name__}.{module}"), name)
    return function
