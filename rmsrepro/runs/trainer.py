"""Lightning's Trainer as a run uses it: its loop, and nothing of what it offers to write or print."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy

from rmsrepro.config import schema
from rmsrepro.config.schema import TrainConfig, TrainerConfig
from rmsrepro.runs.processes import Ranks


def make_trainer(config: TrainConfig, *callbacks: L.Callback, ranks: Ranks | None = None) -> L.Trainer:
    """Return the Trainer of a run with these callbacks.

    Args:
        ranks: this process among those of the run, where trainer.strategy asks for it.
    """
    trainer = config.trainer
    every = (trainer.val_every or 1) * trainer.accumulate
    return L.Trainer(
        accelerator=trainer.accelerator,
        devices=trainer.devices,
        strategy=_strategy(trainer, ranks),
        precision="bf16-mixed" if config.precision == "bf16-mixed" else "32-true",
        max_steps=trainer.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=trainer.accumulate,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
    )


def _strategy(trainer: TrainerConfig, ranks: Ranks | None) -> Strategy | str:
    """Return Lightning's strategy for processes that have been started already."""
    if ranks is None or trainer.strategy is schema.Strategy.single:
        return "auto"
    if trainer.strategy is schema.Strategy.fsdp:
        # One file with the whole state, as the others write it.
        return FSDPStrategy(cluster_environment=ranks.environment, state_dict_type="full")
    return "auto" if ranks.size == 1 else DDPStrategy(cluster_environment=ranks.environment)


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's hints for other uses (workers, loggers, upgrades) out of a run's output."""
    loggers = [
        logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning(\.|$)")
            warnings.filterwarnings(
                "ignore", message=r".*(does not have many workers|dataloader is not resumable).*"
            )
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
