"""A fault of timing, met in practice: B16."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmsrepro.bench import measuring as measuring_module
from rmsrepro.bench import runner as runner_module
from rmsrepro.bench.runner import run_bench
from rmsrepro.bench.worker import measure
from rmsrepro.config.bench import BenchConfig
from tests.bench.test_bench_model_step import lm

SLEEP_S = 0.5
MODULE = f"""
import time
import torch

class Awake(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

class Sleepy(Awake):
    asleep = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.asleep and self.training:
            Sleepy.asleep = True
            time.sleep({SLEEP_S})
        return super().forward(x)
"""


def test_a_first_call_that_sleeps_in_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B16: the first call allocates or compiles; it stands beside the times, and never in them."""
    (tmp_path / "practice_sleepers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(runner_module, "machine_lock_path", lambda: tmp_path / "bench.lock")
    monkeypatch.setattr(
        measuring_module, "run_worker", lambda spec, folder, **others: measure({**spec, "spawned_at": 0.0})
    )
    config = BenchConfig(
        name="model", modes=["fwd_bwd"], processes=2, rounds=4, warmup_s=0.01, block_s=0.001, num_batches=2
    )
    arms = [
        {"name": f"practice_sleepers:{name}", "params": {}, "backend": "composite"}
        for name in ("Sleepy", "Awake")
    ]
    found = run_bench(config, base=lm(tmp_path / "outputs"), norms=arms).result
    rows = {row["norm"]: row for row in found["arms"]}
    sleepy, awake = (rows[f"practice_sleepers:{name}"] for name in ("Sleepy", "Awake"))
    assert sleepy["status"] == awake["status"] == "measured"
    assert sleepy["first_call_s"] >= SLEEP_S > awake["first_call_s"]
    # Each step of an arm that had its first call counted would hold a share of the sleep.
    assert sleepy["median_s"] < SLEEP_S / 10
    for row in (sleepy, awake):
        assert row["iqr_s"] >= 0
        assert row["rounds"] == 8
    for row in found["comparisons"]:
        assert (row["n_processes"], row["n_rounds"]) == (2, 8)
        low, high = row["ratio_ci"]
        marked = any("within the noise" in flag for flag in row["flags"])
        assert marked or not low <= 1 <= high, "a difference inside the noise is marked as one"
    for process in found["processes"]:
        for cell in process["cells"].values():
            assert cell["warm_up"]["steps"] > 0
