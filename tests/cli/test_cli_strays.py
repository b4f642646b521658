"""What ends a program or a loop, raised by a user's code, is an error of its run; a reader may go away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmsrepro.config.screen import Screen
from tests.cli.running import LM, Ran, command, environment, records

Run = Callable[..., Ran]
STRAY = """\
import sys

import torch
from torch import nn


class Stray(nn.Module):
    def __init__(self, dim: int, *, raises: str = "exit") -> None:
        super().__init__()
        self.raises, self.calls = raises, 0
        if raises == "at_once":
            sys.exit(0)

    def forward(self, x):
        self.calls += self.training and x.shape[0] > 1
        if self.calls > 60:
            if self.raises == "exit":
                sys.exit(0)
            if self.raises == "words":
                sys.exit("bye")
            raise {"keyboard": KeyboardInterrupt, "end": GeneratorExit, "stop": StopIteration}[self.raises]
        return x
"""
TOLD = {
    "exit": "SystemExit (0) was raised, which would end the whole program",
    "words": "SystemExit (bye) was raised, which would end the whole program",
    "keyboard": "KeyboardInterrupt was raised, which would end the whole program",
    "end": "GeneratorExit was raised, which would end the whole program",
    "stop": "StopIteration was raised, which would end the epoch",
}
SMALL = [*LM, "model=gru", "backend=composite", "trainer.max_steps=40"]


@pytest.fixture(autouse=True)
def stray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Path("strays.py").write_text(STRAY)
    monkeypatch.syspath_prepend(os.getcwd())
    sys.modules.pop("strays", None)
    yield
    sys.modules.pop("strays", None)


@pytest.mark.parametrize("raises", sorted(TOLD))
def test_a_run_fails_of_it(cli: Run, raises: str) -> None:
    ran = cli("train", *SMALL, "norm=strays:Stray", f"norm.raises={raises}")
    assert ran.code == 1, ran.out
    assert TOLD[raises] in ran.out + ran.err
    [record] = records().values()
    assert record["status"] == "failed"
    assert record["error"].startswith(TOLD[raises])


@pytest.mark.parametrize("workers", [[], ["n_jobs=2"]], ids=["here", "workers"])
def test_the_other_jobs_go_on(cli: Run, workers: list[str]) -> None:
    ran = cli("sweep", *SMALL, "norm=strays:Stray,rmsnorm", f"norm.raises={','.join(TOLD)}", *workers)
    assert ran.code == 1, ran.out
    assert "1 completed" in ran.out
    assert "5 failed" in ran.out
    for told in TOLD.values():
        assert told in ran.out
    assert sorted(record["status"] for record in records().values()) == ["completed"] + ["failed"] * 5


def test_a_norm_that_ends_the_program_when_it_is_built(cli: Run) -> None:
    stray = ["norm=strays:Stray", "norm.raises=at_once"]
    assert TOLD["exit"] in cli("train", *SMALL, *stray).error
    assert TOLD["exit"] in cli("sweep", *SMALL, "norm=rmsnorm,strays:Stray", "norm.raises=at_once").error


def test_no_verb_ends_without_a_word(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(arguments: list[str]) -> int:
        sys.exit(0)

    monkeypatch.setattr("rmsrepro.cli._answer", ends)
    ran = cli("norms")
    assert (ran.code, ran.out) == (1, "")
    assert TOLD["exit"] in ran.err


def test_a_console_outlives_its_reader() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        screen = Screen(file=file)
        for _ in range(3):
            screen.print("some text")
    assert screen.quiet


def test_a_run_outlives_its_reader() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    arguments = command("train", *SMALL, "trainer.val_every=5", "norm=rmsnorm")
    ran = subprocess.run(
        arguments, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment(), check=False
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (0, "")
    [file] = Path("outputs").glob("runs/*/result.json")
    assert json.loads(file.read_text())["status"] == "completed"
