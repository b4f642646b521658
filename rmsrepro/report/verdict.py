"""The rules by which a comparison with the baseline is judged. They stand before the records do.

`RULES` is the text that the page prints; `judge` applies it, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rmsrepro.config.study import higher_is_better
from rmsrepro.report import formatting
from rmsrepro.report.cells import Arm
from rmsrepro.report.records import RunRecord, State
from rmsrepro.report.statistics import ALPHA, PairedDifference, paired_difference

RULES = (
    (
        "Compared is the study's primary metric at the fixed last step, never at the best checkpoint: "
        "difference = arm - baseline, between runs of the same seed, which start from the same shared "
        "weights, see the same batches and differ in nothing but the norm. The first rule that applies "
        "decides:"
    ),
    (
        "different (k of n diverged): k of the n seeds diverged in one arm and finished in the other. Such "
        "a seed is never dropped. A run that ends with a metric that is not finite counts as diverged."
    ),
    (
        "incomplete (k of n): only k of the n planned pairs have ended; a run that failed, is missing, "
        "still runs or was interrupted is never averaged."
    ),
    (
        "undecided (k of n diverged in both arms): a seed was lost to both arms alike, so it tells them "
        "apart in neither direction."
    ),
    (
        "undecided (undertrained): the mean of the baseline's runs has not reached the study's `learned` "
        "threshold, so that an agreement would only say that neither has learned."
    ),
    "undecided (one seed): there is no spread to judge by.",
    (
        "equivalent: the 90 % t interval of the mean paired difference lies strictly inside +-margin, the "
        "margin being fixed by the study beforehand (two one-sided tests, TOST, at 5 %)."
    ),
    (
        "different: not equivalent, and the two-sided paired t test rejects at .05 after Holm's adjustment "
        "over all comparisons that the study plans (one that cannot be tested yet counts as p = 1)."
    ),
    "undecided: neither of the two.",
)


class Outcome(Enum):
    """What a verdict comes to."""

    equivalent = "equivalent"
    different = "different"
    undecided = "undecided"
    incomplete = "incomplete"
    none = "none"
    """No verdict is given: no study fixed a margin, or the study gives none."""


@dataclass(frozen=True)
class Verdict:
    """An outcome, the words for it, and the reason in a sentence."""

    outcome: Outcome
    text: str
    reason: str = ""


@dataclass(frozen=True)
class Pairs:
    """The paired seeds of an arm and the baseline, sorted by what became of them."""

    metric: str
    n: int
    """Planned pairs."""
    seeds: tuple[int, ...]
    """Seeds whose two runs have finished with a finite metric."""
    arm: tuple[float, ...]
    """The arm's metric for `seeds`."""
    baseline: tuple[float, ...]
    arm_diverged: int
    """Seeds that diverged in the arm and finished in the baseline."""
    baseline_diverged: int
    both_diverged: int
    waiting: Mapping[str, int]
    """Why pairs are missing -> how many runs."""

    @property
    def diverged(self) -> int:
        """Pairs of which at least one run diverged and the other ended."""
        return self.arm_diverged + self.baseline_diverged + self.both_diverged

    @property
    def difference(self) -> PairedDifference | None:
        """The paired difference; None unless every planned pair is whole: no mean over survivors."""
        if not self.seeds or len(self.seeds) < self.n:
            return None
        return paired_difference(self.arm, self.baseline)

    @property
    def text(self) -> str:
        """`3 seeds`, or `2 of 3 seeds, 1 diverged`."""
        if len(self.seeds) == self.n:
            return formatting.count(self.n, "seed")
        lost = f", {self.diverged} diverged" if self.diverged else ""
        return f"{len(self.seeds)} of {formatting.count(self.n, 'seed')}{lost}"


