"""Where a person reads: a console that outlives its reader."""

from __future__ import annotations

import contextlib
import os

from rich.console import Console


class Screen(Console):
    """A console that falls silent when its reader has gone, as `head` does, and lets the work go on.

    rich's own ends the program then, which would be the end of a training run.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)
