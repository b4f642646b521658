"""A verdict for each claim of the paper: a function of what a study declares and of what records hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from rmsrepro.config.shell import command
from rmsrepro.config.study import Relation, StudyConfig
from rmsrepro.norms.settings import same_parameters
from rmsrepro.paper import rules
from rmsrepro.paper.claims import Claim, Ledger, Metric, ledger
from rmsrepro.paper.combined import judge_every_p, judge_no_gain, judge_summary
from rmsrepro.paper.declared import Declared, declared, is_timed
from rmsrepro.paper.findings import Findings, Quality, Timing
from rmsrepro.paper.rules import ClaimOutcome, Expected, Judgement
from rmsrepro.paper.statements import (
    TESTS,
    EveryP,
    GradientsOf,
    NoGain,
    QualityOf,
    SumsUp,
    counterpart,
    why_untestable,
)
from rmsrepro.paper.study_files import cheapest_study


@dataclass(frozen=True)
class ClaimVerdict:
    """What a claim comes to."""

    claim: Claim
    relation: Relation | None
    """What the measurement is to the claim; None where nothing measures it."""
    verdict: ClaimOutcome
    measured: float | None
    interval: tuple[float, float] | None
    """95 % for times, 90 % for qualities."""
    unit: str
    """Of `measured`: `% less time`, or the metric whose difference from LayerNorm it is."""
    printed: str
    """What the paper has, in the same unit where there is one."""
    reason: str
    """In a sentence."""
    command: str
    """What would run it; empty where it was run, or nothing can."""
    testable: bool
    """False: nothing in this package tests it."""
    where: str
    """What was looked at, such as `gru/translation, model level, composite`."""


def judge_claims(study: StudyConfig | None, findings: Findings) -> list[ClaimVerdict]:
    """Judge every claim of the ledger, in the paper's order.

    Args:
        study: says which claims are addressed, and by what. Without one only those that a norm's card judges
            are, and the others name the command that would run them.
        findings: what the study's records hold.
    """
    return _Judge(study, findings).all()


def counts(verdicts: Iterable[ClaimVerdict]) -> dict[ClaimOutcome, int]:
    """How many claims came to what; every outcome is there."""
    found = dict.fromkeys(ClaimOutcome, 0)
    for one in verdicts:
        found[one.verdict] += 1
    return found


def timings_used(study: StudyConfig, findings: Findings) -> dict[str, Timing]:
    """Return the timing that each claim on a time is held against, by the claim's id."""
    judge = _Judge(study, findings)
    found = {
        one.claim.id: judge.timing(one)
        for one in declared(study).values()
        if is_timed(one.claim) and one.by.norm
    }
    return {claim: timing for claim, timing in found.items() if timing is not None}


