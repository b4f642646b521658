"""What Hydra's launchers hand to each job of a sweep, made cheap: a tiny job trains for half a second."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig

from rmsrepro.config.compose import GROUPS, with_values
from rmsrepro.config.imports import importing
from rmsrepro.config.overrides import Override

_composed: dict[tuple[str, ...], DictConfig] = {}
"""In this process: what the jobs of the newest sweep have chosen of the groups, and the config it makes."""


class SweepLoader(ConfigLoaderImpl):
    """Hydra's loader for the jobs of one sweep: it composes once for all that choose the same of the groups.

    To compose would take longer than all else that a tiny job does besides training. The values go into a
    copy, as when the sweep was planned.
    """

    def __init__(self, loader: ConfigLoader) -> None:
        super().__init__(config_search_path=loader.get_search_path())
        # A worker is given a new copy of this object for each job, so that what was composed lies elsewhere.
        self._sweep = uuid.uuid4().hex

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """Return the config of a job."""
        values = [text for text in sweep_overrides if _is_value(text)]
        chosen = [text for text in sweep_overrides if not _is_value(text)]
        key = (self._sweep, *chosen)
        if key not in _composed:
            if any(other[0] != self._sweep for other in _composed):
                _composed.clear()
            _composed[key] = super().load_sweep_config(master_config, chosen)
        config = with_values(_composed[key], [Override(*text.split("=", 1)) for text in values])
        config.hydra.overrides.task = [text for text in sweep_overrides if not text.startswith("hydra")]
        return config


def _is_value(text: str) -> bool:
    """Whether an override sets a value of a run; not one that chooses a file or is Hydra's own."""
    key = text.partition("=")[0]
    return key not in GROUPS and key.split(".")[0] != "hydra"


class Handed:
    """A task, importable by name, which a worker unpickles (and imports torch for it) in less time."""

    def __init__(self, task: Callable[[DictConfig], Any]) -> None:
        self._task = task

    def __call__(self, config: DictConfig) -> Any:
        return self._task(config)

    def __reduce__(self) -> tuple[Callable[[bytes], Callable[[DictConfig], Any]], tuple[bytes]]:
        return _unpickled, (pickle.dumps(self._task),)


def _unpickled(content: bytes) -> Callable[[DictConfig], Any]:
    with importing("lightning"):
        task: Callable[[DictConfig], Any] = pickle.loads(content)
    return task
