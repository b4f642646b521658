"""Importing large packages in less time."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing(package: str) -> Iterator[None]:
    """Import a large package in the body, and what it brings with it, without the garbage collector.

    An import makes objects by the hundred thousand, and they stay. The collector would go through all of
    them again and again as they grow more: a fifth of the time of importing torch and Lightning. Afterwards
    it passes over those that are there by then.

    Nothing is changed where the package has been imported already, or the collector is off.
    """
    if package in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
