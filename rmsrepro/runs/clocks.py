"""Five clocks that always sum to the total: train, eval, checkpoint, logging, other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

NAMES = ("train", "eval", "checkpoint", "logging", "other")


class Clocks:
    """A stopwatch that is always on exactly one of the five clocks.

    Switching costs one reading of the monotonic clock and never waits for a device: whoever needs the
    device to be done (a log boundary) synchronises before switching. The state is saved in checkpoints,
    so a resumed run goes on counting.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self._current = "other"
        self._since = now()

    def switch(self, name: str) -> str:
        """Go on with the clock `name`; return the one that was running."""
        moment = self._now()
        before = self._current
        self._seconds[before] += moment - self._since
        self._current, self._since = name, moment
        return before

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Run the body on the clock `name`, then return to the one before."""
        before = self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def read(self, name: str) -> float:
        """Return the seconds on clock `name` so far."""
        running = self._now() - self._since if name == self._current else 0.0
        return self._seconds[name] + running

    def reassign(self, seconds: float, source: str, target: str) -> None:
        """Move `seconds` from one clock to another (warm-up steps leave the training clock)."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def record(self) -> dict[str, float]:
        """Return `{"train_s": ..., ..., "total_s": ...}`; the five sum to the total."""
        self.switch(self._current)
        result = {f"{name}_s": self._seconds[name] for name in NAMES}
        result["total_s"] = sum(self._seconds.values())
        return result

    def state_dict(self) -> dict[str, Any]:
        self.switch(self._current)
        return dict(self._seconds)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Add the seconds of an earlier session."""
        for name in NAMES:
            self._seconds[name] += float(state.get(name, 0.0))
