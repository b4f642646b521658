"""scripts/planted_slowdown.py: that what it plants is what it says. How long it takes is for a bench."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rmsrepro.norms.targets import GivenNorm
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> ModuleType:
    return load_script("planted_slowdown.py")


def built(script: ModuleType, norm: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    given = GivenNorm(norm, {}, "composite")
    module, inputs = script.factory(given)
    return module, inputs


def test_more_work_is_a_twentieth_more(script: ModuleType) -> None:
    counts = {}
    for norm in ("layernorm", "planted_slowdown:MoreWork"):
        module, inputs = built(script, norm)
        with FlopCounterMode(display=False) as counter:
            module(inputs).square().mean().backward()
        counts[norm] = counter.get_total_flops()
    plain, more = counts.values()
    assert plain == 3 * 20 * 2 * 512 * 384 * 384  # forward, and both gradients
    assert more / plain == 21 / 20


def test_the_numbers_are_layernorms(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    x = torch.randn(3, 384)
    expected = nn.functional.layer_norm(x.double(), (384,))
    for norm in (script.MoreWork(384), script.Sleepy(384), script.Sleepy(384)):
        torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert slept == [1.0]  # once in a process, whichever layer comes first


def test_its_command_is_one_of_the_bench(script: ModuleType) -> None:
    command = script.command(["bench.budget_s=9", "bench.processes=4"])
    assert command[0] == "bench"
    assert "norm=layernorm,planted_slowdown:MoreWork,planted_slowdown:Sleepy" in command
    assert command.count("bench.budget_s=9") == 1
    assert "bench.processes=4" in command
