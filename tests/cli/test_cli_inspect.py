"""rmsrepro inspect: targets, what it prints and writes, exit codes."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.running import Ran

Run = Callable[..., Ran]

MODELS = '''
import torch
from torch import nn


class RMSNorm(nn.Module):
    """Subtracts the mean, whatever its name says."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x) * self.weight


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def clean(norm=None):
    make = norm or (lambda dim: nn.RMSNorm(dim, eps=1e-6))
    return nn.Sequential(*(Block(make) for _ in range(3)))


def leftover():
    return nn.Sequential(*(Block(make) for make in (rms, rms, RMSNorm, nn.LayerNorm))), torch.randn(2, 5, 16)


def rms(dim):
    return nn.RMSNorm(dim, eps=1e-6)


def built(norm):
    return nn.Sequential(norm.build(16), nn.Linear(16, 16), norm(16)), torch.randn(2, 16)


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(16), nn.Linear(16, 16))


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 16)


instance = nn.RMSNorm(16, eps=1e-6)
number = 3


def nothing():
    pass


def broken():
    raise RuntimeError("no weights here\\nsecond line")


def leaves():
    raise SystemExit(3)


def greedy(dim, depth):
    return nn.Identity()


def misfit():
    return nn.Linear(4, 4), torch.randn(2, 5)


class Unrunnable(nn.Module):
    def forward(self, x):
        raise SystemExit(0)


def unrunnable():
    return Unrunnable(), torch.randn(2, 5)


class OverTime(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)


def over_time():
    return nn.Sequential(nn.Linear(16, 16), OverTime()), torch.randn(2, 5, 16)


class Inner:
    plain = staticmethod(lambda: nn.GELU())
