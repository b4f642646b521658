"""A norm's card as text of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rmsrepro.verbs.common import show

if TYPE_CHECKING:
    from rmsrepro.norms.card import Card, Subject


def print_card(card: Card, screen: Console) -> None:
    """Print a card, 80 columns wide where the terminal has them."""
    parts = [
        head(card.subject),
        *(Text(f"note: {flag}") for flag in card.flags),
        *_section(f"Checks (compared with {card.subject.reference_name})", _checks(card)),
        *_section(_table_1_title(card), _table_1(card)),
        *_section("Gradients, with a fixed gradient from above", _gradients(card)),
        *_section(_cost_title(card), *_cost(card)),
        *_section("eps", *_eps(card)),
        Text(""),
    ]
    show(Group(*parts), screen, min(screen.width, 100))


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
    said: dict[str, str] = {}
    # What is overwritten explains every error of autograd below it.
    overwrites = [name for name in ("in_place",) if name in card.failed]
    for name in dict.fromkeys([*overwrites, *card.checks]):
        check = card.checks[name]
        status, text = check.status.value, check.text.partition(" Hint: ")[0]
        if name in card.failed:
            # One error of torch comes with other tensors and other numbers in each check.
            first = said.setdefault(re.sub(r"\w+Tensor|\d+", "", text), name)
            text = text if first == name else f"as {first}"
        table.add_row(Text(_SHORT[status], style=_STYLES[status]), Text(name), Text(text))
    return table


def _grid(fixed: int) -> Table:
    """A table without lines; its first `fixed` columns keep their width, the last one wraps."""
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for _ in range(fixed):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _columns(*heads: str, right: int | None = None) -> Table:
    """A table with heads and without lines; from column `right` on its numbers end at the same place."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for number, one in enumerate(heads):
        to_the_right = right is not None and number >= right
        table.add_column(one, no_wrap=True, header_style="", justify="right" if to_the_right else "left")
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
    table = _columns("", *(_HEADS[name] for name in INVARIANCES))
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


def _middle(counts: dict[str, Any]) -> dict[str, Any]:
    """The size in the middle of those that the cost was counted at."""
    middle: dict[str, Any] = counts["cost"][len(counts["cost"]) // 2]
    return middle


def _cost_title(card: Card) -> str:
    what = (
        "of making a d x d matrix, for n rows of data"
        if card.subject.of_weights
        else "for n rows of d entries"
    )
    if "text" in card.counts:
        return f"Cost {what}"
    one = _middle(card.counts)
    return f"Cost {what} (an entry: at n = {one['rows']}, d = {one['dim']})"


def _cost(card: Card) -> list[RenderableType]:
    counts = card.counts
    if "text" in counts:
        return [Text(counts["text"])]
    shapes = ", ".join(f"{one['name']} {tuple(one['shape'])}" for one in counts["parameters"])
    buffers = f", in buffers: {counts['buffer_count']}" if counts["buffer_count"] else ""
    grown = counts["exponents"]
    heads = "operations\ngrow as", "bytes\ngrow as", "operations\nan entry", "bytes\nan entry", "calls"
    table = _columns("", *heads, right=3)
    one = _middle(counts)
    for label, suffix in (("forward", ""), ("with backward", "_with_backward")):
        powers = (
            f"{_power('n', grown[f'{key}{suffix}_n'])} {_power('d', grown[f'{key}{suffix}_d'])}".strip()
            for key in ("flops", "bytes")
        )
        entries = one["rows"] * one["dim"]
        each = (f"{one[f'{key}{suffix}'] / entries:.3g}" for key in ("flops", "bytes"))
        table.add_row(label, *powers, *each, str(one[f"operations{suffix}"]))
    return [
        Text(f"parameters: {shapes or 'none'}; numbers in all: {counts['parameter_count']}{buffers}"),
        Text(f"state grows as {_power('d', grown['state_d'])}"),
        table,
    ]


def _power(letter: str, exponent: float | None) -> str:
    return "0" if exponent is None else f"{letter}^{exponent:.2f}"


def _eps(card: Card) -> list[RenderableType]:
    eps = card.eps
    if "text" in eps:
        return [Text(eps["text"])]
    # A user's eps may be None, which leaves it to the norm.
    setting = " ".join(
        f"{value:g}" if isinstance(value, float) else str(value) for value in eps["setting"].values()
    )
    partings = {
        f"{setting} and 0 (this setting and none)": eps["short_of_zero_eps_below"],
        "1e-05 and 1e-08": eps["eps_1e-5_and_1e-8_part_below"],
    }
    if "inside_and_outside_part_below" in eps:
        partings["inside and outside the root"] = eps["inside_and_outside_part_below"]
    row = "a row of W" if card.subject.of_weights else "a row"
    content: list[RenderableType] = [
        Text(f"Outputs differ by more than 1 % below an RMS of {row} of"),
        _values({name: "nowhere" if rms is None else f"{rms:.3g}" for name, rms in partings.items()}),
    ]
    if eps.get("share_of_zero_eps"):
        content += [
            Text("Output as a share of the one at eps = 0, by the RMS"),
            _shares(eps["share_of_zero_eps"]),
        ]
    return content


def _values(values: dict[str, str]) -> RenderableType:
    table = _grid(1)
    for name, value in values.items():
        table.add_row(name, value)
    return Padding(table, (0, 0, 0, 2))


def _shares(rows: Sequence[dict[str, Any]]) -> RenderableType:
    table = _columns("", *(f"{rms:g}" for rms in rows[0]["rms"]), right=1)
    for one in rows:
        label = f"{one['eps']:g} {one.get('eps_position', '')}".strip()
        table.add_row(label, *(f"{share:.3f}" for share in one["share"]))
    return Padding(table, (0, 0, 0, 2))
