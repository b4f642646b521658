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
from rmsrepro.config.overrides import Override, check_single, take, unquote
from rmsrepro.config.paths import own_files, packaged_conf_dir
from rmsrepro.verbs.common import (
    composer,
    console,
    find_norm,
    known_norms,
    open_plugins,
    read_keys,
    say,
    show,
)

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
        _tell_chosen(unquote(chosen), overrides)
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
    for file in own_files("norm"):
        # One of the name of a built-in file is not read.
        if not (packaged_conf_dir() / "norm" / file.name).is_file():
            named = str(read_keys(file).get("name", "it names no norm"))
            table.add_row(Text(file.stem, style="bold"), Text(f"conf/norm/{file.name}: {named}"))
    show(table, console())
    say("all about one: rmsrepro norms norm=NAME    measured: rmsrepro check-norm NAME")
    return 0


def _tell_chosen(name: str, overrides: list[Override]) -> None:
    """Print a norm, or the norm of a file of ./conf/norm with the values there."""
    from rmsrepro.config.compose import to_train_config
    from rmsrepro.norms import list_norms
    from rmsrepro.norms.given import check_norm_parameters

    if name in list_norms() or name not in {file.stem for file in own_files("norm")}:
        _tell(find_norm(name, f"norm={name}"))
        return
    check_single(overrides, "norms tells of one norm", "; ask once for each")
    with composer(overrides) as opened:
        config = to_train_config(opened.raw(overrides))
    check_norm_parameters([config])
    given = dict(config.norm)
    say(f"{name}: conf/norm/{name}.yaml")
    _tell(find_norm(given.pop("name"), f"norm={name}"), given)


def _tell(info: NormInfo, given: typing.Mapping[str, Any] | None = None) -> None:
    """Print one norm: what it is, from where, and a line for each parameter, its default or what is given."""
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
    for key, default, kind, told in rows:
        value = _typed(given[key]) if given and key in given else default
        table.add_row(Text(f"  norm.{key}={value}"), Text(kind), Text(told))
    if rows:
        show(table, console())


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
