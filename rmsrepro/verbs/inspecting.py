"""The verb that reads a model: inspect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.overrides import Override, check_single, override_text
from rmsrepro.config.paths import expanded
from rmsrepro.norms.targets import GivenNorm, load_model
from rmsrepro.verbs.common import composer, console, open_plugins, say, take_options

if TYPE_CHECKING:
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
    if not options.out_dir.strip():
        raise UserError("out_dir='': expected a folder")
    _check_keys(rest)
    open_plugins(rest)
    spec = _norm(rest)
    model, inputs = load_model(options.target, spec)
    from rmsrepro.norms.inspecting import compare, inspect_model, mixtures, remarks
    from rmsrepro.runs.files import to_json, write_atomic

    path = inspection_path(expanded(options.out_dir), options.target)
    in_the_way = next((one for one in path.parents if one.exists() and not one.is_dir()), None)
    if in_the_way is not None:
        raise UserError(f"out_dir={options.out_dir}: {in_the_way} is a file, not a folder")
    try:
        found = inspect_model(model, inputs)
        mismatches = [] if spec is None else compare(found, spec)
    except ValueError as error:
        raise UserError(f"{options.target}: {error}") from error
    mixed = [] if spec is not None else mixtures(found)
    # A mixture says what the plain remark says, and what the others do.
    said = {(one.paths, one.text.partition(";")[0]) for one in mixed}
    notable = [*mixed, *(one for one in remarks(found) if (one.paths, one.text) not in said)]
    record = _record(options.target, spec, found, mismatches, notable)
    try:
        write_atomic(path, to_json(record) + "\n")
    except OSError as error:
        raise UserError(f"out_dir={options.out_dir}: nothing can be written there ({error})") from error
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
    from rmsrepro.norms import resolve_params
    from rmsrepro.norms.given import check_norm_parameters

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
    lines = [_head(found), *(["", *layer_lines(found.layers, width)] if found.layers else [])]
    if spec is not None:
        wanted = " ".join(
            [spec.name, *(f"norm.{key}={override_text(value)}" for key, value in spec.params.items())]
        )
        if mismatches:
            lines += ["", f"Not as with norm={wanted}:", *_items(mismatches, width)]
        elif found.layers or found.calls:
            lines += ["", f"All as with norm={wanted}."]
        else:
            weights = "; the weights were not looked at" if spec.scope == "weight" else ""
            lines += ["", f"Nothing is normalised, as with norm={wanted}{weights}."]
    if notable:
        lines += ["", "Worth knowing:", *_items(notable, width)]
    lines += [f"note: {note}" for note in found.notes]
    for line in [*lines, ""]:
        style = next((style for start, style in _STYLES.items() if line.startswith(start)), "")
        screen.print(Text(line, style=style), soft_wrap=True)


_STYLES = {"Worth knowing": "bold", "Not as with": "bold red", "All as with": "green"}


def _head(found: Inspection) -> str:
    count = len(found.layers)
    if count == 1 and not found.layers[0].path:
        many = "itself a norm"
    else:
        many = f"{count} of its {found.num_modules} modules {'is a norm' if count == 1 else 'are norms'}"
    ran = f"run in {' and '.join(found.modes)}" if found.modes else "not run: it came without inputs"
    return f"{found.class_name}: {many}; {ran}"


def layer_lines(layers: Sequence[Layer], width: int) -> list[str]:
    """Return a table of layers as lines, and below each of its rows the names of the layers that are so."""
    from rmsrepro.norms.inspecting.grouping import collapse
    from rmsrepro.norms.inspecting.wording import gain_cell

    groups: dict[tuple[str, ...], list[str]] = {}
    for layer in layers:
        one = layer.finding
        bias = ", ".join(one.bias_names) or ("constant" if one.adds_constant else "-")
        cells = layer.class_name, _entries(layer), _mean(one), bias, gain_cell(one), _eps(one), one.divisor
        groups.setdefault(cells, []).append(layer.path)
    heads = ("", "class", "n", "mean", "bias", "gain", "eps", "divided by")
    rows = [heads, *((str(len(paths)), *cells) for cells, paths in groups.items())]
    columns = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    names = [[], *groups.values()]
    lines = []
    for row, paths in zip(rows, names, strict=True):
        start = "".join(f"{cell:<{column}}  " for cell, column in zip(row, columns, strict=False))
        wrapped = TextWrapper(
            max(width, len(start) + 12), initial_indent=start, subsequent_indent=" " * len(start)
        )
        lines += wrapped.wrap(row[-1])
        lines += [f"{' ' * columns[0]}  {path or '(itself)'}" for path in collapse(paths)]
    return lines


def _entries(layer: Layer) -> str:
    """Entries of a row; what was seen where another dimension than the last is one."""
    one = layer.finding
    if not one.dimensions:
        return str(one.width)
    if layer.calls is None:
        return "-"
    return str(math.prod(one.input_shape[place] for place in one.dimensions))


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
