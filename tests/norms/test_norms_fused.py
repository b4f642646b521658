"""The fused norms in PyTorch's terms: graphs, operators, transforms, dtypes, strides, and what is refused.

Their values stand in the tests of all norms (test_norms_layers.py and others), which run on every backend.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rmsrepro.norms import build_norm
from rmsrepro.norms.adding import add_norm
from rmsrepro.norms.backends.fused import ops
from rmsrepro.norms.backends.fused.differentiable import equation
from rmsrepro.norms.backends.fused.kernel import FusedNorm
from rmsrepro.norms.backends.fused.launch import Launcher
from rmsrepro.norms.backends.fused.levels import best_level
from rmsrepro.norms.backends.fused.library import kernels, loaded_kernels
from rmsrepro.norms.params import BUILTIN_PARAMS

COVERED: list[tuple[str, dict[str, Any]]] = [
    ("layernorm", {}),
    ("layernorm", {"bias": False, "gain": False}),
    ("layernorm_nobias", {"eps": 0.0}),
    ("rmsnorm", {"bias": True}),
    ("rmsnorm", {"variant": "authors_torch"}),
    ("prmsnorm", {"p": 0.3}),
    ("l2norm", {}),
    ("scalenorm", {}),
    ("gemma_rmsnorm", {}),
    ("llama_rmsnorm", {}),
]
IDS = [f"{name}-{'-'.join(map(str, given.values()))}" for name, given in COVERED]
covered = pytest.mark.parametrize(("name", "given"), COVERED, ids=IDS)


def norm_and_input(
    name: str, given: dict[str, Any], dtype: torch.dtype, dim: int = 7
) -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    norm = build_norm(name, dim, backend="fused", **given).to(dtype)
    for parameter in norm.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return norm, torch.randn(3, 2, dim, generator=generator, dtype=dtype, requires_grad=True)


def kernel_of(norm: nn.Module) -> FusedNorm:
    kernel = norm._kernel
    assert isinstance(kernel, FusedNorm)
    return kernel


def gain_of(norm: Any) -> Tensor | None:
    return None if norm.weight is None else norm.effective_gain().detach().contiguous().requires_grad_()


@covered
def test_first_and_second_derivatives(name: str, given: dict[str, Any]) -> None:
    norm, x = norm_and_input(name, given, torch.float64)
    parameters = list(norm.parameters())

    def function(x: Tensor, *_: Tensor) -> Tensor:
        return norm(x)

    assert torch.autograd.gradcheck(function, (x, *parameters))
    assert torch.autograd.gradgradcheck(function, (x, *parameters))


@covered
def test_a_graph_is_gone_through_twice(name: str, given: dict[str, Any]) -> None:
    norm, x = norm_and_input(name, given, torch.float32)
    wanted = [x, *norm.parameters()]
    y = norm(x)
    upstream = torch.randn_like(y)
    first = torch.autograd.grad(y, wanted, upstream, retain_graph=True)
    other = torch.autograd.grad(y, wanted, 2 * upstream, retain_graph=True)
    second = torch.autograd.grad(y, wanted, upstream)
    for one, twice, again in zip(first, other, second, strict=True):
        assert torch.equal(one, again)
        torch.testing.assert_close(twice, 2 * one)


def test_an_input_changed_in_place_is_noticed() -> None:
    norm, x = norm_and_input("rmsnorm", {}, torch.float32)
    held = x * 1
    y = norm(held)
    held.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@covered
def test_operators_keep_what_pytorch_asks_of_them(name: str, given: dict[str, Any]) -> None:
    norm, x = norm_and_input(name, given, torch.float32)
    gain, bias, numbers = gain_of(norm), norm.bias, kernel_of(norm)._numbers
    torch.library.opcheck(torch.ops.rmsrepro.norm, (x, gain, bias, *numbers))
    torch.library.opcheck(torch.ops.rmsrepro.add_norm, (x, x.detach() + 1, gain, bias, *numbers))
    y, gain, bias = (None if one is None else one.detach() for one in (x, gain, bias))
    torch.library.opcheck(torch.ops.rmsrepro.norm_backward, (y, y, gain, bias, *numbers))
    torch.library.opcheck(torch.ops.rmsrepro.add_norm_backward, (y, y, y, gain, bias, *numbers))


@covered
def test_every_way_to_the_kernels_gives_the_same(name: str, given: dict[str, Any]) -> None:
    norm, x = norm_and_input(name, given, torch.float32)
    wanted = [x, *norm.parameters()]
    upstream = torch.randn(x.shape)

    def results(function: Any) -> list[Tensor]:
        y = function(x)
        return [y.detach(), *torch.autograd.grad(y, wanted, upstream)]

    expected = results(norm)
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(norm, (x.detach(),)).module()
    with Passing() as seen:
        watched = results(norm)
    assert "rmsrepro.norm.default" in seen.names
    assert "rmsrepro.norm_backward.default" in seen.names
    for found in (results(compiled), watched):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(exported(x.detach()), expected[0])


@covered
def test_second_derivatives_through_the_operators(name: str, given: dict[str, Any]) -> None:
    norm, x = norm_and_input(name, given, torch.float64)
    kernel, gain, bias = kernel_of(norm), gain_of(norm), norm.bias
    given_ones = [one for one in (x, gain, bias) if one is not None]

    def single(*_: Tensor) -> Tensor:
        return torch.ops.rmsrepro.norm(x, gain, bias, *kernel._numbers)

    def double(*_: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.rmsrepro.add_norm(x, x.sin(), gain, bias, *kernel._numbers)

    for function in (single, double):
        assert torch.autograd.gradcheck(function, given_ones)
        assert torch.autograd.gradgradcheck(function, given_ones)
    with torch.enable_grad():
        dx, *_ = torch.ops.rmsrepro.norm_backward(x.detach() + 1, x, gain, bias, *kernel._numbers)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.sum().backward()


def test_second_derivatives_of_a_norm_that_is_used_twice() -> None:
    """The gradients that are differentiated again are partial ones: x depends on the gain as well."""
    results = []
    for backend in ("composite", "fused", "operators"):
        norm = build_norm("rmsnorm", 6, backend="composite" if backend == "composite" else "fused").double()
        x = torch.linspace(-1, 2, 12, dtype=torch.float64).view(2, 6).requires_grad_()

        def apply(x: Tensor, norm: Any = norm, backend: str = backend) -> Tensor:
            if backend != "operators":
                return norm(x)
            return torch.ops.rmsrepro.norm(x, norm.weight, None, *norm._kernel._numbers)

        y = apply(apply(x).sin() + x)
        wanted = [x, norm.weight]
        first = torch.autograd.grad((y**3).sum(), wanted, create_graph=True)
        penalty = sum((one**2).sum() for one in first)
        results.append([*first, *torch.autograd.grad(penalty, wanted)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-11, atol=1e-11)


class Passing(TorchDispatchMode):
    """Lets everything pass, and keeps the operators' names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_fake_and_meta_tensors_have_shapes_alone() -> None:
    norm = build_norm("layernorm", 8, backend="fused")
    with FakeTensorMode() as mode:
        faked = mode.from_tensor(torch.randn(2, 8))
    moved = copy.deepcopy(norm).to("meta")
    assert moved(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 8)
    with mode:
        fake = build_norm("rmsnorm", 8, backend="fused", gain=False)(faked)
    assert fake.shape == (2, 8)
    assert type(fake) is type(faked)


