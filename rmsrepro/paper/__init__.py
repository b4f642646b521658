"""The paper's side of a comparison: its printed headline, and the studies that look into it."""

from __future__ import annotations

from rmsrepro.paper.headline import HEADLINE, Headline
from rmsrepro.paper.studies import BenchJob, StudyJob, bench_jobs, check_study, study_jobs

__all__ = ["HEADLINE", "BenchJob", "Headline", "StudyJob", "bench_jobs", "check_study", "study_jobs"]