class _Judge:
    def __init__(self, study: StudyConfig | None, findings: Findings) -> None:
        self._ledger: Ledger = ledger()
        self._study = study
        self._declared: Mapping[str, Declared] = declared(study) if study else {}
        self._findings = findings

    def all(self) -> list[ClaimVerdict]:
        return [self._verdict(claim) for claim in self._ledger]

    def _verdict(self, claim: Claim) -> ClaimVerdict:
        untestable = why_untestable(claim)
        if untestable:
            judged = Judgement(ClaimOutcome.not_run, f"Not testable here: {untestable}.")
        else:
            judged = self._judged(claim)
        waiting = judged.outcome is ClaimOutcome.not_run and not untestable
        return ClaimVerdict(
            claim=claim,
            relation=judged.relation,
            verdict=judged.outcome,
            measured=judged.measured,
            interval=judged.interval,
            unit=judged.unit,
            printed=printed_text(claim),
            reason=judged.reason,
            command=self._command(claim) if waiting else "",
            testable=not untestable,
            where=judged.where,
        )

    def _judged(self, claim: Claim) -> Judgement:
        test = TESTS.get(claim.id)
        if claim.metric is Metric.property:
            return rules.judge_property(claim, self._findings.cards.get(claim.ours or ""))
        if isinstance(test, GradientsOf):
            return rules.judge_gradients(test.names, self._findings.cards.get(test.norm))
        if isinstance(test, SumsUp):
            parts = {name: self._part(self._ledger[name]) for name in test.parts}
            return judge_summary(parts)
        one = self._declared.get(claim.id)
        if one is None:
            who = (
                f"The study {self._study.name} does not address"
                if self._study
                else "No study is chosen to address"
            )
            return Judgement(ClaimOutcome.not_run, f"{who} it.")
        if isinstance(test, NoGain):
            return judge_no_gain(self._pairs(one), one.relation, one.why)
        if isinstance(test, EveryP):
            return judge_every_p(self._every_p(one), one.relation, one.why)
        if is_timed(claim):
            stands = counterpart(claim)
            printed = self._ledger.reduction(stands)
            assert printed is not None
            return rules.judge_time(stands, printed, one.relation, self.timing(one), one.why)
        quality = self._quality(one.by.cell, one.by.norm)
        expected = test.expected if isinstance(test, QualityOf) else self._expected(claim, quality)
        return rules.judge_quality(expected, one.relation, quality, one.why)

    def _part(self, claim: Claim) -> Judgement:
        if why_untestable(claim):
            return Judgement(ClaimOutcome.not_run, "")
        return self._judged(claim)

    # ------------------------------------------------------------------------------- looking up

    def _fitting(self, one: Declared, norm: str = "", cell: str = "") -> list[Timing]:
        """The timings that a test names, of the norm with the study's parameters, newest first."""
        assert self._study is not None
        by = one.by
        name, given = self._study.norm_of(norm or by.norm)
        return [
            timing
            for timing in self._findings.timings
            if (timing.level, timing.cell, timing.backend) == (by.level, cell or by.cell, by.backend)
            and timing.norm.split("(", 1)[0] == name
            and same_parameters(name, given, timing.params)
        ]

    def timing(self, one: Declared) -> Timing | None:
        """The newest timing that a test names; one that failed only where none was measured."""
        fitting = self._fitting(one)
        return next((timing for timing in fitting if not math.isnan(timing.reduction)), None) or next(
            iter(fitting), None
        )

    def _pairs(self, one: Declared) -> list[tuple[Timing, Timing]]:
        """(RMSNorm, pRMSNorm) of each cell that one bench timed both in, which is what shares a LayerNorm."""
        assert self._study is not None
        cells = [one.by.cell] if one.by.cell else self._study.cells()
        found = []
        for cell in cells:
            both = (
                (rms, partial)
                for rms in self._fitting(one, "rmsnorm", cell)
                for partial in self._fitting(one, "prmsnorm", cell)
                if rms.bench_id == partial.bench_id
            )
            found += list(islice(both, 1))
        return found

    def _quality(self, cell: str, norm: str) -> Quality | None:
        return next((one for one in self._findings.qualities if (one.cell, one.norm) == (cell, norm)), None)

    def _every_p(self, one: Declared) -> dict[str, Judgement]:
        """How each pRMSNorm of the cell is judged, by the study's name of it."""
        assert self._study is not None
        norms = [
            norm for norm in self._study.norms_of(one.by.cell) if self._study.norm_of(norm)[0] == "prmsnorm"
        ]
        return {
            norm: rules.judge_quality(
                Expected.comparable, one.relation, self._quality(one.by.cell, norm), one.why
            )
            for norm in norms
        }

    def _expected(self, claim: Claim, quality: Quality | None) -> Expected:
        """What the paper has of a norm's quality: the side of LayerNorm on which its figure lies."""
        other = self._ledger.layernorm_of(claim)
        if claim.ours in ("rmsnorm", "prmsnorm"):
            return Expected.comparable
        if claim.value is None:
            return Expected.fails
        if other is None or not isinstance(claim.value, float) or not isinstance(other.value, float):
            return Expected.comparable
        difference = claim.value - other.value
        same_unit = quality is not None and claim.unit.lower() in quality.metric.lower()
        margin = (quality.margin or 0.0) if quality is not None and same_unit else 0.0
        if abs(difference) <= margin:
            return Expected.comparable
        return Expected.better if (difference > 0) == (claim.better == "higher") else Expected.worse

    def _command(self, claim: Claim) -> str:
        """What would run a claim that was not run."""
        test = TESTS.get(claim.id)
        if claim.metric is Metric.property or isinstance(test, GradientsOf):
            norm = test.norm if isinstance(test, GradientsOf) else claim.ours
            return command("check-norm", str(norm))
        if isinstance(test, SumsUp):
            parts = (
                self._command(self._ledger[name])
                for name in test.parts
                if not why_untestable(self._ledger[name])
            )
            return next((command for command in parts if command), "")
        if self._study is not None and claim.id in self._declared:
            return command("reproduce", study=self._study.name.removesuffix("_modified"))
        name = cheapest_study().get(claim.id)
        return command("reproduce", study=name) if name else ""


def printed_text(claim: Claim) -> str:
    """What the paper has of a claim, as a short text."""
    stands = counterpart(claim)
    reduction = ledger().reduction(stands)
    if reduction is not None:
        return f"{reduction.text} less time" + ("" if reduction.printed else ", by its two times")
    if claim.metric is Metric.property:
        return "unchanged" if claim.value is True else "changed"
    if claim.metric is Metric.statement or isinstance(claim.value, str):
        return f"{claim.value} {claim.unit}".strip()
    value = "-" if claim.value is None else f"{claim.value:g}"
    spread = "" if claim.spread is None else f" (sd {claim.spread:g})"
    other = ledger().layernorm_of(claim)
    beside = f", LayerNorm {other.value:g}" if other is not None and isinstance(other.value, float) else ""
    return f"{claim.name} {value}{spread} {claim.unit}".strip() + beside
