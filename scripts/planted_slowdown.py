#!/usr/bin/env python
"""Does the bench find a slowdown that was put there? A norm of 5 % more work, and one that sleeps once.

    python scripts/planted_slowdown.py                          about three minutes on one idle core
    python scripts/planted_slowdown.py bench.budget_s=300       any override of rmsrepro bench

The model is a norm and twenty linear maps of one size. `MoreWork` is LayerNorm and one more product of that
size, whose result it multiplies by zero: the same numbers, and by count 21/20 of the multiplications, forward
and backward. `Sleepy` is LayerNorm, and sleeps for a second at its first call. LayerNorm's twins, an A/A
control, stand beside them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from rmsrepro.norms import build_norm
from rmsrepro.norms.targets import GivenNorm

WIDTH, ROWS, LINEARS = 384, 512, 20


class MoreWork(nn.Module):
    """LayerNorm, and a product that adds nothing to its output."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = build_norm("layernorm", dim, backend="composite")
        self.more = nn.Parameter(torch.ones(dim, dim) / dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return LayerNorm of (..., dim)."""
        return self.norm(x) + 0.0 * (x @ self.more)


class Sleepy(nn.Module):
    """LayerNorm, whose first call in a process takes a second longer."""

    awake = False

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = build_norm("layernorm", dim, backend="composite")

    def forward(self, x: Tensor) -> Tensor:
        """Return LayerNorm of (..., dim)."""
        if not Sleepy.awake:
            Sleepy.awake = True
            time.sleep(1.0)
        return self.norm(x)


def factory(norm: GivenNorm) -> tuple[nn.Module, Tensor]:
    """Return a norm with twenty linear maps behind it, and an input."""
    maps = [nn.Linear(WIDTH, WIDTH) for _ in range(LINEARS)]
    inputs = torch.randn(ROWS, WIDTH, requires_grad=True)
    return nn.Sequential(norm.build(WIDTH), *maps), inputs


def command(overrides: list[str]) -> list[str]:
    """Return what follows `rmsrepro` on the command line, in the folder of this file."""
    module = Path(__file__).stem
    given = {
        "bench": "model",
        "model": f"{module}:factory",
        "norm": f"layernorm,{module}:MoreWork,{module}:Sleepy",
        "bench.num_threads": "1",
        "bench.budget_s": "150",
        "out_dir": str(Path("outputs").resolve()),
    }
    given |= dict(text.split("=", 1) for text in overrides)
    return ["bench", *(f"{key}={value}" for key, value in given.items())]


if __name__ == "__main__":
    from rmsrepro.cli import main

    arguments = command(sys.argv[1:])
    os.chdir(Path(__file__).resolve().parent)  # where norms and models are looked for by name
    sys.exit(main(arguments))
