"""What is particular to the compiled backend: what it compiles, what it leaves to the composite norms."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from rmsrepro.norms import BackendUnavailable, NormSpec, build_norm, normed_linear
from rmsrepro.norms.backends import compiled, toolchain
from rmsrepro.norms.equations import equation
from tests.norms.conftest import DIVIDING, NORMS, skip_without
from tests.norms.test_norms_layers import TOLERANCE, assert_agrees, randomise

EXPONENTS = (-17, -9, 0, 9, 17)


@pytest.fixture(autouse=True)
def _compiler() -> None:
    skip_without("compiled")


@pytest.fixture
def no_more_kernels() -> Iterator[None]:
    """From here on, compiling is an error."""
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


def both(norm: str, dim: int, **params: Any) -> tuple[nn.Module, nn.Module]:
    """The norm compiled and composite, with the same parameters."""
    one = randomise(build_norm(norm, dim, backend="compiled", **params))
    return one, randomise(build_norm(norm, dim, backend="composite", **params))


def results(norm: nn.Module, x: Tensor, *args: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = norm(x, *args)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *norm.parameters()], upstream)]


# ------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_agrees_with_float64(norm: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = randomise(build_norm(norm, 8, backend="compiled").to(dtype))
    roundings = 2 if "casting=before_gain" in repr(module) else 1
    assert_agrees(module, (2 * torch.randn(2, 5, 8) + 0.7).to(dtype), roundings * TOLERANCE[dtype])


@pytest.mark.parametrize("norm", ["llama_rmsnorm", "gemma_rmsnorm"])
def test_rounds_where_the_composite_norm_does(norm: str) -> None:
    """Inductor would leave out a cast there and back again."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    one, other = (module.bfloat16() for module in both(norm, 8))
    assert torch.equal(one(x), other(x))


@pytest.mark.parametrize("norm", DIVIDING)
def test_fp32_holds_over_the_range(norm: str) -> None:
    module = build_norm(norm, 8, backend="compiled")
    for exponent in EXPONENTS:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 10.0**exponent
        wide = x.double().requires_grad_()
        leaves = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
        y = equation(module.params, 8)(wide, leaves.get("weight"), leaves.get("bias"))
        upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
        wanted = [y, *torch.autograd.grad(y, [wide, *leaves.values()], upstream.double())]
        for place, (got, expected) in enumerate(zip(results(module, x), wanted, strict=True)):
            scale = expected.abs().max().item()
            if place == 1:
                scale = max(scale, (upstream.abs().max() / x.abs().max() * y.abs().max()).item())
            assert (got.double() - expected).abs().max().item() <= 2e-5 * scale + 1e-38


@pytest.mark.parametrize("norm", DIVIDING)
def test_beyond_the_range_results_stay_finite(norm: str) -> None:
    module = build_norm(norm, 8, backend="compiled")
    for scale in (1e-45, 1e-30, 1e20, 1e37):
        signs = torch.ones(2, 8)
        signs[1, ::2] = -1
        assert all(one.isfinite().all() for one in results(module, signs * scale))


@pytest.mark.slow
@pytest.mark.parametrize("norm", DIVIDING)
@pytest.mark.parametrize("given", [{"eps": 0.0}, {"eps": 1e-3, "eps_position": "outside"}], ids=str)
@pytest.mark.parametrize("dim", [300, 1024])
def test_conventions_at_greater_widths(norm: str, given: dict[str, Any], dim: int) -> None:
    one, other = both(norm, dim, **given)
    for exponent in EXPONENTS:
        x = torch.randn(4, dim, generator=torch.Generator().manual_seed(0)) * 10.0**exponent
        for got, expected in zip(results(one, x), results(other, x), strict=True):
            size = expected.abs().max().item()
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * size + 1e-38)


# --------------------------------------------------------------------------------- what is compiled


