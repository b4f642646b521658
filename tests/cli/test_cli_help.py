"""Help, version, and how fast and quietly they come."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rmsrepro
from rmsrepro.cli import HELP, OVERVIEW
from rmsrepro.norms import list_norms
from tests.cli.running import Ran

Run = Callable[..., Ran]
VERBS = ["train", "eval", "translate", "sample", "convert", "sweep", "status", "bench", "reproduce", "report"]
VERBS += ["export", "norms", "check-norm", "inspect", "doctor", "build-kernels"]


def test_the_verbs_of_the_contract_are_there() -> None:
    assert list(HELP) == VERBS
    for verb in VERBS:
        assert f"\n  {verb} " in OVERVIEW
        assert HELP[verb].startswith(f"usage: rmsrepro {verb}")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview(cli: Run, arguments: list[str]) -> None:
    ran = cli(*arguments)
    assert (ran.code, ran.out, ran.err) == (0, OVERVIEW + "\n", "")


def test_the_package_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rmsrepro", "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, OVERVIEW + "\n", "")
    wrong = subprocess.run(
        [sys.executable, "-m", "rmsrepro", "trian"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "did you mean train" in wrong.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(cli: Run, verb: str) -> None:
    for arguments in (
        [verb, "--help"],
        [verb, "-h"],
        ["help", verb],
        ["--help", verb],
        [verb, "nokey=1", "--help"],
    ):
        ran = cli(*arguments)
        assert (ran.code, ran.out, ran.err) == (0, HELP[verb] + "\n", "")


@pytest.mark.parametrize("arguments", [["trian"], ["help", "trian"], ["trian", "--help"]])
def test_a_misspelt_verb(cli: Run, arguments: list[str]) -> None:
    error = cli(*arguments).error
    assert error.startswith("there is no verb 'trian'; did you mean train? (one of: train, eval, ")


@pytest.mark.parametrize("flag", ["--version", "-V", "version"])
def test_version(cli: Run, flag: str) -> None:
    assert cli(flag).out == f"{rmsrepro.__version__}\n"


def test_help_lines_fit_a_terminal() -> None:
    for text in (OVERVIEW, *HELP.values()):
        assert max(map(len, text.splitlines())) <= 80


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rmsrepro.cli import main; "
        f"[main(a) for a in [['--help'], ['--version'], *([v, '--help'] for v in {VERBS}), ['trian']]]; "
        "print([m for m in ('torch', 'lightning', 'hydra', 'wandb', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_wrong_command_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys; from rmsrepro.cli import main; "
        "print([main(['train', text]) for text in ('nrom=x', 'norm=x', 'seed=x', 'seed=-1', 'norm.p=1')]); "
        "print([m for m in ('torch', 'lightning', 'wandb', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[2, 2, 2, 2, 2]", "[]"]
    code = (
        "import sys; from rmsrepro.cli import main; "
        "print([main(['convert', *more]) for more in ([], ['norm=rmsnorm'], ['RUN', 'out_dir='])]); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[2, 2, 2]", "False"]


def test_a_reader_that_goes_away_is_no_fault() -> None:
    line = f"{sys.executable} -m rmsrepro.cli --help | head -n 1"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout == OVERVIEW.splitlines()[0] + "\n"
    assert done.stderr == ""


def test_the_norms_are_listed(cli: Run) -> None:
    ran = cli("norms")
    assert ran.code == 0
    for name in list_norms():
        assert name in ran.out
    assert "p=0.0625" in ran.out
    assert all(line == line.rstrip() for line in ran.out.splitlines())
    assert cli("norms", "rmsnorm").out == cli("norms", "norm=rmsnorm").out
    one = cli("norms", "norm=rmsnorm")
    assert "variant=paper" in one.out
    assert "paper|authors_torch|authors_tf" in one.out
    assert "layernorm" not in one.out
    assert "takes a mask" in cli("norms", "norm=batchnorm").out
    assert "weights of linear maps" in cli("norms", "norm=weightnorm").out


def test_a_file_of_a_norm_is_told_with_its_values(cli: Run) -> None:
    Path("conf/norm").mkdir(parents=True)
    Path("conf/norm/wide.yaml").write_text("name: prmsnorm\np: 0.75\n")
    ran = cli("norms", "wide")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("wide: conf/norm/wide.yaml\nprmsnorm: ")
    assert "norm.p=0.75 " in ran.out
    assert "norm.eps=1e-05 " in ran.out
    listed = [line.split() for line in cli("norms").out.splitlines()]
    assert ["wide", "conf/norm/wide.yaml:", "prmsnorm"] in listed
    Path("conf/norm/worse.yaml").write_text("name: prmsnorm\nq: 1\n")
    assert "q" in cli("norms", "worse").error
    assert cli("norms", "wider").code == 2
