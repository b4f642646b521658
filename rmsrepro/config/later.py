"""Settings that came after the first records: where they have the value of old, they are as good as absent.

So runs that were made before a setting existed keep their identity, and stand beside newer ones in a report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LATER_SETTINGS: Mapping[str, Any] = {
    "model.output_bias": False,
    "model.empty_source": False,
    "model.qk_norm": False,
    "norm.casting": "after_gain",
    "trainer.strategy": "single",
}
"""The full name of each, and the value that it had, as it were, before it existed."""


def is_as_before(name: str, value: Any) -> bool:
    """Return whether the setting of this full name came later and `value` is the one of old."""
    return name in LATER_SETTINGS and value == LATER_SETTINGS[name]


def without_later(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a section of the configuration without those that are as before."""
    return {key: value for key, value in values.items() if not is_as_before(f"{section}.{key}", value)}
