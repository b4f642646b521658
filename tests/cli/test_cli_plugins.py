"""The user's own norms: registered by a plug-in, named by an import string, or by a file of ./conf."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmsrepro.norms import registry
from tests.cli.running import LM, Ran, records

Run = Callable[..., Ran]
SHORT = [*LM, "trainer.max_steps=2", "trainer.progress=false"]

MODULE = '''
import torch
from torch import nn

from rmsrepro.norms import register_norm


@register_norm("powernorm")
class PowerNorm(nn.Module):
    """Divide by the p-norm."""

    def __init__(self, dim: int, *, power: float = 3.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.power, self.eps = power, eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = None

    def forward(self, x):
        size = (x.abs().pow(self.power).mean(-1, keepdim=True) + self.eps).pow(1 / self.power)
        return x / size * self.weight


class Plain(nn.Module):
    """Named by an import string only."""

    def __init__(self, dim: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * self.weight * self.scale
'''


@pytest.fixture
def module() -> Iterator[str]:
    """A module in the current directory, under a name that no other test uses."""
    before, known = list(sys.path), set(sys.modules)
    registered, strings = dict(registry._registered), dict(registry._import_strings)
    Path("my_norms.py").write_text(MODULE)
    yield "my_norms"
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if name.endswith("_norms"):
            del sys.modules[name]
    for table, content in ((registry._registered, registered), (registry._import_strings, strings)):
        table.clear()
        table.update(content)


def test_a_plugin_of_the_current_directory(cli: Run, module: str) -> None:
    ran = cli("train", *SHORT, f"plugins=[{module}]", "norm=powernorm", "norm.power=2", "model=gru")
    assert ran.code == 0, ran.err
    [record] = records().values()
    assert (record["norm"], record["norm_params"]) == ("powernorm", {"power": 2.0, "eps": 1e-5})
    assert record["backend_used"] == "composite"
    assert record["config"]["plugins"] == ["my_norms"]
    # The checkpoint finds the norm again in a program that has its module.
    assert cli("eval", f"ckpt=outputs/runs/{record['run_id']}", "split=val").code == 0
    listed = cli("norms", f"plugins=[{module}]")
    assert "power=3" in listed.out
    assert "Divide by the p-norm." in " ".join(listed.out.split())


def test_an_import_string(cli: Run, module: str) -> None:
    assert cli("train", *SHORT, f"norm={module}:Plain", "norm.scale=0.5").code == 0
    [record] = records().values()
    assert (record["norm"], record["norm_params"]) == ("my_norms:Plain", {"scale": 0.5})
    assert record["run_id"].startswith("lm-pydoc-transformer-my_norms_Plain-s1-")
    assert "nothing to do" in cli("train", *SHORT, f"norm={module}:Plain", "norm.scale=0.5").out
    assert (
        "my_norms:Plain has no parameter eps (it has: scale)"
        in cli("train", *SHORT, f"norm={module}:Plain", "norm.eps=1").error
    )


def test_the_module_is_part_of_the_identity(cli: Run, module: str) -> None:
    def run_id() -> str:
        ran = cli("sweep", *SHORT, f"norm={module}:Plain", "dry_run=true")
        return ran.out.splitlines()[2].split()[-1]

    first = run_id()
    Path("my_norms.py").write_text(MODULE + "\n# changed\n")
    assert run_id() != first
    Path("my_norms.py").write_text(MODULE)
    assert run_id() == first


def test_a_file_of_the_user_may_name_an_import_string(cli: Run, module: str) -> None:
    Path("conf/norm").mkdir(parents=True)
    Path("conf/norm/half.yaml").write_text("name: my_norms:Plain\nscale: 0.5\n")
    Path("conf/norm/other.yaml").write_text("name: no_such_module:Norm\n")
    assert cli("train", *SHORT, "norm=half").code == 0
    [record] = records().values()
    assert (record["norm"], record["norm_params"]) == ("my_norms:Plain", {"scale": 0.5})
    assert "no module 'no_such_module'" in cli("train", *SHORT, "norm=other").error


def experiment(text: str) -> None:
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text(f"# @package _global_\n{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "plugins: [my_norms]",
        "plugins:\n  - my_norms\nnorm:\n  power: 2.0",
        "defaults:\n  - override /norm: powernorm\nplugins: [my_norms]",
    ],
)
def test_a_plugin_that_only_an_experiment_names(cli: Run, module: str, text: str) -> None:
    experiment(text)
    chosen = [] if "override" in text else ["norm=powernorm"]
    ran = cli("train", *SHORT, "experiment=mine", *chosen)
    assert ran.code == 0, ran.err
    [record] = records().values()
    assert (record["norm"], record["status"]) == ("powernorm", "completed")
    assert record["norm_params"]["power"] == (2.0 if "power:" in text else 3.0)
    assert record["config"]["plugins"] == ["my_norms"]


def test_an_experiments_plugin_in_workers(program: Run, cli: Run, module: str) -> None:
    experiment("plugins: [my_norms]")
    Path("conf/experiment/bare.yaml").write_text("# @package _global_\nseed: 3\n")
    ran = program("sweep", *SHORT, "experiment=mine", "norm=rmsnorm,powernorm", "n_jobs=2")
    assert ran.code == 0, ran.out + ran.err
    assert {record["norm"]: record["status"] for record in records().values()} == {
        "rmsnorm": "completed", "powernorm": "completed",
    }  # fmt: skip
    refused = cli("sweep", *SHORT, "experiment=bare", "norm=powernorm", "dry_run=true")
    assert "norm=powernorm: there is no such norm" in refused.error


def test_the_command_line_goes_before_an_experiments_plugins(cli: Run, module: str) -> None:
    experiment("plugins: [no_such_module]")
    assert "plugins=[no_such_module]: no module named" in cli("train", *SHORT, "experiment=mine").error
    ran = cli("train", *SHORT, "experiment=mine", "plugins=[my_norms]", "norm=powernorm")
    assert ran.code == 0, ran.err


def test_other_programs_find_the_norm_of_a_checkpoint(program: Run, cli: Run, module: str) -> None:
    for arguments in (["plugins=[my_norms]", "norm=powernorm"], ["norm=my_norms:Plain"]):
        assert cli("train", *SHORT, *arguments).code == 0
    for run_id, record in records().items():
        ran = program("eval", f"ckpt=outputs/runs/{run_id}", "split=val")
        assert ran.code == 0, ran.err
        loss = next(line.split()[1] for line in ran.out.splitlines() if line.split()[0] == "val_loss")
        assert float(loss) == pytest.approx(record["metrics"]["val_loss"], abs=1e-3)
    Path("my_norms.py").unlink()
    [named] = [run_id for run_id, record in records().items() if record["norm"] == "powernorm"]
    message = program("sample", f"ckpt=outputs/runs/{named}").error
    assert "plugins=[my_norms]: no module named 'my_norms'" in message


TYPED = """
from enum import Enum
from torch import nn


