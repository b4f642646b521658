"""Jobs through Hydra's own launchers: one after another here, or spread over warm worker processes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.overrides import quoted

LAUNCHERS = ("basic", "joblib")


def check_launcher(name: str) -> None:
    """Raise UserError for a launcher that does not exist."""
    if name not in LAUNCHERS:
        hint = nearest(name, LAUNCHERS)
        raise UserError(f"launcher={name}: there is no such launcher{hint} (one of: {', '.join(LAUNCHERS)})")


def launch(
    task: Callable[[DictConfig], Any],
    jobs: Sequence[Sequence[str]],
    *,
    base: Sequence[str],
    launcher: str,
    n_jobs: int,
) -> list[Any]:
    """Run `task` on the composed config of each job and return what it returned, in order.

    This is the launching half of Hydra's multirun: a sweeper's product of values is not used, since the
    jobs of a study or of a merged sweep are a list. Call it inside `Composer`.

    Args:
        task: importable by name, since workers receive it pickled.
        jobs: the overrides of each job.
        base: overrides that go before each job's own (the search path).
    """
    check_launcher(launcher)
    _let_workers_import()
    overrides = [
        *base,
        f"hydra/launcher={launcher}",
        # Where Hydra would write, if it were to write anything. A path of the user may hold what OmegaConf
        # takes for an interpolation.
        f"hydra.sweep.dir={quoted(Path(tempfile.gettempdir()).as_posix())}",
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra.job.chdir=false",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]
    if launcher == "joblib":
        # One task at a time for each worker: a batch would leave one worker idle at the end.
        overrides += [
            f"hydra.launcher.n_jobs={n_jobs}",
            "hydra.launcher.batch_size=1",
            "hydra.launcher.pre_dispatch=all",
        ]
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_configuration("train", overrides, run_mode=RunMode.MULTIRUN)
    context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
    runner = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    returns = runner.launch([[*base, *job] for job in jobs], initial_job_idx=0)
    if launcher == "joblib":
        _end_workers()
    return [item.return_value for item in returns]


def _end_workers() -> None:
    """End the idle workers: what follows a sweep, such as a timing, should have the machine to itself."""
    from joblib.externals.loky import reusable_executor

    if reusable_executor._executor is not None:
        reusable_executor._executor.shutdown(wait=True)


def _let_workers_import() -> None:
    """Let worker processes import what this one can: the current directory's modules (norms of the user)."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *[path for path in known if path]])
