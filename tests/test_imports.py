"""Imports point one way, and what only reads configuration starts without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from rmsrepro.cli import HELP
from rmsrepro.verbs import FUNCTIONS, find

VERBS = ("train", "eval", "translate", "sample", "sweep", "status", "bench", "reproduce", "report", "norms")
VERBS += ("check-norm",)
HEAVY = ("torch", "lightning", "datasets", "wandb", "pandas", "scipy")


def test_import_linter_contracts_hold(repo_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from importlinter.cli import lint_imports

    exit_code = lint_imports(str(repo_root / "pyproject.toml"), no_cache=True, no_logo=True)
    report = capsys.readouterr().out
    assert exit_code == 0, report
    assert "0 broken" in report


def test_every_package_has_a_place_in_the_import_contracts(repo_root: Path) -> None:
    settings = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))
    placed = set(re.findall(r"rmsrepro\.(\w+)", str(settings["tool"]["importlinter"]["contracts"])))
    packages = {path.parent.name for path in (repo_root / "rmsrepro").glob("*/__init__.py")}
    assert packages - placed == set()


@pytest.mark.parametrize(
    "module", ["rmsrepro", "rmsrepro.config.schema", "rmsrepro.norms.params", "rmsrepro.cli"]
)
def test_module_is_imported_without_heavy_packages(module: str) -> None:
    program = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_help_is_answered_without_heavy_packages() -> None:
    program = "import sys; from rmsrepro.cli import main; sys.argv = ['rmsrepro', '--help']; sys.exit(main())"
    # -X importtime lists every module that is imported, on stderr, one a line after the last "|".
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert "rmsrepro" in imported
    assert imported & set(HEAVY) == set()
    for verb in VERBS:
        assert re.search(rf"\b{verb}\b", result.stdout), f"{verb} is missing from --help"


def test_a_training_run_imports_little_besides_torch_and_lightning() -> None:
    """No package for reports, translation or trackers: each would be paid for by every run and worker."""
    watched = (
        "import sys; import torch, lightning; before = set(sys.modules); from rmsrepro.cli import main; "
        "code = main(['train', 'norm=rmsnorm', 'debug=fast', 'tracker=none']); "
        "print(code); print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True, check=True)
    code, modules = done.stdout.splitlines()[-2:]
    assert code == "0", done.stderr
    imported = set(modules.split())
    assert "rmsrepro.runs.execution" in imported
    others = (
        "pandas",
        "plotly",
        "jinja2",
        "datasets",
        "pyarrow",
        "tokenizers",
        "sacrebleu",
        "babel",
        "num2words",
    )
    others += ("wandb", "joblib", "submitit")
    assert imported & set(others) == set()
    assert {name.split(".")[1] for name in imported if name.startswith("rmsrepro.")} == {
        "cli", "config", "data", "models", "norms", "runs", "tasks", "verbs",
    }  # fmt: skip
    verbs = {name for name in imported if name.startswith("rmsrepro.verbs.")}
    assert verbs == {f"rmsrepro.verbs.{name}" for name in ("common", "failures", "training")}


def test_every_verb_has_a_function() -> None:
    assert list(FUNCTIONS) == list(HELP)
    for verb in FUNCTIONS:
        assert callable(find(verb)), verb


def imported_distributions(root: Path) -> set[str]:
    """The distributions that the modules under `root` import, by their normalised names."""
    names: set[str] = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
    third_party = names - set(sys.stdlib_module_names) - {"rmsrepro"}
    owners = packages_distributions()
    # `hydra_plugins` is a namespace that several distributions share; the others come with extras.
    return {
        owners.get(name, [name])[0].lower().replace("_", "-")
        for name in third_party - {"hydra_plugins", "submitit", "triton"}
    }


def test_every_imported_distribution_is_declared(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=!~; \[]", entry)[0].lower() for entry in project["dependencies"]}
    assert imported_distributions(repo_root / "rmsrepro") - declared == set()
