"""rmsrepro check-norm: the card on the screen and in its file, users' norms, wrong commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rmsrepro
from rmsrepro.norms import registry
from tests.cli.running import Ran, tree

Run = Callable[..., Ran]

MODULE = '''
import torch
from torch import nn

from rmsrepro.norms import register_norm


class Sound(nn.Module):
    """RMSNorm as a user would write it."""

    def __init__(self, dim: int, *, eps: float = 1e-5, broken: bool = False) -> None:
        super().__init__()
        if broken:
            raise RuntimeError("no such luck\\nand more")
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError("another last dimension")
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(x.dtype)


class Overwriting(Sound):
    def forward(self, x):
        x /= (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return x * self.weight


class Leaves(Sound):
    """Ends the program on its first call."""

    def forward(self, x):
        raise SystemExit(0)


class LeavesAtOnce(Sound):
    def __init__(self, dim: int) -> None:
        raise SystemExit(0)


@register_norm("careless", summary="fp32 out, and in place")
class Careless(Sound):
    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim, eps=eps)

    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x) * torch.ones((), dtype=torch.float32).expand(x.shape[-1])
        return x.mul_((x.square().mean(-1, keepdim=True) + self.eps).rsqrt()) * self.weight
'''


@pytest.fixture
def module() -> Iterator[str]:
    """A module in the current directory, under a name that no other test uses."""
    path, known = list(sys.path), set(sys.modules)
    registered, strings = dict(registry._registered), dict(registry._import_strings)
    Path("carded_norms.py").write_text(MODULE)
    yield "carded_norms"
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if name == "carded_norms":
            del sys.modules[name]
    for table, content in ((registry._registered, registered), (registry._import_strings, strings)):
        table.clear()
        table.update(content)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the two checks that take most of the time."""
    from rmsrepro.norms.card import card

    kept = {name: check for name, check in card.CHECKS.items() if not name.startswith("torch_")}
    monkeypatch.setattr(card, "CHECKS", kept)


def card_of(name: str, folder: str = "outputs") -> dict[str, Any]:
    card: dict[str, Any] = json.loads(Path(folder, "cards", f"{name}.json").read_text())
    return card


def test_the_card_of_rmsnorm(cli: Run) -> None:
    ran = cli("check-norm", "rmsnorm")
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "FAIL" not in ran.out
    assert ran.out.splitlines()[-1] == "card: outputs/cards/rmsnorm.json"
    card = card_of("rmsnorm")
    assert list(card) == [
        "schema_version", "name", "source", "scope", "backend", "dim", "params", "torch_version",
        "package_version", "status", "failed", "checks", "invariances", "invariance_details", "gradients",
        "counts", "eps", "flags",
    ]  # fmt: skip
    assert card["schema_version"] == 1
    assert (card["name"], card["scope"], card["backend"], card["dim"]) == (
        "rmsnorm",
        "activation",
        "composite",
        64,
    )
    assert card["source"] == "Zhang & Sennrich 2019, eq. 4"
    assert (card["torch_version"], card["package_version"]) == (torch.__version__, rmsrepro.__version__)
    assert card["params"]["eps"] == 1e-5
    assert card["params"]["eps_position"] == "inside"
    assert (card["status"], card["failed"]) == ("pass", [])
    assert card["invariances"] == {
        "weight_matrix_rescaling": True,
        "weight_matrix_recentering": False,
        "weight_vector_rescaling": False,
        "dataset_rescaling": True,
        "dataset_recentering": False,
        "single_case_rescaling": True,
    }
    assert card["invariance_details"]["method"] == "eps = 0"
    deviations = card["invariance_details"]["deviations"]
    assert list(deviations) == list(card["invariances"])
    assert all(
        (max(offs) < 1e-12) == held
        for offs, held in zip(deviations.values(), card["invariances"].values(), strict=True)
    )
    for name, check in card["checks"].items():
        assert list(check) == ["status", "text", "measured", "bound"], name
        assert check["status"] in ("pass", "not applicable"), name
        assert f"\n  pass  {name} " in ran.out or f"\n  n/a   {name} " in ran.out
    assert {name: one and one["holds"] for name, one in card["gradients"].items()} == {
        "gain_unchanged_by_input_scale": True,
        "gain_unchanged_by_weight_scale": True,
        "bias_unchanged_by_input_scale": None,
        "bias_unchanged_by_weight_scale": None,
        "weight_unchanged_by_input_scale": True,
        "weight_inverse_to_weight_scale": True,
        "weight_orthogonal_to_weight": True,
    }
    assert card["counts"]["exponents"]["state_d"] == 1.0
    assert card["eps"]["short_of_zero_eps_below"] == pytest.approx(0.0222, abs=1e-4)
    table = [line.split() for line in ran.out.splitlines() if line.startswith(("  measured ", "  paper "))]
    assert table == [[who, "yes", "no", "no", "yes", "no", "yes"] for who in ("measured", "paper")]