@covered
def test_function_transforms_and_forward_derivatives(name: str, given: dict[str, Any]) -> None:
    norm, x = norm_and_input(name, given, torch.float64)
    rows = x.detach().reshape(-1, 7)
    torch.testing.assert_close(torch.func.vmap(norm)(rows), norm(rows))
    jacobian = torch.func.jacrev(norm)(rows[0])
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(norm, rows[0]))
    tangent = torch.randn_like(rows[0])
    _, along = torch.func.jvp(norm, (rows[0],), (tangent,))
    torch.testing.assert_close(along, jacobian @ tangent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_changes_neither_dtype_nor_values(dtype: torch.dtype, enabled: bool) -> None:
    norm, x = norm_and_input("layernorm", {}, torch.float32)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    expected = norm(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        for function in (norm, compiled):
            assert torch.equal(function(x), expected)
            half = function(x.to(dtype))
            assert half.dtype == dtype
            torch.testing.assert_close(half.float(), expected, rtol=0.02, atol=0.02)


@covered
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_strides_do_not_matter(name: str, given: dict[str, Any], dtype: torch.dtype) -> None:
    norm, _ = norm_and_input(name, given, dtype)
    wide = torch.randn(4, 5, 16).to(dtype)
    sources = [
        wide[..., 3:10],  # rows in a wider tensor
        wide[::2, 1:, 2:9],  # no one distance between rows
        wide[:, :, :7].transpose(0, 1),
        torch.randn(7, 5).to(dtype).t(),  # entries apart
        torch.randn(5, 1).to(dtype).expand(5, 7),
        torch.randn(7).to(dtype),
        torch.empty(0, 3, 7, dtype=dtype),
    ]
    for source in sources:
        results = []
        for x in (source.detach().requires_grad_(), source.detach().contiguous().requires_grad_()):
            y = norm(x)
            assert y.is_contiguous()
            upstream = torch.ones(1, dtype=dtype).expand(y.shape)
            results.append([y, *torch.autograd.grad(y, [x, *norm.parameters()], upstream)])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "l2norm"])