'''


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the current directory, forgotten afterwards."""
    Path("models.py").write_text(MODELS)
    Path("failing.py").write_text("raise KeyError('weights')\n")
    Path("needy.py").write_text("import not_installed\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    yield
    for name in ("models", "failing", "needy"):
        sys.modules.pop(name, None)


def record(target: str, folder: str = "outputs") -> dict[str, object]:
    content: dict[str, object] = json.loads(Path(folder, "inspections", f"{target}.json").read_text())
    return content


def test_a_clean_model(cli: Run) -> None:
    ran = cli("inspect", "models:clean", "norm=rmsnorm", "norm.eps=1e-6")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "Sequential: 3 of its 10 modules are norms; not run: it came without inputs",
        "",
        "   class    n   mean  bias  gain    eps           divided by",
        "3  RMSNorm  16  kept  -     weight  1e-06 inside  rms",
        "   0-2.norm",
        "",
        "All as with norm=rmsnorm norm.eps=1e-06.",
        "",
        "record: outputs/inspections/models.clean.json",
    ]
    content = record("models.clean")
    assert content["mismatches"] == []
    assert [layer["path"] for layer in content["layers"]] == ["0.norm", "1.norm", "2.norm"]  # type: ignore[attr-defined]


def test_leftovers_of_layernorm_are_named_by_what_they_do(cli: Run) -> None:
    ran = cli("inspect", "models:leftover", "norm=rmsnorm", "norm.eps=1e-6")
    assert ran.code == 1
    mismatches = ran.out.split("Not as with norm=rmsnorm norm.eps=1e-06:\n")[1].splitlines()
    assert mismatches[:6] == [
        "- 2-3.norm subtract a mean; rmsnorm does not",
        "- 3.norm carries a bias (bias); rmsnorm has none",
        "- 3.norm has eps 1e-05 inside; rmsnorm has eps 1e-06 inside",
        "",
        "Worth knowing:",
        "- 2.norm returns fp32 for a bf16 input and fp32 parameters",
    ]
    assert ran.out.endswith("\n\nrecord: outputs/inspections/models.leftover.json\n")
    content = record("models.leftover")
    assert content["norm"]["name"] == "rmsnorm"  # type: ignore[index]
    assert content["mismatches"][0] == {  # type: ignore[index]
        "paths": ["2.norm", "3.norm"],
        "text": "subtracts a mean; rmsnorm does not",
    }
    assert content["modes"] == ["evaluation", "training"]


def test_without_a_norm_a_mixed_model_is_flagged(cli: Run) -> None:
    ran = cli("inspect", "models:leftover")
    assert ran.code == 0
    assert "- 3.norm carries a bias (bias); 3 other layers carry no bias" in ran.out
    assert "norm=" not in ran.out
    assert record("models.leftover")["norm"] is None


def test_a_norm_over_another_dimension(cli: Run) -> None:
    ran = cli("inspect", "models:over_time", "norm=rmsnorm", "norm.eps=1e-6", "norm.gain=false")
    assert ran.code == 1
    assert "1  OverTime  5  kept  -     -     1e-06 inside  rms over dimension 1\n" in ran.out
    assert "- 1 normalises over dimension 1 of 3; rmsnorm over the last dimension\n" in ran.out
    assert record("models.over_time")["layers"][0]["finding"]["dimensions"] == [1]  # type: ignore[index]


def test_torchs_encoder(cli: Run) -> None:
    ran = cli("inspect", "models:encoder", "norm=layernorm")
    assert ran.code == 0
    assert "- layers.0-1.norm1 and layers.0-1.norm2 are never called in evaluation" in ran.out
    assert "- layers.0-1 are one fused operation of torch in evaluation" in ran.out
    assert cli("inspect", "models:encoder", "norm=rmsnorm").code == 1


@pytest.mark.parametrize(
    "target", ["models:instance", "models:Model", "models:Inner.plain", "torch.nn:Identity"]
)
def test_modules_classes_and_attributes(cli: Run, target: str) -> None:
    ran = cli("inspect", target)
    assert (ran.code, ran.err) == (0, "")
    assert record(target.replace(":", "."))["target"] == target


def test_a_factory_is_given_the_norm(cli: Run) -> None:
    ran = cli("inspect", "models:built", "norm=prmsnorm", "norm.p=0.5")
    assert ran.code == 0
    assert "rms of first 8" in ran.out
    # One that may take the norm gets it, too.
    assert cli("inspect", "models:clean", "norm=scalenorm").code == 0


def test_norms_of_users(cli: Run) -> None:
    assert cli("inspect", "models:built", "norm=models:RMSNorm", "norm.eps=1e-4").code == 0
    assert cli("inspect", "models:instance", "norm=none").code == 1
    Path("mine.py").write_text(
        "from rmsrepro.norms import register_norm\nimport models\n"
        "register_norm('inspected_norm')(type('Mine', (models.RMSNorm,), {}))\n"
    )
    try:
        assert cli("inspect", "models:built", "plugins=[mine]", "norm=inspected_norm").code == 0
    finally:
        from rmsrepro.norms import unregister_norm

        unregister_norm("inspected_norm")
        sys.modules.pop("mine")


def test_out_dir_and_width(cli: Run) -> None:
    ran = cli("inspect", "models:leftover", "out_dir=else where")
    assert ran.out.splitlines()[-1] == "record: else where/inspections/models.leftover.json"
    assert max(map(len, ran.out.splitlines())) <= 80
    assert all(line == line.rstrip() for line in ran.out.splitlines())
    assert record("models.leftover", "else where")["schema_version"] == 1
    assert not Path("outputs").exists()


WRONG = [
    ("", "inspect needs a model: rmsrepro inspect package.module:factory"),
    ("models", "'models' is no import string; it has the form package.module:name"),
    ("models:", "'models:' is no import string"),
    ("modelz:clean", "modelz:clean: there is no module 'modelz'; modules of the current directory ("),
    ("needy:x", "needy:x: importing it failed: No module named 'not_installed'"),
    ("failing:x", "failing:x: importing it failed: KeyError: 'weights'"),
    ("models:clean_", "models:clean_: models has no 'clean_'; did you mean clean?"),
    (
        "models:number",
        "models:number: expected a torch.nn.Module, a pair (module, inputs), or a function that",
    ),
    ("models:nothing", "got None"),
    ("models:broken", "models:broken: it raised RuntimeError: no weights here"),
    ("models:leaves", "models:leaves: it raised SystemExit: 3"),
    ("models:greedy", "models:greedy: it needs dim, depth; name a function without required arguments"),
    ("models:built", "models:built: it takes one argument (norm); say which norm it is built with"),
    ("models:misfit", "models:misfit: the module does not run on its inputs: RuntimeError: mat1 and mat2"),
    ("models:clean norm=rmsnrom", "norm=rmsnrom: there is no such norm; did you mean rmsnorm"),
    ("models:clean norm=rmsnorm norm.p=.5", "norm.p=0.5: rmsnorm has no parameter p"),
    ("models:clean norm=rmsnorm norm.eps=-1", "norm.eps must be 0 or more"),
    ("models:clean norm.eps=1", "norm.eps=1: it belongs to a norm, which norm=NAME names"),
    ("models:clean norm=rmsnorm,layernorm", "inspect compares with one norm"),
    (
        "models:clean model=gru",
        "model=gru: inspect has no option model (it takes a model, norm, norm.PARAMETER",
    ),
    ("models:clean plugin=[x]", "inspect has no option plugin; did you mean plugins?"),
    ("models:clean out_dir=", "out_dir='': expected a folder"),
    ("models:unrunnable", "models:unrunnable: the module does not run on its inputs: SystemExit: 0"),
    ("models:clean out_dir=models.py", "out_dir=models.py: models.py is a file, not a folder"),
    ("norm=rmsnorm", "inspect needs a model"),
]


@pytest.mark.parametrize(("command", "message"), WRONG, ids=[command for command, _ in WRONG])
def test_wrong_commands(cli: Run, command: str, message: str) -> None:
    assert message in cli("inspect", *command.split()).error
    assert not Path("outputs").exists()


def test_as_a_program(program: Run) -> None:
    ran = program("inspect", "models:leftover", "norm=layernorm")
    assert ran.code == 1
    assert ran.err == ""
    assert "keep the mean; layernorm subtracts a mean" in ran.out


def test_what_is_computed_comes_before_remarks_on_dtypes(cli: Run) -> None:
    Path("hidden.py").write_text(
        "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm, self.linear = Norm(), nn.Linear(16, 16)\n"
        "    def forward(self, x):\n"
        "        return F.layer_norm(self.linear(self.norm(x)), (16,))\n"
        "class Norm(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.ones(16))\n"
        "    def forward(self, x):\n"
        "        return self.weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, True) + 1e-6))\n"
        "def model():\n"
        "    return nn.Sequential(Block(), Block()), torch.randn(4, 16)\n"
    )
    try:
        ran = cli("inspect", "hidden:model")
    finally:
        sys.modules.pop("hidden", None)
    told = ran.out.split("Worth knowing:\n")[1].replace("\n  ", " ").splitlines()
    assert told[0] == (
        "- 0-1 normalise in forward by F.layer_norm, eps 1e-05 inside, subtracting a mean; every layer keeps "
        "it"
    )
    assert told[1].startswith("- 0-1.norm return")
    assert ran.out.count("F.layer_norm") == 1
