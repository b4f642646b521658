"""Which claims a study addresses, and how: its `claims`, one claim at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.study import ClaimTest, Relation, StudyBench, StudyClaims, StudyConfig
from rmsrepro.paper.claims import Claim, Metric, ledger
from rmsrepro.paper.statements import TESTS, EveryP, NoGain, QualityOf, counterpart, declarable


@dataclass(frozen=True)
class Declared:
    """How a study addresses one claim."""

    claim: Claim
    relation: Relation
    by: ClaimTest
    """With the study's own norm and backend filled in."""
    why: str


def declared(study: StudyConfig) -> dict[str, Declared]:
    """Return what a study declares, by the claim's id.

    Raises:
        UserError: a claim that there is not, that no study can address, or that is addressed twice; or a test
            that the study's own grid or timings do not make. Of the claims that a `*` stands for, those that
            no study can address are passed over.
    """
    found: dict[str, Declared] = {}
    for number, entry in enumerate(study.claims):
        where = f"study {study.name!r}: claims[{number}]"
        if not entry.why.strip():
            raise UserError(f"{where}: why is empty; say in a sentence what makes it {entry.relation.value}.")
        if not entry.claims:
            raise UserError(f"{where}: claims is empty; name at least one.")
        for pattern in entry.claims:
            matching = ledger().matching(pattern)
            if not matching:
                raise UserError(f"{where}: there is no claim {pattern!r}{nearest(pattern, ledger().ids)}.")
            possible = [claim for claim in matching if not declarable(claim)]
            if not possible:
                first = matching[0]
                raise UserError(f"{where}: {first.id} cannot be declared; {declarable(first)}.")
            for claim in possible:
                if claim.id in found:
                    raise UserError(f"{where}: {claim.id} is addressed already, by an earlier entry.")
                by = _filled(where, claim, entry.by, study)
                found[claim.id] = Declared(claim, entry.relation, by, entry.why.strip())
    return found


def still_declared(study: StudyConfig, before: StudyConfig, *, other_values: bool) -> list[StudyClaims]:
    """Return what is left of the claims of `before` in `study`, which a command line made of it.

    Args:
        other_values: more than the grid was changed, so that nothing is faithful any more.
    """
    kept = []
    for one in declared(before).values():
        changed = other_values and one.relation is Relation.faithful
        entry = StudyClaims(
            claims=[one.claim.id],
            relation=Relation.proxy if changed else one.relation,
            by=one.by,
            why="changed on the command line" if changed else one.why,
        )
        try:
            declared(replace(study, claims=[entry]))
        except UserError:
            continue
        kept.append(entry)
    return kept


def is_timed(claim: Claim) -> bool:
    """Whether a claim is judged by timings; else by runs."""
    return counterpart(claim).metric is Metric.time or isinstance(TESTS.get(claim.id), NoGain)


def norm_for(claim: Claim, study: StudyConfig, chosen: str = "") -> str | None:
    """The study's norm that a claim speaks of: `chosen`, else the one of that name, else a variant of it."""
    test = TESTS.get(claim.id)
    wanted = test.norm if isinstance(test, QualityOf) else counterpart(claim).ours
    if chosen:
        return chosen if chosen in study.norms else None
    if wanted in study.norms:
        return wanted
    return next((norm for norm in study.norms if study.norm_of(norm)[0] == wanted), None)


def _filled(where: str, claim: Claim, by: ClaimTest, study: StudyConfig) -> ClaimTest:
    """Fill in what a test leaves open, and check that the study makes it."""
    several = isinstance(TESTS.get(claim.id), NoGain | EveryP)
    norm = "" if several else norm_for(claim, study, by.norm)
    if norm is None:
        told = f"names the norm {by.norm!r}" if by.norm else f"is about {claim.norm or 'a norm'}"
        hint = nearest(by.norm, study.norms) if by.norm else ""
        raise UserError(f"{where}: {claim.id} {told}, which the study does not have{hint}.")
    cells = study.cells()
    if by.cell and by.cell not in cells:
        raise UserError(
            f"{where}: by.cell is {by.cell!r}, which the study does not have{nearest(by.cell, cells)} "
            f"(it has {', '.join(cells)})."
        )
    if not by.cell and not isinstance(TESTS.get(claim.id), NoGain):
        raise UserError(f"{where}: by.cell is missing; it names the cell that tests {claim.id}.")
    if by.cell and norm and norm not in study.norms_of(by.cell):
        raise UserError(f"{where}: {norm} does not run in {by.cell} (norm_cells).")
    filled = replace(by, norm=norm, backend=by.backend or study.backend)
    if is_timed(claim):
        if not any(_times(timing, filled, study) for timing in study.timings()):
            raise UserError(
                f"{where}: no timing of the study measures {claim.id} (by.level={by.level}"
                f"{f', by.cell={by.cell}' if by.cell else ''}, by.backend={filled.backend}); "
                "add it to benches."
            )
        return filled
    metric = study.primary_metric(by.cell.split("/")[1])
    if not study.verdict or metric not in study.margin:
        raise UserError(
            f"{where}: {claim.id} is judged by {metric}, for which the study "
            + ("gives no verdict." if not study.verdict else "has no margin.")
        )
    return filled


def _times(timing: StudyBench, by: ClaimTest, study: StudyConfig) -> bool:
    """Whether a timing measures what a test looks at."""
    return (
        timing.level == by.level
        and (not by.cell or by.cell in timing.cells)
        and by.backend in (timing.backends or [study.backend])
        and (not by.norm or by.norm in (timing.norms or study.norms))
    )
