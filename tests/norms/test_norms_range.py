"""Property tests over shapes, dtypes and scales."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rmsrepro.norms import build_norm, norm_info, takes_mask
from rmsrepro.norms.equations import equation
from tests.norms.conftest import CENTRED, DIVIDING, NORMS, skip_without

quick = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
dims = st.one_of(st.integers(1, 40), st.sampled_from([256, 257, 341, 512, 1000, 1024, 4099]))

either = pytest.mark.parametrize("backend", ["composite", "fused"])
"""Not compiled: each example would be compiled for itself. test_norms_compiled has its range."""


def build(norm: str, dim: int, backend: str, **params: Any) -> Any:
    """Build the norm where the backend has it, else reject the example; skip without the backend."""
    skip_without(backend)
    assume(backend in norm_info(norm).backends)
    return build_norm(norm, dim, backend=backend, **params)


def rows(dim: int, seed: int, *, count: int = 3) -> Tensor:
    """Rows (count, dim) in float64 with 0.1 <= |a| <= 1 and both signs."""
    generator = torch.Generator().manual_seed(seed)
    size = 0.1 + 0.9 * torch.rand(count, dim, generator=generator, dtype=torch.float64)
    return size * (2 * torch.randint(2, (count, dim), generator=generator) - 1)


def run(norm: Any, x: Tensor, upstream: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *norm.parameters()], upstream)]


def run_equation(norm: Any, x: Tensor, upstream: Tensor) -> list[Tensor]:
    x = x.detach().double().requires_grad_()
    leaves = {name: p.detach().double().requires_grad_() for name, p in norm.named_parameters()}
    y = equation(norm.params, norm.dim)(x, leaves.get("weight"), leaves.get("bias"))
    return [y.detach(), *torch.autograd.grad(y, [x, *leaves.values()], upstream.double())]


@either
@quick
@given(
    norm=st.sampled_from(DIVIDING),
    dim=dims,
    exponent=st.floats(-17, 18),
    eps=st.sampled_from([0.0, 1e-5, 1e-30]),
    position=st.sampled_from(["inside", "outside"]),
    seed=st.integers(0, 1000),
)
def test_fp32_holds_from_1e_minus_18_to_1e18(
    backend: str, norm: str, dim: int, exponent: float, eps: float, position: str, seed: int
) -> None:
    # One entry is no layernorm: it is 0/eps, or rounding noise over itself.
    if dim == 1 and norm.startswith("layernorm"):
        dim = 2
    module = build(norm, dim, backend, eps=eps, eps_position=position)
    x = (rows(dim, seed) * 10.0**exponent).float()
    if norm.startswith("layernorm"):
        # Rows that are nearly constant would test the input's rounding and not the norm.
        x[:, 0] = x[:, 1:].abs().amax(-1) * -x[:, 1:].sum(-1).sign().where(x[:, 1:].sum(-1) != 0, 1)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1))
    results = zip(run(module, x, upstream), run_equation(module, x, upstream), strict=True)
    for index, (got, expected) in enumerate(results):
        scale = expected.abs().max().item()
        if index == 1:
            # The input's gradient is a difference: upstream/denominator less its part along the input.
            largest_output = module(x).abs().max().item()
            scale = max(scale, (upstream.abs().max() / x.abs().max()).item() * largest_output)
        # A result below fp32's normal range may come out as 0.
        assert (got.double() - expected).abs().max().item() <= 2e-5 * scale + 1e-38


@either
@quick
@given(
    norm=st.sampled_from(DIVIDING),
    dim=st.one_of(st.integers(2, 40), st.sampled_from([257, 1024])),
    exponent=st.one_of(st.floats(18, 38.2), st.floats(-45, -18)),
    eps=st.sampled_from([0.0, 1e-5, 1e-45, 1e-60, 1e-100]),
    position=st.sampled_from(["inside", "outside"]),
    seed=st.integers(0, 1000),
)
def test_beyond_the_range_results_stay_finite(
    backend: str, norm: str, dim: int, exponent: float, eps: float, position: str, seed: int
) -> None:
    module = build(norm, dim, backend, eps=eps, eps_position=position)
    x = (rows(dim, seed) * 10.0**exponent).float()
    x[0, 1:] = 0  # a lone large or small entry
    x[1] = x[1].abs()  # for layernorm: a sum that overflows
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1))
    for got in run(module, x, upstream):
        assert got.isfinite().all()


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-30, 1e-20, 1e19, 1e20, 1e30, 1e38, 3.3e38])
@pytest.mark.parametrize("dim", [8, 1024])
def test_extreme_rows_stay_finite(dividing: Any, dim: int, scale: float) -> None:
    for eps in (0.0, 1e-5):
        norm = dividing.build(dim, eps=eps)
        signs = torch.ones(2, dim)
        signs[1, ::2] = -1
        if dividing.norm in CENTRED:
            scale = min(scale, 1.7e38)
        for got in run(norm, signs * scale, torch.ones(2, dim)):
            assert got.isfinite().all()


@either
@quick
@given(
    norm=st.sampled_from(NORMS),
    shape=st.lists(st.integers(0, 4), max_size=3),
    dim=st.integers(2, 64),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    p=st.floats(0.01, 1.0),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_dtype(
    backend: str, norm: str, shape: list[int], dim: int, dtype: torch.dtype, p: float, seed: int
) -> None:
    extra = {"p": p} if norm == "prmsnorm" else {}
    module = build(norm, dim, backend, **extra)
    count = math.prod(shape)
    x = rows(dim, seed, count=count).reshape(*shape, dim).to(dtype)
    y = module(x)
    assert y.shape == x.shape
    assert y.dtype == dtype
    parameters = {name: p.detach().double() for name, p in module.named_parameters()}
    expected = equation(module.params, dim)(x.double(), **parameters)
    # The rounding of the output, plus in half precision nothing: the statistics are wide.
    bound = 2 * torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 1e-5
    bound = 1e-12 if dtype is torch.float64 else bound
    torch.testing.assert_close(y.double(), expected, rtol=bound, atol=bound / 100)


@quick
@given(norm=st.sampled_from(NORMS), dim=st.integers(2, 64), shift=st.floats(-3, 3), seed=st.integers(0, 1000))
def test_rows_do_not_see_each_other(norm: str, dim: int, shift: float, seed: int) -> None:
    module = build_norm(norm, dim)
    if takes_mask(module):
        module.eval()
    x = rows(dim, seed, count=4).float()
    other = x.clone()
    other[1:] += shift
    assert torch.equal(module(x)[0], module(other)[0])


def test_nan_and_infinite_inputs_are_not_hidden(dividing: Any) -> None:
    norm = dividing.build(8)
    for value in (math.nan, math.inf):
        x = torch.ones(1, 8)
        x[0, 0] = value
        assert not norm(x).isfinite().all()
