"""The verb that reads a model: inspect."""

from __future__ import annotations

import importlib
import inspect as introspection
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rmsrepro.config.errors import UserError, first_line, nearest
from rmsrepro.config.overrides import Override, check_single
from rmsrepro.verbs.common import composer, console, open_plugins, say, take_options

if TYPE_CHECKING:
    from torch import nn

    from rmsrepro.norms import NormSpec
    from rmsrepro.norms.inspecting import Inspection, Layer, Remark
    from rmsrepro.norms.probing import Finding


@dataclass
class InspectVerb:
    target: str | None = None
    out_dir: str = "outputs"


def inspect(overrides: list[Override]) -> int:
    """Say what normalises in a model, by probing it, and where it is not the norm that was asked for."""
    options, rest = take_options(InspectVerb, overrides)
    if not options.target:
        raise UserError("inspect needs a model: rmsrepro inspect package.module:factory")
    _check_keys(rest)
    open_plugins(rest)
    spec = _norm(rest)
    model, inputs = load_model(options.target, spec)
    from rmsrepro.norms.inspecting import compare, inspect_model, mixtures, remarks
    from rmsrepro.runs.files import to_json, write_atomic

    path = inspection_path(Path(options.out_dir).expanduser(), options.target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out_dir={options.out_dir}: nothing can be written there ({error})") from error
    try:
        found = inspect_model(model, inputs)
    except ValueError as error:
        raise UserError(f"{options.target}: {error}") from error
    mismatches = [] if spec is None else compare(found, spec)
    notable = [*([] if spec is not None else mixtures(found)), *remarks(found)]
    record = _record(options.target, spec, found, mismatches, notable)
    write_atomic(path, to_json(record) + "\n")
    print_inspection(found, mismatches, notable, spec, console())
    say(f"record: {path}")
    return 1 if mismatches else 0


def inspection_path(out_dir: Path, target: str) -> Path:
    """Return the file of an inspection: out_dir/inspections/TARGET.json, the target's colon as a dot."""
    return out_dir / "inspections" / f"{target.replace(':', '.')}.json"


# -------------------------------------------------------------------------------------- the command


def _check_keys(overrides: Sequence[Override]) -> None:
    known = ("norm", "plugins", "out_dir")
    for item in overrides:
        if item.key not in known and not item.key.startswith("norm."):
            raise UserError(
                f"{item.text}: inspect has no option {item.key}{nearest(item.key, known)} (it takes a model, "
                "norm, norm.PARAMETER, plugins and out_dir)"
            )
    check_single(overrides, "inspect compares with one norm", "; run it once for each")


def _norm(overrides: Sequence[Override]) -> NormSpec | None:
    """Return the norm that the model should have; None where the command names none."""
    parameters = [item for item in overrides if item.key.startswith("norm.")]
    if not any(item.key == "norm" for item in overrides):
        if parameters:
            raise UserError(f"{parameters[0].text}: it belongs to a norm, which norm=NAME names")
        return None
    from rmsrepro.config.compose import to_train_config
    from rmsrepro.norms import NormSpec, resolve_params
    from rmsrepro.norms.given import check_norm_parameters

    @dataclass(frozen=True)
    class GivenNorm(NormSpec):
        """The spec, which a factory may also call with a width."""

        def __call__(self, dim: int) -> nn.Module:
            return self.build(dim)

    with composer(overrides) as opened:
        config = to_train_config(opened.raw(list(overrides)))
    check_norm_parameters([config])
    params = dict(config.norm)
    name = params.pop("name")
    try:
        resolve_params(name, **params)
    except (ValueError, TypeError) as error:
        raise UserError(f"norm={name}: {error}") from error
    return GivenNorm(name, params, "auto")


def load_model(target: str, spec: NormSpec | None) -> tuple[nn.Module, Any]:
    """Import what `target` names and make a module of it; return it with its inputs, None where it has none.

    Raises:
        UserError: it cannot be imported, cannot be called, or gives no module.
    """
    from torch import nn

    made = _imported(target)
    if not isinstance(made, nn.Module) and callable(made):
        made = _made(target, made, spec)
    if isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made[0], made[1]
    if not isinstance(made, nn.Module):
        kind = type(made).__name__
        raise UserError(
            f"{target}: expected a torch.nn.Module, a pair (module, inputs), or a function that returns "
            f"one of them; got {'None' if made is None else f'a {kind}'}"
        )
    return made, None


def _imported(target: str) -> Any:
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", target):
        raise UserError(
            f"{target!r} is no import string; it has the form package.module:name, where name is a module, a "
            "class or a function"
        )
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        ours = f"{module_name}.".startswith(f"{error.name}.")
        what = (
            f"there is no module {error.name!r}; modules of the current directory ({Path.cwd().name}/) and "
            "installed ones can be named, without .py"
            if ours
            else f"importing it failed: {error}"
        )
        raise UserError(f"{target}: {what}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise UserError(f"{target}: importing it failed: {_said(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            choices = [name for name in dir(found) if not name.startswith("_")]
            raise UserError(f"{target}: {module_name} has no {part!r}{nearest(part, choices)}")
        found = getattr(found, part)
    return found


def _made(target: str, factory: Any, spec: NormSpec | None) -> Any:
    """Call a factory: without arguments, or with the norm."""
    try:
        parameters = list(introspection.signature(factory).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    variadic = (introspection.Parameter.VAR_POSITIONAL, introspection.Parameter.VAR_KEYWORD)
    required = [
        one for one in parameters if one.default is introspection.Parameter.empty and one.kind not in variadic
    ]
    if len(required) > 1:
        names = ", ".join(one.name for one in required)
        raise UserError(
            f"{target}: it needs {names}; name a function without required arguments, or with one, the norm"
        )
    if required and spec is None:
        raise UserError(
            f"{target}: it takes one argument ({required[0].name}); say which norm it is built with, as in "
            "norm=rmsnorm, or name a function without required arguments"
        )
    given: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if required and required[0].kind is introspection.Parameter.KEYWORD_ONLY:
        keywords[required[0].name] = spec
    elif required:
        given = (spec,)
    elif spec is not None and any(one.name == "norm" for one in parameters):
        keywords["norm"] = spec
    try:
        return factory(*given, **keywords)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        called = "called with the norm, " if given or keywords else ""
        raise UserError(f"{target}: {called}it raised {_said(error)}") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__


# ---------------------------------------------------------------------------------------- the record


def _record(
    target: str,
    spec: NormSpec | None,
    found: Inspection,
    mismatches: Sequence[Remark],
    notable: Sequence[Remark],
) -> dict[str, Any]:
    from rmsrepro.config.plain import plain

    content: dict[str, Any] = plain(found)
    return {
        "schema_version": 1,
        "target": target,
        "norm": None if spec is None else {"name": spec.name, **spec.resolved_params},
        **content,
        "mismatches": [{"paths": list(one.paths), "text": one.text} for one in mismatches],
        "remarks": [{"paths": list(one.paths), "text": one.text} for one in notable],
    }


# ------------------------------------------------------------------------------------------ printing


def print_inspection(
    found: Inspection,
    mismatches: Sequence[Remark],
    notable: Sequence[Remark],
    spec: NormSpec | None,
    screen: Console,
) -> None:
    """Print the layers, one line for those that are alike, then what deserves attention."""
    width = min(screen.width, 100)
    lines = [_head(found), *(["", *layer_lines(found.layers)] if found.layers else [])]
    if notable:
        lines += ["", "Worth knowing:", *_items(notable, width)]
    lines += [f"note: {note}" for note in found.notes]
    if spec is not None:
        wanted = " ".join([spec.name, *(f"norm.{key}={value}" for key, value in spec.params.items())])
        if mismatches:
            lines += ["", f"Not as with norm={wanted}:", *_items(mismatches, width)]
        elif found.layers or found.calls:
            lines += ["", f"All as with norm={wanted}."]
        else:
            weights = "; the weights were not looked at" if spec.scope == "weight" else ""
            lines += ["", f"Nothing is normalised, as with norm={wanted}{weights}."]
    for line in [*lines, ""]:
        screen.print(Text(line), soft_wrap=True)


def _head(found: Inspection) -> str:
    count = len(found.layers)
    if count == 1 and not found.layers[0].path:
        many = "itself a norm"
    else:
        many = f"{count} of its {found.num_modules} modules {'is a norm' if count == 1 else 'are norms'}"
    ran = f"run in {' and '.join(found.modes)}" if found.modes else "not run: it came without inputs"
    return f"{found.class_name}: {many}; {ran}"


def layer_lines(layers: Sequence[Layer]) -> list[str]:
    """Return a table of layers, and below each of its lines the names of the layers that are so."""
    from rmsrepro.norms.inspecting.grouping import collapse
    from rmsrepro.norms.inspecting.wording import gain_cell

    heads = ("class", "n", "mean", "bias", "gain", "eps", "divided by", "layers")
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer in layers:
        one = layer.finding
        bias = ", ".join(one.bias_names) or ("constant" if one.adds_constant else "-")
        cells = layer.class_name, str(one.width), _mean(one), bias, gain_cell(one), _eps(one), one.divisor
        groups.setdefault(cells, []).append(layer.path)
    rows = [heads, *((*cells, str(len(paths))) for cells, paths in groups.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines = texts[:1]
    for text, paths in zip(texts[1:], groups.values(), strict=True):
        lines += [text, *(f"  {path or '(itself)'}" for path in collapse(paths))]
    return lines


def _mean(one: Finding) -> str:
    if one.mean_share is None:
        return "other"
    if not one.subtracts_mean:
        return "kept"
    return "subtracted" if abs(one.mean_share - 1) < 0.01 else f"{one.mean_share:.2g} of it"


def _eps(one: Finding) -> str:
    from rmsrepro.norms.probing import Kind

    return "-" if one.kind is Kind.bounded else str(one.eps)


def _items(remarks: Sequence[Remark], width: int) -> list[str]:
    """Return remarks as a list, wrapped at `width`."""
    wrapped = TextWrapper(width, initial_indent="- ", subsequent_indent="  ", break_long_words=False)
    wrapped.break_on_hyphens = False
    return [line for remark in remarks for line in wrapped.wrap(str(remark))]
