"""The verb that makes views of the records for other programs: export."""

from __future__ import annotations

from dataclasses import dataclass

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.overrides import Override
from rmsrepro.verbs.common import only_options, say

TARGETS = ("wandb",)


@dataclass
class ExportVerb:
    to: str = ""
    runs: str = ""
    out_dir: str = "outputs"


def export(overrides: list[Override]) -> int:
    """Make the offline mirror of runs for Weights & Biases from their records."""
    from rmsrepro.runs.disk import check_writable
    from rmsrepro.runs.mirror import export as export_runs

    options = only_options(ExportVerb, overrides, "export")
    if options.to not in TARGETS:
        given = f"{options.to}: cannot export to that{nearest(options.to, TARGETS)}; " if options.to else ""
        raise UserError(f"{given}write: rmsrepro export wandb [RUN ...] [out_dir=DIR]")
    return (
        0
        if export_runs(
            check_writable(options.out_dir), [name for name in options.runs.split(",") if name], say
        )
        else 1
    )
