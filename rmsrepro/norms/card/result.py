"""What a check says."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch


class Status(Enum):
    passed = "pass"
    failed = "fail"
    not_applicable = "not applicable"


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    status: Status
    text: str
    """One sentence: what was found, or why it failed or does not apply."""
    measured: Any = None
    """The numbers, as JSON holds them."""
    bound: Any = None
    """What they are held against."""

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status.value,
            "text": self.text,
            "measured": self.measured,
            "bound": self.bound,
        }


def judged(good: bool, text: str, measured: Any = None, bound: Any = None) -> Check:
    """Return a check that passed or failed."""
    return Check(Status.passed if good else Status.failed, text, measured, bound)


def not_applicable(reason: str) -> Check:
    """Return a check that says nothing about this norm, and why."""
    return Check(Status.not_applicable, reason)


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def guarded(check: Callable[[], Check]) -> Check:
    """Run a check; one that raises has failed, with the exception's first line.

    A norm under test may raise anything at all, an exit included.
    """
    try:
        return check()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Check(Status.failed, f"it raised {first_line(error)}{_place(error)}")


def _place(error: BaseException) -> str:
    """Return the line of the norm that an error comes from, which says more than a dozen frames of torch."""
    import rmsrepro

    ours = tuple(str(Path(one.__path__[0])) for one in (rmsrepro, torch))
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)
    ]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


@dataclass
class Findings:
    """Collects what is wrong inside one check."""

    problems: list[str] = field(default_factory=list)

    def expect(self, good: bool, problem: str) -> None:
        """Note `problem` unless `good`."""
        if not good and problem not in self.problems:
            self.problems.append(problem)

    def check(self, fine: str, measured: Mapping[str, Any] | None = None, bound: Any = None) -> Check:
        """Return the check: `fine` when nothing is wrong, else what is."""
        text = "; ".join(self.problems) or fine
        return judged(not self.problems, text, None if measured is None else dict(measured), bound)
