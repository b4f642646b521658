"""The checkpoint files of a run: the newest and the one before it, each whole or not there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

LAST = "last.ckpt"
"""The newest checkpoint."""
PREVIOUS = "previous.ckpt"
"""The one before, for the case that the newest is damaged."""
_WRITTEN = "last.ckpt.tmp"


class CheckpointFiles(CheckpointIO):
    """How Lightning writes a run's checkpoints, and takes up the one that was read already.

    Args:
        content: of the checkpoint that `Trainer.fit` is given; handed over once, so that it is not held in
            memory while the run goes on.
    """

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        self._content = content

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a file, and wait until the disk has it.

        Raises:
            OSError: the disk is full, or cannot be written; as the cause or context of torch's own error.
        """
        # A file of Python's: given a path, torch writes by itself, and then does not tell what went wrong.
        with open(path, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        content, self._content = self._content, None
        if content is None:
            raise RuntimeError(f"{path} was not read, or was handed over before")
        return content

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)


def checkpoint_to_write(folder: Path) -> Path:
    """Return the file in a run's folder that a new checkpoint is written to."""
    return folder / "checkpoints" / _WRITTEN


def keep_checkpoint(folder: Path) -> None:
    """Make the file that was written the newest checkpoint, and the newest the previous one.

    At each moment there is a whole `last.ckpt` (or, on a file system without hard links, a whole
    `previous.ckpt`).
    """
    written = checkpoint_to_write(folder)
    last, previous = written.with_name(LAST), written.with_name(PREVIOUS)
    if last.exists():
        second = written.with_name(f"{PREVIOUS}.tmp")
        second.unlink(missing_ok=True)
        try:
            os.link(last, second)
        except OSError:
            last.replace(previous)
        else:
            second.replace(previous)
    written.replace(last)
    _sync_folder(written.parent)


def discard_unfinished(folder: Path) -> None:
    """Remove what is left of checkpoints that were not written to their end."""
    checkpoint_to_write(folder).unlink(missing_ok=True)
    checkpoint_to_write(folder).with_name(f"{PREVIOUS}.tmp").unlink(missing_ok=True)


def set_aside(file: Path, why: str = "damaged") -> Path:
    """Rename a checkpoint that cannot be gone on from, so that none that can is replaced by it.

    Returns:
        Where it is: `damaged-last.ckpt`, say; one that was there before is replaced.
    """
    aside = file.with_name(f"{why}-{file.name}")
    file.replace(aside)
    return aside


def _sync_folder(folder: Path) -> None:
    """Let the renaming outlive a crash of the machine, where the system can promise that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
