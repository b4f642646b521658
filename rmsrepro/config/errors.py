"""The one exception that means: the user asked for what cannot be done as asked; and how it is shown."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType


class UserError(ValueError):
    """A wrong command, key, value or file. The command line prints its message and exits with 2.

    The message says what is wrong, where, what would be valid and what to do.
    """


class ProgramEnd(BaseException):
    """The program was told to end: no code that it calls has failed."""


class StrayEnd(RuntimeError):
    """Code from outside the package raised what ends a program or a loop, and means no error."""

    def __init__(self, error: BaseException) -> None:
        what = "the epoch" if isinstance(error, StopIteration) else "the whole program"
        said = f" ({first_line(error)})" if str(error).strip() else ""
        super().__init__(
            f"{type(error).__name__}{said} was raised, which would end {what}; a norm or a plug-in has to "
            "raise an error instead, such as RuntimeError"
        )


class contained:
    """Turn what would end the program or a loop into a `StrayEnd`; errors and `ProgramEnd` pass.

    Args:
        keyboard: so with KeyboardInterrupt: where a handler of our own sees to Ctrl-C.
    """

    def __init__(self, *, keyboard: bool = False) -> None:
        self._keyboard = keyboard

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ProgramEnd):
            return
        if isinstance(error, KeyboardInterrupt) and not self._keyboard:
            return
        if isinstance(error, StopIteration) or not isinstance(error, Exception):
            # Lightning makes a SystemExit of a KeyboardInterrupt.
            first = next((one for one in causes(error) if isinstance(one, KeyboardInterrupt)), error)
            raise StrayEnd(first) from error


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's message; its type's name where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it: a full disk may come out as a failure to write an archive."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        yield current
        seen.append(current)
        current = current.__cause__ or current.__context__


def nearest(word: str, choices: Iterable[str], *, limit: int = 3) -> str:
    """Return ``"; did you mean a, b?"`` for the choices closest to `word`, whatever its case; or ""."""
    spelled: dict[str, str] = {}
    for choice in choices:
        spelled.setdefault(choice.lower(), choice)
    found = difflib.get_close_matches(word.lower(), spelled, n=limit, cutoff=0.6)
    close = [spelled[one] for one in found]
    return f"; did you mean {', '.join(close)}?" if close else ""


def check_text(arguments: Sequence[str]) -> None:
    """Refuse an argument that no record could hold, and no screen show.

    Raises:
        UserError: one with bytes that are no UTF-8 (Python writes them as lone surrogates), or with a NUL.
    """
    for argument in arguments:
        if "\0" in argument or any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise UserError(
                f"{argument!r}: an argument holds what is no text in UTF-8; a file of such a name has to be "
                "renamed"
            )


def for_screen(message: str) -> str:
    """Wrap a message at words to the width of the terminal that it goes to; elsewhere it stays as it is."""
    if not sys.stderr.isatty():
        return message
    import textwrap

    try:
        # Not shutil's, which asks for the width of the standard output.
        width = int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stderr.fileno()).columns)
    except (ValueError, OSError):
        width = 0
    # A path is not broken, so that it can be copied; a terminal that does not tell its width says 0.
    wrapper = textwrap.TextWrapper(
        max(width, 20) if width else 80,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapper.fill(line) for line in message.splitlines())