@pytest.mark.usefixtures("without_compiler")
def test_parameters_backend_and_folder(cli: Run) -> None:
    arguments = ["norm.eps=1e-3", "norm.bias=true", "dim=16", "out_dir=some where/else"]
    ran = cli("check-norm", "norm=prmsnorm", "norm.p=0.5", *arguments)
    assert ran.code == 0, ran.out
    card = card_of("prmsnorm-bias_true-eps_0.001-p_0.5", "some where/else")
    assert (card["params"]["eps"], card["params"]["p"], card["params"]["bias"]) == (1e-3, 0.5, True)
    assert card["dim"] == 16
    assert card["flags"] == ["prmsnorm: k=8 of 16 entries; below 16 the estimate is heavy-tailed"]
    assert "note: prmsnorm: k=8" in ran.out
    assert not Path("outputs").exists()
    assert cli("check-norm", "rmsnorm", "backend=torch", "dim=16").code == 0
    card = card_of("rmsnorm")
    assert card["backend"] == "torch"
    assert card["invariance_details"]["method"] == "its eps cannot be 0"
    assert card["invariances"]["single_case_rescaling"]


@pytest.mark.usefixtures("without_compiler")
def test_weightnorm_goes_through_its_linear_map(cli: Run) -> None:
    ran = cli("check-norm", "weightnorm", "dim=16")
    assert ran.code == 0, ran.out
    card = card_of("weightnorm")
    assert card["scope"] == "weight"
    assert [name for name, held in card["invariances"].items() if held] == [
        "weight_matrix_rescaling",
        "weight_vector_rescaling",
    ]
    assert card["checks"]["last_dimension"]["status"] == "not applicable"
    assert "measured over the rows of a weight matrix" in ran.out


def test_a_norm_of_ones_own(cli: Run, module: str) -> None:
    ran = cli("check-norm", f"{module}:Sound", "norm.eps=1e-6", "dim=16")
    assert ran.code == 0, ran.out
    card = card_of("carded_norms.Sound-eps_1e-06")
    assert (card["name"], card["source"]) == ("carded_norms:Sound", "carded_norms:Sound")
    assert card["params"] == {"eps": 1e-6, "broken": False}
    assert [name for name, held in card["invariances"].items() if held] == [
        "weight_matrix_rescaling",
        "dataset_rescaling",
        "single_case_rescaling",
    ]
    assert card["checks"]["table_1"]["status"] == "not applicable"
    assert card["checks"]["torch_compile"]["measured"]["graph_breaks"] == 0
    assert "\n  paper " not in ran.out
    assert "RMSNorm as a user would write it." in ran.out


@pytest.mark.usefixtures("without_compiler")
def test_failures_are_named_and_the_card_is_written(cli: Run, module: str) -> None:
    ran = cli("check-norm", "careless", f"plugins=[{module}]", "dim=16")
    assert ran.code == 1
    card = card_of("careless")
    assert card["failed"] == ["dtype_rule", "in_place"]
    assert ran.err == "failed: dtype_rule, in_place\n"
    assert "\n  FAIL  in_place " in ran.out
    assert "FAIL  in_place             the input is overwritten in evaluation" in ran.out
    assert card["checks"]["in_place"]["status"] == "fail"
    assert card["status"] == "fail"


def test_a_card_is_named_by_what_was_chosen(cli: Run, module: str) -> None:
    Path("conf/norm").mkdir(parents=True)
    Path("conf/norm/carded_file.yaml").write_text(f"name: {module}:Sound\neps: 1e-3\n")
    for arguments, name in (
        (["rmsnorm"], "rmsnorm"),
        ([f"{module}:Sound"], f"{module}.Sound"),
        (["carded_file"], "carded_file"),
        (["carded_file", "norm.eps=0.50"], "carded_file-eps_0.5"),
        (["rmsnorm", "norm.eps_position=outside"], "rmsnorm-eps_position_outside"),
    ):
        ran = cli("check-norm", *arguments, "show=true")
        assert ran.out.endswith(f"card: outputs/cards/{name}.json\n"), ran.err


@pytest.mark.usefixtures("without_compiler")
def test_a_reason_is_printed_once_and_what_explains_it_first(cli: Run, module: str) -> None:
    ran = cli("check-norm", f"{module}:Overwriting", "dim=16")
    checks = ran.out.split("Checks")[1].split("The paper's table 1:")[0]
    assert ran.code == 1
    assert checks.splitlines()[1].startswith("  FAIL  in_place ")
    assert checks.count("a leaf Variable") == 1
    assert "FAIL  gradcheck            as agreement_fp32" in checks
    assert "Hint" not in ran.out
    assert max(map(len, ran.err.splitlines())) <= 80


