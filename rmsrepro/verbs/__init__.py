"""What each verb of the command line does, from its overrides to its exit code."""

from __future__ import annotations

from rmsrepro.verbs.cards import check_norm
from rmsrepro.verbs.converting import convert
from rmsrepro.verbs.doctor import doctor
from rmsrepro.verbs.exporting import export
from rmsrepro.verbs.inspecting import inspect
from rmsrepro.verbs.kernels import build_kernels
from rmsrepro.verbs.listing import norms
from rmsrepro.verbs.reporting import report, reproduce
from rmsrepro.verbs.timing import bench
from rmsrepro.verbs.training import sweep, train
from rmsrepro.verbs.using import evaluate, sample, translate
from rmsrepro.verbs.watching import status

__all__ = [
    "bench",
    "build_kernels",
    "check_norm",
    "convert",
    "doctor",
    "evaluate",
    "export",
    "inspect",
    "norms",
    "report",
    "reproduce",
    "sample",
    "status",
    "sweep",
    "train",
    "translate",
]