class Kind(Enum):
    MEAN = "mean"
    LARGEST = "largest"


class Typed(nn.Module):
    def __init__(
        self, dim, *, kind: Kind = Kind.MEAN, cap: float | None = 1.0, count: int = 2, word="a", on=True
    ) -> None:
        super().__init__()

    def forward(self, x):
        return x
"""


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("norm.kind=largest", "kind", "largest"),
        ("norm.kind=LARGEST", "kind", "largest"),
        ("norm.cap=null", "cap", None),
        ("norm.cap=0.5", "cap", 0.5),
        ("norm.count=3", "count", 3),
        ("norm.word=7", "word", "7"),
        ("norm.word='x y'", "word", "x y"),
        ("norm.on=false", "on", False),
    ],
)
def test_values_of_every_type(cli: Run, module: str, text: str, key: str, value: object) -> None:
    Path("my_norms.py").write_text(TYPED)
    ran = cli("train", *SHORT, "trainer.max_steps=1", f"norm={module}:Typed", text)
    assert ran.code == 0, ran.err
    [record] = records().values()
    defaults = {"kind": "mean", "cap": 1.0, "count": 2, "word": "a", "on": True}
    assert record["norm_params"] == defaults | {key: value}
    # The record says enough to make the norm again.
    again = cli("eval", f"ckpt=outputs/runs/{record['run_id']}", "split=val")
    assert again.code == 0, again.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("norm.kind=larges", "kind must be one of mean, largest, got 'larges'; did you mean largest?"),
        ("norm.cap=high", "norm.cap=high: expected a number"),
        ("norm.count=2.5", "norm.count=2.5: expected a whole number"),
        ("norm.count=null", "norm.count=null: it cannot be null"),
        ("norm.on=maybe", "norm.on=maybe: expected true or false"),
        ("norm.coun=3", "there is no key norm.coun with norm=my_norms:Typed; did you mean norm.count"),
        ("norm.eps=1", "norm.eps=1.0: my_norms:Typed has no parameter eps"),
    ],
)
def test_wrong_values_of_every_type(cli: Run, module: str, text: str, message: str) -> None:
    Path("my_norms.py").write_text(TYPED)
    assert message in cli("train", *SHORT, f"norm={module}:Typed", text).error
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("my_norms:Nothing", "has no attribute 'Nothing'"),
        ("no_such_module:Norm", "No module named 'no_such_module'"),
        ("my_norms:MODULE", "must be a class derived from torch.nn.Module"),
        ("failing_norms:Norm", "ZeroDivisionError"),
    ],
)
def test_an_installed_plugin_that_fails(
    cli: Run, module: str, monkeypatch: pytest.MonkeyPatch, value: str, reason: str
) -> None:
    Path("my_norms.py").write_text(MODULE + "\n\nMODULE = 1\n")
    Path("failing_norms.py").write_text("1 / 0\n")
    point = importlib.metadata.EntryPoint("plugged", value, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda: {"plugged": point})
    # Its norm is refused with the reason, and no other command minds.
    refused = cli("train", *SHORT, "norm=plugged").error
    assert refused.startswith("norm=plugged: ")
    assert reason in refused
    assert reason in cli("norms", "norm=plugged").error
    ran = cli("norms")
    assert ran.code == 0
    assert "rmsnorm" in ran.out
    assert "note: a plug-in cannot be used: norm=plugged: " in ran.err
    assert reason in ran.err
    assert cli("train", "norm=rmsnorm", "show=true").code == 0


def test_two_installed_plugins_of_one_name(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        importlib.metadata.EntryPoint("plugged", value, registry.ENTRY_POINT_GROUP)
        for value in ("a:A", "b:B")
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry._entry_points.cache_clear()
    try:
        assert "the norm 'plugged' is offered twice, by a:A and by" in cli("train", "norm=rmsnorm").error
    finally:
        registry._entry_points.cache_clear()


@pytest.mark.slow
def test_processes_of_a_bench_find_the_users_norms(program: Run, module: str) -> None:
    experiment("plugins: [my_norms]")
    Path("conf/norm").mkdir(parents=True)
    Path("conf/norm/half.yaml").write_text("name: my_norms:Plain\nscale: 0.5\n")
    timing = ["bench.processes=2", "bench.budget_s=2", "bench.warmup_s=0.05", "bench.rounds=5"]
    ran = program(
        "bench", *LM, *timing, "bench.num_threads=1", "model=gru", "experiment=mine",
        "norm=powernorm,my_norms:Plain,half",
    )  # fmt: skip
    assert ran.code == 0, ran.out + ran.err
    [file] = Path("outputs/bench").glob("*/result.json")
    result = json.loads(file.read_text())
    assert {arm["arm"]: arm["status"] for arm in result["arms"]} == {
        "layernorm/composite": "measured",
        "powernorm/composite": "measured",
        "my_norms:Plain/composite": "measured",
        "my_norms:Plain(scale=0.5)/composite": "measured",
    }
    assert len(result["comparisons"]) == 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("broken_norms", "1 / 0", "plugins=[broken_norms]: importing it failed: ZeroDivisionError"),
        (
            "broken_norms",
            "import no_such_thing",
            "plugins=[broken_norms]: importing it failed: No module named 'no_such_thing' "
            "(broken_norms.py, line 1)",
        ),
        ("broken_norms", "def (", "plugins=[broken_norms]: importing it failed: SyntaxError"),
        ("exiting_norms", "raise SystemExit(0)", "plugins=[exiting_norms]: importing it failed: SystemExit"),
        (
            "taken_norms",
            MODULE.replace("powernorm", "rmsnorm"),
            "importing it failed: ValueError: the norm 'rmsnorm' is registered already",
        ),
    ],
)  # fmt: skip
def test_a_plugin_that_fails(cli: Run, module: str, name: str, text: str, message: str) -> None:
    Path(f"{name}.py").write_text(text)
    assert message in cli("train", "show=true", f"plugins=[{name}]").error
    assert records() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODULE.replace("super().__init__()", "raise RuntimeError('no room')"), "RuntimeError: no room"),
        (
            MODULE.replace("scale: float = 1.0", "scale"),
            "the parameter 'scale' needs an annotation or a default",
        ),
        ("class Plain: pass", "must be a class derived from torch.nn.Module"),
    ],
)
def test_a_class_that_is_no_norm(cli: Run, module: str, text: str, message: str) -> None:
    Path("my_norms.py").write_text(text)
    assert message in cli("train", *SHORT, f"norm={module}:Plain").error


def test_workers_find_the_users_norms(program: Run, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Path("it's [my] dir, ~x {y} $z")
    odd.mkdir()
    monkeypatch.chdir(odd)
    Path("my_norms.py").write_text(MODULE)
    Path("conf/norm").mkdir(parents=True)
    Path("conf/norm/soft.yaml").write_text("name: powernorm\npower: 2.5\n")
    ran = program(
        "sweep", *SHORT, f"plugins=[{module}]", f"norm=layernorm,powernorm,soft,{module}:Plain",
        "norm.power=2", "launcher=joblib", "n_jobs=2",
    )  # fmt: skip
    assert ran.code == 0, ran.out + ran.err
    found = {record["norm"]: record for record in records().values()}
    assert {name: record["status"] for name, record in found.items()} == {
        "layernorm": "completed", "powernorm": "completed", "my_norms:Plain": "completed",
    }  # fmt: skip
    # soft is powernorm, and norm.power on the command line goes before its file: one and the same.
    assert found["powernorm"]["norm_params"]["power"] == 2.0
    assert "1 of 4 jobs are the same as others and were merged" in ran.out
