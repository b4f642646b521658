"""What this machine can measure, in words."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rmsrepro.bench.load import OtherLoad
from rmsrepro.bench.protocol import RESOLUTION_SHARE
from rmsrepro.bench.settings import UNKNOWN, last_level_cache_bytes, machine_settings
from rmsrepro.bench.statistics import AA_WIDTH
from rmsrepro.config.bench import BenchConfig
from rmsrepro.runs.processor import (
    compiler,
    cpu_model,
    cpu_quota,
    load_average,
    physical_cores,
    usable_cpus,
)

if TYPE_CHECKING:
    from rmsrepro.bench.trial import Trial

Fact = tuple[str, str]
"""A word and what there is to say of it."""
DEFAULTS = BenchConfig()


def machine_facts(look_s: float = 0.3) -> Iterator[Fact]:
    """Yield what the system tells, without torch: cores, load, frequency, memory, compiler, kernels.

    Args:
        look_s: how long to look at the load.
    """
    cache = last_level_cache_bytes()
    size = UNKNOWN if cache is None else f"{cache / 2**20:g} MB"
    yield "processor", f"{cpu_model()}, last cache {size}"
    yield "cores", _cores()
    yield "load", _load(look_s)
    settings = machine_settings()
    yield "frequency", frequency_words(settings["governor"], settings["frequency_mhz"])
    yield "memory", memory_words(settings["c_library"])
    yield "compiler", compiler() or "none found (c++, g++, clang++): nothing can be compiled here"
    yield "kernels", kernels_words()
    yield "triton", _triton()


def torch_facts() -> Iterator[Fact]:
    """Yield what torch tells: version, threads, GPU, backends, clock."""
    import torch

    from rmsrepro.bench.devices import choose_clock, choose_device

    others = f"lightning {_version('lightning')}, Python {platform.python_version()}"
    yield "torch", f"{torch.__version__}, {others}"
    yield "threads", threads_words(torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"))
    yield "gpu", _gpu()
    yield "backends", _backends()
    clock = choose_clock(choose_device("auto"))
    block = seconds_words(clock.resolution / RESOLUTION_SHARE)
    yield "clock", f"moves in steps of {seconds_words(clock.resolution)}, so a block lasts {block} at least"


def trial_facts(trial: Trial) -> Iterator[Fact]:
    """Yield what a trial found, and what a bench can hope for."""
    ratio = trial.ratio
    noise = f"{100 * trial.round_sd:.1f} % from round to round, {100 * trial.pair_sd:.1f} % between pairs"
    yield (
        "A/A",
        f"LayerNorm against itself: {ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] in "
        f"{trial.num_rounds} rounds of {seconds_words(trial.step_s)} a step; noise {noise} of twins",
    )
    if trial.other_load is not None:
        busy = f"other programs kept {trial.other_load:.2f} cores busy"
        yield "meanwhile", busy + _too_loud(trial.other_load)
    yield "outlook", outlook_words(100 * trial.half_width(DEFAULTS.processes))


def trial(seconds: float, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Trial:
    """Run the trial on the device that a bench would use."""
    from rmsrepro.bench.devices import choose_clock, choose_device
    from rmsrepro.bench.trial import TrialStep, aa_trial

    device = choose_device("auto")
    return aa_trial(seconds, choose_clock(device), lambda: TrialStep(device), on_progress=on_progress)


# ------------------------------------------------------------------------------------------- words


def outlook_words(percent: float) -> str:
    """Say what a bench can tell whose intervals reach `percent` to either side."""
    wanted = 100 * DEFAULTS.precision
    hope = (
        f"a bench of {DEFAULTS.processes} processes can hope for intervals of {percent:.1f} % to either "
        "side: smaller differences stay open"
    )
    if percent > AA_WIDTH * wanted:
        return f"{hope}. That is too noisy for a comparison to be trusted: let the machine rest"
    if percent > wanted:
        return f"{hope}. For bench.precision={DEFAULTS.precision:g} it takes more processes, or less noise"
    return f"{hope}. That is within bench.precision={DEFAULTS.precision:g}"


def frequency_words(governor: str, range_mhz: object) -> str:
    """Say what `machine_settings` found of the governor and the frequency."""
    if governor == UNKNOWN and not isinstance(range_mhz, list):
        return "governor and frequency unknown: the system does not tell, and timings say so"
    now = f"{range_mhz[0]:.0f} to {range_mhz[1]:.0f} MHz now" if isinstance(range_mhz, list) else UNKNOWN
    loose = "" if governor in (UNKNOWN, "performance") else "; it may move with the load"
    return f"governor {governor}, frequency {now}{loose}"


def memory_words(c_library: str) -> str:
    """Say what allocation does to timings with this C library."""
    if not c_library.startswith("glibc"):
        return f"C library {c_library}: it cannot keep large blocks, so bench.keep_blocks does nothing"
    return (
        f"{c_library}: a lone large layer (inputs of 1 MiB and more) runs several times slower through page "
        "faults alone, a whole step hardly. bench=layer keeps large blocks (bench.keep_blocks); the other "
        "levels and training runs have the system's default"
    )


def kernels_words() -> str:
    """Say whether the fused kernels are built for this processor, or what would; builds nothing."""
    from rmsrepro.norms.backends.fused.building import find, ready_to_build
    from rmsrepro.norms.backends.fused.compilers import KernelsUnavailable
    from rmsrepro.norms.backends.fused.levels import best_level, known_levels

    try:
        level = best_level()
        found = find([level])
        if found is None:
            tools = ready_to_build([level])
            how = compiled_words(tools.openmp, tools.python_headers is not None)
            return (
                f"for {level.name}, not built yet: the first use of backend=fused takes seconds "
                f"({tools.version}, {how}); rmsrepro build-kernels builds them for all processors of the kind"
            )
    except (KernelsUnavailable, ValueError) as error:
        return f"backend=fused cannot run on the processor: {error}"
    path, built = found
    how = compiled_words(built.openmp, built.python_headers)
    held = "all levels" if len(built.levels) == len(known_levels()) else "this level alone"
    return f"for {level.name}, built ({built.compiler}, {how}; {held}): {_from_home(path)}"


def _kernels_await_building() -> bool:
    from rmsrepro.norms.backends.fused.building import find, ready_to_build
    from rmsrepro.norms.backends.fused.compilers import KernelsUnavailable
    from rmsrepro.norms.backends.fused.levels import best_level

    try:
        level = best_level()
        return find([level]) is None and bool(ready_to_build([level]).command)
    except (KernelsUnavailable, ValueError):
        return False


def compiled_words(openmp: bool, python_headers: bool) -> str:
    """Say what kernels can do that were compiled with or without OpenMP and Python's headers."""
    threads = "OpenMP" if openmp else "no OpenMP: one thread"
    return f"{threads}, {'Python.h' if python_headers else 'no Python.h: calls take microseconds more'}"


