"""The watch for a run that is beyond help."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

_PATIENCE = 20


class Divergence:
    """Decides when a run is beyond help: a loss that is no number, or one far above where it began."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._first: float | None = None
        self._recent: deque[float] = deque(maxlen=_PATIENCE)

    def reason(self, loss: float) -> str | None:
        """Take the loss of one update; return why the run has diverged, or None."""
        if not math.isfinite(loss):
            return f"the training loss is {loss}"
        if self._first is None:
            self._first = loss
        self._recent.append(loss)
        limit = self._factor * self._first
        if len(self._recent) == _PATIENCE and min(self._recent) > limit:
            return (
                f"the training loss stayed above {self._factor:g} times its start ({limit:.3g}) "
                f"for {_PATIENCE} updates looked at"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first = state["first"]
        self._recent = deque(state["recent"], maxlen=_PATIENCE)
