from __future__ import annotations

from typing import Any

import pytest

from rmsrepro.bench.cells import Cost
from rmsrepro.bench.counting import copy_cost, layer_cost

# Worked out by hand for 3 rows of 4 entries in fp32: 12 entries, 48 bytes a stream, 16 bytes a gain or bias.
FORWARD: list[tuple[str, dict[str, Any], int, int]] = [
    # 2 streams, gain and bias; a row: mean 4, centre 4, squares and mean 8, eps and root 2, divide 4,
    # gain and bias 8
    ("layernorm", {}, 2 * 48 + 2 * 16, 3 * 30),
    ("layernorm_nobias", {}, 2 * 48 + 16, 3 * 26),
    # a row: squares and mean 8, eps and root 2, divide 4, gain 4
    ("rmsnorm", {}, 2 * 48 + 16, 3 * 18),
    ("rmsnorm", {"bias": True}, 2 * 48 + 2 * 16, 3 * 22),
    ("rmsnorm", {"gain": False}, 2 * 48, 3 * 14),
    ("llama_rmsnorm", {}, 2 * 48 + 16, 3 * 18),
    # 1 + weight once: 4 more
    ("gemma_rmsnorm", {}, 2 * 48 + 16, 3 * 18 + 4),
    # p .5: 2 entries are read for the statistic: 4, eps and root 2, divide 4, gain 4
    ("prmsnorm", {"p": 0.5}, 2 * 48 + 16, 3 * 14),
    # squares and sum 7, eps and root 2, divide 4, gain 4
    ("l2norm", {}, 2 * 48 + 16, 3 * 17),
    # the same, its gain is one number
    ("scalenorm", {}, 2 * 48 + 4, 3 * 17),
    # sum 3, its square 1, squares 7, add 1, mean 1, eps and root 2, divide 4, gain 4
    ("crmsnorm", {}, 2 * 48 + 16, 3 * 23),
    # alpha x 4, tanh 4, gain 4, bias 4; alpha is one number
    ("dyt", {}, 2 * 48 + 2 * 16 + 4, 3 * 16),
    # x is read twice; an entry: mean, centre, square, add, divide, gain, bias; a column: eps and root
    ("batchnorm", {}, 3 * 48 + 2 * 16, 3 * 28 + 8),
]

# Backward alone: 3 streams, the parameters read once more and their gradients written.
BACKWARD: list[tuple[str, dict[str, Any], int, int]] = [
    # a row: centre 4, normalised 4, h 4, mean of h 4, mean of h t 8, dx 16, dgain 8, dbias 4
    ("layernorm", {}, 3 * 48 + 2 * 2 * 16, 3 * 52),
    ("layernorm_nobias", {}, 3 * 48 + 2 * 16, 3 * 48),
    # a row: h 4, dot 7, r^3 dot / n 4, dx 12, dgain 12
    ("rmsnorm", {}, 3 * 48 + 2 * 16, 3 * 39),
    ("rmsnorm", {"bias": True}, 3 * 48 + 4 * 16, 3 * 43),
    ("rmsnorm", {"gain": False}, 3 * 48, 3 * 23),
    ("gemma_rmsnorm", {}, 3 * 48 + 2 * 16, 3 * 39),
    # the correction reaches 2 entries only: dx 8
    ("prmsnorm", {"p": 0.5}, 3 * 48 + 2 * 16, 3 * 35),
    ("l2norm", {}, 3 * 48 + 2 * 16, 3 * 38),
    ("scalenorm", {}, 3 * 48 + 2 * 4, 3 * 38),
    # c (x + sum): 4 more than rmsnorm
    ("crmsnorm", {}, 3 * 48 + 2 * 16, 3 * 43),
    # alpha x, tanh, its square, 1 less it: 16; h 4, times that 4, dx 4, dalpha 8, dgain 8, dbias 4
    ("dyt", {}, 3 * 48 + 2 * (2 * 16 + 4), 3 * 48),
    # x and dL/dy once more
    ("batchnorm", {}, 5 * 48 + 2 * 2 * 16, 3 * 52),
]


@pytest.mark.parametrize(("norm", "params", "nbytes", "flops"), FORWARD)
def test_forward_counts_equal_those_by_hand(
    norm: str, params: dict[str, Any], nbytes: int, flops: int
) -> None:
    assert layer_cost(norm, params, (3, 4), "fwd", "float32") == Cost(nbytes, flops)


@pytest.mark.parametrize(("norm", "params", "nbytes", "flops"), BACKWARD)
def test_backward_adds_what_is_counted_by_hand(
    norm: str, params: dict[str, Any], nbytes: int, flops: int
) -> None:
    forward = layer_cost(norm, params, (3, 4), "fwd", "float32")
    both = layer_cost(norm, params, (3, 4), "fwd_bwd", "float32")
    assert forward.bytes is not None
    assert forward.flops is not None
    assert both == Cost(forward.bytes + nbytes, forward.flops + flops)


def test_leading_dimensions_are_rows_and_half_precision_is_half_the_bytes() -> None:
    flat = layer_cost("rmsnorm", {}, (6, 4), "fwd_bwd", "float32")
    assert layer_cost("rmsnorm", {}, (2, 3, 4), "fwd_bwd", "float32") == flat
    assert flat.bytes is not None
    assert layer_cost("rmsnorm", {}, (6, 4), "fwd_bwd", "bfloat16") == Cost(flat.bytes // 2, flat.flops)


def test_the_counts_at_a_size_of_the_paper() -> None:
    # 80 x 1024 fp32: 327680 bytes a stream.
    found = layer_cost("layernorm", {}, (80, 1024), "fwd_bwd", "float32")
    assert found == Cost(5 * 327680 + 3 * 2 * 4096, 80 * (7 * 1024 + 2 + 13 * 1024))


def test_a_copy_reads_and_writes_and_computes_nothing() -> None:
    assert copy_cost((80, 1024), "float32") == Cost(655360, 0)


def test_the_equation_of_a_users_norm_is_not_known() -> None:
    assert layer_cost("torch.nn:RMSNorm", {}, (3, 4), "fwd", "float32") == Cost()
