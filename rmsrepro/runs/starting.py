"""Which checkpoint a run goes on from, and what an earlier session left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.checkpoint_files import LAST, PREVIOUS, discard_unfinished, set_aside
from rmsrepro.runs.checkpoints import Checkpoint, load_checkpoint
from rmsrepro.runs.files import remove_torn
from rmsrepro.runs.records import count_rows, rows_before
from rmsrepro.tasks import normalisation


def starting_point(
    config: TrainConfig, run_id: str, folder: Path, parent: Checkpoint | None, say: Callable[[str], None]
) -> Checkpoint | None:
    """Return the newest checkpoint in a run's folder that can be gone on from, else the parent's.

    Files that a killed process did not finish are removed; a checkpoint that cannot be read, or whose rows of
    `metrics.jsonl` are gone, is renamed, and that is said.

    Raises:
        UserError: the checkpoint there is another run's.
    """
    remove_torn(folder)
    discard_unfinished(folder)
    for name in (LAST, PREVIOUS):
        own = folder / "checkpoints" / name
        if not own.is_file():
            continue
        older = name == LAST and own.with_name(PREVIOUS).is_file()
        then = f"going on from {PREVIOUS}" if older else "starting anew"
        try:
            found = load_checkpoint(own)
        except UserError as error:
            say(f"note: {error}; it is kept as {set_aside(own).name}; {then}")
            continue
        if found.run_id != run_id:
            there, here = normalisation(found.config), normalisation(config)
            raise UserError(
                f"{own} is a checkpoint of {found.run_id}, trained with {there.words(here)}; this run is "
                f"{run_id} with {here.words(there)}. Move it away, or use it as ckpt=PATH"
            )
        if (gone := _rows_gone(found, folder)) is not None:
            say(f"note: {gone}; it is kept as {set_aside(own, 'unused').name}; {then}")
            continue
        return found
    return parent


def _rows_gone(found: Checkpoint, folder: Path) -> str | None:
    """Say that the metrics are not those that a checkpoint was written with; None where they are.

    A run that went on from it would never make the missing rows again, and end as if it had them.
    """
    then: list[int] | None = found.state.get("rows")
    if then is None:
        return None  # a checkpoint of an older version
    path = folder / "metrics.jsonl"
    now = count_rows(rows_before(path, found.step, found.state["pending_row"]))
    if now == then:
        return None
    had, has = (f"{count} (the last of step {last})" if count else "none" for count, last in (then, now))
    return (
        f"{path} has other rows than when {found.path} was written: of those before it there were {had}, and "
        f"there are {has}"
    )