def test_second_derivatives_at_a_row_of_zeros(name: str) -> None:
    """There the norm is linear, a / sqrt(eps) (or a - mean(a) over it): its second derivative is zero."""
    norm, _ = norm_and_input(name, {}, torch.float64)
    x = torch.zeros(1, 7, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(norm(x)[0, 2], x, create_graph=True)
    weight = torch.zeros(7, dtype=torch.float64)
    weight[2] = norm.weight[2].detach()
    slope = (weight - weight.mean() if name == "layernorm" else weight) / 1e-5**0.5
    torch.testing.assert_close(first[0], slope)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    assert torch.equal(second, torch.zeros_like(x))


@covered
def test_gradients_that_are_batches_views_or_nothing(name: str, given: dict[str, Any]) -> None:
    norm, x = norm_and_input(name, given, torch.float64)
    twin = build_norm(name, 7, backend="composite", **given).double()
    twin.load_state_dict(norm.state_dict())
    batch = torch.randn(4, *x.shape, dtype=torch.float64)
    zeros, negated = torch._efficientzerotensor(x.shape, dtype=torch.float64), torch._neg_view(batch[0])
    for function in (norm, twin):
        y, total = function(x), add_norm(function, x, x.sin())
        found = [
            *torch.autograd.grad(
                y, [x, *function.parameters()], batch, is_grads_batched=True, retain_graph=True
            ),
            *torch.autograd.grad(total, [x], (batch, batch), is_grads_batched=True),
            *torch.autograd.grad(y, [x, *function.parameters()], negated, retain_graph=True),
            *torch.autograd.grad(y, [x, *function.parameters()], zeros),
            function(torch._neg_view(x.detach())),
            torch.autograd.functional.jacobian(function, x.detach()[0], vectorize=True),
            torch.autograd.functional.hessian(
                lambda x, f=function: f(x).sin().sum(), x.detach()[0], vectorize=True
            ),
        ]
        if function is norm:
            expected = found
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_another_default_device_changes_nothing() -> None:
    norm = build_norm("layernorm", 8, backend="fused")
    x = torch.randn(8, 5).t().requires_grad_()
    expected = [norm(x), *add_norm(norm, x, x)]
    with torch.device("meta"):
        found = [norm(x), *add_norm(norm, x, x)]
        gradients = torch.autograd.grad(found[0], [x, *norm.parameters()], torch.ones(5, 8, device="cpu"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(one.device.type == "cpu" for one in gradients)


def test_parameters_of_other_dtypes_and_layouts() -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    gain, bias = torch.randn(16, dtype=torch.float32)[::2], torch.randn(8).to(torch.bfloat16)
    kernel = kernel_of(build_norm("layernorm", 8, backend="fused"))
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        expected = equation(kernel.rule, x.to(dtype).double(), gain.double(), bias.double())
        found = kernel(x.to(dtype), gain, bias)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_what_is_refused() -> None:
    norm = build_norm("layernorm", 8, backend="fused")
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        norm(torch.zeros(2, 8).to(torch.float8_e4m3fn))
    kernel = kernel_of(norm)
    with pytest.raises(ValueError, match=r"the input is on cpu, the norm's parameters on meta"):
        kernel(torch.zeros(2, 8), torch.ones(8, device="meta"), None)
    with pytest.raises(ValueError, match=r"x is \(2, 8\).*residual \(3, 8\).*must be alike"):
        kernel.add(torch.zeros(2, 8), torch.zeros(3, 8))


def test_copies_share_the_kernel_and_pickles_find_it() -> None:
    norm, x = norm_and_input("prmsnorm", {"p": 0.5}, torch.float32)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(other(x), norm(x))
        assert other.weight is not norm.weight
    launched = pickle.loads(pickle.dumps(kernel_of(norm)._launcher))
    assert isinstance(launched, Launcher)
    assert launched.rule == kernel_of(norm).rule


def test_records_can_say_which_kernels_were_used() -> None:
    norm, x = norm_and_input("rmsnorm", {}, torch.float32)
    norm(x)
    used = loaded_kernels()
    assert used is not None
    assert used["level"] == kernels().level == best_level().name
    assert used["library"].endswith(".so")
    code = "from rmsrepro.norms.backends.fused.library import loaded_kernels as f; print(f())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "None\n"


def test_all_but_these_are_covered() -> None:
    from rmsrepro.norms.backends import refusal

    refused = {name for name, params in BUILTIN_PARAMS.items() if refusal(params(), "fused") is not None}
    assert refused == {"batchnorm", "weightnorm", "crmsnorm", "dyt"}


def test_the_same_numbers_from_call_to_call() -> None:
    norm = build_norm("layernorm", 96, backend="fused")
    x = torch.randn(3000, 96, requires_grad=True)
    upstream = torch.randn(3000, 96)
    found = [torch.autograd.grad(norm(x), [x, *norm.parameters()], upstream) for _ in range(3)]
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_rules_pass_through_operators_whole() -> None:
    for name, given in COVERED:
        rule = kernel_of(build_norm(name, 9, backend="fused", **given)).rule
        assert type(rule)(*ops.numbers(rule)) == rule


def test_a_tensor_that_a_transform_left_behind() -> None:
    norm, wanted = (build_norm("rmsnorm", 8, backend=backend) for backend in ("fused", "composite"))
    left: list[Tensor] = []

    def leaky(x: Tensor) -> Tensor:
        left.append(x)
        return (x * x).sum()

    torch.func.grad(leaky)(torch.randn(3, 8))
    torch.testing.assert_close(norm(left[0]), wanted(left[0]))
    for one in norm.add(left[0], left[0]):  # type: ignore[operator]
        assert one.shape == (3, 8)
    torch.testing.assert_close(norm.add(left[0], left[0])[1], wanted(2 * left[0]))  # type: ignore[operator]
