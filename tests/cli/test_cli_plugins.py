"""The user's own norms: registered by a plug-in, named by an import string, or by a file of ./conf."""

from __future__ import annotations

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
        if name in ("my_norms", "broken_norms", "taken_norms", "exiting_norms"):
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
    assert "power=3.0" in listed.out
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


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("broken_norms", "1 / 0", "plugins=[broken_norms]: importing it failed: ZeroDivisionError"),
        ("broken_norms", "import no_such_thing", "no module named 'no_such_thing'"),
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
