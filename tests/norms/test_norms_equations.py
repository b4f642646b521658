"""The ground truth against plain numpy and against values worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from rmsrepro.norms import resolve_params
from rmsrepro.norms.equations import batchnorm, equation, l2norm, layernorm, prmsnorm, rmsnorm, weightnorm
from rmsrepro.norms.params import NormParams
from tests.norms.conftest import DIVIDING, NORMS


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
@pytest.mark.parametrize("norm", NORMS)
def test_equations_equal_numpy(
    norm: str, eps: float, outside: bool, numpy_reference: Callable[..., np.ndarray]
) -> None:
    rng = np.random.default_rng(0)
    x, gain, bias = rng.normal(0.4, 2, (3, 2, 10)), rng.normal(size=10), rng.normal(size=10)
    x[1, 1] = 0
    position = "outside" if outside else "inside"
    extra = {"p": 0.3} if norm == "prmsnorm" else {}
    given = {"eps": eps, "eps_position": position, **extra} if norm in DIVIDING else {}
    function = equation(resolve_params(norm, **given), 10)
    y = function(torch.from_numpy(x), torch.from_numpy(gain), torch.from_numpy(bias))
    expected = numpy_reference(norm, x, gain, bias, eps=eps, outside=outside, k=3)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-12, atol=1e-13)


def test_batchnorm_leaves_masked_rows_out() -> None:
    rng = np.random.default_rng(0)
    x, mask = torch.from_numpy(rng.normal(0.4, 2, (3, 4, 6))), torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    x[1, 2:] = 1e6
    y = batchnorm(x, eps=0.1, mask=mask)
    rows = x[mask].numpy()
    expected = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 0.1)
    np.testing.assert_allclose(y[mask].numpy(), expected, rtol=1e-13)


def test_weightnorm_rows_have_the_length_of_their_gains() -> None:
    v = double(3, 4, 6, 8).reshape(2, 2)
    w = weightnorm(v, double(1, -2), eps=0.0)
    torch.testing.assert_close(w, double(0.6, 0.8, -1.2, -1.6).reshape(2, 2), rtol=1e-15, atol=0)
    outside = weightnorm(v, double(1, 1), eps=5.0, outside=True)
    torch.testing.assert_close(outside, double(0.3, 0.4, 0.4, 8 / 15).reshape(2, 2), rtol=1e-15, atol=0)
    assert torch.equal(weightnorm(torch.zeros(1, 3), torch.ones(1), eps=0.0), torch.zeros(1, 3))


def test_three_and_four() -> None:
    x = double(3, 4)
    torch.testing.assert_close(
        rmsnorm(x, eps=0.0), double(0.848528137423857, 1.131370849898476), rtol=1e-14, atol=0
    )
    torch.testing.assert_close(layernorm(x, eps=0.0), double(-1, 1), rtol=1e-14, atol=0)
    torch.testing.assert_close(l2norm(x, eps=0.0), double(0.6, 0.8), rtol=1e-14, atol=0)
    torch.testing.assert_close(rmsnorm(7 * x, eps=0.0), rmsnorm(x, eps=0.0), rtol=1e-14, atol=0)
    assert (rmsnorm(x + 1, eps=0.0) - rmsnorm(x, eps=0.0)).abs().max() > 0.01


def test_one_to_eight() -> None:
    x = torch.arange(1, 9, dtype=torch.float64)
    full = rmsnorm(x, eps=0.0)
    assert full[0].item() == pytest.approx(0.19802950859533489, rel=1e-15)
    assert full[7].item() == pytest.approx(1.584236068762679, rel=1e-15)
    torch.testing.assert_close(prmsnorm(x, eps=0.0, k=2), 0.6324555320336759 * x, rtol=1e-14, atol=0)
    torch.testing.assert_close(prmsnorm(x, eps=0.0, k=4), 0.3651483716701107 * x, rtol=1e-14, atol=0)


def test_gradient_of_one_two_two() -> None:
    x = double(1, 2, 2).requires_grad_()
    (dx,) = torch.autograd.grad(rmsnorm(x, eps=0.0), x, double(1, 0, 0))
    expected = double(0.5132002392796674, -0.1283000598199169, -0.1283000598199169)
    torch.testing.assert_close(dx, expected, rtol=1e-14, atol=0)
    assert abs((x.detach() @ dx).item()) < 1e-15


@pytest.mark.parametrize("position", ["inside", "outside"])
@pytest.mark.parametrize("norm", DIVIDING)
def test_gradients_of_zero_rows_are_zero_at_eps_zero(norm: str, position: str) -> None:
    x = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    y = equation(resolve_params(norm, eps=0.0, eps_position=position), 8)(x, None, None)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(dx, torch.zeros_like(dx))


@pytest.mark.parametrize("position", ["inside", "outside"])
@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("norm", DIVIDING)
def test_equations_are_twice_differentiable(norm: str, eps: float, position: str) -> None:
    torch.manual_seed(0)
    function = equation(resolve_params(norm, eps=eps, eps_position=position), 5)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (5,), (5,))]
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def test_a_user_norm_has_no_equation() -> None:
    with pytest.raises(TypeError, match="no equation"):
        equation(NormParams(), 3)
