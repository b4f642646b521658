"""The expected best of n trials in random order, from a finite number of trials."""

from __future__ import annotations

import math
from collections.abc import Sequence


def expected_best(values: Sequence[float], *, higher: bool) -> list[float]:
    """Return, for n = 1 to B, the mean over all subsets of n of the B `values` of the subset's best.

    With the values sorted from best to worst, v_1 to v_B, the best of a subset of n is v_i in
    C(B - i, n - 1) of the C(B, n) subsets. So it is the expected best of the first n trials in random order.
    Such curves are Dodge et al.'s (2019, "Show Your Work: Improved Reporting of Experimental Results",
    EMNLP), there of draws that may repeat; without repeats the estimate has no bias (Tang et al. 2020,
    "Showing Your Work Doesn't Always Work", ACL).

    Args:
        values: one a trial, in any order; infinitely bad for one that was lost. No NaN.
        higher: whether a larger value is the better one.

    Returns:
        Where all trials of a subset may be lost, its mean is infinitely bad, too.
    """
    ordered = sorted(values, reverse=higher)
    total = len(ordered)
    curve = []
    for n in range(1, total + 1):
        worst = ordered[total - n]  # the best of the subset of the n worst
        if math.isinf(worst):
            curve.append(worst)
            continue
        weight, parts = n / total, []
        for place, value in enumerate(ordered[: total - n + 1], start=1):
            parts.append(weight * value)
            weight *= (total - place - n + 1) / max(1, total - place)
        curve.append(math.fsum(parts))
    return curve
