"""What `sweep tune=true` may be told: ranges, points, seeds. Imports no torch.

These are keys of the verb and not of a run: a trial is the run that `train` would make with the same values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from omegaconf import OmegaConf

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.explain import explain
from rmsrepro.config.overrides import Override, one_value

PREFIX = "tuning."
"""What the keys begin with on the command line."""
TUNED = {"lr": "lr", "warmup": "warmup_steps", "decay": "weight_decay"}
"""Key of a range -> the key of `optim` that is drawn from it, in the order of the sequence's dimensions."""
MOST_POINTS = 1000


@dataclass
class TuningConfig:
    """How `sweep tune=true` draws the points that every norm is tried with, and what follows."""

    points: int = 8
    """Trials of each norm. A larger number keeps the points there are and adds to them."""
    lr: list[float] = field(default_factory=lambda: [1e-3, 3e-2])
    """From and to of optim.lr, log-uniform. optim.lr=X instead fixes it for all trials."""
    warmup: list[int] | None = None
    """From and to of optim.warmup_steps, whole numbers, both ends included, uniform. None: from a twentieth
    to half of trainer.max_steps. optim.warmup_steps=N instead fixes it."""
    decay: list[float] = field(default_factory=lambda: [1e-3, 1e-1])
    """From and to of optim.weight_decay, AdamW's decay of weights, log-uniform; the schedule's decay of the
    learning rate is not tuned. optim.weight_decay=X instead fixes it."""
    seed: int = 0
    """Seed of all trials, and of the sequence that the points come from."""
    final_seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    """Seeds that each norm's best point is run with afterwards; none of them is tuning.seed."""
    margin: float | None = 0.05
    """The largest difference of val_loss, in nats a token, by which two tuned norms still count as the same;
    fix it before. None: the page shows numbers and no verdict."""


@dataclass(frozen=True)
class Range:
    """Where the values of one parameter come from."""

    low: float
    high: float
    whole: bool = False
    """Whole numbers, uniform, both ends included; else log-uniform."""

    def at(self, share: float) -> float:
        """The value at a share, in [0, 1), of the range: whole, or of four digits so that it can be typed."""
        if self.whole:
            return int(self.low) + int(share * (int(self.high) - int(self.low) + 1))
        value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return min(max(float(f"{value:.4g}"), self.low), self.high)


def read_tuning(overrides: Sequence[Override]) -> TuningConfig:
    """Read the keys, given without `tuning.` in front, and check what needs no run to be known.

    Raises:
        UserError: an unknown key, a wrong type, or a value that makes no sense.
    """
    names = [item.name for item in fields(TuningConfig)]
    node = OmegaConf.structured(TuningConfig)
    for item in overrides:
        if item.key not in names:
            raise UserError(
                f"{PREFIX}{item.text}: there is no key {PREFIX}{item.key}{nearest(item.key, names)} "
                f"(keys there: {', '.join(names)})"
            )
        value = one_value(
            item, PREFIX, "it takes one value; a range or a list stands in brackets, as in [1,2]"
        )
        try:
            OmegaConf.update(node, item.key, value, merge=True)
            settings = OmegaConf.to_object(node)
        except Exception as error:  # OmegaConf's own, and what an interpolation raises
            raise UserError(f"{PREFIX}{explain(error)}") from None
    settings = OmegaConf.to_object(node)
    assert isinstance(settings, TuningConfig)
    _check(settings)
    return settings


def _check(tuning: TuningConfig) -> None:
    if not 2 <= tuning.points <= MOST_POINTS:
        raise UserError(f"tuning.points={tuning.points}: expected a whole number from 2 to {MOST_POINTS}")
    for key in ("lr", "decay"):
        _check_range(key, getattr(tuning, key), lowest=None)
    if tuning.warmup is not None:
        _check_range("warmup", tuning.warmup, lowest=0)
    for key, seeds in (("seed", [tuning.seed]), ("final_seeds", tuning.final_seeds)):
        for seed in seeds:
            if isinstance(seed, list | dict) or not 0 <= seed < 2**63:
                raise UserError(f"tuning.{key}: {seed}: expected a whole number from 0 to 2^63 - 1")
    if not tuning.final_seeds:
        raise UserError("tuning.final_seeds=[]: expected at least one seed, as in tuning.final_seeds=[1,2,3]")
    if len(set(tuning.final_seeds)) < len(tuning.final_seeds):
        raise UserError(f"tuning.final_seeds={_text(tuning.final_seeds)}: a seed is named more than once")
    if tuning.seed in tuning.final_seeds:
        raise UserError(
            f"tuning.final_seeds={_text(tuning.final_seeds)}: {tuning.seed} is tuning.seed; the best of many "
            "trials was lucky with that seed, so the runs that are compared need fresh ones"
        )
    if tuning.margin is not None and not (math.isfinite(tuning.margin) and tuning.margin > 0):
        raise UserError(
            f"tuning.margin={tuning.margin}: expected a number above zero, or null for no verdict"
        )


def _check_range(key: str, ends: list[float] | list[int], lowest: int | None) -> None:
    """Check a range of numbers: above zero for a logarithm, or from `lowest` on."""
    shown = f"tuning.{key}={_text(ends)}"
    example = "[10,100]" if key == "warmup" else "[1e-3,1e-2]"
    if len(ends) != 2 or any(isinstance(end, list | dict) or not math.isfinite(end) for end in ends):
        raise UserError(f"{shown}: expected two numbers, from and to, as in tuning.{key}={example}")
    if lowest is None and not ends[0] > 0:
        raise UserError(f"{shown}: values are drawn log-uniformly, so the range must begin above zero")
    if lowest is not None and ends[0] < lowest:
        raise UserError(f"{shown}: expected {lowest} or more")
    if not ends[0] < ends[1]:
        raise UserError(
            f"{shown}: the second number must be the larger one; to fix a value instead of tuning it, write "
            f"optim.{TUNED[key]}={ends[0]:g}"
        )


def ranges_of(tuning: TuningConfig, fixed: Sequence[str], max_steps: int) -> dict[str, Range]:
    """Return key of `optim` -> its range, without those that are `fixed`, for runs of so many updates.

    Raises:
        UserError: a warm-up that is longer than the run.
    """
    warmup = tuning.warmup
    if warmup is None:
        warmup = [max(0, max_steps // 20), max(1, max_steps // 2, max_steps // 20 + 1)]
    elif "warmup_steps" not in fixed and 0 < max_steps < warmup[1]:
        raise UserError(
            f"tuning.warmup={_text(warmup)}: longer than the run (trainer.max_steps={max_steps}), which "
            "would never reach its learning rate"
        )
    ranges = {
        "lr": Range(tuning.lr[0], tuning.lr[1]),
        "warmup_steps": Range(warmup[0], warmup[1], whole=True),
        "weight_decay": Range(tuning.decay[0], tuning.decay[1]),
    }
    return {key: one for key, one in ranges.items() if key not in fixed}


def _text(values: Sequence[object]) -> str:
    return f"[{','.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)}]"
