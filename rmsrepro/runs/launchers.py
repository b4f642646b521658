"""Hydra's launchers that a sweep may use, their packages, and the options of each. Imports no torch."""

from __future__ import annotations

import copy
import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rmsrepro.config.errors import UserError, first_line, nearest
from rmsrepro.config.overrides import Override, one_value, quoted

LAUNCHERS = ("basic", "joblib", "submitit_local", "submitit_slurm")
PREFIX = "launcher."
"""What the options of a launcher begin with on the command line."""
_PACKAGES = {
    "joblib": ("hydra_plugins.hydra_joblib_launcher", "hydra-joblib-launcher"),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "hydra-submitit-launcher"),
    "submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "hydra-submitit-launcher"),
}
_ONE_PROCESS = "a job of a sweep is one process"
_FIXED = {
    "joblib": dict.fromkeys(("backend", "prefer", "require"), "the workers are processes")
    | {"batch_size": "one task at a time goes to each worker", "pre_dispatch": "all tasks are known at once"},
    "submitit_local": {
        "submitit_folder": "the sweep chooses it, below out_dir",
        "nodes": _ONE_PROCESS,
        "tasks_per_node": _ONE_PROCESS,
    },
    "submitit_slurm": {"nodes": _ONE_PROCESS, "tasks_per_node": _ONE_PROCESS},
}
"""Options of Hydra's launchers that a sweep decides, and why."""
_DEFAULTS = {
    # One task at a time for each worker: a batch would leave one worker idle at the end.
    "joblib": {"batch_size": "1", "pre_dispatch": "all"},
    # A job that has no end of its own in the plug-in's defaults is killed after an hour.
    "submitit_local": {"name": "rmsrepro", "timeout_min": str(7 * 24 * 60)},
    # A job that runs out of time saves its run, and goes on in the queue.
    "submitit_slurm": {"name": "rmsrepro", "max_num_timeout": "100"},
}


@dataclass(frozen=True)
class LauncherOptions:
    """A launcher, how many jobs it runs at a time (None: its own choice), and its own options."""

    name: str = "basic"
    n_jobs: int | None = None
    options: Sequence[Override] = field(default_factory=tuple)
    """Without `launcher.` in front."""

    @property
    def here(self) -> int:
        """How many jobs run on this machine at a time."""
        return (self.n_jobs or 1) if self.name in ("joblib", "submitit_local") else 1

    def overrides(self, folder: str) -> list[str]:
        """Return what chooses and sets the launcher in Hydra's own configuration.

        Args:
            folder: for the files of submitit.
        """
        values = dict(_DEFAULTS.get(self.name, {}))
        if self.name.startswith("submitit"):
            values["submitit_folder"] = quoted(f"{folder}/%j")
        if self.n_jobs is not None and self.name == "joblib":
            values["n_jobs"] = str(self.n_jobs)
        if self.n_jobs is not None and self.name == "submitit_slurm":
            values["array_parallelism"] = str(self.n_jobs)
        values |= {item.key: item.value for item in self.options}
        # `++`: the keys of a dictionary need not be there before.
        return [
            f"hydra/launcher={self.name}",
            *(f"{'++' if '.' in key else ''}hydra.launcher.{key}={value}" for key, value in values.items()),
        ]


def check_launcher(name: str) -> None:
    """Raise UserError for a launcher that does not exist, or whose package is not installed."""
    if name not in LAUNCHERS:
        hint = nearest(name, LAUNCHERS)
        raise UserError(f"launcher={name}: there is no such launcher{hint} (one of: {', '.join(LAUNCHERS)})")
    module, package = _PACKAGES.get(name, ("", ""))
    if module and not _found(module):
        raise UserError(f"launcher={name}: its package is not installed; pip install {package}")


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def check_cluster(name: str) -> None:
    """Raise UserError where jobs are to be submitted to Slurm, and there is none."""
    missing = [program for program in ("sbatch", "srun", "sacct") if shutil.which(program) is None]
    if name == "submitit_slurm" and missing:
        raise UserError(
            f"launcher=submitit_slurm: {', '.join(missing)} of Slurm cannot be found here; start the sweep "
            "where you submit jobs, or use launcher=submitit_local"
        )


def check_options(launcher: LauncherOptions) -> None:
    """Raise UserError for an option that the launcher does not have, or a value of the wrong type."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    if not launcher.options:
        return
    Plugins.instance()  # which registers their configurations
    node: Any = {}
    if launcher.name != "basic":
        node = copy.deepcopy(ConfigStore.instance().load(f"hydra/launcher/{launcher.name}.yaml").node)
    fixed = _FIXED.get(launcher.name, {})
    known = [str(key) for key in node if key != "_target_" and key not in fixed]
    for item in launcher.options:
        text = f"{PREFIX}{item.text}"
        if item.key in fixed:
            raise UserError(f"{text}: it cannot be set here, as {fixed[item.key]}")
        head = item.key.split(".")[0]
        if head not in known or ("." in item.key and not isinstance(node._get_node(head), DictConfig)):
            have = f"it has: {', '.join(known)}" if known else "it has none"
            raise UserError(
                f"{text}: launcher={launcher.name} has no option {item.key}{nearest(head, known)} ({have})"
            )
        value = one_value(item, PREFIX, "an option of the launcher takes one value; put commas into quotes")
        try:
            OmegaConf.update(node, item.key, value, merge=True)
        except OmegaConfBaseException as error:
            raise UserError(f"{text}: {first_line(error)}") from error
