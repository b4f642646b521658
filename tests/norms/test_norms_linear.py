"""normed_linear, and the norm of weights."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from rmsrepro.norms import (
    NormSpec,
    build_norm,
    list_norms,
    match_gains,
    norm_parameter_names,
    normed_linear,
    register_norm,
    weight_normed,
)
from rmsrepro.norms.equations import weightnorm
from rmsrepro.norms.linear import WeightNorm, WeightNormLinear
from tests.norms.conftest import NORMS

pytestmark = pytest.mark.usefixtures("forget_norms")


def linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 7, bias=bias).double()


def rows(count: int = 4) -> Tensor:
    return torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_activations_follows_the_map(norm: str) -> None:
    inner = linear()
    module = normed_linear(inner, NormSpec(norm)).double()
    assert module.linear is inner
    expected = inner(rows()) if norm == "none" else build_norm(norm, 7).double()(inner(rows()))
    torch.testing.assert_close(module(rows()), expected)
    assert norm_parameter_names(module) == (
        set() if norm == "none" else {f"norm.{name}" for name, _ in module.norm.named_parameters()}
    )


def test_a_norm_over_positions_is_given_the_mask() -> None:
    module = normed_linear(linear(), NormSpec("batchnorm", {"eps": 0.0})).double()
    mask = torch.tensor([True, True, True, False])
    y = module(rows(), mask)
    torch.testing.assert_close(y[mask].mean(0), torch.zeros(7).double(), atol=1e-12, rtol=0)


def test_build_norm_names_the_function_for_weightnorm() -> None:
    with pytest.raises(ValueError, match=r"weights of a linear map.*normed_linear\(linear, NormSpec"):
        build_norm("weightnorm", 8)
    with pytest.raises(ValueError, match=r"weightnorm\.eps must be 0 or more"):
        build_norm("weightnorm", 8, eps=-1)
    with pytest.raises(ValueError, match="backend=torch cannot run weightnorm"):
        normed_linear(linear(), NormSpec("weightnorm", backend="torch"))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("given", [{}, {"eps": 0.0}, {"eps": 0.3}, {"eps": 0.3, "eps_position": "outside"}])
def test_weightnorm_starts_as_the_map_itself(given: dict[str, float], bias: bool) -> None:
    inner = linear(bias)
    module = normed_linear(inner, NormSpec("weightnorm", given))
    torch.testing.assert_close(module(rows()), inner(rows()), rtol=1e-12, atol=1e-12)
    assert dict(module.named_parameters()).keys() == (
        {"linear.weight", "linear.norm.weight"} | ({"linear.bias"} if bias else set())
    )
    assert module.linear.weight is inner.weight
    assert norm_parameter_names(module) == {"linear.norm.weight"}


@pytest.mark.parametrize("position", ["inside", "outside"])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_weightnorm_equals_its_equation(eps: float, position: str) -> None:
    module = normed_linear(linear(), NormSpec("weightnorm", {"eps": eps, "eps_position": position}))
    gains = torch.linspace(-1, 2, 7).double()
    module.linear.norm.weight.data = gains
    v, b = module.linear.weight.detach(), module.linear.bias.detach()
    x = rows().requires_grad_()
    y = module(x)
    leaves = [v.clone().requires_grad_(), gains.clone().requires_grad_(), b.clone().requires_grad_()]
    again = rows().requires_grad_()
    expected = again @ weightnorm(leaves[0], leaves[1], eps=eps, outside=position == "outside").T + leaves[2]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    got = torch.autograd.grad(
        y, [x, module.linear.weight, module.linear.norm.weight, module.linear.bias], upstream
    )
    wanted = torch.autograd.grad(expected, [again, *leaves], upstream)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_weightnorm_is_twice_differentiable() -> None:
    norm = WeightNorm(3).double()

    def call(v: Tensor, g: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": g}, (v,))

    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (3,))]
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


def test_only_the_chosen_rows_are_normalised() -> None:
    inner = linear()
    module = weight_normed(inner, NormSpec("weightnorm", {"eps": 0.0}), [slice(0, 2), slice(5, 7)])
    assert isinstance(module, WeightNormLinear)
    nn.init.ones_(module.norm.weight)
    lengths = module.effective_weight().norm(dim=1)
    torch.testing.assert_close(lengths[[0, 1, 5, 6]], torch.ones(4).double())
    torch.testing.assert_close(module.effective_weight()[2:5], inner.weight[2:5])
    assert weight_normed(inner, NormSpec("weightnorm"), []) is inner
    assert weight_normed(inner, NormSpec("rmsnorm")) is inner


def test_gains_follow_weights_that_are_drawn_anew() -> None:
    model = nn.Sequential(normed_linear(linear(), NormSpec("weightnorm")), nn.Linear(7, 2))
    nn.init.normal_(model[0].linear.weight)
    plain = rows() @ model[0].linear.weight.T + model[0].linear.bias
    assert not torch.allclose(model[0](rows()), plain)
    match_gains(model)
    torch.testing.assert_close(model[0](rows()), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_a_row_of_zeros_stays_finite(eps: float) -> None:
    inner = linear(bias=False)
    inner.weight.data[3] = 0.0
    module = normed_linear(inner, NormSpec("weightnorm", {"eps": eps}))
    y = module(rows())
    y.sum().backward()
    assert torch.equal(y[:, 3], torch.zeros(4).double())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weightnorm_keeps_the_dtype(dtype: torch.dtype) -> None:
    module = normed_linear(linear().to(dtype), NormSpec("weightnorm"))
    assert module.to(dtype)(rows().to(dtype)).dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.float()(rows().float()).dtype == torch.bfloat16


def test_copies_states_and_compiles() -> None:
    module = normed_linear(linear(), NormSpec("weightnorm"))
    other = normed_linear(nn.Linear(5, 7).double(), NormSpec("weightnorm")).double()
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other(rows()), module(rows()))
    assert torch.equal(copy.deepcopy(module)(rows()), module(rows()))
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(rows()), module(rows()))


def test_wrong_shapes_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weightnorm was built for 3 rows, got the shape \(4, 5\)"):
        WeightNorm(3)(torch.ones(4, 5))
    with pytest.raises(ValueError, match="dim must be positive"):
        WeightNorm(0)


def test_a_users_norm_of_weights() -> None:
    @register_norm("unit_rows", scope="weight")
    class UnitRows(nn.Module):
        """Rows of length one."""

        def __init__(self, rows: int, *, power: float = 1.0) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(rows))
            self.power = power

        def forward(self, v: Tensor) -> Tensor:
            return v / v.norm(dim=1, keepdim=True) ** self.power * self.weight.unsqueeze(1)

    assert "unit_rows" in list_norms()
    module = normed_linear(linear(bias=False), NormSpec("unit_rows")).double()
    torch.testing.assert_close(module.linear.effective_weight().norm(dim=1), torch.ones(7).double())
    with pytest.raises(ValueError, match="normed_linear"):
        build_norm("unit_rows", 7)
