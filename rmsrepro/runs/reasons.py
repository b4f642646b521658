"""Why a run failed, and what to do next, in one line."""

from __future__ import annotations

import errno
import re

from rmsrepro.config.errors import StrayEnd, UserError, causes, first_line

SMALLER = "data.batch_tokens (and raise trainer.accumulate) or model.size"
_MEMORY = re.compile(
    r"out of memory|not enough memory|can't allocate memory|cannot allocate memory|ALLOC_FAILED",
    re.IGNORECASE,
)
_EXTRAS = {"triton": "gpu", "submitit": "slurm", "hydra_plugins": "slurm"}
"""Optional packages that an extra of this package brings."""
DIVERGED = "lower optim.lr, raise optim.warmup_steps, or set optim.clip_norm"
"""What to do about a run that diverged."""


class WorkerLost(RuntimeError):
    """The process that a job ran in ended without an answer.

    Args:
        ends: how worker processes ended, as names of signals or exit codes; empty where unknown.
    """

    def __init__(self, ends: str = "") -> None:
        if not ends or "SIGKILL" in ends or "-9" in ends:
            told = f"was killed ({ends})" if ends else "ended without an answer"
            super().__init__(
                f"its worker process {told}, most likely for want of memory; lower n_jobs, or {SMALLER}"
            )
        elif "SIGTERM" in ends or "SIGINT" in ends:
            super().__init__(f"its worker process was stopped from outside ({ends}); repeat the same command")
        else:
            super().__init__(
                f"its worker process crashed ({ends}); try backend=composite, and run the job alone with "
                "rmsrepro train to see where"
            )


class KilledAgain(RuntimeError):
    """The process that trained a run was killed several times, and took the sweep along.

    Args:
        times: in a row, without a further checkpoint.
        steps: how many updates it had told of the last time.
    """

    def __init__(self, times: int, steps: int) -> None:
        super().__init__(
            f"the process that trained it was killed {times} times in a row without reaching a further "
            f"checkpoint (the last time at step {steps}), most likely for want of memory; lower {SMALLER}, "
            "or give it a worker of its own (n_jobs=2), whose end does not end the sweep"
        )


def explain(error: BaseException) -> str:
    """Say what went wrong and, where it is known, what to do; in text that any file can hold."""
    name, text = type(error).__name__, str(error).strip()
    if isinstance(error, UserError | StrayEnd | WorkerLost | KilledAgain):
        return _writable(text or name)
    return known_reason(error) or (_writable(f"{name}: {first_line(text)}") if text else name)


def _writable(text: str) -> str:
    """Spell out lone surrogates, which UTF-8 does not have."""
    return text.encode("utf-8", "backslashreplace").decode()


def known_reason(error: BaseException) -> str | None:
    """Say what went wrong and what to do, where it is one of the usual causes; else None."""
    return next((_writable(reason) for one in causes(error) if (reason := _known(one))), None)


def _known(error: BaseException) -> str | None:
    number = error.errno if isinstance(error, OSError) else None
    memory = isinstance(error, MemoryError) or number == errno.ENOMEM
    # torch.OutOfMemoryError is a RuntimeError as well, and says so in words.
    if memory or (isinstance(error, RuntimeError) and _MEMORY.search(str(error))):
        return f"out of memory: {first_line(error)}; lower {SMALLER}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {first_line(error)}; make room in out_dir, or set another one, and repeat "
            "the same command"
        )
    if isinstance(error, PermissionError):
        return f"not permitted: {first_line(error)}; change the permissions, or set another out_dir"
    if isinstance(error, ImportError):
        return _missing_package(error)
    return None


def _missing_package(error: ImportError) -> str:
    name = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not name or name == "rmsrepro":
        return f"an import failed: {first_line(error)}; reinstall the package that it names, or leave it out"
    command = f"pip install 'rmsrepro[{_EXTRAS[name]}]'" if name in _EXTRAS else f"pip install {name}"
    return f"a package is missing: {first_line(error)}; {command}, if that is its name there"
