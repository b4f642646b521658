"""Which checkpoint a run goes on from, and what an earlier session left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.checkpoint_files import LAST, PREVIOUS, discard_unfinished, set_aside
from rmsrepro.runs.checkpoints import Checkpoint, load_checkpoint
from rmsrepro.runs.files import remove_torn
from rmsrepro.tasks import normalisation


def starting_point(
    config: TrainConfig, run_id: str, folder: Path, parent: Checkpoint | None, say: Callable[[str], None]
) -> Checkpoint | None:
    """Return the newest checkpoint in a run's folder that can be read, else the parent's.

    Files that a killed process did not finish are removed; a checkpoint that cannot be read is renamed, and
    that is said.

    Raises:
        UserError: the checkpoint there is another run's.
    """
    remove_torn(folder)
    discard_unfinished(folder)
    for name in (LAST, PREVIOUS):
        own = folder / "checkpoints" / name
        if not own.is_file():
            continue
        try:
            found = load_checkpoint(own)
        except UserError as error:
            older = name == LAST and own.with_name(PREVIOUS).is_file()
            then = f"going on from {PREVIOUS}" if older else "starting anew"
            say(f"note: {error}; it is kept as {set_aside(own).name}; {then}")
            continue
        if found.run_id != run_id:
            there, here = normalisation(found.config), normalisation(config)
            raise UserError(
                f"{own} is a checkpoint of {found.run_id}, trained with {there.words(here)}; this run is "
                f"{run_id} with {here.words(there)}. Move it away, or use it as ckpt=PATH"
            )
        return found
    return parent
