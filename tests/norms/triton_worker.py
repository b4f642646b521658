"""Runs Triton kernels on the CPU for test_norms_triton: `python -m tests.norms.triton_worker`, with pickles.

A process of its own, since triton's interpreter is chosen when kernels are decorated, for good.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import triton

from rmsrepro.norms.backends.fused import checking, triton_norms


def tuned(case: checking.Case) -> tuple[dict[str, float], int]:
    """Return the errors with tilings that a tuner chose, and how many it tried."""
    tried = []
    triton_norms._tuned.cache_clear()

    def benchmark(call: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
        call()
        tried.append(call)
        return [1.0 / len(tried)] * len(quantiles)  # the last one wins

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "autotune", partial(triton.autotune, do_bench=benchmark))
        patch.setattr(triton_norms, "INTERPRETED", False)
        patch.setattr(triton_norms, "_processors", lambda device: 2)
        patch.setattr(triton_norms, "WORTH_TUNING", 0)
        return checking.errors(case, triton_norms, "cpu"), len(tried)


def main() -> None:
    # What prints goes to stderr; the answers have stdout for themselves.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Overflow is meant in some of the tests.
    warnings.simplefilter("ignore")
    while True:
        try:
            name, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if name == "errors":
                answer = (None, [checking.errors(case, triton_norms, "cpu") for case in args])
            elif name == "tuned":
                answer = (None, tuned(*args))
            else:
                answer = (None, getattr(triton_norms, name)(*args))
        except Exception as error:
            answer = (traceback.format_exc() if not isinstance(error, ValueError) else error, None)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