@pytest.mark.parametrize("norm", ["layernorm", "batchnorm"])
def test_other_numbers_of_rows_compile_nothing(norm: str, request: pytest.FixtureRequest) -> None:
    one, other = both(norm, 8)
    results(one, torch.randn(5, 8))
    request.getfixturevalue("no_more_kernels")
    for shape in ((7, 8), (8, 8), (3, 4, 8), (65, 8), (2, 2, 2, 8)):
        x = torch.randn(shape)
        for got, expected in zip(results(one, x), results(other, x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_norms_of_equal_parameters_share_a_kernel(request: pytest.FixtureRequest) -> None:
    one, same = build_norm("rmsnorm", 8, backend="compiled"), build_norm("rmsnorm", 8, backend="compiled")
    assert one._kernel is same._kernel
    assert build_norm("rmsnorm", 8, backend="compiled", eps=1e-3)._kernel is not one._kernel
    assert copy.deepcopy(one)._kernel is one._kernel
    assert pickle.loads(pickle.dumps(one))._kernel is one._kernel
    x = torch.randn(3, 8)
    one(x)
    request.getfixturevalue("no_more_kernels")
    assert torch.equal(same(x), one(x))


def test_many_widths_meet_no_limit() -> None:
    """torch compiles a function at most eight times, and then stops or runs it uncompiled."""
    for dim in range(20, 30):
        x = torch.randn(2, dim, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            y = build_norm("dyt", dim, backend="compiled")(x)
        torch.testing.assert_close(y, torch.tanh(0.5 * x))


def test_no_rows_and_one_row() -> None:
    norm, other = both("rmsnorm", 8)
    assert norm(torch.ones(0, 8)).shape == (0, 8)
    x = torch.randn(8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(norm(x), other(x))


def test_batchnorm_with_masks_and_running_statistics() -> None:
    one, other = both("batchnorm", 8)
    generator = torch.Generator().manual_seed(0)
    for rows in (5, 9):
        x = torch.randn(3, rows, 8, generator=generator)
        mask = torch.rand(3, rows, generator=generator) > 0.3
        for got, expected in zip(results(one, x, mask), results(other, x, mask), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.running_mean, other.running_mean)
    torch.testing.assert_close(one.running_var, other.running_var)
    torch.testing.assert_close(one.eval()(x), other.eval()(x))


def test_weightnorm() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    found = {}
    for backend in ("compiled", "composite"):
        linear = normed_linear(copy.deepcopy(plain), NormSpec("weightnorm", {}, backend))
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
        linear(x).square().sum().backward()
        found[backend] = [linear(x), *(parameter.grad for parameter in linear.parameters())]
    for got, expected in zip(*found.values(), strict=True):
        torch.testing.assert_close(got, expected)


# -------------------------------------------------------------------------------- what is left alone


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "dyt"])
def test_second_derivatives(norm: str) -> None:
    torch.manual_seed(0)
    module = randomise(build_norm(norm, 6, backend="compiled")).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in module.named_parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (x, *module.parameters())
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


def test_one_tensor_in_two_places() -> None:
    """The gain is the input: the second derivative sees both uses."""
    norm, other = build_norm("rmsnorm", 3, backend="compiled"), build_norm("rmsnorm", 3, backend="composite")
    found = []
    for kernel in (norm._kernel, other._kernel):
        x = torch.tensor([1.0, 2.0, 2.0], requires_grad=True)
        (dx,) = torch.autograd.grad(kernel(x, x, None).square().sum(), x, create_graph=True)
        found.append([dx, *torch.autograd.grad(dx.square().sum(), x)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("norm", ["layernorm", "dyt"])
def test_transforms_follow_the_equations(norm: str) -> None:
    one, other = both(norm, 8)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for transform in (torch.func.vmap, torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(one)(x), transform(other)(x))
    tangent = torch.ones_like(x)
    torch.testing.assert_close(torch.func.jvp(one, (x,), (tangent,)), torch.func.jvp(other, (x,), (tangent,)))
    upstream = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    (got,) = torch.autograd.grad(one(x), x, upstream, is_grads_batched=True)
    (expected,) = torch.autograd.grad(other(x), x, upstream, is_grads_batched=True)
    torch.testing.assert_close(got, expected)


def test_an_outer_compiler_sees_through_it() -> None:
    torch.compiler.reset()
    model = nn.Sequential(build_norm("layernorm", 8, backend="compiled"), nn.Linear(8, 8))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x), model(x))
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


def test_checkpointing_and_inference() -> None:
    norm, _ = both("rmsnorm", 8)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    from torch.utils.checkpoint import checkpoint

    y = checkpoint(norm, x, use_reentrant=False)
    (got,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(norm(x).sum(), x)
    torch.testing.assert_close(got, expected)
    with torch.inference_mode():
        torch.testing.assert_close(norm(x.detach().clone()), y)
    assert build_norm("rmsnorm", 8, backend="compiled").to("meta")(x.to("meta")).is_meta


# --------------------------------------------------------------------------------- without a compiler


def test_without_a_compiler_building_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    toolchain.why_no_compiler.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match=r"needs a C\+\+ compiler .* or use backend=composite"):
            build_norm("rmsnorm", 8, backend="compiled")
        with pytest.raises(BackendUnavailable, match="install one"):
            _ = NormSpec("weightnorm", {}, "compiled").backend_used
        assert build_norm("none", 8, backend="compiled")(torch.ones(2, 8)).shape == (2, 8)
    finally:
        toolchain.why_no_compiler.cache_clear()


def test_a_compiler_that_fails_is_named_on_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise torch._inductor.exc.CppCompileError(["g++", "x.cpp"], "no such instruction")

    norm = build_norm("rmsnorm", 8, backend="compiled", eps=0.5)
    monkeypatch.setattr(norm._kernel, "_forward", broken)
    with pytest.raises(BackendUnavailable, match=r"Inductor failed .*use backend=composite"):
        norm(torch.ones(2, 8))


def test_equals_torchs_own_where_there_is_one() -> None:
    norm = randomise(build_norm("layernorm", 8, backend="compiled"))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(norm(x), F.layer_norm(x, (8,), norm.weight, norm.bias))
    assert isinstance(norm._kernel, compiled.Compiled)
