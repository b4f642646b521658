from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rmsrepro.config.bench import (
    BenchConfig,
    BenchJobConfig,
    check_bench_config,
    keeps_blocks,
    parse_shape,
)
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


LAYER = BenchConfig(name="layer", shapes=["80x1024"], modes=["fwd"], dtypes=["float32"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": []}, "bench.shapes is empty; bench=layer needs at least one"),
        ({"modes": []}, "bench.modes is empty"),
        ({"dtypes": []}, "bench.dtypes is empty"),
        ({"shapes": ["80"]}, r"bench.shapes: '80' is no shape; .* as in bench.shapes=\[80x1024,2048x256\]"),
        ({"shapes": ["80x0"]}, "bench.shapes: '80x0' is no shape"),
        ({"shapes": ["80x-4"]}, "bench.shapes: '80x-4' is no shape"),
        ({"shapes": ["80xx4"]}, "bench.shapes: '80xx4' is no shape"),
        ({"shapes": ["8²x4"]}, "is no shape"),
        ({"shapes": ["8x4", "8x4"]}, "bench.shapes: 8x4 is named more than once"),
        ({"modes": ["step"]}, "bench.modes: 'step'; bench=layer has fwd, fwd_bwd"),
        ({"modes": ["fwdbwd"]}, "bench.modes: 'fwdbwd'; did you mean fwd_bwd"),
        ({"dtypes": ["fp32"]}, "bench.dtypes: 'fp32'; bench=layer has float32, bfloat16"),
        ({"name": "step"}, "bench.shapes: only bench=layer takes it"),
    ],
)
def test_cells_that_a_level_does_not_have_are_refused(change: dict[str, Any], message: str) -> None:
    check_bench_config(LAYER)
    with pytest.raises(UserError, match=message):
        check_bench_config(replace(LAYER, **change))


def test_a_shape_has_rows_and_a_width() -> None:
    assert parse_shape("80x1024") == (80, 1024)
    assert parse_shape("4x128x512") == (4, 128, 512)


def test_large_blocks_are_kept_for_layers_unless_told_otherwise() -> None:
    assert keeps_blocks(LAYER)
    assert not keeps_blocks(BenchConfig())
    assert keeps_blocks(BenchConfig(keep_blocks=True))
    assert not keeps_blocks(replace(LAYER, keep_blocks=False))


def test_the_defaults_are_fine() -> None:
    check_bench_config(BenchConfig())


def test_the_configuration_is_read_without_torch() -> None:
    code = "import sys, rmsrepro.config.bench; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
