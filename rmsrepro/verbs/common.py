"""What the verbs share: their own options, the plug-ins, and the open composer."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console, RenderableType

from rmsrepro.config.compose import Composer
from rmsrepro.config.errors import UserError, first_line, nearest
from rmsrepro.config.imports import importing
from rmsrepro.config.overrides import RAW_KEYS, Override, as_typed, expand, unquote
from rmsrepro.config.paths import own_files, packaged_conf_dir, shadowed_files, user_conf_dir
from rmsrepro.config.plugins import import_from_here, load_plugins
from rmsrepro.config.screen import Screen

if TYPE_CHECKING:
    from rmsrepro.norms import NormInfo

T = TypeVar("T")


def console(*, stderr: bool = False) -> Console:
    """Return a console that wraps at the terminal's width and leaves pipes alone."""
    return Screen(stderr=stderr, highlight=False)


def say(text: str, *, stderr: bool = False) -> None:
    """Print plain text as it is: no markup, no wrapping in the middle of a path."""
    console(stderr=stderr).print(text, markup=False, soft_wrap=True)


def show(content: RenderableType, screen: Console, width: int | None = None) -> None:
    """Print a table without the blanks that fill its lines, which nobody wants in a file."""
    with screen.capture() as printed:
        screen.print(content, width=width)
    screen.file.write("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()))
    screen.file.flush()


def take_options(kind: type[T], overrides: Sequence[Override]) -> tuple[T, list[Override]]:
    """Read a verb's own options, the fields of the dataclass `kind`; return them and the other overrides.

    Raises:
        UserError: a value of the wrong type.
    """
    hints = get_type_hints(kind)
    node = OmegaConf.structured(kind)
    rest = []
    for item in overrides:
        if item.key not in hints:
            rest.append(item)
            continue
        optional = type(None) in get_args(hints[item.key])
        if as_typed(item.value) == "???":
            raise UserError(f"{item.text}: a value is missing; ??? stands for one that is to be given")
        try:
            if "${" in item.value and hints[item.key] not in (str, str | None):
                raise OmegaConfBaseException("an option is no interpolation")
            node[item.key] = _value(item, text=hints[item.key] in (str, str | None), optional=optional)
        except OmegaConfBaseException as error:
            expected = next(
                (words for kind_, words in _KINDS if hints[item.key] in (kind_, kind_ | None)), "text"
            )
            raise UserError(f"{item.text}: expected {expected}") from error
    result: T = OmegaConf.to_object(node)  # type: ignore[assignment]
    return result, rest


_KINDS = ((bool, "true or false"), (int, "a whole number"), (float, "a number"))


def only_options(kind: type[T], overrides: Sequence[Override], verb: str) -> T:
    """As `take_options`, for a verb that takes nothing else.

    Raises:
        UserError: a key that is no option of the verb.
    """
    options, rest = take_options(kind, overrides)
    if rest:
        names = [item.name for item in fields(kind)]  # type: ignore[arg-type]
        key = rest[0].key
        raise UserError(
            f"{rest[0].text}: {verb} has no option {key}{nearest(key, names)} (it has: {', '.join(names)})"
        )
    return options


def _value(item: Override, *, text: bool, optional: bool) -> Any:
    """Read an option's value; text is taken as typed, commas, brackets and all."""
    if optional and item.value in ("null", "None", ""):
        return None
    if not text:
        return unquote(item.value)
    typed = unquote(item.value) if RAW_KEYS.match(item.key) else as_typed(item.value)
    # A prompt may hold what OmegaConf would take for an interpolation.
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", typed)


def open_plugins(overrides: Sequence[Override]) -> None:
    """Import what `plugins` names, and make the current directory importable.

    As in the composed configuration, `plugins=[...]` of the command line takes the place of the list in an
    experiment's file.

    Raises:
        UserError: see `load_plugins`.
    """
    import_from_here()
    given = _choices("plugins", overrides)
    for value in given:
        load_plugins(_module_names(value))
    for group in () if given else OVERLAYS:
        for value in _choices(group, overrides):
            load_plugins(_plugins_of_overlay(group, unquote(value)))


OVERLAYS = ("experiment", "debug")
"""The groups whose files may set any key."""


def _choices(key: str, overrides: Sequence[Override]) -> list[str]:
    """Return every value that is given for `key`, those of a sweep one by one."""
    jobs = [job for item in overrides if item.key == key for job in expand([item])]
    return list(dict.fromkeys(job[0].value for job in jobs))


def _plugins_of_overlay(group: str, name: str) -> list[str]:
    """Return the modules that an overlay lists; none where it lists none, or cannot be read.

    Its norm is known only after they were imported, so this reads the file before anything is composed.
    """
    folders = [folder for folder in (packaged_conf_dir(), user_conf_dir()) if folder]  # as Hydra searches
    for file in (folder / group / f"{name}.yaml" for folder in folders):
        if file.is_file():
            plugins = read_keys(file).get("plugins")
            return [str(module) for module in plugins] if isinstance(plugins, ListConfig) else []
    return []


def _module_names(value: str) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        parsed = OverridesParser.create().parse_override(f"plugins={value}").value()
    except Exception:
        parsed = None
    if not isinstance(parsed, list):
        raise UserError(f"plugins={value}: expected a list of modules, as in plugins=[mynorms]")
    return [str(getattr(name, "text", name)) for name in parsed]


def known_norms(overrides: Sequence[Override]) -> Mapping[str, type]:
    """Return the parameter classes of all norms, those that `norm=pkg.module:Class` names included.

    An installed plug-in that cannot be used is left out with a note, unless its norm is chosen.

    Raises:
        UserError: a chosen norm that cannot be had.
    """
    from rmsrepro.norms import list_norms

    chosen = {unquote(value) for value in _choices("norm", overrides)}
    try:
        listed = list_norms()
    except ValueError as error:  # two plug-ins with one name
        raise UserError(str(error)) from error
    found = {}
    for name in listed:
        try:
            found[name] = find_norm(name, f"norm={name}").params_class
        except UserError as error:
            if name in chosen:
                raise
            say(f"note: a plug-in cannot be used: {error}", stderr=True)
    for name in (name for name in chosen if ":" in name):
        found[name] = find_norm(name, f"norm={name}").params_class
    for file in own_files("norm"):
        # A file of the user may name an import string; the parameters beside it must be known too.
        name = _norm_name(file)
        if ":" in name and (file.stem in chosen or "experiment" in {item.key for item in overrides}):
            found[name] = find_norm(name, f"{file.name}: name: {name}").params_class
    return found


def find_norm(name: str, where: str) -> NormInfo:
    """Return what is known of a norm; the message begins with `where` it is named.

    Raises:
        UserError: no such norm, or one whose module fails.
    """
    from rmsrepro.norms import norm_info

    try:
        return norm_info(name)
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:  # importing a user's module runs whatever stands in it
        raise UserError(
            f"{where}: importing it failed: {type(error).__name__}: {first_line(error)}"
        ) from error


def _norm_name(file: Path) -> str:
    return str(read_keys(file).get("name", ""))


def read_keys(file: Path) -> DictConfig:
    """Read a YAML file of keys; empty where it is damaged: composing says what is wrong, if it is chosen."""
    try:
        content = OmegaConf.load(file)
    except Exception:
        return DictConfig({})
    return content if isinstance(content, DictConfig) else DictConfig({})


@contextlib.contextmanager
def composer(overrides: Sequence[Override], config_name: str = "train") -> Iterator[Composer]:
    """Load plug-ins, register all norms, and open Hydra."""
    with importing("torch"):  # as plug-ins do
        open_plugins(overrides)
    for note in shadowed_files():
        say(f"note: {note}", stderr=True)
    with Composer(known_norms(overrides), config_name) as opened:
        yield opened


def label_study(overrides: Sequence[Override]) -> list[Override]:
    """Write `study=NAME` as the key that holds it: `study` itself is a group of files."""
    return [Override("study_name", item.value) if item.key == "study" else item for item in overrides]


def command_line(verb: str, overrides: Sequence[Override]) -> str:
    """Return a command as it can be pasted into a shell, in the directory where it was typed."""
    return shlex.join(["rmsrepro", verb, *(item.typed or item.text for item in overrides)])
