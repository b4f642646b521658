"""Every norm in every backend: values, gradients, dtypes, shapes, and what a module must put up with."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from rmsrepro.norms import build_norm, norm_info, takes_mask
from rmsrepro.norms.equations import equation
from tests.norms.conftest import CENTRED, skip_without

EACH = ("composite", "torch", "compiled", "fused")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def randomise(norm: nn.Module, seed: int = 1) -> nn.Module:
    """Give gain and bias values that would show up if they were left out or exchanged."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in norm.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return norm


def reference(norm: Any, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Output and gradients (x, then parameters) of the equation in float64."""
    wide = x.detach().double().requires_grad_()
    leaves = {name: p.detach().double().requires_grad_() for name, p in norm.named_parameters()}
    learned = {"alpha": leaves["alpha"]} if "alpha" in leaves else {}
    y = equation(norm.params, norm.dim)(wide, leaves.get("weight"), leaves.get("bias"), **learned)
    return [y.detach(), *torch.autograd.grad(y, [wide, *leaves.values()], upstream.double())]


def assert_agrees(norm: Any, x: Tensor, tolerance: float) -> None:
    """Compare output and all gradients with float64, relative to the largest entry of each."""
    x = x.detach().requires_grad_()
    y = norm(x)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x.dtype)
    got = [y, *torch.autograd.grad(y, [x, *norm.parameters()], upstream)]
    for one, expected in zip(got, reference(norm, x, upstream), strict=True):
        assert one.isfinite().all()
        error = (one.double() - expected).abs().max()
        # A gradient at a single entry, or of one row of a batch's statistics, is a difference of equal
        # terms, here of at most 1/sqrt(eps).
        lonely = norm.dim == 1 or x.shape[:-1].numel() == 1
        size = max(1e-6**-0.5 if lonely else 0.0, expected.abs().max().item())
        if expected.numel() == 1:
            # One number for all entries: the sum of as many terms of both signs.
            size = max(size, x.numel() ** 0.5)
        assert error <= tolerance * size, (error, size)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 320), (4, 257), (1, 1), (3, 1000)], ids=str)
def test_agrees_with_float64(arm: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = randomise(arm.build(shape[-1]).to(dtype))
    roundings = 2 if "casting=before_gain" in repr(norm) else 1
    assert_agrees(norm, (2 * torch.randn(shape) + 0.7).to(dtype), roundings * TOLERANCE[dtype])


@pytest.mark.parametrize("position", ["inside", "outside"])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 0.2])
@pytest.mark.parametrize(("gain", "bias"), [(True, True), (False, True), (True, False), (False, False)])
def test_conventions(dividing: Any, eps: float, position: str, gain: bool, bias: bool) -> None:
    wanted = {"eps": eps, "eps_position": position, "gain": gain, "bias": bias}
    known = {field.name for field in dataclasses.fields(norm_info(dividing.norm).params_class)}
    norm = randomise(dividing.build(12, **{key: value for key, value in wanted.items() if key in known}))
    assert (norm.weight is None) == ("gain" in known and not gain)
    assert (norm.bias is None) == ("bias" not in known or not bias)
    assert_agrees(norm, torch.randn(4, 12, generator=torch.Generator().manual_seed(3)), 2e-6)


@pytest.mark.parametrize(("gain", "bias"), [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_layernorm_with_any_affine_part(backend: str, gain: bool, bias: bool) -> None:
    skip_without(backend)
    norm = randomise(build_norm("layernorm", 12, backend=backend, gain=gain, bias=bias))
    assert_agrees(norm, torch.randn(4, 12, generator=torch.Generator().manual_seed(3)), 2e-6)


def test_first_and_second_derivatives(arm: Any) -> None:
    torch.manual_seed(0)
    norm = randomise(arm.build(6, **({} if arm.norm in ("none", "dyt") else {"eps": 0.1})).double())
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in norm.named_parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(norm, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (x, *norm.parameters())
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


def test_second_derivatives_at_eps_zero(dividing: Any) -> None:
    torch.manual_seed(0)
    norm = dividing.build(6, eps=0.0).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(norm, (x,))
    assert gradgradcheck(norm, (x,))


def test_published_values(dividing: Any) -> None:
    values = {
        "layernorm": [-1.0, 1.0],
        "layernorm_nobias": [-1.0, 1.0],
        "rmsnorm": [0.848528137423857, 1.131370849898476],
        "prmsnorm": [1.0, 4 / 3],
        "l2norm": [0.6, 0.8],
        "scalenorm": [0.6 * 2**0.5, 0.8 * 2**0.5],
        # (9 + 16 + 49) / 3
        "crmsnorm": [3 / (74 / 3) ** 0.5, 4 / (74 / 3) ** 0.5],
        "batchnorm": [-1.0, 1.0],
    }
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    norm = dividing.build(2, eps=0.0).double()
    norm.reset_parameters()  # scalenorm's sqrt(2) in the wider type

    def call(x: Tensor) -> Tensor:
        # batchnorm: two rows, of which the first is x and the second x with its entries exchanged.
        return norm(torch.stack((x, x.flip(0))))[0]

    y = call(x)
    of_rms = values["rmsnorm"] if dividing.norm.endswith("rmsnorm") else None
    torch.testing.assert_close(y.tolist(), values.get(dividing.norm, of_rms), rtol=1e-15, atol=1e-15)
    # Scaling the input changes nothing; shifting it does, except where a mean is subtracted.
    torch.testing.assert_close(call(9 * x).tolist(), y.tolist(), rtol=1e-14, atol=0)
    shifted = (call(x + 1) - y).abs().max().item()
    assert shifted < 1e-14 if dividing.norm in CENTRED else shifted > 0.01


@pytest.mark.parametrize("backend", ["composite", "compiled", "fused"])
def test_published_gradient_in_fp32(backend: str) -> None:
    skip_without(backend)
    x = torch.tensor([1.0, 2.0, 2.0], requires_grad=True)
    build_norm("rmsnorm", 3, backend=backend, eps=0.0)(x)[0].backward()
    assert x.grad is not None
    expected = [0.5132002392796674, -0.1283000598199169, -0.1283000598199169]
    torch.testing.assert_close(x.grad.tolist(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("dim", "p", "k_rule", "k"),
    [
        (100, 0.0625, "ceil", 7),
        (100, 0.07, "ceil", 7),
        (100, 0.29, "ceil", 29),
        (300, 0.07, "ceil", 21),
        (512, 0.0625, "ceil", 32),
        (100, 0.0625, "floor", 6),
        (100, 0.29, "floor", 29),
        (512, 0.0625, "floor", 32),
    ],
)
@pytest.mark.parametrize("backend", ["composite", "fused"])
def test_which_entries_count(backend: str, dim: int, p: float, k_rule: str, k: int) -> None:
    skip_without(backend)
    norm = build_norm("prmsnorm", dim, backend=backend, p=p, k_rule=k_rule, gain=False)
    # Row i is 1 at entry i: it is scaled by sqrt(k) where i counts, and by 1/sqrt(eps) where it does not.
    scale = norm(torch.eye(dim)).diagonal()
    assert torch.equal((scale < 100).nonzero().flatten(), torch.arange(k))
    torch.testing.assert_close(scale[:k], torch.full((k,), k**0.5), rtol=1e-3, atol=0)


# ------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("parameters", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_output_has_the_input_dtype(
    arm: Any, dtype: torch.dtype, parameters: torch.dtype, autocast: bool
) -> None:
    norm = arm.build(8).to(parameters)
    x = torch.randn(4, 8).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), warnings.catch_warnings():
        warnings.simplefilter("error")
        y = norm(x)
    assert y.dtype == dtype
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert all(p.grad is not None and p.grad.dtype == parameters for p in norm.parameters())


@pytest.mark.shares_kernels
def test_autocast_changes_no_value(arm: Any) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    norm = randomise(arm.build(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(x)
    assert torch.equal(y, norm(x))


@pytest.mark.parametrize("backend", EACH)
def test_half_precision_squares_do_not_overflow(backend: str) -> None:
    skip_without(backend)
    x = torch.full((2, 8), 300.0, dtype=torch.float16)
    y = build_norm("rmsnorm", 8, backend=backend)(x)
    assert torch.equal(y, torch.ones_like(x))
    layer = build_norm("layernorm", 8, backend=backend)(x + x.new_tensor([30000.0, 0, 0, 0, 0, 0, 0, 0]))
    torch.testing.assert_close(layer[0, 0].item(), 7**0.5, rtol=1e-3, atol=0)
    if backend != "torch":
        assert torch.equal(build_norm("prmsnorm", 8, backend=backend)(x), torch.ones_like(x))


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_gain_gradients_are_not_added_in_half_precision(arm: Any, parameters: torch.dtype) -> None:
    norm = arm.build(8).to(parameters)
    x = torch.ones(65536, 8, dtype=torch.bfloat16, requires_grad=True)
    if arm.norm in CENTRED:
        # Ones are centred to zero; rows (and columns) of ones and minus ones are their own norm.
        x = x.detach() * torch.tensor([1, -1]).repeat(4)
        x[1::2] *= -1
    norm(x).backward(x if arm.norm in CENTRED else torch.ones_like(x))
    if norm.weight is not None:
        expected = {
            "l2norm": 65536 / 8**0.5,
            "scalenorm": 65536 * 8**0.5,
            "crmsnorm": 65536 / 8**0.5,  # (8 + 64) / 9
            "dyt": 65536 * math.tanh(0.5),
        }.get(arm.norm, 65536.0)
        rounding = 1e-5 if parameters is torch.float32 else 4e-3
        torch.testing.assert_close(
            norm.weight.grad.float(), torch.full_like(norm.weight.float(), expected), rtol=rounding, atol=0
        )
    if norm.bias is not None:
        norm.bias.grad = None
        norm(x).backward(torch.ones_like(x))
        assert torch.equal(norm.bias.grad.float(), torch.full((8,), 65536.0))


def test_gain_gradient_of_ones_is_exact_without_eps(dividing: Any) -> None:
    if dividing.norm in ("rmsnorm", "prmsnorm"):
        norm = dividing.build(8, eps=0.0)
        x = torch.ones(65536, 8, dtype=torch.bfloat16)
        norm(x).backward(torch.ones_like(x))
        assert torch.equal(norm.weight.grad, torch.full((8,), 65536.0))


# ---------------------------------------------------------------------------------------- zero rows


@pytest.mark.parametrize("p", [1.0, 0.5, 0.125])
@pytest.mark.parametrize("position", ["inside", "outside"])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-5])
def test_zero_rows(dividing: Any, eps: float, position: str, p: float) -> None:
    extra = {"p": p} if dividing.norm == "prmsnorm" else {}
    norm = dividing.build(8, eps=eps, eps_position=position, **extra)
    x = torch.zeros(2, 8, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(y, torch.zeros_like(y))
    slope = 0.0 if eps == 0 or dividing.norm in CENTRED else 1 / eps
    if slope and position == "inside":
        slope = eps**-0.5
    slope *= 8**0.5 if dividing.norm == "scalenorm" else 1.0
    torch.testing.assert_close(x.grad, torch.full((2, 8), slope), rtol=1e-6, atol=0)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in norm.parameters())


@pytest.mark.parametrize("position", ["inside", "outside"])
@pytest.mark.parametrize("eps", [1e-45, 1e-100, 1e-300])
def test_an_eps_that_fp32_cannot_hold_counts_as_zero(dividing: Any, eps: float, position: str) -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    dividing.build(8, eps=eps, eps_position=position)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("backend", EACH)
def test_zero_rows_in_each_backend(backend: str) -> None:
    skip_without(backend)
    x = torch.zeros(2, 8, requires_grad=True)
    y = build_norm("rmsnorm", 8, backend=backend, eps=1e-8)(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(y, torch.zeros_like(y))
    torch.testing.assert_close(x.grad, torch.full((2, 8), 1e4), rtol=1e-6, atol=0)


@pytest.mark.parametrize("position", ["inside", "outside"])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-5])
@pytest.mark.parametrize("backend", ["composite", "fused"])
def test_rows_whose_first_entries_are_zero(backend: str, eps: float, position: str) -> None:
    skip_without(backend)
    norm = build_norm("prmsnorm", 8, backend=backend, p=0.25, eps=eps, eps_position=position)
    x = torch.tensor([[0.0, 0.0, 1.0, -2.0, 3.0, 0.0, 1.0, 1.0]], requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert x.grad is not None
    scale = 0.0 if eps == 0 else 1 / eps if position == "outside" else eps**-0.5
    torch.testing.assert_close(y, x.detach() * scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(x.grad, torch.full((1, 8), scale), rtol=1e-6, atol=0)


def test_zero_rows_leave_other_rows_alone(dividing: Any) -> None:
    if takes_mask(dividing.build(8)):
        pytest.skip("its rows share their statistics")
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    with_zero = torch.cat([x, torch.zeros(1, 8)]).requires_grad_()
    norm = dividing.build(8, eps=0.0)
    y = norm(with_zero)
    (dx,) = torch.autograd.grad(y.square().sum() + y.sum(), with_zero)
    alone = x.clone().requires_grad_()
    z = norm(alone)
    (expected,) = torch.autograd.grad(z.square().sum() + z.sum(), alone)
    assert torch.equal(y[:3], z)
    assert torch.equal(dx[:3], expected)
    assert torch.equal(dx[3], torch.zeros(8))


# -------------------------------------------------------------------------------- shapes and memory


@pytest.mark.shares_kernels
def test_a_wrong_last_dimension_is_refused(arm: Any) -> None:
    for dim, shape in ((4, (2, 5)), (1, (2, 4)), (4, (2, 1)), (4, (0,)), (4, ())):
        with pytest.raises(
            ValueError, match=rf"{arm.norm} was built for a last dimension of {dim}.*shape \("
        ):
            arm.build(dim)(torch.ones(shape))


@pytest.mark.shares_kernels
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_numbers_of_another_kind_are_refused(arm: Any, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"{arm.norm} takes floating-point numbers, got {dtype}"):
        arm.build(4)(torch.ones(2, 4).to(dtype))


@pytest.mark.shares_kernels
@pytest.mark.parametrize(
    ("dim", "error"),
    [
        (0, ValueError),
        (-3, ValueError),
        (2.0, TypeError),
        ((2, 2), TypeError),
        (True, TypeError),
        ("8", TypeError),
    ],
)
def test_a_wrong_size_is_refused(arm: Any, dim: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="dim"):
        arm.build(dim)


@pytest.mark.shares_kernels
@pytest.mark.parametrize("shape", [(0, 8), (0, 5, 8), (3, 0, 8), (0, 512)], ids=str)
def test_empty_batches(arm: Any, shape: tuple[int, ...]) -> None:
    norm = arm.build(shape[-1])
    x = torch.zeros(shape, requires_grad=True)
    y = norm(x)
    assert y.shape == shape
    y.sum().backward()
    for parameter in norm.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("dim", [8, 512])
def test_memory_layout_changes_nothing(arm: Any, dim: int) -> None:
    norm = randomise(arm.build(dim))
    base = torch.randn(dim, 6, generator=torch.Generator().manual_seed(0))
    for view in (
        base.t(),
        base.t()[::2],
        base.t().expand(3, 6, dim),
        base.t().reshape(2, 3, dim).transpose(0, 1),
    ):
        torch.testing.assert_close(norm(view), norm(view.contiguous()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("train", [True, False])
def test_the_input_is_not_modified(arm: Any, train: bool, dtype: torch.dtype) -> None:
    norm = randomise(arm.build(2).to(dtype)).train(train)
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=dtype)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            before = x.clone()
            norm(x)
            assert torch.equal(x, before)


@pytest.mark.shares_kernels
def test_the_graph_can_be_run_twice(arm: Any) -> None:
    norm = randomise(arm.build(8))
    x = torch.randn(3, 8, requires_grad=True)
    y = norm(x).square().sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


@pytest.mark.parametrize("backend", EACH)
def test_a_large_mean_does_not_cancel_the_variance(backend: str) -> None:
    skip_without(backend)
    # In fp32 mean(x^2) - mean(x)^2 has no digit left here.
    x = 1e4 + torch.arange(8, dtype=torch.float32)
    expected = (torch.arange(8) - 3.5) / 5.25**0.5
    torch.testing.assert_close(build_norm("layernorm", 8, backend=backend)(x), expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------ modules


@pytest.mark.shares_kernels
def test_initial_parameters_and_effective_gain(arm: Any) -> None:
    norm = arm.build(5)
    gain = torch.full((5,), 5**0.5) if arm.norm == "scalenorm" else torch.ones(5)
    assert torch.equal(norm.effective_gain(), gain)
    if arm.norm == "none":
        assert list(norm.parameters()) == []
    elif arm.norm == "gemma_rmsnorm":
        assert torch.equal(norm.weight, torch.zeros(5))
    elif arm.norm == "scalenorm":
        assert torch.equal(norm.weight, torch.full((1,), 5**0.5))
    else:
        assert torch.equal(norm.weight, torch.ones(5))
        assert norm.effective_gain() is norm.weight
    if arm.norm in ("layernorm", "batchnorm", "dyt"):
        assert torch.equal(norm.bias, torch.zeros(5))
    else:
        assert norm.bias is None


@pytest.mark.shares_kernels
def test_effective_gain_without_gain(dividing: Any) -> None:
    if dividing.norm == "scalenorm":
        pytest.skip("it is its gain")
    norm = dividing.build(5, gain=False)
    assert norm.weight is None
    assert torch.equal(norm.effective_gain(), torch.ones(5))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks(arm: Any, compiler: str) -> None:
    torch.compiler.reset()
    norm = randomise(arm.build(300))
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(0), requires_grad=True)
    compiled = torch.compile(norm, fullgraph=True, backend=compiler)
    y, expected = compiled(x), norm(x)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    (dx_expected,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(dx, dx_expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [{"eps": 0.0}, {"eps_position": "outside"}], ids=str)
def test_compiles_with_every_convention(dividing: Any, given: dict[str, Any]) -> None:
    torch.compiler.reset()
    norm = dividing.build(8, **given)
    x = torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(norm, fullgraph=True, backend="aot_eager")(x), norm(x))


@pytest.mark.shares_kernels
def test_copies_and_pickles(arm: Any) -> None:
    norm = randomise(arm.build(8))
    x = torch.randn(4, 8)
    copied = copy.deepcopy(norm)
    assert torch.equal(copied(x), norm(x))
    for parameter in copied.parameters():
        parameter.data.zero_()
    assert torch.equal(pickle.loads(pickle.dumps(norm))(x), norm(x))
    assert all(p.abs().sum() > 0 for p in norm.parameters())


@pytest.mark.shares_kernels
def test_state_dict_round_trip(arm: Any) -> None:
    norm, other = randomise(arm.build(8)), arm.build(8)
    buffer = io.BytesIO()
    torch.save(norm.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    x = torch.randn(4, 8)
    assert torch.equal(other(x), norm(x))
    names = {
        "none": set(),
        "layernorm": {"weight", "bias"},
        "batchnorm": {"weight", "bias", "running_mean", "running_var"},
        "dyt": {"weight", "bias", "alpha"},
        "gemma_rmsnorm": {"weight", "gain_offset"},
    }.get(arm.norm, {"weight"})
    assert set(norm.state_dict()) == names


def test_a_state_dict_with_other_parameters_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        build_norm("layernorm", 8).load_state_dict(build_norm("rmsnorm", 8).state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*bias"):
        build_norm("rmsnorm", 8).load_state_dict(build_norm("layernorm", 8).state_dict())


def test_repr_says_how_it_is_computed() -> None:
    assert repr(build_norm("layernorm_nobias", 8, eps=1e-6, backend="torch")) == (
        "LayerNormNoBias(8, eps=1e-06, eps_position=inside, gain=True, backend=torch)"
    )
