#!/usr/bin/env python
"""Write the ledger in docs/claims.md from rmsrepro/paper/claims.yaml and the built-in studies.

    python scripts/document_claims.py            rewrite the part between the markers
    python scripts/document_claims.py --check    exit with 1 if it is out of date

Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rmsrepro.config.study import Relation  # noqa: E402
from rmsrepro.paper.claims import Claim, Metric, ledger  # noqa: E402
from rmsrepro.paper.declared import declared  # noqa: E402
from rmsrepro.paper.statements import TESTS, GradientsOf, SumsUp, why_untestable  # noqa: E402
from rmsrepro.paper.study_files import BY_COST, built_in  # noqa: E402

PAGE = ROOT / "docs" / "claims.md"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
STUDIES = {name: declared(built_in(name)) for name in BY_COST}


def tested_by(claim: Claim) -> str:
    """Return what tests a claim: studies (bold where faithful), a card, other claims, or why nothing does."""
    if why_untestable(claim):
        return "-"
    test = TESTS.get(claim.id)
    if claim.metric is Metric.property or isinstance(test, GradientsOf):
        return "**`check-norm`**"
    if isinstance(test, SumsUp):
        return f"its {len(test.parts)} parts"
    names = [
        f"**{name}**" if found[claim.id].relation is Relation.faithful else name
        for name, found in STUDIES.items()
        if claim.id in found
    ]
    return ", ".join(names) or "no built-in study"


def value_text(claim: Claim) -> str:
    """Return a claim's value with its spread, and its percentage where it has one."""
    if claim.metric is Metric.property:
        return "yes" if claim.value is True else "no"
    value = (
        "-"
        if claim.value is None
        else f"{claim.value:g}"
        if not isinstance(claim.value, str)
        else claim.value
    )
    spread = "" if claim.spread is None else f" ± {claim.spread:g}"
    reduction = ledger().reduction(claim)
    return value + spread + ("" if reduction is None else f"<br>{reduction_text(claim)}")


def reduction_text(claim: Claim) -> str:
    """Return `24.7 % ± 4.1`, in italics where the paper prints the two times only."""
    reduction = ledger().reduction(claim)
    assert reduction is not None
    text = f"{reduction.pct:.1f} %" + ("" if reduction.sd != reduction.sd else f" ± {reduction.sd:.1f}")
    return text if reduction.printed else f"*{text}*"


def column(claim: Claim) -> str:
    """Return the head of a claim's column."""
    if claim.metric is Metric.time:
        return claim.unit
    return claim.name.replace(" at token position ", " ") + (
        f", {claim.unit}" if claim.unit not in ("", "rank") else ""
    )


def block(claims: list[Claim]) -> Iterator[str]:
    """Yield the table of one block: a line a norm, a column a figure, and what tests each figure."""
    first = claims[0]
    prefix = first.id.split("-")[0]
    about = [
        first.task,
        first.model,
        first.framework,
        next((one.hardware for one in claims if one.hardware), ""),
    ]
    yield f"**{first.table}**, `{prefix}-...`: {'; '.join(part for part in about if part)}"
    yield ""
    untested = {why_untestable(claim) for claim in claims}
    columns = list(dict.fromkeys(column(claim) for claim in claims))
    heads = ["norm", *columns, *([] if len(untested) == 1 and "" not in untested else ["tested by"])]
    yield f"| {' | '.join(heads)} |"
    yield "|" + " --- |" * len(heads)
    for norm, line in groupby(claims, key=lambda claim: claim.norm):
        by_column = {column(claim): claim for claim in line}
        cells = [norm, *(value_text(by_column[name]) if name in by_column else "" for name in columns)]
        if heads[-1] == "tested by":
            cells.append(tests_text(by_column.values()))
        yield f"| {' | '.join(cells)} |"
    yield ""
    if heads[-1] != "tested by":
        yield f"Not tested: {untested.pop()}."
        yield ""


def tests_text(claims: Iterable[Claim]) -> str:
    """Return what tests the figures of a line, figures with the same test together."""
    by_test: dict[str, list[str]] = {}
    for claim in claims:
        by_test.setdefault(tested_by(claim), []).append("time" if claim.metric is Metric.time else claim.name)
    if len(by_test) == 1:
        return next(iter(by_test))
    return "; ".join(f"{', '.join(names)}: {test}" for test, names in by_test.items())


def generated() -> str:
    """Return the generated part of the page."""
    in_tables = [claim for claim in ledger() if claim.metric is not Metric.statement and is_figure(claim)]
    lines: list[str] = []
    keys = [(claim.table, claim.framework, claim.model) for claim in in_tables]
    for key in dict.fromkeys(keys):
        lines += block([claim for claim, own in zip(in_tables, keys, strict=True) if own == key])
    lines += [
        "**In words, and what sums up**",
        "",
        "| claim | where | what it says | tested by |",
        "|" + " --- |" * 4,
    ]
    for claim in ledger():
        if claim not in in_tables:
            says = (
                f"{claim.norm}: {claim.name} {claim.value} {claim.unit}".strip()
                if is_range(claim)
                else claim.value
            )
            reason = why_untestable(claim)
            how = f"- ({reason})" if reason else tested_by(claim)
            lines.append(f"| `{claim.id}` | {claim.table} | {says} | {how} |")
    return "\n".join(lines).rstrip()


def is_range(claim: Claim) -> bool:
    """Whether a claim is a range of figures and stands in no table."""
    return claim.metric is not Metric.statement and isinstance(claim.value, str)


def is_figure(claim: Claim) -> bool:
    """Whether a claim is a figure of a table."""
    return claim.metric is not Metric.statement and not is_range(claim)


def page_with(text: str, page: str) -> str:
    """Return the page with the part between the markers replaced."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def main(arguments: list[str]) -> int:
    """Rewrite the page, or check it; return the exit code."""
    page = PAGE.read_text(encoding="utf-8")
    new = page_with(generated(), page)
    if "--check" in arguments:
        if new != page:
            print(
                f"{PAGE.relative_to(ROOT)} is out of date: python scripts/document_claims.py", file=sys.stderr
            )
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
