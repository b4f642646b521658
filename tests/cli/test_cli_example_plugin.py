"""The plug-in of examples/: built as a wheel, installed, and used by programs of its own."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.cli.running import LM, TRANSLATION, Ran, environment, records

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "lpnorm"
SHORT = ["trainer.max_steps=2", "trainer.progress=false"]
Session = Callable[..., list[Ran]]

# Several commands in one program: most of the time of a short one is the import of torch.
SCRIPT = """
import contextlib, io, json, sys
from rmsrepro.cli import main

for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(json.loads(line))
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=sys.__stdout__, flush=True)
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel of the example was installed into."""
    folder = tmp_path_factory.mktemp("example")
    source = shutil.copytree(EXAMPLE, folder / "source")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = folder.glob("*.whl")
    assert wheel.name == "rmsrepro_lpnorm-0.1.0-py3-none-any.whl"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    done = subprocess.run(
        [*install, "--target", str(folder / "site"), str(wheel)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture
def session(installed: Path) -> Session:
    """Run commands one after another in a program that has the plug-in."""

    def run(*commands: list[str]) -> list[Ran]:
        path = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            input="".join(json.dumps(command) + "\n" for command in commands),
            capture_output=True,
            text=True,
            env=environment({"PYTHONPATH": path}),
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [Ran(*json.loads(line)) for line in done.stdout.splitlines()]

    return run


def test_it_is_listed_and_its_parameters_are_checked(session: Session) -> None:
    listed, told, *wrong = session(
        ["norms"],
        ["norms", "norm=lpnorm"],
        ["train", *LM, "norm=lpnorm", "norm.ordr=1"],
        ["train", *LM, "norm=lpnorm", "norm.order=high"],
        ["train", *LM, "norm=lpnorm", "norm.order=0.5"],
        ["train", *LM, "norm=lpnorm", "norm.gains=eech"],
        ["train", *LM, "norm=lpnorm", "norm.groups=3"],
        ["train", *LM, "norm=lpnorm", "norm.p=0.5"],
        ["train", *LM, "norm=lpnrm"],
        ["sweep", *LM, "norm=rmsnorm", "norm.order=1"],
        ["bench", "norm=lpnorm", "norm.eps=-1"],
    )
    assert "lpnorm" in listed.out
    assert "norm.gains=each" in told.out
    assert "each|one|none" in told.out
    messages = [
        "there is no key norm.ordr with norm=lpnorm; did you mean norm.order",
        "norm.order=high: expected a number",
        "norm=lpnorm: order must be 1 or more, got 0.5",
        "norm.gains=eech: not a valid value; did you mean each? (one of: each, one, none)",
        "norm=lpnorm: groups=3 does not divide the width 16",
        "norm.p=0.5: lpnorm has no parameter p (it has: eps, gains, groups, matched, order)",
        "norm=lpnrm: there is no such norm; did you mean lpnorm",
        "norm.order=1.0: rmsnorm has no parameter order",
        "norm=lpnorm: lpnorm.eps must be 0 or more, got -1",
    ]
    for message, ran in zip(messages, wrong, strict=True):
        assert message in ran.error
    assert not Path("outputs").exists()


def test_it_trains_in_both_models_and_tasks(session: Session) -> None:
    cells = [(model, name) for model in ("gru", "transformer") for name in ("lm", "translation")]
    task = {"lm": LM, "translation": TRANSLATION}
    parameters = ["norm.gains=one", "norm.order=3"]
    ran = session(
        *(
            ["train", *task[name], *SHORT, f"model={model}", "norm=lpnorm", *parameters]
            for model, name in cells
        )
    )
    assert [one.code for one in ran] == [0] * 4, [one.err for one in ran]
    found = records()
    assert sorted((record["model"], record["task"]) for record in found.values()) == cells
    for record in found.values():
        assert (record["norm"], record["status"]) == ("lpnorm", "completed")
        assert record["backend_used"] == "composite"
        assert record["norm_params"] == {
            "order": 3.0, "groups": 1, "matched": True, "gains": "one", "eps": 1e-5,
        }  # fmt: skip
        assert math.isfinite(record["metrics"]["val_loss"])


def test_workers_find_it_and_the_page_shows_it(session: Session) -> None:
    grid = ["norm=layernorm,lpnorm", "norm.order=2,3", "model=gru,transformer", "backend=composite"]
    swept, reported = session(["sweep", *LM, *SHORT, *grid, "n_jobs=2"], ["report"])
    assert swept.code == 0, swept.out + swept.err
    # layernorm has no order, so its jobs of the two are one.
    assert "6 runs: 0 done already, 6 to do" in swept.out
    norms = sorted(record["norm"] for record in records().values())
    assert norms == ["layernorm"] * 2 + ["lpnorm"] * 4
    assert {record["status"] for record in records().values()} == {"completed"}
    assert reported.code == 0, reported.err
    page = Path("outputs/reports/all")
    assert sorted(row["norm"] for row in csv.DictReader((page / "results.csv").open())) == norms
    assert "lpnorm" in (page / "index.html").read_text()


def test_order_two_trains_as_rmsnorm_does(session: Session) -> None:
    shared = [*LM, "model=gru", "norm.eps=1e-4", "trainer.progress=false", "backend=composite"]
    ran = session(
        ["train", *shared, "norm=lpnorm", "norm.order=2"],
        ["train", *shared, "norm=rmsnorm", "norm.eps_position=outside"],
    )
    assert [one.code for one in ran] == [0, 0], [one.err for one in ran]
    losses = {record["norm"]: record["metrics"]["val_loss"] for record in records().values()}
    assert losses["lpnorm"] == pytest.approx(losses["rmsnorm"], rel=1e-4)


def test_without_the_plugin_there_is_no_such_norm(program: Callable[..., Ran]) -> None:
    assert "there is no such norm" in program("train", "norm=lpnorm").error


@pytest.mark.slow
def test_it_earns_its_card(session: Session) -> None:
    [ran] = session(["check-norm", "lpnorm", "norm.order=1"])
    assert ran.code == 0, ran.out + ran.err
    card = json.loads(Path("outputs/cards/lpnorm-order_1.0.json").read_text())
    assert card["invariances"]["weight_matrix_rescaling"] is True
    assert card["invariances"]["weight_matrix_recentering"] is False
    assert card["invariances"]["single_case_rescaling"] is True


@pytest.mark.slow
def test_it_is_timed(session: Session) -> None:
    timing = ["bench.processes=2", "bench.budget_s=2", "bench.warmup_s=0.05", "bench.rounds=5"]
    [ran] = session(
        ["bench", *LM, *timing, "model=gru", "norm=lpnorm", "norm.order=3", "bench.num_threads=1"]
    )
    assert ran.code == 0, ran.out + ran.err
    [file] = Path("outputs/bench").glob("*/result.json")
    result = json.loads(file.read_text())
    assert [arm["arm"] for arm in result["arms"]] == ["layernorm/composite", "lpnorm/composite"]
    [comparison] = result["comparisons"]
    assert (comparison["arm"], comparison["baseline"]) == ("lpnorm/composite", "layernorm/composite")
    assert comparison["ratio"] > 0


# ------------------------------------------------------------------------------------------- its mathematics


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rmsrepro_lpnorm", EXAMPLE / "rmsrepro_lpnorm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("order", [1.0, 1.5, 2.0, 7.0])
@pytest.mark.parametrize("groups", [1, 3])
def test_values_are_those_of_its_equation(example: ModuleType, order: float, groups: int) -> None:
    draw = np.random.default_rng(0)
    x, gain = draw.normal(size=(5, 12)), draw.normal(size=12)
    norm = example.LpNorm(12, order=order, groups=groups, matched=False, eps=1e-3).double()
    norm.weight.data.copy_(torch.from_numpy(gain))
    expected = np.empty_like(x)
    width = 12 // groups
    for row in range(5):
        for first in range(0, 12, width):
            part = x[row, first : first + width]
            size = (sum(abs(value) ** order for value in part) / width) ** (1 / order)
            expected[row, first : first + width] = part / (size + 1e-3) * gain[first : first + width]
    np.testing.assert_allclose(norm(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-12)


def test_gaussian_rows_come_out_with_unit_rms_whatever_the_order(example: ModuleType) -> None:
    x = 30 * torch.randn(64, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for order in (1.0, 2.0, 5.0):
        y = example.LpNorm(4096, order=order)(x)
        assert float(y.detach().square().mean().sqrt()) == pytest.approx(1.0, abs=0.01)


def test_rows_of_zeros_and_gains(example: ModuleType) -> None:
    for order in (1.0, 3.0):
        norm = example.LpNorm(4, order=order, eps=0.0)
        x = torch.tensor([[0.0, 0, 0, 0], [3e20, 0, 0, 4e20], [3e-20, 0, 0, 4e-20]], requires_grad=True)
        y = norm(x)
        y.sum().backward()
        assert torch.equal(y[0], torch.zeros(4))
        assert torch.allclose(y[1], y[2])
        assert x.grad is not None
        assert torch.equal(x.grad[0], torch.zeros(4))
        assert torch.isfinite(x.grad).all()
    sizes = [
        None if (weight := example.LpNorm(4, gains=gains).weight) is None else weight.shape[0]
        for gains in example.Gains
    ]
    assert sizes == [4, 1, None]