def pair_up(arm: Arm, baseline: Arm | None, seeds: tuple[int, ...], metric: str) -> Pairs:
    """Pair the runs of two arms by seed and say what became of each pair."""
    whole: list[tuple[int, float, float]] = []
    lost = {"arm": 0, "baseline": 0, "both": 0}
    waiting: dict[str, int] = {}
    for seed in seeds:
        ours = arm.runs.get(seed)
        theirs = baseline.runs.get(seed) if baseline else None
        states = _fate(ours, metric), _fate(theirs, metric)
        if states == ("ended", "ended") and ours and theirs:
            whole.append((seed, ours.metrics[metric], theirs.metrics[metric]))
        elif states == ("diverged", "ended"):
            lost["arm"] += 1
        elif states == ("ended", "diverged"):
            lost["baseline"] += 1
        elif states == ("diverged", "diverged"):
            lost["both"] += 1
        else:
            for state in states:
                if state not in ("ended", "diverged"):
                    waiting[state] = waiting.get(state, 0) + 1
    return Pairs(
        metric=metric,
        n=len(seeds),
        seeds=tuple(seed for seed, _, _ in whole),
        arm=tuple(value for _, value, _ in whole),
        baseline=tuple(value for _, _, value in whole),
        arm_diverged=lost["arm"],
        baseline_diverged=lost["baseline"],
        both_diverged=lost["both"],
        waiting=waiting,
    )


def _fate(run: RunRecord | None, metric: str) -> str:
    """What became of a run, as far as a comparison of `metric` is concerned."""
    if run is None:
        return "not run"
    if run.diverged(metric):
        return "diverged"
    if run.value(metric) is not None:
        return "ended"
    if run.state is not State.completed:
        return run.state.value
    return f"without {metric}" if run.finished else "ended early"


def judge(
    pairs: Pairs, *, margin: float | None, adjusted_p: float, learned: float | None, baseline: str
) -> Verdict:
    """Apply `RULES` to one comparison; `adjusted_p` is Holm's p-value, NaN where there is no test."""
    n = pairs.n
    if pairs.arm_diverged or pairs.baseline_diverged:
        return Verdict(Outcome.different, *_diverged_words(pairs, baseline))
    ended = len(pairs.seeds) + pairs.both_diverged
    if ended < n:
        missing = formatting.join([f"{count} {state}" for state, count in sorted(pairs.waiting.items())])
        return Verdict(Outcome.incomplete, f"incomplete ({ended} of {n})", f"runs missing: {missing}")
    if pairs.both_diverged:
        text = f"undecided ({pairs.both_diverged} of {n} diverged in both arms)"
        return Verdict(Outcome.undecided, text, "the same seeds were lost to both arms")
    if learned is not None:
        reached = math.fsum(pairs.baseline) / len(pairs.baseline)
        passed = reached >= learned if higher_is_better(pairs.metric) else reached <= learned
        if not passed:
            reason = f"{baseline}: {pairs.metric} {reached:.4g}, threshold {learned:g}"
            return Verdict(Outcome.undecided, "undecided (undertrained)", reason)
    difference = pairs.difference
    if difference is None or difference.n < 2:
        return Verdict(Outcome.undecided, "undecided (one seed)", "one seed has no spread to judge by")
    if margin is None:
        return Verdict(
            Outcome.undecided, "undecided (no margin)", f"the study sets no margin for {pairs.metric}"
        )
    test = f"TOST p = {difference.p_equivalent(margin):.2g}, Holm p = {adjusted_p:.2g}"
    if difference.within(margin):
        also = "; a difference was found, but it lies inside the margin" if adjusted_p < ALPHA else ""
        return Verdict(Outcome.equivalent, "equivalent", test + also)
    if adjusted_p < ALPHA:
        return Verdict(
            Outcome.different, f"different ({better_or_worse(difference.mean, pairs.metric)})", test
        )
    return Verdict(Outcome.undecided, "undecided", test)


def better_or_worse(difference: float, metric: str) -> str:
    """`better`, `worse` or `the same`, for a difference arm - baseline; empty for NaN."""
    if math.isnan(difference):
        return ""
    if difference == 0:
        return "the same"
    return "better" if (difference > 0) == higher_is_better(metric) else "worse"


def _diverged_words(pairs: Pairs, baseline: str) -> tuple[str, str]:
    n, parts = pairs.n, []
    if pairs.arm_diverged:
        parts.append(f"{pairs.arm_diverged + pairs.both_diverged} of {n} diverged")
    if pairs.baseline_diverged or pairs.both_diverged:
        parts.append(f"{baseline}: {pairs.baseline_diverged + pairs.both_diverged} of {n} diverged")
    missing = sum(pairs.waiting.values())
    reason = "a diverged seed is not dropped" + (f"; {missing} run(s) still missing" if missing else "")
    return f"different ({'; '.join(parts)})", reason
