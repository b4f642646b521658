"""Overrides as typed on the command line: checked, quoted where they are paths, and expanded.

Everything here works on strings and on Hydra's own override parser, before anything is composed.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rmsrepro.config.errors import UserError, first_line, nearest

RAW_KEYS = re.compile(
    r"^(?:data\.(?:path|cache_dir|train|val|test|(?:train|val|test)_(?:src|tgt))|ckpt|out_dir|.*\.path)$"
)
"""Keys whose value is a path: taken as typed, with its spaces, commas, brackets and tildes."""

_KEY = re.compile(r"^[A-Za-z_][\w]*(?:[./][A-Za-z_][\w]*)*(?:@[\w.]+)?$")


@dataclass(frozen=True)
class Override:
    """One `key=value` of the command line; `value` is the text that Hydra's grammar will read."""

    key: str
    value: str
    typed: str = field(default="", compare=False, repr=False)
    """The whole as it was typed; empty for one that was not."""

    @property
    def text(self) -> str:
        return f"{self.key}={self.value}"


def quoted(value: str) -> str:
    """Return `value` as a single-quoted string of Hydra's grammar that means exactly `value`."""
    # A backslash matters to the grammar only in front of a quote (or at the end, which is one),
    # and to OmegaConf only in front of an interpolation.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    escaped = re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", escaped)
    return f"'{escaped}'"


def split_override(text: str) -> Override:
    """Split `key=value`; refuse what the typed configuration has no room for.

    Raises:
        UserError: `text` is no override, or one of Hydra's `+`, `++`, `~` forms.
    """
    if text.startswith(("+", "~")):
        bare = text.lstrip("+~").split("=", 1)[0]
        raise UserError(
            f"{text!r}: the configuration is typed, so keys cannot be added or deleted; "
            f"write {bare}=VALUE for a key that exists (rmsrepro train show=true lists them all)"
        )
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{text!r} is not an override: write it as key=value, without spaces round the '='")
    if not _KEY.match(key):
        raise UserError(f"{text!r}: {key!r} is not a key; keys are words joined by dots, as in norm.eps=1e-6")
    if RAW_KEYS.match(key):
        plain = as_typed(value)
        value = "null" if plain in ("null", "None") else quoted(plain)
    return Override(key, value, text)


def as_typed(value: str) -> str:
    """Return a raw value without the pair of quotes that a user of Hydra may have put round it."""
    quote = value[:1]
    wrapped = len(value) > 1 and quote in "'\"" and value[-1] == quote and quote not in value[1:-1]
    return value[1:-1] if wrapped else value


def override_text(value: Any) -> str:
    """Write a plain value as an override does."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(override_text, value))}]"
    return "null" if value is None else str(value)


def take(overrides: Iterable[Override], key: str) -> tuple[str | None, list[Override]]:
    """Return the last value given for `key` (None: not given) and the overrides without it."""
    rest = [item for item in overrides if item.key != key]
    given = [item.value for item in overrides if item.key == key]
    return (given[-1] if given else None), rest


def unquote(value: str) -> str:
    """Return the string that a quoted or bare override value stands for."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        override = OverridesParser.create().parse_override(f"x={value}")
    except Exception:
        return value  # text outside of the grammar stands for itself
    if override.is_sweep_override():
        return value
    parsed = override.value()
    if parsed is None:
        return "null"
    # OmegaConf's rule: of 2 k + 1 backslashes in front of an interpolation k stay, and it is none.
    text = str(getattr(parsed, "text", parsed))
    return re.sub(r"(\\+)(?=\$\{)", lambda m: m[1][: len(m[1]) // 2] if len(m[1]) % 2 else m[1], text)


def truth(key: str, value: str) -> bool:
    """Read a flag such as `dry_run=true`."""
    known = {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }
    if value.lower() not in known:
        raise UserError(f"{key}={value}: expected true or false")
    return known[value.lower()]


def chosen_experiment(overrides: Sequence[Override]) -> str | None:
    """Return the name given as `experiment=NAME`."""
    value, _ = take(overrides, "experiment")
    return None if value is None or value == "null" else unquote(value)


def expand(overrides: Sequence[Override]) -> list[list[Override]]:
    """Expand choices (`norm=a,b`, `range(1,4)`, `choice(...)`) into one list of overrides a job.

    The product runs in the order of the command line, the last key fastest.

    Raises:
        UserError: a value that Hydra's grammar cannot read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    axes: list[list[Override]] = []
    for item in overrides:
        try:
            parsed = parser.parse_override(item.text)
        except Exception as error:
            raise UserError(unreadable(item, error)) from None
        if parsed.is_sweep_override():
            try:
                values = list(parsed.sweep_string_iterator())
            except Exception as error:
                raise UserError(f"{item.text}: {first_line(error)}") from None
            if not values:
                raise UserError(f"{item.text}: this sweep has no values")
            axes.append([Override(item.key, _unescaped(value)) for value in dict.fromkeys(values)])
        else:
            axes.append([item])
    return [list(job) for job in itertools.product(*axes)]


def _unescaped(value: str) -> str:
    """Return a value of a sweep without the backslashes before colons that nobody typed: it is shown."""
    plain = value.replace("\\:", ":")
    return plain if unquote(plain) == unquote(value) else value


def check_single(
    overrides: Iterable[Override],
    who: str = "train makes one run",
    advice: str = "; for several values use rmsrepro sweep with the same overrides",
) -> None:
    """Refuse choices where only one value makes sense; the message says who takes one, and what to do."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for item in overrides:
        try:
            parsed = parser.parse_override(item.text)
        except Exception as error:
            raise UserError(unreadable(item, error)) from None
        if parsed.is_sweep_override():
            raise UserError(f"{item.text}: {who}{advice}")


def one_value(item: Override, prefix: str, otherwise: str) -> object:
    """Return the value of an override as Hydra reads it, for keys that are not a run's.

    Args:
        prefix: what stood before the key on the command line.
        otherwise: what is said of several values.

    Raises:
        UserError: it cannot be read, or is several values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        parsed = OverridesParser.create().parse_override(f"x={item.value}")
    except Exception as error:
        raise UserError(unreadable(Override(f"{prefix}{item.key}", item.value), error)) from None
    if parsed.is_sweep_override():
        raise UserError(f"{prefix}{item.text}: {otherwise}")
    return parsed.value()


def unreadable(item: Override, error: Exception) -> str:
    """Explain a value that the override grammar cannot read."""
    return (
        f"{item.text}: cannot read the value ({first_line(error)}); put it in quotes if it holds "
        f"brackets, quotes, commas, '=' or letters with accents: \"{item.key}='...'\""
    )


def unknown_choice(group: str, name: str, choices: Sequence[str]) -> str:
    """The message for a group value that does not exist."""
    hint = "; did you mean none?" if name == "null" and "none" in choices else nearest(name, choices)
    text = f"{group}={name}: there is no such {group}{hint} ({group} is one of: {', '.join(choices)})"
    if group == "norm":
        return f"{text} (a norm of your own: plugins=[module] or norm=module:Class)"
    if group == "model" and ":" in name:
        timing = shlex.join(["rmsrepro", "bench", "bench=model", f"model={name}"])
        return f"{text}; a model of your own can be timed: {timing}"
    return text