def threads_words(threads: int, given: str | None) -> str:
    """Say how many threads torch uses, and why."""
    why = f"OMP_NUM_THREADS={given}" if given else "its own choice"
    cores = len(usable_cpus())
    many = f"; more than the {cores} processors, so they wait for each other" if threads > cores else ""
    return f"torch uses {threads} ({why}); bench.num_threads sets them{many}"


def seconds_words(value: float) -> str:
    """Write a short time: 41 ns, 1.32 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _cores() -> str:
    cpus = usable_cpus()
    cores, quota = physical_cores(cpus), cpu_quota()
    where = "physical cores unknown" if cores is None else f"on {cores} physical cores"
    limited = quota is not None and quota < len(cpus)
    limit = f"; the container's limit is {quota:g} of them" if limited else ""
    return f"{len(cpus)} of {os.cpu_count() or len(cpus)} logical processors may be used, {where}{limit}"


def _load(look_s: float) -> str:
    other = OtherLoad()
    time.sleep(look_s)
    busy, average = other.stop(), load_average()
    now = UNKNOWN if busy is None else f"other programs keep {busy:.2f} cores busy{_too_loud(busy)}"
    return f"{now}; {UNKNOWN if average is None else f'{average:.2f}'} in the last minute"


def _too_loud(busy: float) -> str:
    limit = DEFAULTS.max_other_load
    return f" (above {limit:g} no comparison is trusted)" if busy > limit else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _from_home(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def _triton() -> str:
    if find_spec("triton") is None:
        return "not installed: the fused kernels of a GPU need it"
    return f"{_version('triton')}; it compiles the fused kernels of a GPU"


def _gpu() -> str:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "none"
    if device.type != "cuda":
        return str(device)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"{', '.join(names)}; timed by events on the device"


def _backends() -> str:
    """Each backend with the norms that it takes as they are by default, or what it lacks on this machine."""
    from rmsrepro.norms import resolve_params
    from rmsrepro.norms.backends import BACKENDS, missing, refusal
    from rmsrepro.norms.params import BUILTIN_PARAMS

    names = [name for name in BUILTIN_PARAMS if name != "none"]
    told = []
    for backend in reversed(BACKENDS):
        refused = [name for name in names if refusal(resolve_params(name), backend) is not None]
        taken = [name for name in names if name not in refused]
        which = "all norms" if len(refused) < len(taken) else ", ".join(taken)
        but = f" but {', '.join(refused)}" if refused and len(refused) < len(taken) else ""
        # Asking for what the kernels lack builds them.
        lacking = None if backend == "fused" and _kernels_await_building() else missing(backend)
        told.append(f"{backend} ({which}{but}{f'; not here: {lacking}' if lacking else ''})")
    return "; ".join(told)
