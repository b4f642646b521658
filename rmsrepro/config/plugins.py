"""Modules of the user, imported before anything is composed so that their norms are registered."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from rmsrepro.config.errors import UserError


def import_from_here() -> None:
    """Make modules of the current directory importable, as `python -m` does."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def load_plugins(names: Iterable[str]) -> None:
    """Import each module of `plugins=[...]`.

    Raises:
        UserError: a module that is not there, or that fails while it is imported.
    """
    import_from_here()
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise UserError(f"plugins=[{name}]: importing it failed: {error}{_place(error)}") from error
            raise UserError(
                f"plugins=[{name}]: no module named {error.name!r}; modules of the current directory "
                f"({Path.cwd().name}/) and installed ones can be named, without .py"
            ) from error
        except (Exception, SystemExit) as error:
            raise UserError(
                f"plugins=[{name}]: importing it failed: {type(error).__name__}: {error}"
            ) from error


def _place(error: BaseException) -> str:
    """Return the line of a file that an import failed at."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<")]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
