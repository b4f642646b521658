"""BatchNorm: what the mask leaves out, and what the running statistics are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rmsrepro.norms import BatchNorm, build_norm, recurrence
from rmsrepro.norms.equations import batchnorm


def make(dim: int = 6, **params: float) -> BatchNorm:
    norm = build_norm("batchnorm", dim, **params)
    assert isinstance(norm, BatchNorm)
    return norm.double()


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, dtype=torch.float64, generator=generator) + 0.7


def test_equals_torch_in_training_and_evaluation() -> None:
    ours, theirs = make(momentum=0.3), nn.BatchNorm1d(6, momentum=0.3).double()
    for seed in range(3):
        x = rows(5, 6, seed=seed)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-12, atol=0)
    x = rows(5, 6, seed=9)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 4),
    length=st.integers(1, 5),
    eps=st.sampled_from([0.0, 1e-5, 0.1]),
    outside=st.booleans(),
    seed=st.integers(0, 99),
)
def test_masked_positions_count_for_nothing(
    batch: int, length: int, eps: float, outside: bool, seed: int
) -> None:
    x = rows(batch, length, 4, seed=seed)
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[0, 0] = True
    x[~mask] = 1e8
    x.requires_grad_()
    norm = make(4, eps=eps, eps_position="outside" if outside else "inside")
    y = norm(x, mask)
    upstream = rows(batch, length, 4, seed=seed + 1).masked_fill(~mask.unsqueeze(-1), 0.0)
    (dx,) = torch.autograd.grad(y, x, upstream)
    again = x.detach().requires_grad_()
    expected = batchnorm(again, eps=eps, outside=outside, mask=mask)
    (dx_expected,) = torch.autograd.grad(expected, again, upstream)
    lonely = int(mask.sum()) == 1
    torch.testing.assert_close(y[mask], expected[mask], rtol=1e-9, atol=1e-9)
    assert y.isfinite().all()
    if not lonely or eps > 0:
        torch.testing.assert_close(dx[mask], dx_expected[mask], rtol=1e-7, atol=1e-7 * (1e3 if lonely else 1))
    assert torch.equal(dx[~mask], torch.zeros_like(dx[~mask]))
    # Only rows that count are in the running statistics.
    kept = x.detach()[mask]
    if not lonely:
        torch.testing.assert_close(norm.running_mean, 0.1 * kept.mean(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * kept.var(0), rtol=1e-9, atol=1e-12)


def test_padding_may_hold_anything() -> None:
    x, mask = rows(2, 3, 6), torch.tensor([[True, True, True], [True, False, False]])
    expected = make()(x, mask)[mask]
    for filling in (torch.nan, torch.inf, 1e300):
        assert torch.equal(make()(x.masked_fill(~mask.unsqueeze(-1), filling), mask)[mask], expected)


def test_a_mask_of_another_shape_is_refused() -> None:
    for mask in (torch.ones(3, dtype=torch.bool), torch.ones(2, 3, 1, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"a mask for the shape \(2, 3, 6\) has the shape \(2, 3\), got"):
            make()(rows(2, 3, 6), mask)


@pytest.mark.parametrize("mask", [None, torch.zeros(2, 3, dtype=torch.bool)], ids=["one row", "all masked"])
def test_too_few_rows_leave_the_running_statistics_alone(mask: torch.Tensor | None) -> None:
    norm = make()
    x = rows(1, 6) if mask is None else rows(2, 3, 6)
    assert norm(x, mask).isfinite().all()
    assert torch.equal(norm.running_mean, torch.zeros(6).double())
    assert torch.equal(norm.running_var, torch.ones(6).double())
    norm(rows(0, 6))
    assert torch.equal(norm.running_mean, torch.zeros(6).double())


def test_a_recurrence_counts_as_one_update_by_rows() -> None:
    """Three steps of 4, 4 and 2 rows: means and variances within a step, weighted by their rows."""
    norm = make(momentum=0.25)
    steps = [rows(4, 6, seed=1), rows(4, 6, seed=2) + 5, rows(2, 6, seed=3) - 5]
    with recurrence([norm]):
        for step in steps:
            y = norm(step)
            expected = batchnorm(step, eps=1e-5)
            torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
        assert torch.equal(norm.running_mean, torch.zeros(6).double()), "not before the end"
    arrays = [step.numpy() for step in steps]
    mean = sum(a.sum(0) for a in arrays) / 10
    var = sum(((a - a.mean(0)) ** 2).sum(0) for a in arrays) / (3 + 3 + 1)
    np.testing.assert_allclose(norm.running_mean.numpy(), 0.25 * mean, rtol=1e-12)
    np.testing.assert_allclose(norm.running_var.numpy(), 0.75 + 0.25 * var, rtol=1e-12)
    # Afterwards each call counts by itself again.
    norm(steps[0])
    assert not np.allclose(norm.running_mean.numpy(), 0.25 * mean)


def test_a_recurrence_that_fails_or_evaluates_leaves_nothing_open() -> None:
    norm = make()
    with pytest.raises(RuntimeError, match="stop"), recurrence([norm]):
        raise RuntimeError("stop")
    norm.eval()
    with recurrence([norm]):
        norm(rows(3, 6))
    assert torch.equal(norm.running_mean, torch.zeros(6).double())
    with recurrence([]):
        pass


@pytest.mark.parametrize("exponent", [-18, -9, 0, 9, 18])
def test_fp32_holds_over_the_range(exponent: int) -> None:
    x = (rows(400, 6) * 10.0**exponent).float().requires_grad_()
    norm = build_norm("batchnorm", 6, eps=0.0)
    upstream = torch.randn(400, 6, generator=torch.Generator().manual_seed(5))
    y = norm(x)
    (dx,) = torch.autograd.grad(y, x, upstream)
    again = x.detach().double().requires_grad_()
    expected = batchnorm(again, eps=0.0)
    (dx_expected,) = torch.autograd.grad(expected, again, upstream.double())
    assert (y.double() - expected).abs().max() < 2e-5
    assert (dx.double() - dx_expected).abs().max() < 2e-5 * dx_expected.abs().max()


def test_state_holds_the_running_statistics() -> None:
    norm, other = make(), make()
    norm(rows(5, 6))
    other.load_state_dict(norm.state_dict())
    x = rows(5, 6, seed=4)
    assert torch.equal(other.eval()(x), norm.eval()(x))
    norm.reset_parameters()
    assert torch.equal(norm.running_var, torch.ones(6).double())


def test_a_batch_that_overflowed_is_not_remembered() -> None:
    norm = build_norm("batchnorm", 6)
    for scale in (1e30, 1e38):
        assert norm((rows(5, 6) * scale).float().clamp(-3e38, 3e38)).isfinite().all()
    norm(rows(5, 6).float())
    assert norm.running_var.isfinite().all()
    assert norm.eval()(rows(5, 6).float()).isfinite().all()
