"""What launchers hand to jobs: configs composed once for all that choose the same, tasks imported quickly."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from rmsrepro.runs.handover import Handed, SweepLoader
from rmsrepro.runs.sweep import run_job
from rmsrepro.verbs.common import composer

JOBS = [
    ["norm=rmsnorm", "seed=1", "norm.eps=1e-6", "norm.gain=false"],
    ["norm=rmsnorm", "seed=2", "trainer.num_threads=null"],
    ["norm=prmsnorm", "model=gru", "sites=[gates_x,cand_x]", "norm.p=0.25"],
    [
        "norm=layernorm",
        "task=translation",
        "data=parallel_files",
        r"data.train_src='with, a \'comma\' and \\${x}'",
    ],
    ["norm=layernorm", "experiment=shakespeare_char", "debug=fast", "optim.betas=[0.9,0.99]"],
    [
        "debug=fast",
        "seed=3",
        "norm=rmsnorm",
        "tracker=wandb",
        "tracker.project='my runs'",
        "backend=composite",
    ],
]


@pytest.fixture
def master() -> Iterator[DictConfig]:
    """The config that a launcher has, inside an open composer."""
    with composer([]):
        overrides = ["hydra/job_logging=none", "hydra.sweep.subdir=.", "hydra.job.chdir=false"]
        loader = GlobalHydra.instance().config_loader()
        yield loader.load_configuration("train", overrides, run_mode=RunMode.MULTIRUN)


def content(config: DictConfig) -> Any:
    """All but the name that Hydra would give a job's folder, which has none here."""
    with open_dict(config):
        del config.hydra.job.override_dirname
    return OmegaConf.to_container(config, resolve=False)


def test_a_job_has_the_config_that_hydra_composes(master: DictConfig) -> None:
    hydras = GlobalHydra.instance().config_loader()
    ours = SweepLoader(hydras)
    for job in [*JOBS, *JOBS]:
        expected = hydras.load_sweep_config(master, list(job))
        assert content(ours.load_sweep_config(master, job)) == content(expected), job


def test_groups_are_composed_once_a_sweep(master: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[list[str]] = []
    original = ConfigLoaderImpl.load_configuration

    def load(self: Any, config_name: Any, overrides: list[str], *rest: Any, **named: Any) -> DictConfig:
        composed.append([text for text in overrides if not text.startswith("hydra")])
        return original(self, config_name, overrides, *rest, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", load)
    loader = SweepLoader(GlobalHydra.instance().config_loader())
    for seed in (1, 2, 3):
        for norm in ("rmsnorm", "layernorm"):
            # A worker has another copy for each job.
            config = copy.copy(loader).load_sweep_config(master, [f"norm={norm}", f"seed={seed}"])
            assert (config.norm.name, config.seed) == (norm, seed)
    assert composed == [["norm=rmsnorm"], ["norm=layernorm"]]
    # Another sweep, before which a file may have changed.
    SweepLoader(GlobalHydra.instance().config_loader()).load_sweep_config(master, ["norm=rmsnorm", "seed=1"])
    assert composed[2:] == [["norm=rmsnorm"]]


def test_a_change_of_one_jobs_config_is_not_the_next_ones(master: DictConfig) -> None:
    loader = SweepLoader(GlobalHydra.instance().config_loader())
    first = loader.load_sweep_config(master, ["norm=rmsnorm", "seed=1"])
    with open_dict(first):
        first.hydra.job.num = 7
        first.optim.lr = 5.0
    second = loader.load_sweep_config(master, ["norm=rmsnorm", "seed=1"])
    assert second.optim.lr != 5.0
    assert OmegaConf.is_missing(second.hydra.job, "num")


def test_a_worker_imports_torch_with_the_collector_off(tmp_path: Path) -> None:
    file = tmp_path / "task.pkl"
    file.write_bytes(pickle.dumps(Handed(partial(run_job, backend_notes={"run": "note"}))))
    code = """\
import gc, pickle, sys
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
with open(sys.argv[1], "rb") as content:
    before = "torch" in sys.modules
    task = pickle.load(content)
print(before, "torch" in sys.modules, len(full), gc.isenabled(), task.func.__name__, task.keywords)
"""
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=False)
    assert done.stdout.split(maxsplit=4) == [
        "False", "True", "0", "True", "run_job {'backend_notes': {'run': 'note'}}\n",
    ], done.stderr  # fmt: skip
