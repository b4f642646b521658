"""The verb `norms`: which norms there are, and what one of them takes."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from typing import Any

from rich.table import Table
from rich.text import Text

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, take, unquote
from rmsrepro.verbs.common import console, find_norm, known_norms, open_plugins, say

if typing.TYPE_CHECKING:
    from rmsrepro.norms import NormInfo


def norms(overrides: list[Override]) -> int:
    """List the norms with their parameters, or with norm=NAME one of them with all there is to say."""
    from rmsrepro.norms import norm_info

    _, rest = take(overrides, "plugins")
    chosen, rest = take(rest, "norm")
    if rest:
        raise UserError(f"{rest[0].text}: norms takes plugins=[module,...] and norm=NAME only")
    open_plugins(overrides)
    if chosen is not None:
        _tell(find_norm(unquote(chosen), f"norm={unquote(chosen)}"))
        return 0
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for name in known_norms(overrides):
        info = norm_info(name)
        table.add_row(Text(name, style="bold"), Text(info.summary or info.source))
        given = "  ".join(f"{key}={value}" for key, value, *_ in _parameters(info.params_class))
        if given:
            table.add_row("", Text(given, style="dim"))
    console().print(table)
    say("all about one: rmsrepro norms norm=NAME    measured: rmsrepro check-norm NAME")
    return 0


def _tell(info: NormInfo) -> None:
    """Print one norm: what it is, from where, and a line for each parameter."""
    say(f"{info.name}: {info.summary}" if info.summary else info.name)
    over = "entries over all positions (takes a mask)" if info.takes_mask else "rows of the last dimension"
    facts = {
        "source": info.source,
        "acts on": "the weights of linear maps" if info.scope == "weight" else over,
        "backends": ", ".join(info.backends),
    }
    for key, value in facts.items():
        say(f"  {key:<9} {value}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = _parameters(info.params_class)
    for key, value, kind, told in rows:
        table.add_row(Text(f"  norm.{key}={value}"), Text(kind), Text(told))
    if rows:
        console().print(table)


def _parameters(params_class: type[Any]) -> list[tuple[str, str, str, str]]:
    """Return name, default as typed on the command line, kind and meaning of each parameter."""
    hints = typing.get_type_hints(params_class)
    rows = []
    for item in dataclasses.fields(params_class):
        default = "" if item.default is dataclasses.MISSING else _typed(item.default)
        rows.append((item.name, default, _kind(hints[item.name]), str(item.metadata.get("help", ""))))
    return rows


def _typed(value: object) -> str:
    """Write a value as the command line takes it."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _kind(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "|".join(str(member.value) for member in hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return "|".join(_kind(one) for one in typing.get_args(hint))
    words = {bool: "true|false", int: "whole number", float: "number", str: "text", type(None): "null"}
    return words.get(hint, str(hint))
