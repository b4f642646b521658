"""Runs the kernels of a level for test_norms_fused_levels: `python -m tests.norms.levels_worker FILE [bare]`.

A process of its own, since the level is chosen once, by RMSREPRO_KERNEL_LEVEL. It prints how far results are
from the norms in float64, in units of what is allowed, and writes some of them to FILE.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rmsrepro.norms.backends.fused import compilers
from rmsrepro.norms.backends.fused.launch import Launcher
from rmsrepro.norms.backends.fused.library import kernels
from rmsrepro.norms.backends.fused.rule import Rule

WIDTHS = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 257, 1000)
ALLOWED = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = tuple(ALLOWED)


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    rows: int
    n: int
    k: int
    centred: bool = False
    layout: str = "dense"
    outside: bool = False
    threads: int = 1

    def __str__(self) -> str:
        parts = [str(self.dtype).removeprefix("torch."), f"{self.rows}x{self.n}", f"k={self.k}", self.layout]
        parts += ["centred"] * self.centred + ["outside"] * self.outside + [f"{self.threads} threads"]
        return " ".join(parts)


def cases() -> list[Case]:
    found: list[Case] = []
    statistics = ("all", "part", "centred")
    others = ("strided", "residual", "strided residual")
    for dtype, n, statistic, dense in itertools.product(DTYPES, WIDTHS, statistics, (True, False)):
        layout = "dense" if dense else others[len(found) // 2 % 5 % 3]
        k = max(1, n // 3) if statistic == "part" else n
        rows = (1, 3, 9, 19)[len(found) % 4]
        found.append(Case(dtype, rows, n, k, statistic == "centred", layout, len(found) % 5 == 0))
    # Enough for two threads, also in rows that do not share out evenly.
    for dtype, (rows, n), centred in itertools.product(
        DTYPES, ((35, 1000), (301, 64), (20001, 1), (6001, 3)), (False, True)
    ):
        layout = ("dense", "strided", "residual")[len(found) % 3]
        found.append(Case(dtype, rows, n, n, centred, layout, threads=2))
    # Outputs of 8 MB and more, which go past the cache where rows begin at cache lines.
    for dtype, n in (*((dtype, 1024) for dtype in DTYPES), (torch.float32, 1024), (torch.bfloat16, 1000)):
        rows, centred = (8 << 20) // (n * dtype.itemsize) + 3, len(found) % 2 == 0
        layout = "residual" if centred else "dense"
        found.append(Case(dtype, rows, n, n if centred else 512, centred, layout, threads=1 + centred))
    return found


def statement(
    case: Case, x: Tensor, gain: Tensor, bias: Tensor, dy: Tensor, extra: Tensor | float
) -> dict[str, tuple[Tensor, Tensor]]:
    """Each result in float64, with the size of the terms that it is made of, by formulas of its own."""
    n, k, eps = case.n, case.k, 1e-3
    a = x - x.sum(1, keepdim=True) / n if case.centred else x
    m = torch.einsum("ij,ij->i", a[:, :k], a[:, :k])[:, None] / k
    denominator = m.sqrt() + eps if case.outside else (m + eps).sqrt()
    t = a / denominator
    h = dy * gain
    # The derivative of 1/denominator, by the chain rule from m.
    d_denominator = -(h * a).sum(1, keepdim=True) / denominator**2
    d_m = d_denominator / (2 * m.sqrt() if case.outside else 2 * denominator)
    d_a = h / denominator
    d_a[:, :k] += torch.where(m > 0, d_m, torch.zeros_like(m)) * 2 * a[:, :k] / k
    dx = d_a - d_a.mean(1, keepdim=True) if case.centred else d_a

    def largest(one: Tensor) -> Tensor:
        return one.abs().amax(1, keepdim=True)

    spread = largest(h) * (1 + largest(t) ** 2 * (n / k if k < n else 1)) / denominator
    # What is subtracted is no more exact than the numbers it is subtracted from.
    lost = largest(x) / denominator if case.centred else torch.zeros_like(m)
    return {
        "y": (t * gain + bias, (largest(t) + lost) * largest(gain[None]) + largest(bias[None])),
        "dx": (dx + extra, spread + (largest(extra) if isinstance(extra, Tensor) else 0.0)),
        "dgain": ((dy * t).sum(0), (dy.abs() * (t.abs() + lost)).sum(0) + largest(t).max()),
        "dbias": (dy.sum(0), dy.abs().sum(0) + 1e-300),
    }


def rows_of(case: Case, generator: torch.Generator) -> Tensor:
    wide = torch.randn(min(case.rows, 97), case.n + 5, generator=generator).to(case.dtype)
    wide = wide.repeat(-(-case.rows // 97), 1)[: case.rows]  # many rows are some of them over and over
    return wide[:, 3 : 3 + case.n] if "strided" in case.layout else wide[:, : case.n].contiguous()


def run(case: Case, seed: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The results, and how far they are off."""
    torch.set_num_threads(case.threads)
    generator = torch.Generator().manual_seed(seed)
    launcher = Launcher(Rule(case.k, case.centred, 1 / case.k, 1e-3, case.outside, False), case.n)
    x, residual, dy, ds = (rows_of(case, generator) for _ in range(4))
    parameter = torch.float64 if case.dtype is torch.float64 else torch.float32
    gain, bias = (
        torch.randn(case.n, generator=generator, dtype=torch.float64).to(parameter) for _ in range(2)
    )

    def once() -> dict[str, Tensor]:
        if "residual" in case.layout:
            total, y = launcher.add_forward(x, residual, gain, bias)
            dx, dgain, dbias = launcher.backward(dy, total, gain, bias.dtype, ds)
        else:
            total, y = x, launcher.forward(x, gain, bias)
            dx, dgain, dbias = launcher.backward(dy, x, gain, bias.dtype)
        assert dgain is not None
        assert dbias is not None
        return {"total": total, "y": y, "dx": dx, "dgain": dgain, "dbias": dbias}

    results, again = once(), once()
    for name, one in results.items():
        assert torch.equal(one, again[name]), f"{case}: {name} differs from call to call"
    added = "residual" in case.layout
    if added:
        assert torch.equal(results["total"], x + residual), f"{case}: the sum is another"
    wanted = statement(
        case,
        results["total"].double(),
        gain.double(),
        bias.double(),
        dy.double(),
        ds.double() if added else 0.0,
    )
    worst = {}
    for name, (exact, size) in wanted.items():
        # Sums over many rows are off by more, as the root of their number.
        more = max(1.0, (case.rows / 64) ** 0.5) if name in ("dgain", "dbias") else 1.0
        allowed = max(ALLOWED[results[name].dtype], 2e-7 if case.dtype is not torch.float64 else 0.0) * more
        # Below a dtype's normal numbers the next one is always as far.
        limits = torch.finfo(results[name].dtype)
        room = allowed * size + limits.smallest_normal * limits.eps
        worst[name] = ((results[name].double() - exact).abs() / room).max().item()
    return results, worst


def main(file: str) -> None:
    level, worst, kept = kernels().level, dict[str, dict[str, float]](), dict[str, np.ndarray]()
    for seed, case in enumerate(cases()):
        results, worst[str(case)] = run(case, seed)
        if case.rows < 100:
            for name in ("y", "dx", "dgain", "dbias"):
                kept[f"{case}: {name}"] = results[name].double().numpy()
    np.savez(file, **kept)
    print(json.dumps({"level": level, "worst": worst}))


def forget_openmp_and_python() -> None:
    """Build as where the compiler has no OpenMP and Python's headers are not installed."""
    compilers._knows_openmp = lambda command: False
    compilers.sysconfig.get_path = lambda name: "/nonexistent"
    assert not compilers.toolchain().openmp
    assert compilers.toolchain().python_headers is None


if __name__ == "__main__":
    if "bare" in sys.argv:
        forget_openmp_and_python()
    main(sys.argv[1])
