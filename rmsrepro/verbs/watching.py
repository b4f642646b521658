"""The verb `status`: how far the runs and the sweeps of an output folder are."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.overrides import Override
from rmsrepro.config.paths import expanded
from rmsrepro.verbs.common import console, only_options, say

if TYPE_CHECKING:
    from rmsrepro.runs.status import Status


@dataclass
class StatusVerb:
    watch: bool = False
    out_dir: str = "outputs"
    every_s: float = 2.0
    forget: str | None = None


def status(overrides: list[Override]) -> int:
    """Show how far the runs of an output folder are."""
    from rich.live import Live

    from rmsrepro.runs.disk import in_the_way
    from rmsrepro.runs.status import read_status

    options = only_options(StatusVerb, overrides, "status")
    folder = expanded(options.out_dir)
    if (reason := in_the_way(folder)) is not None:
        raise UserError(f"out_dir={folder}: {reason}; name the folder that holds runs/: out_dir=DIR")
    if options.forget is not None:
        return _forget(folder, options.forget)
    if not (folder / "runs").is_dir():
        say(f"no runs in {folder} yet; start with: rmsrepro sweep study=smoke")
        return 0
    if not options.every_s > 0:
        raise UserError(f"every_s={options.every_s}: expected seconds above zero")
    screen = console()
    if not options.watch:
        now = read_status(folder)
        if screen.is_terminal:
            screen.print(_status_table(now))
        else:
            say(_status_text(now))
        return 0
    with Live(console=screen, refresh_per_second=4) if screen.is_terminal else nullcontext() as live:
        told = ""
        while True:
            now = read_status(folder)
            if live is not None:
                live.update(_status_table(now))
            elif now.headline != told:
                told = now.headline
                say(told)
            if not now.running and not now.left:
                return 0
            time.sleep(options.every_s)


def _status_text(now: Status) -> str:
    """Lines for a pipe or a file: a run a line, its id whole."""
    width = max((len(row.run_id) for row in now.rows), default=0)
    rows = [
        f"{row.state:<12} {row.run_id:<{width}} {row.progress:>9}  {row.note}".rstrip() for row in now.rows
    ]
    for sweep in now.sweeps:
        rows.append(f"sweep {sweep.sweep_id} {sweep.state}: {sweep.counts}")
        if sweep.advice:
            rows.append(f"  {sweep.advice}")
    for tuning in now.tunings:
        rows += [f"tuning {tuning.tuning_id}: {tuning.undone}", f"  {tuning.advice}"]
    return "\n".join([now.headline, *rows])


def _status_table(now: Status) -> RenderableType:
    parts: list[RenderableType] = [Text(now.headline, style="bold")]
    if now.rows:
        table = Table(box=None, pad_edge=False)
        for heading, justify in (("state", "left"), ("run", "left"), ("step", "right"), ("note", "left")):
            table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for row in now.rows:
            # As Text: a [ in an error is no markup.
            table.add_row(*map(Text, (row.state, row.run_id, row.progress, row.note)))
        parts.append(table)
    for sweep in now.sweeps:
        parts.append(Text(f"sweep {sweep.sweep_id} {sweep.state}: {sweep.counts}"))
        if sweep.advice:
            parts.append(Text(f"  {sweep.advice}", overflow="fold"))
    for tuning in now.tunings:
        parts.append(Text(f"tuning {tuning.tuning_id}: {tuning.undone}", overflow="fold"))
        parts.append(Text(f"  {tuning.advice}", overflow="fold"))
    return Group(*parts)


def _forget(out_dir: Path, given: str) -> int:
    """Give up a sweep or a tuning that nobody will go on with, or all such; their runs stay.

    Raises:
        UserError: there is none of that name, or it is at work.
    """
    from rmsrepro.runs.manifests import read_manifests
    from rmsrepro.runs.status import read_status
    from rmsrepro.runs.tuning_record import give_up_tuning, read_tunings

    manifests, damaged = read_manifests(out_dir)
    sweeps = {path.stem: path for path in [*(one.path for one in manifests), *damaged]}
    records, broken = read_tunings(out_dir)
    tunings = {one.tuning_id: one for one in records}
    damaged_tunings = {path.stem: path for path in broken}
    now = read_status(out_dir)
    left = [row.tuning_id for row in now.tunings]
    if given == "abandoned":
        chosen = [*(row.sweep_id for row in now.sweeps if not row.live), *left]
    elif given in sweeps or given in left or given in damaged_tunings:
        chosen = [given]
    else:
        known = [*sweeps, *left, *damaged_tunings]
        hint = nearest(given, ["abandoned", *known])
        names = ", ".join(known) or "none in this folder"
        raise UserError(
            f"forget={given}: there is no such sweep{hint} (known: {names}; forget=abandoned takes all that "
            "are abandoned)"
        )
    if any(one.live and one.sweep_id in chosen for one in manifests):
        raise UserError(f"forget={given}: this sweep is at work; stop it first")
    for name in chosen:
        if name in sweeps:
            sweeps[name].unlink(missing_ok=True)
        elif name in damaged_tunings:
            damaged_tunings[name].unlink(missing_ok=True)
        else:
            give_up_tuning(out_dir, tunings[name])
        say(f"forgot the {'sweep' if name in sweeps else 'tuning'} {name}; what its runs recorded stays")
    if not chosen:
        say("no sweep is abandoned")
    return 0
