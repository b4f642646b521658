#!/usr/bin/env python
"""Write the tables of docs/configuration.md from the dataclasses that they describe.

    python scripts/document_config.py            rewrite the part between the markers
    python scripts/document_config.py --check    exit with 1 if it is out of date

What a key means is the text under its field, so a key is documented in one place. Imports no torch.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rmsrepro.config import bench, schema, sizes, study, tuning  # noqa: E402
from rmsrepro.norms import params  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
OWN = ("norm", "model", "task", "data", "optim", "trainer", "tracker", "bench")
"""Fields that are groups of keys, with a table of their own."""

SOURCES: tuple[tuple[str, type], ...] = (
    ("pydoc", schema.PydocConfig),
    ("tinyshakespeare", schema.TinyShakespeareConfig),
    ("wikitext", schema.WikitextConfig),
    ("text_files", schema.TextFilesConfig),
    ("cldr", schema.CldrConfig),
    ("multi30k", schema.Multi30kConfig),
    ("wmt14", schema.Wmt14Config),
    ("parallel_files", schema.ParallelFilesConfig),
)


def field_texts(kind: type) -> dict[str, str]:
    """Return the text under each field (or enum member) of the class body; a class without texts gives {}."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for item, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        target: ast.expr | None = item.target if isinstance(item, ast.AnnAssign) else None
        if isinstance(item, ast.Assign):
            target = item.targets[0]
        if (
            isinstance(target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[target.id] = " ".join(str(following.value.value).split())
    return found


def default_of(item: dataclasses.Field[Any]) -> str:
    """Return a field's default as it would be typed."""
    value = item.default
    if value is MISSING:
        value = item.default_factory() if item.default_factory is not MISSING else "???"
    if value == "???":
        return "required"
    return f"`{typed(value)}`"


def typed(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list):
        return "[" + ",".join(typed(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{}" if not value else json.dumps(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or "''"


def choices(hint: Any) -> str:
    """Return the members of an enum type with their texts, or nothing."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and issubclass(kind, Enum):
            texts = field_texts(kind)
            if not texts:
                return " One of " + ", ".join(f"`{one.value}`" for one in kind) + "."
            return "".join(f"<br>`{one.value}`: {texts.get(one.name, '')}" for one in kind)
    return ""


def rows(kind: type, prefix: str, *, inherited: bool = False, skip: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a table row for each field of `kind`; without `inherited`, of those its class body states."""
    hints = get_type_hints(kind)
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if dataclasses.is_dataclass(one):
            texts |= field_texts(one)
    own = set(inspect.get_annotations(kind))
    restated = {name for one in kind.__mro__[1:] for name in inspect.get_annotations(one)}
    for item in fields(kind):
        if item.name in skip or not (inherited or item.name in own):
            continue
        meaning = texts.get(item.name, "").replace("None:", "null:")
        if item.name not in restated:
            meaning += choices(hints[item.name])
        # `study` is how the command line writes it.
        name = "study" if item.name == "study_name" else item.name
        yield f"| `{prefix}{name}` | {default_of(item)} | {cell(meaning)} |"


def cell(text: str) -> str:
    """Return `text` with the bars that would end a table's cell escaped."""
    return text.replace("|", "\\|")


def table(
    lines: Iterator[str] | list[str], heads: tuple[str, ...] = ("key", "default", "meaning")
) -> list[str]:
    """Return a Markdown table; nothing for no lines."""
    body = list(lines)
    if not body:
        return []
    return ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads), *body, ""]


def summary(kind: type) -> str:
    """Return a class's docstring in one line; nothing for the one that `dataclass` makes up."""
    text = kind.__doc__ or ""
    return "" if text.startswith(f"{kind.__name__}(") else " ".join(text.split())


def norm_rows() -> Iterator[str]:
    """One row a parameter, with the norms that have it."""
    owners: dict[str, list[type[params.NormParams]]] = {}
    for kind in params.BUILTIN_PARAMS.values():
        for item in fields(kind):
            owners.setdefault(item.name, []).append(kind)
    for name, kinds in owners.items():
        helps = [str(item.metadata["help"]) for kind in kinds for item in fields(kind)
                 if item.name == name and "help" in item.metadata]  # fmt: skip
        by_default: dict[str, list[str]] = {}
        for kind in kinds:
            item = next(one for one in fields(kind) if one.name == name)
            by_default.setdefault(default_of(item), []).append(kind.norm)
        default = (
            next(iter(by_default)) if len(by_default) == 1 else "<br>".join(defaults_in_words(by_default))
        )
        hint = get_type_hints(kinds[0])[name]
        text = NORM_TEXTS.get(name) or (helps[-1] if helps else "")
        yield f"| `norm.{name}` | {default} | {cell(text + choices(hint))} | {norms_in_words(kinds)} |"


def norms_in_words(kinds: list[type[params.NormParams]]) -> str:
    """Return the norms' names, or those of the others where these are fewer."""
    others = [kind.norm for kind in params.BUILTIN_PARAMS.values() if kind not in kinds]
    if len(others) < len(kinds):
        return f"all but {', '.join(others)}"
    return ", ".join(kind.norm for kind in kinds)


def defaults_in_words(by_default: dict[str, list[str]]) -> Iterator[str]:
    """Yield a line for each default; the one that most norms have comes last and names none of them."""
    usual = max(by_default, key=lambda value: len(by_default[value]))
    for value, norms in by_default.items():
        if value != usual:
            yield f"{value}: {', '.join(norms)}"
    yield f"{usual}: the others"


NORM_TEXTS = {
    "eps": "Added to the denominator; 0 is allowed.",
    "eps_position": "Where eps is added.",
    "gain": "Whether the output is multiplied by a learned gain (`weight`, ones at the start).",
    "bias": "Whether a learned bias is added (zeros at the start).",
    "alpha": "The slope at the start; it is learned.",
    "casting": "Where half-precision input is rounded.",
    "momentum": "Weight of the newest batch in the running statistics, in (0, 1].",
    "p": "Fraction of the entries that the statistic reads, in (0, 1].",
    "k_rule": "How p * width becomes a whole number.",
    "variant": "Preset of eps, eps_position and, for prmsnorm, k_rule; values given explicitly win.",
}


def size_rows(presets: dict[schema.Size, dict[str, Any]]) -> tuple[list[str], tuple[str, ...]]:
    """Return the rows and heads of a table of size presets."""
    keys = list(next(iter(presets.values())))
    lines = [
        f"| `{size.value}` | " + " | ".join(f"`{typed(preset[key])}`" for key in keys) + " |"
        for size, preset in presets.items()
    ]
    return lines, ("size", *(f"`model.{key}`" for key in keys))


def generated() -> str:
    """Return the generated part of the page."""
    out: list[str] = []

    def section(title: str, text: str = "") -> None:
        out.extend([f"### {title}", ""])
        if text:
            out.extend([*textwrap.wrap(text, 110, break_long_words=False), ""])

    section("The run", summary(schema.TrainConfig))
    out.extend(table(rows(schema.TrainConfig, "", skip=OWN)))
    section("`norm`", "`norm=NAME` or `norm=package.module:Class`. The equations: [norms.md](norms.md).")
    out.extend(table(norm_rows(), ("key", "default", "meaning", "norms that have it")))
    section("`model`", summary(schema.ModelConfig))
    out.extend(table(rows(schema.ModelConfig, "model.", skip=("name",))))
    for name, model, presets in (
        ("transformer", schema.TransformerConfig, sizes.TRANSFORMER_SIZES),
        ("gru", schema.GRUConfig, sizes.GRU_SIZES),
    ):
        section(f"`model={name}`", summary(model))
        out.extend(table(rows(model, "model.", skip=("name",))))
        out.extend(table(*size_rows(presets)))
    section("`task`")
    for name, task in (("lm", schema.LMConfig), ("translation", schema.TranslationConfig)):
        lines = table(rows(task, "task.", skip=("name",)))
        out.extend([f"`task={name}`: {summary(task) or 'Source sentences to target sentences.'}"
                    + ("" if lines else " It has no keys."), "", *lines])  # fmt: skip
    section("`data`", "Keys that every source has. A source may have another default, shown below.")
    out.extend(table(rows(schema.DataConfig, "data.", skip=("name",))))
    out.extend(["Sources of `task=translation` (cldr, multi30k, wmt14, parallel_files) have besides:", ""])
    out.extend(table(rows(schema.TranslationDataConfig, "data.", skip=("name",))))
    for name, source in SOURCES:
        base = [one for one in source.__mro__ if one is schema.PathDataConfig]
        lines = [line for one in base for line in rows(one, "data.", skip=("name",))]
        lines += rows(source, "data.", skip=("name",))
        doc = summary(source)
        out.extend([f"`data={name}`" + (f": {doc}" if doc else ""), "", *table(lines)])
    section("`optim`", summary(schema.OptimConfig))
    out.extend(table(rows(schema.OptimConfig, "optim.")))
    section(
        "`trainer`",
        "`trainer=cpu` is the same with `trainer.accelerator=cpu`. `trainer=ddp` trains a run in two "
        "processes or more, `trainer=fsdp` in one a GPU, with its part of the model: [scale](scale.md).",
    )
    out.extend(table(rows(schema.TrainerConfig, "trainer.")))
    section("`tracker`", summary(schema.TrackerConfig) + " `tracker=none|wandb` chooses.")
    out.extend(table(rows(schema.TrackerConfig, "tracker.")))
    section(
        "`bench`", summary(bench.BenchConfig) + " Only `rmsrepro bench` (and `reproduce`) has these keys."
    )
    out.extend(table(rows(bench.BenchConfig, "bench.")))
    section(
        "`tuning`",
        "What `rmsrepro sweep tune=true` draws for every norm ([how](method.md#tuning)). Only it has these "
        "keys, one value each. Lists of other keys make cells, each tuned by itself with the same points.",
    )
    out.extend(table(rows(tuning.TuningConfig, "tuning.")))
    section("A study file", summary(study.StudyConfig) + " A file `conf/study/NAME.yaml`.")
    out.extend(table(rows(study.StudyConfig, "", skip=("bench", "benches", "claims", "jobs"))))
    out.extend(table(rows(study.StudyJobs, "jobs.")))
    out.extend(["`bench` is a timing, `benches` a list of them, each with these keys:", ""])
    out.extend(table(rows(study.StudyBench, "")))
    out.extend(["`claims` is a list, each entry with these keys (see [claims.md](claims.md)):", ""])
    claims = rows(study.StudyClaims, "", skip=("by",))
    out.extend(table([*claims, *rows(study.ClaimTest, "by.")]))
    return "\n".join(out).rstrip()


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
                f"{PAGE.relative_to(ROOT)} is out of date: python scripts/document_config.py", file=sys.stderr
            )
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
