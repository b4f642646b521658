"""What the paper prints of the times that a study measures: for showing the two side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rmsrepro.config.study import StudyConfig
from rmsrepro.paper.claims import Claim, Reduction, ledger
from rmsrepro.paper.declared import declared, is_timed
from rmsrepro.paper.statements import counterpart


@dataclass(frozen=True)
class PrintedTime:
    """A printed time reduction, and the timing of the study that is held against it."""

    claim: Claim
    reduction: Reduction
    level: str
    cell: str
    norm: str
    """The name that records have."""
    params: Mapping[str, Any]
    backend: str


def printed_times(study: StudyConfig) -> list[PrintedTime]:
    """Return the printed reductions that the study's claims are about, in the paper's order."""
    found = []
    for one in declared(study).values():
        stands = counterpart(one.claim)
        reduction = ledger().reduction(stands)
        if reduction is None or not is_timed(one.claim) or not one.by.norm or stands.id != one.claim.id:
            continue
        norm, params = study.norm_of(one.by.norm)
        found.append(
            PrintedTime(one.claim, reduction, one.by.level, one.by.cell, norm, params, one.by.backend)
        )
    order = {name: place for place, name in enumerate(ledger().ids)}
    return sorted(found, key=lambda one: order[one.claim.id])
