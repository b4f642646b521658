"""Trackers mirror the records as they are written; losing one loses nothing.

wandb needs no account here: it writes `outputs/wandb` offline unless `tracker.mode=online` (or WANDB_MODE)
says otherwise. `wandb sync` uploads such a folder later.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rmsrepro.config.errors import nearest
from rmsrepro.config.imports import importing
from rmsrepro.config.paths import expanded
from rmsrepro.config.schema import TrackerName, TrainConfig
from rmsrepro.config.shell import command, in_folder

MODES = ("offline", "online", "disabled", "dryrun", "run", "shared")
"""What WANDB_MODE may be, ours first."""


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Mirror a row of metrics."""

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """End the tracker's run: `status` as in result.json, `summary` its final metrics."""


class NoTracker:
    """tracker=none: the records alone."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        pass

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        pass


class WandbTracker:
    """One wandb run for one training run, also inside a sweep; it ends failed when the run failed."""

    def __init__(
        self,
        config: TrainConfig,
        flat: Mapping[str, Any],
        *,
        run_id: str,
        backend: str,
        say: Callable[[str], None],
        mode: str | None = None,
        folder: Path | None = None,
        goes_on: bool = False,
    ) -> None:
        """Begin a run of wandb's.

        Args:
            say: told what goes wrong later.
            goes_on: the run goes on from a checkpoint, and makes again what it had made after it.
            mode: "offline" or "online"; None: as the environment and the config say.
            folder: where wandb makes its folder; None: `config.out_dir`.
        """
        # The first run of a process imports wandb, and wandb more of itself as it begins.
        with importing("wandb"), _without_variables(also=("WANDB_MODE",) if mode else ()):
            self._begin(config, flat, run_id, backend, mode, folder or expanded(config.out_dir))
        self._say = say
        self._known_to = -math.inf
        """Rows of earlier steps are on the server already."""
        if self._run.resumed:
            self._look_at_server(run_id, config, goes_on)

    def _look_at_server(self, run_id: str, config: TrainConfig, goes_on: bool) -> None:
        """See how far a run that is mirrored online had come there: a row that was sent stays as it is."""
        last = self._run.summary.get("step")
        if goes_on and isinstance(last, int | float):
            # Of the last step itself perhaps not all was sent.
            self._known_to = last
            return
        again = command("export", "wandb", run_id, **in_folder(config.out_dir))
        self._say(
            f"note: wandb: the online run {run_id} has rows of an earlier attempt, and those of this one are "
            f"added to them; {again} makes a mirror of this one alone, offline"
        )

    def _begin(
        self,
        config: TrainConfig,
        flat: Mapping[str, Any],
        run_id: str,
        backend: str,
        mode: str | None,
        folder: Path,
    ) -> None:
        import wandb

        mode = mode or os.environ.get("WANDB_MODE") or config.tracker.mode.value
        self.offline = mode in ("offline", "dryrun")
        """Whether all is written to a folder, for an upload later."""
        # wandb writes from a process of its own, which keeps the directory that it was started in.
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if not any(os.environ.get(name) for name in ("WANDB_CACHE_DIR", "XDG_CACHE_HOME", "HOME")):
            # That process has no place for its log then, and prints it between our lines.
            os.environ["WANDB_CACHE_DIR"] = str(expanded(config.out_dir).resolve() / "wandb" / "cache")
        self._run = wandb.init(
            project=config.tracker.project,
            entity=config.tracker.entity,
            id=run_id,
            name=run_id,
            group=config.study_name or "runs",
            job_type=f"{config.model.name}/{config.task.name}",
            tags=[_tag(config.norm["name"]), _tag(backend)],
            config=dict(flat),
            mode=mode,  # type: ignore[arg-type]
            dir=str(folder),
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("train_seconds")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if step >= self._known_to:
            self._guard(lambda: self._run.log({"step": step, **values}))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        def end() -> None:
            self._run.summary.update({**summary, "status": status})
            self._run.finish(exit_code=0 if status == "completed" else 1)

        self._guard(end)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a view must never cost a run
            self._say(f"note: wandb: {trouble(error)}; the records go on without it")


def open_tracker(
    config: TrainConfig,
    flat: Mapping[str, Any],
    *,
    run_id: str,
    backend: str,
    say: Callable[[str], None],
    goes_on: bool,
) -> Tracker:
    """Return the tracker that the config asks for; one that cannot be had is named and done without.

    Args:
        goes_on: see `WandbTracker`.
    """
    disabled = (
        os.environ.get("WANDB_MODE", "").lower() == "disabled" or config.tracker.mode.value == "disabled"
    )
    if config.tracker.name is TrackerName.none or disabled:
        return NoTracker()
    try:
        return WandbTracker(config, flat, run_id=run_id, backend=backend, say=say, goes_on=goes_on)
    except ImportError:
        say("note: wandb is not installed: records only (pip install wandb, or tracker=none to silence this)")
    except Exception as error:
        say(f"note: wandb could not start ({trouble(error)}); the records go on without it")
    return NoTracker()


def trouble(error: Exception) -> str:
    """Say in one line what wandb does not like; it tells of a wrong WANDB_MODE in four, without the name."""
    mode = os.environ.get("WANDB_MODE", "").strip()
    if mode and mode not in MODES and isinstance(error, ValueError):  # as pydantic's are
        return f"WANDB_MODE={mode}: no such mode{nearest(mode, MODES)} (one of: {', '.join(MODES)})"
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def _without_variables(also: Sequence[str] = ()) -> Iterator[None]:
    """Take variables of wandb's that are set to nothing out of the environment: it would refuse them.

    Args:
        also: variables that are not to count, whatever they are set to.
    """
    out = {
        name: value
        for name, value in os.environ.items()
        if name in also or (name.startswith("WANDB_") and not value.strip())
    }
    for name in out:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(out)


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested config as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _tag(text: str) -> str:
    # wandb takes tags of 1 to 64 characters.
    return text[:64] or "none"
