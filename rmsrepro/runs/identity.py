"""What makes two runs the same run: the hash of everything that changes the result, and nothing else."""

from __future__ import annotations

import hashlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rmsrepro.config.errors import StrayEnd, UserError, contained, first_line
from rmsrepro.config.later import without_later
from rmsrepro.config.plain import plain
from rmsrepro.config.schema import GRUConfig, Strategy, TrainConfig, TrainerConfig
from rmsrepro.norms import norm_info
from rmsrepro.norms.given import check_processes, check_task
from rmsrepro.norms.trial import try_norm
from rmsrepro.runs.files import to_json
from rmsrepro.tasks import norm_spec

RESULTS_VERSION = 1
"""Raised whenever a change of this package changes what a run computes; old records then no longer match."""


@dataclass(frozen=True)
class Identity:
    """A run's id, the slug of its cell (all seeds alike share it), and what was hashed."""

    run_id: str
    group: str
    content: dict[str, Any]


def check_norm(config: TrainConfig) -> None:
    """Build the norm once, and call a user's, so that what is wrong is known before anything begins.

    Raises:
        UserError: the norm cannot be built as configured, its forward does not work or lets rows influence
            each other (`try_norm`), or it does not suit the task.
    """
    spec = norm_spec(config)
    dim = max(1, config.model.d_model or 1)
    gpu = config.trainer.accelerator != "cpu" and torch.cuda.is_available()
    try:
        with contained():
            spec.check(dim)
            try_norm(spec, dim, ("cpu", "cuda") if gpu else ("cpu",))
    except (ValueError, TypeError) as error:
        raise UserError(f"norm={spec.name}: {error}") from error
    except Exception as error:  # a user's class may raise anything, and a width may be beyond the memory
        kind = "" if isinstance(error, StrayEnd) else f"{type(error).__name__}: "
        raise UserError(
            f"norm={spec.name}: it cannot be built at width {config.model.d_model} "
            f"({kind}{first_line(error)})"
        ) from error
    check_task(spec.name, config.task.name)
    check_processes(spec.name, config.trainer)


def identify(config: TrainConfig, *, data_hash: str, parent: str | None = None) -> Identity:
    """Return the identity of a resolved config.

    Paths, trackers, intervals of logging and the machine do not enter; the norm's source file does when
    the norm is not the package's own.
    """
    spec = norm_spec(config)
    model = without_later("model", plain(config.model))
    model.pop("size")
    placement, sites = config.placement.value, sorted(site.value for site in config.sites)
    if spec.is_none or spec.scope == "weight":
        # There is no module to put between queries and keys, or around a branch.
        model.pop("qk_norm", None)
        placement = "none"
        sites = sites if isinstance(config.model, GRUConfig) else []
    content = {
        "results_version": RESULTS_VERSION,
        "norm": spec.name,
        "norm_params": without_later("norm", spec.resolved_params),
        "norm_source": norm_source(spec.name),
        "backend": spec.backend_used,
        "placement": placement,
        "sites": sites,
        "model": model,
        "task": plain(config.task),
        "data": data_hash,
        "optim": plain(config.optim),
        "max_steps": config.trainer.max_steps,
        "accumulate": config.trainer.accumulate,
        "seed": config.seed,
        "precision": config.precision,
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "parent": parent,
    }
    if config.trainer.divergence_factor != TrainerConfig.divergence_factor:
        # It decides whether a run ends as `diverged`; most never touch it.
        content["divergence_factor"] = config.trainer.divergence_factor
    if config.trainer.strategy is Strategy.fsdp or config.trainer.devices > 1:
        # The sums over a batch run in another order, and each process draws its own dropout.
        content["processes"] = [config.trainer.strategy.value, config.trainer.devices]
    digest = hashlib.sha256(to_json(content, indent=None).encode()).hexdigest()[:10]
    group = "-".join(
        slug(part) for part in (config.task.name, config.data.name, config.model.name, spec.name)
    )
    return Identity(f"{group}-s{config.seed}-{digest}", group, content)


def failed_id(config: TrainConfig) -> str:
    """A run id for a job that cannot be planned: stable, so that repeating the sweep makes no second one."""
    content = plain(config)
    content.pop("out_dir")
    digest = hashlib.sha256(to_json(content, indent=None).encode()).hexdigest()[:10]
    return f"{config.task.name}-{config.data.name}-{config.model.name}-invalid-s{config.seed}-{digest}"


def slug(text: str, limit: int = 60) -> str:
    """Return `text` as a short word of letters, digits and underscores that needs no quotes anywhere."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_")[:limit] or "x"


def norm_source(name: str) -> str | None:
    """Return the hash of the file that defines a norm from outside the package; None for the package's own.

    A class without a file (of a notebook) has its import path instead.
    """
    cls = norm_info(name).factory
    if cls is None or cls.__module__.split(".")[0] == "rmsrepro":
        return None
    file = norm_file(name)
    if file is None:
        return f"{cls.__module__}.{cls.__qualname__}"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def norm_file(name: str) -> Path | None:
    """Return the file that defines a norm from outside the package, if there is one."""
    cls = norm_info(name).factory
    try:
        file = None if cls is None else inspect.getsourcefile(cls)
    except TypeError:
        file = None
    return None if file is None else Path(file)
