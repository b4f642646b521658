"""The one exception that means: the user asked for something that cannot be done as asked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong command, key, value or file. The command line prints its message and exits with 2.

    The message says what is wrong, where, what would be valid and what to do.
    """


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's message; its type's name where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def nearest(word: str, choices: Iterable[str], *, limit: int = 3) -> str:
    """Return ``"; did you mean a, b?"`` for the choices closest to `word`, whatever its case; or ""."""
    spelled: dict[str, str] = {}
    for choice in choices:
        spelled.setdefault(choice.lower(), choice)
    found = difflib.get_close_matches(word.lower(), spelled, n=limit, cutoff=0.6)
    close = [spelled[one] for one in found]
    return f"; did you mean {', '.join(close)}?" if close else ""
