"""Jobs through Hydra's own launchers: one after another here, in worker processes, or in a queue."""

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

from rmsrepro.config.overrides import quoted
from rmsrepro.runs.handover import Handed, SweepLoader
from rmsrepro.runs.launchers import LauncherOptions
from rmsrepro.runs.submitted import launch_in_queue, launch_locally


def launch(
    task: Callable[[DictConfig], Any],
    jobs: Sequence[Sequence[str]],
    *,
    base: Sequence[str],
    launcher: LauncherOptions,
    folder: Path,
) -> list[Any]:
    """Run `task` on the composed config of each job and return what it returned, in order.

    This is the launching half of Hydra's multirun: a sweeper's product of values is not used, since the
    jobs of a study or of a merged sweep are a list. Call it inside `Composer`. Of a job that submitit lost
    (killed, cancelled) a `submitted.Lost` is returned.

    Args:
        task: importable by name, since workers receive it pickled.
        jobs: the overrides of each job.
        base: overrides that go before each job's own (the search path).
        folder: where submitit keeps its files; on a cluster, one that all machines see.
    """
    _let_workers_import()
    texts = [[*base, *job] for job in jobs]

    def launch_part(part: Sequence[Sequence[str]], files: Path) -> list[Any]:
        runner = make_runner(task, base=base, launcher=launcher, folder=files)
        return [item.return_value for item in runner.launch(part, initial_job_idx=0)]

    if launcher.name == "submitit_local":
        return launch_locally(launch_part, texts, launcher.here, folder)
    if launcher.name == "submitit_slurm":
        return launch_in_queue(launch_part, texts, folder)
    results = launch_part(texts, folder)
    if launcher.name == "joblib":
        _end_workers()
    return results


def make_runner(
    task: Callable[[DictConfig], Any], *, base: Sequence[str], launcher: LauncherOptions, folder: Path
) -> Any:
    """Return Hydra's launcher, set up; call it inside `Composer`."""
    # Another machine need not have this one's folder for temporary files.
    where = folder if launcher.name == "submitit_slurm" else Path(tempfile.gettempdir())
    overrides = [
        *base,
        *launcher.overrides(folder.as_posix()),
        # Where Hydra would write, if it were to write anything. A path of the user may hold what OmegaConf
        # takes for an interpolation.
        f"hydra.sweep.dir={quoted(where.as_posix())}",
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra.job.chdir=false",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_configuration("train", overrides, run_mode=RunMode.MULTIRUN)
    context = HydraContext(config_loader=SweepLoader(loader), callbacks=Callbacks(config))
    handed = Handed(task)
    return Plugins.instance().instantiate_launcher(hydra_context=context, task_function=handed, config=config)


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
