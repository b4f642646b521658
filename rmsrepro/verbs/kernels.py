"""The verb that compiles the fused kernels ahead of time: build-kernels."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override
from rmsrepro.verbs.common import only_options, say


@dataclass
class BuildKernelsVerb:
    rerun: bool = False


def build_kernels(overrides: list[Override]) -> int:
    """Compile the kernels for every level of this kind of processor into one library; say where it lies."""
    options = only_options(BuildKernelsVerb, overrides, "build-kernels")
    from rmsrepro.norms.backends.fused.building import build, find
    from rmsrepro.norms.backends.fused.compilers import KernelsUnavailable, toolchain
    from rmsrepro.norms.backends.fused.levels import best_level, known_levels

    levels, since = known_levels(), time.monotonic()
    try:
        used = best_level()
        found = find(levels)
        there = found is not None and not options.rerun
        if not there:
            tools = toolchain()
            threads = "OpenMP" if tools.openmp else "without OpenMP: the kernels will use one thread"
            say(f"compiling for {len(levels)} levels with {tools.version}, {threads}")
            build(levels, anew=options.rerun, again=True, tell=say)
            found = find(levels)
    except (KernelsUnavailable, ValueError) as error:
        raise UserError(str(error)) from error
    if found is None:
        raise UserError("the kernels were built and are gone already: another program empties the cache")
    path, built = found
    how = "there already; rerun=true builds it anew" if there else f"in {time.monotonic() - since:.1f} s"
    say(f"{path}: {built.size / 1e3:.0f} kB, {how}")
    for name in built.levels:
        say(f"  {name}{' (this processor uses it)' if name == used.name else ''}")
    return 0
