"""What each process of a run builds, and how it trains: the same data, model and loop in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from rmsrepro.config.schema import TrainConfig
from rmsrepro.data import build_data
from rmsrepro.runs.checkpoints import Checkpoint, check_tokens
from rmsrepro.runs.processes import Ranks
from rmsrepro.runs.seeding import stream_seed
from rmsrepro.tasks import Task, build_task


def build(
    config: TrainConfig, *, cache_dir: Path, fingerprint: str, start: Checkpoint | None, ranks: Ranks
) -> tuple[Task, Any]:
    """Return the model of a run and its data, which go on where `start` ended.

    Args:
        cache_dir: for trained tokenizers and tables.
        fingerprint: of the data, so that large files are read once less.

    Raises:
        UserError: data that cannot be read, or that a checkpoint's tokens do not fit.
    """
    data = build_data(
        config.data,
        config.task.name,
        seed=stream_seed(config.seed, "data"),
        accumulate=config.trainer.accumulate,
        cache_dir=cache_dir,
        fingerprint=fingerprint,
    )
    if start:
        check_tokens(start, data, config.data.name)
        data.load_state_dict(start.position)
    module = build_task(config, data)
    module.processes = ranks.size
    return module, data


def fit(trainer: L.Trainer, module: Task, data: Any, *, start: Checkpoint | None, ranks: Ranks) -> None:
    """Train this process's part of each batch."""
    # Loaders instead of the data module: with one, Lightning looks for hooks of its three times a step, and
    # this one has none.
    trainer.fit(
        module,
        train_dataloaders=ranks.part_of(data.train_dataloader()),
        val_dataloaders=ranks.part_of(data.val_dataloader()),
        ckpt_path=str(start.path) if start else None,
        weights_only=True,
    )
