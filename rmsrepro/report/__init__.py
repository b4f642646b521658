"""The report: one page from whatever records exist, and the same scorecard for a terminal."""

from __future__ import annotations

from rmsrepro.report.build import ReportResult, build_report, watch_report
from rmsrepro.report.scorecard import Scorecard
from rmsrepro.report.terminal import print_scorecard

__all__ = ["ReportResult", "Scorecard", "build_report", "print_scorecard", "watch_report"]
