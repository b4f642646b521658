"""The configuration of a paired timing. Imports no torch, so that `rmsrepro --help` stays fast."""

from __future__ import annotations

from dataclasses import dataclass, field

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.schema import TrainConfig

LEVELS = ("layer", "model", "step")
MODES = {"layer": ("fwd", "fwd_bwd"), "model": ("fwd", "fwd_bwd"), "step": ("step",)}
"""What is timed at each level: the forward pass, forward and backward, or all that training does."""
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass
class BenchConfig:
    """How to time: the `bench` group."""

    name: str = "step"
    """The level. layer: one norm by itself. model: forward and backward of a model. step: a whole training
    step with its optimiser, as a bare loop."""
    norms: list[str] = field(default_factory=lambda: ["layernorm", "rmsnorm", "prmsnorm"])
    """The arms; layernorm is the baseline and is added when missing."""
    backends: list[str] = field(default_factory=lambda: ["composite"])
    """Each norm is timed with each of these, and compared with the layernorm of the same backend."""
    processes: int = 8
    """Fresh processes that measure, one after another; the pilot adds more where precision needs them and
    the budget pays. The process is the unit of inference, so at least two."""
    budget_s: float = 120.0
    """Wall-clock seconds for all processes together, their start and warm-up included. A target:
    each process measures at least the fewest rounds that give a usable median."""
    precision: float = 0.02
    """Relative precision aimed at: 0.02 is 2 %. Bounds the A/A control, and decides the numbers of rounds
    and processes."""
    rounds: int | None = None
    """Rounds in each process; None: a pilot decides, from budget and precision, before anything counts."""
    shapes: list[str] = field(default_factory=list)
    """bench=layer: shapes of the input, rows x width, as in [80x1024,4x128x512]."""
    modes: list[str] = field(default_factory=list)
    """fwd (forward, nothing kept for a backward pass), fwd_bwd (forward and the gradients of input and
    parameters). Empty: what the level has by itself."""
    dtypes: list[str] = field(default_factory=list)
    """bench=layer: float32, bfloat16, float16, float64, of the input and the parameters alike."""
    keep_blocks: bool | None = None
    """Whether the C library keeps large blocks of memory instead of returning them to the system after each
    use (glibc, on a CPU). None: for bench=layer only. The same for all arms; training runs keep the system's
    default."""
    framework: bool = False
    """bench=step: whether the step is timed inside Lightning's Trainer too, alone and with the records and
    clocks of a run, so that their share of it is seen. Beside the layernorm of the first backend only."""
    warmup_s: float = 0.5
    """Warm-up of each arm in each process, in the mean over the arms. It goes on until stable, at most
    four times as long, and never takes more than a quarter of the budget."""
    block_s: float = 0.02
    """Least length of a timed block (longer where the clock is coarse)."""
    num_batches: int = 8
    """Batches prepared outside the clock, and used over and over."""
    num_threads: int | None = None
    """Threads of torch on the CPU; None: trainer.num_threads, and without that torch's own choice."""
    seed: int = 0
    """Orders the arms within rounds and the building of the arms; apart from the run's seed."""
    cells: int = 1
    """A/A controls in the whole report: each tests at .05 divided by it, or by the controls of this bench
    where these are more."""
    max_other_load: float = 0.15
    """Cores kept busy by other programs, above which the timing is not trusted."""
    timeout_s: float | None = None
    """A process is stopped after so many seconds; None: a generous multiple of its share."""
    lock_wait_s: float = 600.0
    """How long to wait for another bench on this machine to end."""
    reuse: bool = False
    """Take an earlier timing with the same key instead of measuring again."""


@dataclass
class BenchJobConfig(TrainConfig):
    """What `rmsrepro bench` is composed into: what to run, as for training, and how to time it."""

    bench: BenchConfig = field(default_factory=BenchConfig)
    """How it is timed."""


def check_bench_config(config: BenchConfig) -> None:
    """Raise UserError for a value that cannot be measured with."""
    if config.name not in LEVELS:
        hint = nearest(config.name, LEVELS)
        raise UserError(f"bench={config.name}: no such level{hint}; there are: {', '.join(LEVELS)}")
    if config.processes < 2:
        raise UserError(
            f"bench.processes={config.processes}: the interval is taken over processes, so it needs at "
            "least 2 (8 for a figure worth quoting)"
        )
    if not 0 < config.precision < 1:
        raise UserError(
            f"bench.precision={config.precision}: a fraction between 0 and 1 is needed; write 2 % as 0.02"
        )
    if config.rounds is not None and config.rounds < 1:
        raise UserError(f"bench.rounds={config.rounds}: at least 1, or null to let a pilot decide")
    for key in ("budget_s", "block_s"):
        if not getattr(config, key) > 0:
            raise UserError(f"bench.{key}={getattr(config, key)}: must be above 0 seconds")
    for key in ("warmup_s", "lock_wait_s", "max_other_load"):
        if not getattr(config, key) >= 0:
            raise UserError(f"bench.{key}={getattr(config, key)}: must not be negative")
    for key in ("num_batches", "cells"):
        if getattr(config, key) < 1:
            raise UserError(f"bench.{key}={getattr(config, key)}: at least 1")
    if config.num_threads is not None and config.num_threads < 1:
        raise UserError(f"bench.num_threads={config.num_threads}: at least 1, or null for torch's choice")
    if config.timeout_s is not None and not config.timeout_s > 0:
        raise UserError(f"bench.timeout_s={config.timeout_s}: must be above 0 seconds, or null")
    if config.framework and config.name != "step":
        raise UserError(
            "bench.framework=true: only bench=step has a training step to put into a Trainer; "
            f"bench={config.name} has none"
        )
    _check_cells(config)


def _check_cells(config: BenchConfig) -> None:
    """Raise UserError for shapes, modes or dtypes that the level does not have."""
    for key in ("shapes", "modes", "dtypes"):
        values = getattr(config, key)
        repeated = next((value for value in values if values.count(value) > 1), None)
        if repeated is not None:
            raise UserError(f"bench.{key}: {repeated} is named more than once")
        if config.name == "layer" and not values:
            raise UserError(f"bench.{key} is empty; bench=layer needs at least one")
    if config.name != "layer":
        for key, source in (("shapes", "the data decide the shape"), ("dtypes", "precision= decides")):
            if getattr(config, key):
                raise UserError(f"bench.{key}: only bench=layer takes it; for bench={config.name} {source}")
    for shape in config.shapes:
        parse_shape(shape)
    for mode in config.modes:
        _known("modes", mode, MODES[config.name], f"bench={config.name}")
    for dtype in config.dtypes:
        _known("dtypes", dtype, DTYPES, "bench=layer")


def _known(key: str, value: str, choices: tuple[str, ...], level: str) -> None:
    if value not in choices:
        hint = nearest(value, choices)
        raise UserError(f"bench.{key}: {value!r}{hint}; {level} has {', '.join(choices)}")


def parse_shape(text: str) -> tuple[int, ...]:
    """Return (80, 1024) for "80x1024".

    Raises:
        UserError: not at least two whole numbers above zero with an x between them.
    """
    parts = str(text).split("x")
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(
            f"bench.shapes: {text!r} is no shape; write rows x width with whole numbers above zero, as in "
            "bench.shapes=[80x1024,2048x256]"
        )
    return tuple(int(part) for part in parts)


def keeps_blocks(config: BenchConfig) -> bool:
    """Whether large blocks of memory are kept: as asked, or else for bench=layer only."""
    return config.name == "layer" if config.keep_blocks is None else config.keep_blocks
