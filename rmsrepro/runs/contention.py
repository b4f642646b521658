"""Whether other runs were at work on the machine while a run was: then its times tell about them as well."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from rmsrepro.runs.files import number, read_json
from rmsrepro.runs.owners import alive
from rmsrepro.runs.workers import jobs_together

CONTENDED = "contended: other runs were at work on this machine meanwhile, so its times are not to be quoted"
"""The flag in a run's record."""
_CLOCKS_APART_S = 120.0
"""A file server's clock may differ so much from this machine's."""


def is_contended(result: Mapping[str, Any]) -> bool:
    """Whether a run's record says that its times were contended."""
    flags = result.get("flags")
    return isinstance(flags, list) and any("contended" in str(flag) for flag in flags)


class Neighbours:
    """Looks for other runs of the same output folder on this machine, from now on.

    A run that begins and ends between two looks is found by its record, one that was killed by the progress
    that it told. Runs of other output folders are not seen, and nor are other programs.
    """

    def __init__(self, folder: Path) -> None:
        """Begin to look on behalf of the run in `folder`."""
        self._folder, self._since = folder, time.time()
        self.found = jobs_together() > 1

    def look(self) -> bool:
        """Return whether another run was at work since the beginning, at any time that was looked at."""
        if not self.found:
            with contextlib.suppress(OSError), os.scandir(self._folder.parent) as entries:
                self.found = any(
                    entry.name != self._folder.name and self._at_work(Path(entry.path)) for entry in entries
                )
        return self.found

    def _at_work(self, other: Path) -> bool:
        owner = read_json(other / "lock.json")
        if _of_another(owner) and alive(owner, other / "lock.json"):
            return True
        running = read_json(other / "running.json")
        if _of_another(running):
            return number(running.get("updated")) >= self._since
        try:
            if (other / "result.json").stat().st_mtime < self._since - _CLOCKS_APART_S:
                return False
        except OSError:
            return False
        return self._ended_meanwhile(read_json(other / "result.json") or {})

    def _ended_meanwhile(self, result: Mapping[str, Any]) -> bool:
        machine, clocks = result.get("machine"), result.get("clocks")
        if not isinstance(machine, Mapping) or machine.get("host") != socket.gethostname():
            return False
        if not isinstance(clocks, Mapping) or not number(clocks.get("total_s")):
            return False  # it was recorded without having run
        try:
            ended = time.mktime(time.strptime(str(result.get("finished"))[:19], "%Y-%m-%dT%H:%M:%S"))
        except (ValueError, OverflowError):
            return False
        # It is told in whole seconds: a run that ended within this one may have come before.
        return ended >= self._since


def _of_another(owner: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Whether a lock or a report of progress is of another process of this machine."""
    return owner is not None and owner.get("host") == socket.gethostname() and owner.get("pid") != os.getpid()
