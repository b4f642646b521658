"""What a bench measures: cells, arms, and the step that an arm does in a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Cell:
    """What the arms of one comparison share. A process measures its cells one after another."""

    level: str
    shape: str
    """Of the input, as text: `80x1024`."""
    mode: str
    """fwd, fwd_bwd or step."""
    dtype: str

    @property
    def name(self) -> str:
        """`80x1024/fwd/float32`: how samples.csv and the records of processes refer to it."""
        return f"{self.shape}/{self.mode}/{self.dtype}"


@dataclass(frozen=True)
class Arm:
    """What is timed: one norm on one backend, or something that a level sets beside them.

    The baseline is built and timed as two independent twins.
    """

    label: str
    """`norm/backend`, with the parameters where two arms would otherwise have the same label."""
    norm: str
    params: dict[str, Any]
    backend: str
    is_baseline: bool = False
    unavailable: str | None = None
    """Why this backend cannot do it, or this task or level not have it."""
    role: str = "norm"
    """norm: ranked against the baseline of its backend. Any other (`copy`, `framework`) is a level's own: it
    is timed in the same rounds and never among the comparisons."""
    against: Sequence[str] = ()
    """Labels of the arms that an arm of another role than norm is set against (the table `extras`). Its first
    loss must be that of the first of them."""

    @property
    def twins(self) -> list[str]:
        """The names under which it is sampled."""
        return [f"{self.label}#1", f"{self.label}#2"] if self.is_baseline else [self.label]


class ArmStep(Protocol):
    """One step of an arm. `Step` has an answer for everything but the call.

    A step may have a method `repeat(count)` that does `count` steps: a block then calls it once, instead of
    the step `count` times (for steps whose control lies elsewhere, such as a trainer's loop).
    """

    remarks: Sequence[str]
    """What to say of the arm that does not keep it from being ranked; filled by `check`."""
    in_thread: bool
    """Whether it works in a thread of its own, where the memory of a step is not seen on a CPU."""

    def __call__(self) -> object: ...

    def seed(self) -> None:
        """Set the random streams to the state in which the first step is compared."""

    def check(self) -> str | None:
        """Return what is wrong with what the step computes, or None. After the first call, off the clock."""

    def loss(self) -> float | None:
        """Loss of the last step, which equal arms must share; None where there is none."""

    def tidy(self) -> None:
        """Free what steps pile up. Between rounds, off the clock."""

    def close(self) -> None:
        """End what the step holds, such as a thread. When its cell is over."""


class Step:
    """A step without loss or anything to check: a base for the real ones."""

    remarks: Sequence[str] = ()
    in_thread = False

    def __call__(self) -> object:
        raise NotImplementedError

    def seed(self) -> None:
        """Nothing random."""

    def check(self) -> str | None:
        """Nothing to check."""
        return None

    def loss(self) -> float | None:
        """No loss."""
        return None

    def tidy(self) -> None:
        """Nothing piles up."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Contestant:
    """What a session is told of an arm: under which names it runs and what it is held against."""

    label: str
    twins: list[str]
    baseline: str | None
    """Label of its baseline; the baseline's own is its own label. None: it is compared with nothing."""
    reference: str | None = None
    """Label of the arm whose first loss must be the same: the same norm on the reference backend."""


@dataclass(frozen=True)
class Cost:
    """What an arm's step needs by its equation; None where it was not counted."""

    bytes: int | None = None
    """Read and written at least once."""
    flops: int | None = None