@pytest.mark.usefixtures("without_compiler")
def test_a_norm_that_ends_the_program_has_failed(cli: Run, module: str) -> None:
    ran = cli("check-norm", f"{module}:Leaves", "dim=8")
    assert ran.code == 1
    assert "it raised SystemExit: 0 (carded_norms.py:" in ran.out
    assert card_of("carded_norms.Leaves")["status"] == "fail"


@pytest.mark.usefixtures("without_compiler")
def test_the_eps_of_torchs_rmsnorm_is_none(cli: Run) -> None:
    ran = cli("check-norm", "torch.nn:RMSNorm", "dim=8")
    assert "None and 0 (this setting and none)" in ran.out
    assert card_of("torch.nn.RMSNorm")["eps"]["setting"] == {"eps": None}


@pytest.mark.usefixtures("without_compiler")
def test_a_disk_that_is_full_at_the_end(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rmsrepro.runs.files.write_atomic", full)
    ran = cli("check-norm", "none", "dim=8")
    assert ran.error == "out_dir=outputs: no card can be written there ([Errno 28] No space left on device)"


def test_show_measures_nothing(cli: Run) -> None:
    ran = cli("check-norm", "prmsnorm", "norm.variant=authors_torch", "show=true")
    assert ran.code == 0
    assert "eps=1e-08 eps_position=outside" in ran.out
    assert "k_rule=floor" in ran.out
    assert ran.out.endswith("card: outputs/cards/prmsnorm-variant_authors_torch.json\n")
    assert tree() == set()


WRONG = [
    ("", "check-norm needs a norm: rmsrepro check-norm rmsnorm, or pkg.module:Class"),
    ("dim=8", "check-norm needs a norm"),
    ("rmsnrom", "norm=rmsnrom: there is no such norm; did you mean rmsnorm, prmsnorm"),
    ("rmsnorm layernorm", "'layernorm' is not an override"),
    ("rmsnorm,layernorm", "norm=rmsnorm,layernorm: check-norm measures one norm; run it once for each"),
    ("no_such_module:Norm", "there is no module 'no_such_module'"),
    ("carded_norms:Sund", "carded_norms has no 'Sund'; did you mean Sound?"),
    ("norm.eps=1", "check-norm needs a norm"),
    ("rmsnorm norm.esp=1", "norm.esp=1: there is no key norm.esp"),
    ("layernorm norm.p=0.5", "norm.p=0.5: layernorm has no parameter p"),
    ("prmsnorm norm.p=6.25", "is a fraction in (0, 1], got 6.25; did you mean 0.0625?"),
    ("rmsnorm norm.eps=-1", "eps must be 0 or more, got -1"),
    ("rmsnorm norm.eps=small", "norm.eps=small: expected a number"),
    ("rmsnorm backend=trch", "backend=trch: not a valid value; did you mean torch?"),
    ("prmsnorm backend=torch", "backend=torch cannot run prmsnorm: torch has no function for it"),
    ("rmsnorm dim=0", "dim=0: expected a whole number above zero"),
    ("rmsnorm dim=many", "dim=many: expected a whole number"),
    (
        "rmsnorm seed=1",
        "seed=1: check-norm takes a norm, norm.PARAMETER=VALUE, backend, plugins, dim, out_dir",
    ),
    ("rmsnorm +dim=3", "'+dim=3': the configuration is typed"),
    ("rmsnorm show=maybe", "show=maybe: expected true or false"),
    ("rmsnorm plugins=[no_such_module]", "plugins=[no_such_module]: no module named 'no_such_module'"),
    ("rmsnorm out_dir=taken", "out_dir=taken: no card can be written there"),
    (
        "rmsnorm out_dir=folders",
        "out_dir=folders: no card can be written there (folders/cards/rmsnorm.json is a folder)",
    ),
    ("rmsnorm out_dir=", "out_dir='': expected a folder"),
    ("rmsnorm out_dir= show=true", "out_dir='': expected a folder"),
    (
        "carded_norms:LeavesAtOnce",
        "norm=carded_norms:LeavesAtOnce: it cannot be built at dim=64 (SystemExit: 0)",
    ),
    (
        "carded_norms:Sound norm.broken=true dim=8",
        "norm=carded_norms:Sound: it cannot be built at dim=8 (RuntimeError: no such luck); dim=N measures",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text or "nothing" for text, _ in WRONG])
def test_wrong_commands(
    cli: Run, module: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("taken").write_text("a file\n")
    Path("folders/cards/rmsnorm.json").mkdir(parents=True)
    monkeypatch.setattr("rmsrepro.norms.card.make_card", None)  # nothing is measured
    ran = cli("check-norm", *text.split())
    assert message in " ".join(ran.error.split())
    assert ran.out == ""
    assert not Path("outputs").exists()


def test_a_wrong_name_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys; from rmsrepro.cli import main; "
        "texts = 'rmsnrom', 'rmsnorm dim=0', 'rmsnorm norm.p=1'; "
        "print([main(['check-norm', *text.split()]) for text in texts]); "
        "print([m for m in ('torch', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[2, 2, 2]", "[]"]
