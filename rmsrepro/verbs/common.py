"""What the verbs share: their own options, the plug-ins, and the open composer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from rmsrepro.config.compose import Composer
from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.overrides import Override, expand, take, unquote
from rmsrepro.config.plugins import import_from_here, load_plugins

T = TypeVar("T")


def console(*, stderr: bool = False) -> Console:
    """Return a console that wraps at the terminal's width and leaves pipes alone."""
    return Console(stderr=stderr, highlight=False)


def say(text: str, *, stderr: bool = False) -> None:
    """Print plain text as it is: no markup, no wrapping in the middle of a path."""
    console(stderr=stderr).print(text, markup=False, soft_wrap=True)


def take_options(kind: type[T], overrides: Sequence[Override]) -> tuple[T, list[Override]]:
    """Read a verb's own options, the fields of the dataclass `kind`; return them and the other overrides.

    Raises:
        UserError: a value of the wrong type.
    """
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    node = OmegaConf.structured(kind)
    rest = []
    for item in overrides:
        if item.key not in names:
            rest.append(item)
            continue
        value = _value(item)
        try:
            node[item.key] = value
        except OmegaConfBaseException as error:
            hint = next(field.type for field in fields(kind) if field.name == item.key)  # type: ignore[arg-type]
            raise UserError(f"{item.text}: expected {hint}") from error
    result: T = OmegaConf.to_object(node)  # type: ignore[assignment]
    return result, rest


def only_options(kind: type[T], overrides: Sequence[Override], verb: str) -> T:
    """As `take_options`, for a verb that takes nothing else.

    Raises:
        UserError: a key that is no option of the verb.
    """
    options, rest = take_options(kind, overrides)
    if rest:
        names = [item.name for item in fields(kind)]  # type: ignore[arg-type]
        key = rest[0].key
        raise UserError(f"{rest[0].text}: {verb} has no option {key}{nearest(key, names)} (it has: {', '.join(names)})")
    return options


def _value(item: Override) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        value = OverridesParser.create().parse_override(f"x={item.value}").value()
    except Exception:
        return item.value  # text that is no literal of the grammar, such as a prompt
    return getattr(value, "text", value) if not isinstance(value, list | dict) else value


def open_plugins(overrides: Sequence[Override]) -> None:
    """Import what `plugins=[...]` names, and make the current directory importable.

    Raises:
        UserError: see `load_plugins`.
    """
    import_from_here()
    value, _ = take(overrides, "plugins")
    if value is not None:
        parsed = _value(Override("plugins", value))
        names = parsed if isinstance(parsed, list) else [parsed]
        load_plugins(str(getattr(name, "text", name)) for name in names)


def known_norms(overrides: Sequence[Override]) -> Mapping[str, type]:
    """Return the parameter classes of all norms, those that `norm=pkg.module:Class` names included.

    Raises:
        UserError: an import string that leads to no norm.
    """
    from rmsrepro.norms import list_norms, norm_info

    found = {name: norm_info(name).params_class for name in list_norms()}
    for job in expand([item for item in overrides if item.key == "norm"]):
        for item in job:
            name = unquote(item.value)
            if ":" in name:
                try:
                    found[name] = norm_info(name).params_class
                except (ValueError, TypeError, ImportError) as error:
                    raise UserError(f"norm={name}: {error}") from error
    return found


@contextlib.contextmanager
def composer(overrides: Sequence[Override], config_name: str = "train") -> Iterator[Composer]:
    """Load plug-ins, register all norms, and open Hydra."""
    open_plugins(overrides)
    with Composer(known_norms(overrides), config_name) as opened:
        yield opened


def label_study(overrides: Sequence[Override]) -> list[Override]:
    """Write `study=NAME` as the key that holds it: `study` itself is a group of files."""
    return [Override("study_name", item.value) if item.key == "study" else item for item in overrides]
