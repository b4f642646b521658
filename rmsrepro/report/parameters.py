"""How norms are named on a page: by the parameters that tell them apart."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rmsrepro.norms.settings import resolved, whole
from rmsrepro.report.formatting import norm_title
from rmsrepro.report.records import Comparison, RunRecord


def settings_of(run: RunRecord) -> dict[str, Any]:
    """All parameters of a run's norm; of a norm that is not to be had here, those that the run recorded."""
    found = resolved(run.norm, run.norm_params)
    return {**run.norm_recorded, **run.norm_params} if found is None else found


def key_of(params: Mapping[str, Any]) -> str:
    """Equal for equal parameters."""
    return json.dumps(params, sort_keys=True, default=str)


class Names:
    """How norms are named on a page: where a norm has several settings, with what tells them apart."""

    def __init__(self, settings: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        met: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
        for norm, params in settings:
            met[norm].setdefault(key_of(params), params)
        self._apart = {
            norm: {
                key
                for params in kinds.values()
                for key, value in params.items()
                if any(other.get(key) != value for other in kinds.values())
            }
            for norm, kinds in met.items()
        }

    def suffix(self, norm: str, params: Mapping[str, Any]) -> str:
        """` (p=0.25)`, or nothing for a norm that is met with one setting only."""
        apart = self._apart.get(norm, set())
        shown = ", ".join(f"{key}={value_text(value)}" for key, value in params.items() if key in apart)
        return f" ({shown})" if shown else ""

    def given(self, norm: str, given: Mapping[str, Any]) -> str:
        """The title of a norm by the parameters that it was given."""
        return self.title(norm, whole(norm, given))

    def title(self, norm: str, params: Mapping[str, Any]) -> str:
        """`pRMSNorm (p=0.25)`."""
        return norm_title(norm) + self.suffix(norm, params)


def names_of(runs: Iterable[RunRecord], timings: Iterable[Comparison] = ()) -> Names:
    """The names for a page that shows these runs and timings."""
    met: list[tuple[str, Mapping[str, Any]]] = [(run.norm, settings_of(run)) for run in runs if run.norm]
    for timed in timings:
        for norm, given in (
            (timed.plain_norm, timed.params),
            (timed.plain_baseline, timed.baseline_params),
        ):
            # What a norm that is not to be had was not given, nobody knows.
            params = resolved(norm, given) if norm else None
            if params is not None:
                met.append((norm, params))
    return Names(met)


def value_text(value: Any) -> str:
    """A value as a command line has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "+".join(map(value_text, value))
    return "not set" if value is None else str(value)
