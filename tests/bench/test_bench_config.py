from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rmsrepro.config.bench import BenchConfig, BenchJobConfig, check_bench_config
from rmsrepro.config.errors import UserError


def test_the_schema_serves_as_a_structured_config() -> None:
    node = OmegaConf.structured(BenchJobConfig)
    merged = OmegaConf.merge(node, OmegaConf.from_dotlist(["bench.processes=3", "bench.precision=0.01"]))
    assert merged.bench.processes == 3
    assert OmegaConf.to_object(merged.bench) == BenchConfig(processes=3, precision=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "stepp"}, "bench=stepp: no such level; did you mean step"),
        ({"processes": 1}, "bench.processes=1: the interval is taken over processes"),
        ({"precision": 2.0}, r"bench.precision=2.0: .* write 2 % as 0.02"),
        ({"rounds": 0}, "bench.rounds=0: at least 1"),
        ({"budget_s": 0.0}, "bench.budget_s=0.0: must be above 0 seconds"),
        ({"warmup_s": -1.0}, "bench.warmup_s=-1.0: must not be negative"),
        ({"num_batches": 0}, "bench.num_batches=0: at least 1"),
        ({"num_threads": 0}, "bench.num_threads=0: at least 1"),
        ({"timeout_s": 0.0}, "bench.timeout_s=0.0: must be above 0"),
    ],
)
def test_values_that_cannot_be_measured_with_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_bench_config(replace(BenchConfig(), **change))


def test_the_defaults_are_fine() -> None:
    check_bench_config(BenchConfig())


def test_the_configuration_is_read_without_torch() -> None:
    code = "import sys, rmsrepro.config.bench; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
