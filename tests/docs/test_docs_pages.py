"""What the README and the pages of docs/ state about the package is so: links, paths, names, keys, tables."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest

from rmsrepro.cli import HELP
from rmsrepro.config.compose import Composer, _keys
from rmsrepro.config.overrides import split_override
from rmsrepro.norms import list_norms, norm_info
from rmsrepro.norms.params import BUILTIN_PARAMS, PRESETS
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def tables(page: Path) -> list[list[list[str]]]:
    """The tables of a page as rows of cells, heads first, without the rule below them."""
    found: list[list[list[str]]] = []
    for line in [*prose(page).split("\n"), ""]:
        if not line.startswith("|"):
            found.append([])
        elif not set(line) <= set("|- "):
            found[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return [table for table in found if table]


def code(cell: str) -> list[str]:
    """The words in backticks of a table's cell."""
    return re.findall(r"`([^`]+)`", cell)


# --------------------------------------------------------------------------------- links and paths


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def written_by_readers() -> set[str]:
    """Files that the pages tell their readers to write: the first line of a block is their name."""
    blocks = itertools.chain.from_iterable(FENCE.findall(page.read_text(encoding="utf-8")) for page in PAGES)
    return {
        name
        for block in blocks
        for name in re.findall(r"\A```\w+\n(?:# @.*\n)?# (\S+\.\w+)$", block, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_exist(page: Path) -> None:
    mentioned = {
        word
        for span in re.findall(r"`([^`]+)`", prose(page))
        for word in span.split()
        if re.match(r"(rmsrepro|conf|docs|scripts|tests)/[\w.*/-]*$", word)
        and not re.search(r"[A-Z]{4}", word)
    }
    # A wheel carries conf/ as rmsrepro/conf; experiment=mine is the reader's own.
    mentioned -= written_by_readers() | {"rmsrepro/conf"}
    assert sorted(path for path in mentioned if not list(ROOT.glob(path))) == []


def test_the_map_names_what_is_there() -> None:
    (map_,) = [table for table in tables(ROOT / "README.md") if table[0] == ["You look for", "File", "Name"]]
    missing = []
    for _, files, names in map_[1:]:
        texts = [
            file.read_text(encoding="utf-8")
            for file in (ROOT / name for name in code(files))
            if file.is_file()
        ]
        assert texts, files
        missing += [
            (files, name)
            for name in code(names)
            if not re.search(
                rf"^\s*(?:def|class) {name}\b|^{name}\b.* =", "\n".join(texts), flags=re.MULTILINE
            )
        ]
    assert missing == []
    assert {"build_norm", "DATAFLOWS", "training_step"} <= {name for row in map_ for name in code(row[2])}


def test_readme_says_nothing_of_verbs_that_are_not_there() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    used = set(re.findall(r"^rmsrepro ([a-z][a-z-]*)", text, re.MULTILINE))
    used |= set(re.findall(r"`rmsrepro ([a-z][a-z-]*)[ `]", text))
    assert used <= set(HELP)
    assert set(HELP) <= used


# ----------------------------------------------------------------------------------- configuration


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """scripts/document_config.py."""
    return load_script("document_config.py")


def test_configuration_page_is_up_to_date(generator: ModuleType) -> None:
    page = generator.PAGE.read_text(encoding="utf-8")
    assert generator.page_with(generator.generated(), page) == page, "run: python scripts/document_config.py"


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    norms = {name: norm_info(name).params_class for name in list_norms()}
    choices = [
        ["task=lm", f"data={data}", f"model={model}"]
        for data in ("pydoc", "tinyshakespeare", "wikitext", "text_files")
        for model in ("gru", "transformer")
    ]
    choices += [
        ["task=translation", f"data={data}"] for data in ("cldr", "multi30k", "wmt14", "parallel_files")
    ]
    keys: set[str] = set()
    with Composer(norms) as composer:
        for chosen in choices:
            keys |= set(_keys(composer.raw([split_override(item) for item in chosen])))
    with Composer(norms, "bench") as composer:
        keys |= set(_keys(composer.raw([])))
    # Names follow from the choice of the group; study_name is written study.
    names = {"norm.name", "model.name", "task.name", "data.name", "study_name"}
    assert len(keys) > 90
    assert sorted(key for key in keys - names if f"| `{key}` |" not in text) == []


def test_every_key_says_what_it_means() -> None:
    silent = [
        row[0]
        for table in tables(ROOT / "docs" / "configuration.md")
        if table[0][:3] == ["key", "default", "meaning"]
        for row in table[1:]
        if not row[2]
    ]
    assert silent == []


def test_options_of_the_verbs_are_documented() -> None:
    (listed,) = [table for table in tables(ROOT / "docs" / "configuration.md") if table[0][0] == "Verb"]
    told = {code(row[0])[0]: row[1] for row in listed[1:]}
    assert set(told) == set(HELP)
    for file in (ROOT / "rmsrepro" / "verbs").glob("*.py"):
        for kind in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(kind, ast.ClassDef) and kind.name.endswith("Verb"):
                verb = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.name.removesuffix("Verb")).lower()
                for field in kind.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        assert re.search(rf"`{field.target.id}[=`]", told[verb]), (verb, field.target.id)


def test_choices_named_in_the_page_are_all_there_are() -> None:
    from rmsrepro.config.paths import group_choices

    text = " ".join(prose(ROOT / "docs" / "configuration.md").split())
    for group in ("experiment", "study", "optim", "trainer", "tracker", "debug", "bench", "model", "task"):
        told = re.search(rf"`{group}` \(([^)]*)\)", text)
        assert told is not None, group
        named = set(re.findall(r"[a-z]\w+", told[1].split(":")[0]))
        assert named == set(group_choices(group)), group


# -------------------------------------------------------------------------------------------- norms


def test_norms_page_lists_the_norms_and_presets() -> None:
    page = ROOT / "docs" / "norms.md"
    norms = next(table for table in tables(page) if table[0][0] == "Norm")
    assert [name for row in norms[1:] for name in code(row[0])] == list(BUILTIN_PARAMS)
    presets = next(table for table in tables(page) if table[0][0] == "`variant`")
    told = {code(row[0])[0]: (float(row[1]), row[2], row[3]) for row in presets[1:]}
    assert told == {
        variant.value: (values["eps"], values["eps_position"].value, values["k_rule"].value)
        for variant, values in PRESETS.items()
    }


def test_data_page_names_the_sources_and_files() -> None:
    from rmsrepro.data.files import SPLIT_NAMES, TABLE_SUFFIXES, TEXT_SUFFIXES
    from rmsrepro.data.parallel import PARALLEL_SOURCES
    from rmsrepro.data.text import TEXT_SOURCES

    page = ROOT / "docs" / "data.md"
    sources, splits, formats, *_ = tables(page)
    assert [code(row[0])[0] for row in sources[1:]] == [*TEXT_SOURCES, *PARALLEL_SOURCES]
    assert [set(code(row[1])) for row in splits[1:]] == [set(names) for names in SPLIT_NAMES.values()]
    assert set(code(formats[1][1])) == {*TEXT_SUFFIXES, *TABLE_SUFFIXES}
    assert set(code(formats[2][1])) == set(TABLE_SUFFIXES)


def test_models_page_counts_the_norms() -> None:
    import torch

    from rmsrepro.config.schema import Placement, Size, TransformerConfig
    from rmsrepro.config.sizes import resolve_model
    from rmsrepro.models import build_model
    from rmsrepro.norms import NormSpec, is_norm

    listed = next(table for table in tables(ROOT / "docs" / "models.md") if table[0][0] == "`placement`")
    branches = 4  # a decoder of two layers
    assert [code(row[0])[0] for row in listed[1:]] == [placement.value for placement in Placement]
    for row in listed[1:]:
        expected = eval(row[2].replace("2 R", "2 * R"), {"R": branches})
        model = build_model(
            resolve_model(TransformerConfig(size=Size.tiny)),
            "lm",
            src_vocab=8,
            tgt_vocab=8,
            max_len=4,
            norm=NormSpec("rmsnorm"),
            placement=Placement(code(row[0])[0]),
            sites=[],
            seed=1,
        )
        assert isinstance(model, torch.nn.Module)
        assert sum(is_norm(module) for module in model.modules()) == expected, row[0]


def test_rules_of_the_verdict_are_told_in_order() -> None:
    from rmsrepro.report.verdict import RULES

    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    rules = re.findall(r"^\d+\. `([a-z]+(?: \([^)`]*\))?)`", text, re.MULTILINE)
    assert rules == [rule.split(":")[0].split(" by")[0] for rule in RULES[1:]]


def test_claims_page_is_up_to_date() -> None:
    ledger = load_script("document_claims.py")
    page = ledger.PAGE.read_text(encoding="utf-8")
    assert ledger.page_with(ledger.generated(), page) == page, "run: python scripts/document_claims.py"


def test_claims_page_tells_the_rules_in_order() -> None:
    from rmsrepro.paper import RULES, ClaimOutcome

    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    told = re.findall(r"^\d+\. `([a-z ]+)`", text, re.MULTILINE)
    heads = [rule.split(":")[0] for rule in RULES]
    assert list(dict.fromkeys(told)) == [
        head for head in heads if head in {one.value for one in ClaimOutcome}
    ]
    assert set(told) == {one.value for one in ClaimOutcome}


def test_claims_page_names_every_claim_of_the_studies() -> None:
    from rmsrepro.paper import study_jobs
    from rmsrepro.paper.study_files import BY_COST, built_in

    (listed,) = [table for table in tables(ROOT / "docs" / "claims.md") if table[0][0] == "study"]
    assert [code(row[0])[0] for row in listed[1:]] == list(BY_COST)
    assert [int(row[2]) for row in listed[1:]] == [len(study_jobs(built_in(name))) for name in BY_COST]


def test_dataclasses_of_the_pages_are_dataclasses() -> None:
    """The generator reads the texts under fields; a class without them would leave empty cells."""
    from rmsrepro.config import schema

    kinds = [value for value in vars(schema).values() if dataclasses.is_dataclass(value)]
    assert len(kinds) > 15
