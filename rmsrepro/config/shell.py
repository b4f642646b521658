"""Commands that messages tell the user to type: each can be pasted into a shell, whatever its names hold."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rmsrepro.config.overrides import RAW_KEYS, Override, override_text, quoted, unquote

OUT_DIR = "outputs"
"""Where records lie unless `out_dir` says otherwise."""


def command(verb: str, *arguments: str, **values: Any) -> str:
    """Return a command line.

    Args:
        arguments: as the program is to get them; `values` come after them.
        values: plain values of keys, by name.
    """
    words = [shlex.quote(argument) for argument in arguments]
    return " ".join(["rmsrepro", verb, *words, *(word(key, value) for key, value in values.items())])


def typed(key: str, value: Any) -> str:
    """Return the `key=value` by which the program gives the key just this plain value."""
    return f"{key}={_path(str(value)) if RAW_KEYS.match(key) and value is not None else _text(value)}"


def word(key: str, value: Any) -> str:
    """Return `typed` as a word of a shell's command line."""
    return shlex.quote(typed(key, value))


def words(overrides: Iterable[Override]) -> str:
    """Return overrides as words of a shell's command line."""
    return " ".join(
        word(item.key, unquote(item.value))
        if RAW_KEYS.match(item.key) and item.value != "null"
        else shlex.quote(item.text)
        for item in overrides
    )


def in_folder(out_dir: str | Path) -> dict[str, str]:
    """Return the `out_dir` that a command on these records needs: none where it is the usual one."""
    return {} if Path(out_dir) == Path(OUT_DIR) else {"out_dir": str(out_dir)}


def _path(value: str) -> str:
    """A path is taken as it is typed, but for a pair of quotes round it and the word for none."""
    return f"./{value}" if value in ("null", "None") or value[:1] in ("'", '"') else value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if not isinstance(value, str):
        return override_text(value)
    return value if _stands_for_itself(value) else quoted(value)


def _stands_for_itself(value: str) -> bool:
    """Whether Hydra's grammar reads a bare text as itself, and not as a number, a list or null."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        override = OverridesParser.create().parse_override(f"x={value}")
    except Exception:  # outside of the grammar
        return False
    return not override.is_sweep_override() and override.value() == value and "${" not in value
