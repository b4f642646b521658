"""The paper's side of a comparison: its claims, the studies that look into them, and what becomes of them."""

from __future__ import annotations

from rmsrepro.paper.claims import Claim, Metric, Reduction, ledger
from rmsrepro.paper.findings import Findings, NormCard, Quality, Timing, read_cards
from rmsrepro.paper.headline import HEADLINE, Headline
from rmsrepro.paper.printed import PrintedTime, printed_times
from rmsrepro.paper.rules import RULES, ClaimOutcome
from rmsrepro.paper.studies import BenchJob, StudyJob, bench_jobs, study_jobs
from rmsrepro.paper.study_checks import check_study
from rmsrepro.paper.text import claims_text
from rmsrepro.paper.verdicts import ClaimVerdict, counts, judge_claims, timings_used

__all__ = [
    "HEADLINE",
    "RULES",
    "BenchJob",
    "Claim",
    "ClaimOutcome",
    "ClaimVerdict",
    "Findings",
    "Headline",
    "Metric",
    "NormCard",
    "PrintedTime",
    "Quality",
    "Reduction",
    "StudyJob",
    "Timing",
    "bench_jobs",
    "check_study",
    "claims_text",
    "counts",
    "judge_claims",
    "ledger",
    "printed_times",
    "read_cards",
    "study_jobs",
    "timings_used",
]
