"""The verb that measures a norm: check-norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, check_single
from rmsrepro.verbs.common import composer, console, say, take_options

if TYPE_CHECKING:
    from rmsrepro.norms.card import Card, Subject


@dataclass
class CheckNormVerb:
    dim: int = 64
    out_dir: str = "outputs"
    show: bool = False


def check_norm(overrides: list[Override]) -> int:
    """Measure a norm, print its card and write it; `show=true` says what would be measured instead."""
    options, rest = take_options(CheckNormVerb, overrides)
    subject = _subject(options, rest)
    from rmsrepro.norms.card import make_card
    from rmsrepro.norms.card.card import card_path
    from rmsrepro.runs.files import to_json, write_atomic

    path = card_path(Path(options.out_dir).expanduser(), subject.name)
    screen = console()
    if options.show:
        screen.print(head(subject))
        say(f"card: {path}")
        return 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out_dir={options.out_dir}: no card can be written there ({error})") from error
    progress = console(stderr=True)
    if progress.is_terminal:
        with progress.status("") as spinner:
            card = make_card(subject, lambda what: spinner.update(Text(f"{subject.name}: {what}")))
    else:
        card = make_card(subject)
    write_atomic(path, to_json(card.to_json()) + "\n")
    print_card(card, screen)
    say(f"card: {path}")
    if card.failed:
        say(f"failed: {', '.join(card.failed)}", stderr=True)
    return 1 if card.failed else 0


def _subject(options: CheckNormVerb, overrides: Sequence[Override]) -> Subject:
    """Return the norm that the command names, known to be one that can be built.

    Raises:
        UserError: no such norm, a wrong parameter, a backend that does not run it, or a class that cannot be
            built.
    """
    from rmsrepro.config.compose import to_train_config
    from rmsrepro.norms.given import check_norm_parameters

    if not any(item.key == "norm" for item in overrides):
        raise UserError("check-norm needs a norm: rmsrepro check-norm rmsnorm, or pkg.module:Class")
    for item in overrides:
        if item.key not in ("norm", "backend", "plugins") and not item.key.startswith("norm."):
            raise UserError(
                f"{item.text}: check-norm takes a norm, norm.PARAMETER=VALUE, backend, plugins, dim, "
                "out_dir and show"
            )
    check_single(overrides, "check-norm measures one norm", "; run it once for each")
    if options.dim < 1:
        raise UserError(f"dim={options.dim}: expected a whole number above zero")
    # Composed as for a run, so that names, files of ./conf and parameters mean what they mean there.
    with composer(overrides) as opened:
        config = to_train_config(opened.raw(list(overrides)))
    check_norm_parameters([config])
    given = dict(config.norm)
    name = given.pop("name")
    chosen = any(item.key == "backend" for item in overrides)
    return _buildable(name, given, config.backend.value if chosen else "composite", options.dim)


def _buildable(name: str, params: dict[str, Any], backend: str, dim: int) -> Subject:
    """Build the norm once: what is wrong with the command shows here, what is wrong with the norm later."""
    from rmsrepro.norms import NormSpec
    from rmsrepro.norms.card import Subject
    from rmsrepro.norms.card.result import first_line

    try:
        used = NormSpec(name, params, backend).backend_used
        subject = Subject(name, params, used, dim)
        _ = subject.resolved
    except (ValueError, TypeError) as error:
        raise UserError(f"norm={name}: {error}") from error
    try:
        subject.build()
    except Exception as error:  # a user's class may raise anything
        raise UserError(
            f"norm={name}: it cannot be built at dim={dim} ({first_line(error)}); dim=N measures it at another "
            "width"
        ) from error
    return subject


# ---------------------------------------------------------------------------------------- printing


def print_card(card: Card, screen: Console) -> None:
    """Print a card, 80 columns wide where the terminal has them."""
    parts = [
        head(card.subject),
        *(Text(f"note: {flag}") for flag in card.flags),
        _checks(card),
        *_section(_table_1_title(card), _table_1(card)),
        *_section("Gradients, with a fixed gradient from above", _gradients(card)),
        *_section("Cost, for n rows of d entries", *_cost(card)),
        *_section("eps", *_eps(card)),
        Text(""),
    ]
    screen.print(Group(*parts), width=min(screen.width, 100))


def _section(title: str, *content: RenderableType | None) -> list[RenderableType]:
    shown = [Padding(one, (0, 0, 0, 2)) for one in content if one is not None]
    return [Text(""), Text(title, style="bold"), *shown] if shown else []


def head(subject: Subject) -> RenderableType:
    """Return what is measured: name, equation, source, parameters."""
    from rmsrepro.norms.making import plain

    info = subject.info
    params = " ".join(f"{key}={_plainly(value)}" for key, value in plain(subject.resolved).items())
    over = "the rows of a weight matrix" if subject.of_weights else "activations"
    return Group(
        Text.assemble((subject.name, "bold"), f"  {info.summary}"),
        Text(f"source: {info.source}"),
        Text(f"parameters: {params or 'none'}"),
        Text(f"measured over {over}, backend {subject.backend}, dim {subject.dim}"),
    )


def _plainly(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_STYLES = {"pass": "green", "fail": "bold red", "not applicable": "dim"}
_SHORT = {"pass": "pass", "fail": "FAIL", "not applicable": "n/a"}


def _checks(card: Card) -> RenderableType:
    table = _grid(2)
    for name, check in card.checks.items():
        status = check.status.value
        table.add_row(Text(_SHORT[status], style=_STYLES[status]), Text(name), Text(check.text))
    return Group(Text(""), Text("Checks", style="bold"), table)


def _grid(fixed: int, *, indent: int = 2) -> Table:
    """A table without lines; its first `fixed` columns keep their width, the last one wraps."""
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for _ in range(fixed):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


_HEADS = {
    "weight_matrix_rescaling": "W matrix\nrescaled",
    "weight_matrix_recentering": "W matrix\nrecentred",
    "weight_vector_rescaling": "W vector\nrescaled",
    "dataset_rescaling": "data set\nrescaled",
    "dataset_recentering": "data set\nrecentred",
    "single_case_rescaling": "one case\nrescaled",
}


def _table_1_title(card: Card) -> str:
    method = card.invariance_details.get("method", "")
    return "The paper's table 1: is n(W x) unchanged?" + (f" ({method})" if method else "")


def _table_1(card: Card) -> RenderableType | None:
    from rmsrepro.norms.card.invariance import INVARIANCES, PAPER

    if not card.invariance_details:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for column in ("", *(_HEADS[name] for name in INVARIANCES)):
        table.add_column(column, no_wrap=True, header_style="")
    table.add_row("measured", *(_yes(card.invariances[name]) for name in INVARIANCES))
    if card.subject.name in PAPER:
        table.add_row("paper", *map(_yes, PAPER[card.subject.name]))
    return table


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _gradients(card: Card) -> RenderableType | None:
    from rmsrepro.norms.card.gradients import STATEMENTS

    measured = {name: one for name, one in card.gradients.items() if one is not None}
    if not measured:
        return None
    table = _grid(2)
    for name, one in measured.items():
        table.add_row(_yes(one["holds"]), STATEMENTS[name][0], f"off by {one['deviation']:.1e}")
    return table


def _cost(card: Card) -> list[RenderableType]:
    counts = card.counts
    if "text" in counts:
        return [Text(counts["text"])]
    shapes = ", ".join(
        f"{one['name']} {tuple(one['shape']) if one['shape'] else 'a number'}" for one in counts["parameters"]
    )
    buffers = f"; {counts['buffer_count']} numbers in buffers" if counts["buffer_count"] else ""
    grown = counts["exponents"]
    lines = [f"parameters: {shapes or 'none'}: {counts['parameter_count']} in all{buffers}"]
    lines.append(f"state grows as {_power('d', grown['state_d'])}")
    for label, suffix in (("forward", ""), ("with backward", "_with_backward")):
        told = [
            f"{what} as {_power('n', grown[f'{key}{suffix}_n'])} {_power('d', grown[f'{key}{suffix}_d'])}"
            for what, key in (("operations", "flops"), ("bytes", "bytes"))
        ]
        one = counts["cost"][len(counts["cost"]) // 2]
        entries = one["rows"] * one["dim"]
        lines.append(
            f"{label}: {', '.join(told)}; at n = {one['rows']}, d = {one['dim']} "
            f"{one[f'flops{suffix}'] / entries:.3g} operations and {one[f'bytes{suffix}'] / entries:.3g} bytes "
            f"an entry, in {one[f'operations{suffix}']} tensor operations"
        )
    return [Text(line) for line in lines]


def _power(letter: str, exponent: float | None) -> str:
    return "nothing" if exponent is None else f"{letter}^{exponent:.2f}"


def _eps(card: Card) -> list[RenderableType]:
    eps = card.eps
    if "text" in eps:
        return [Text(eps["text"])]
    setting = " ".join(str(value) for value in eps["setting"].values())
    row = "row of W" if card.subject.of_weights else "row"
    lines = [
        f"{_below(eps['short_of_zero_eps_below'], row)} this setting ({setting}) is 1 % off eps = 0",
        f"{_below(eps['eps_1e-5_and_1e-8_part_below'], row)} eps 1e-5 and 1e-8 part by 1 %",
    ]
    if "inside_and_outside_part_below" in eps:
        lines.append(
            f"{_below(eps['inside_and_outside_part_below'], row)} inside and outside the root part by 1 %"
        )
    content: list[RenderableType] = [Text(line) for line in lines]
    if eps.get("share_of_zero_eps"):
        content += [Text("output as a share of the one at eps = 0:"), _shares(eps["share_of_zero_eps"])]
    return content


def _below(rms: float | None, row: str) -> str:
    return f"at no RMS of a {row}" if rms is None else f"below an RMS of {rms:.3g} of a {row}"


def _shares(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("RMS", no_wrap=True, header_style="")
    for rms in rows[0]["rms"]:
        table.add_column(f"{rms:g}", no_wrap=True, justify="right", header_style="")
    for one in rows:
        label = f"{one['eps']:g} {one.get('eps_position', '')}".strip()
        table.add_row(label, *(f"{share:.3f}" for share in one["share"]))
    return table
