"""What the paper prints of the times that a study measured: for showing the two side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rmsrepro.paper.claims import Claim, Reduction, ledger
from rmsrepro.paper.findings import Timing
from rmsrepro.paper.statements import counterpart


@dataclass(frozen=True)
class PrintedTime:
    """A printed time reduction, and the timing that was held against it."""

    claim: Claim
    reduction: Reduction
    timing: Timing


def printed_times(used: Mapping[str, Timing]) -> list[PrintedTime]:
    """Return the printed reductions that timings were held against, in the paper's order.

    Args:
        used: by the claim's id (see `timings_used`). What says in words what another claim says in numbers is
            passed over.
    """
    found = []
    for claim in ledger():
        reduction = ledger().reduction(claim)
        if claim.id in used and reduction is not None and counterpart(claim).id == claim.id:
            found.append(PrintedTime(claim, reduction, used[claim.id]))
    return found
