"""How a sweep ended: its counts, and every failure with its reason, what to do, and its traceback's place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rmsrepro.verbs.common import say

if TYPE_CHECKING:
    from rmsrepro.runs.planning import Job


def tell_end(jobs: Sequence[Job], seconds: float) -> int:
    """Say how the jobs of a sweep ended, what many have in common once; return the exit code."""
    words = {"planned": "not run", "busy": "left to another process"}
    counts = Counter(words.get(job.status, job.status) for job in jobs)
    skipped = sum(job.skipped for job in jobs)
    text = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    say(f"{text} ({skipped} of them before) in {seconds:.0f} s")
    groups: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        if job.status in ("failed", "diverged", "planned", "interrupted", "busy"):
            groups.setdefault((job.status, job.error or ""), []).append(job)
    for (status, error), group in groups.items():
        word = words.get(status, status)
        for job in group:
            say(f"{word}: {job.text}")
        if error:
            _tell_reason(group, status, error)
    failed = any(job.status in ("failed", "planned", "interrupted") for job in jobs)
    if failed:
        these = "those that failed or were not run" if counts["diverged"] else "these"
        say(f"the same command runs {these} again and skips what is finished")
    if counts["diverged"]:
        say("what diverged is finished: rerun=true trains it anew, and with it all the others")
    return 1 if failed else 0


def _tell_reason(group: Sequence[Job], status: str, error: str) -> None:
    from rmsrepro.runs.reasons import DIVERGED
    from rmsrepro.runs.result import runs_dir

    say(f"  {error}; {DIVERGED}" if status == "diverged" else f"  {error}")
    if len(group) > 1:
        say(f"  (all {len(group)} of them)")
    files = (runs_dir(job.config.out_dir) / job.run_id / "error.txt" for job in group)
    if (file := next((file for file in files if file.is_file()), None)) is not None:
        say(f"  traceback: {file}")
