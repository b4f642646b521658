"""Faults of the arithmetic of norms, met in practice: B05, B06, B07, B09, B11, B12, B13."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.config.schema import OptimConfig, Placement, Schedule, Site
from rmsrepro.models.blocks import Residual
from rmsrepro.models.gru import GRULayer
from rmsrepro.norms import (
    NormSpec,
    build_norm,
    norm_parameter_names,
    normed_linear,
    register_norm,
    resolve_params,
    takes_mask,
)
from rmsrepro.norms import layers as norm_layers
from rmsrepro.norms.adding import add_norm
from rmsrepro.norms.linear import WeightNorm
from rmsrepro.norms.params import KRule, count_entries
from rmsrepro.tasks.optim import build_optimizer
from tests.models.norms import MASKED, PLAIN, WEIGHTS
from tests.norms.conftest import Arm, skip_without
from tests.practice.arms import (
    CELLS,
    CHEAP,
    EVERYWHERE,
    FEW,
    cells,
    inputs,
    mean_loss,
    model,
    name,
    skip_where_lacking,
)

every_arm = pytest.mark.parametrize("arm", CHEAP, ids=name)
pytestmark = pytest.mark.usefixtures("users_norms_registered")
everywhere = pytest.mark.parametrize("arm", EVERYWHERE, ids=name)
HALF = [torch.bfloat16, torch.float16]


# ------------------------------------------------------------------------------------------- dtypes


@everywhere
def test_a_step_of_mixed_precision_in_every_place(arm: Arm) -> None:
    """B05: fp32 gains lift a bf16 stream to fp32, and a layer behind the norm meets a dtype it cannot use."""
    skip_where_lacking(arm)
    for task, place in cells(arm):
        built = model(arm, task, place)
        given = inputs(task, [4, 2], 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = built(*given)
        loss = mean_loss(logits, given[-1])
        loss.backward()
        assert logits.dtype == torch.bfloat16, place
        assert loss.isfinite(), place
        for key, parameter in built.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.isfinite().all(), key


@everywhere
def test_a_model_of_half_precision_stays_there(arm: Arm) -> None:
    """B05: the same without autocast, the whole model in bf16."""
    skip_where_lacking(arm)
    for task, place in cells(arm, FEW):
        built = model(arm, task, place).bfloat16()
        given = inputs(task, [4, 2], 4)
        logits = built(*given)
        mean_loss(logits, given[-1]).backward()
        assert logits.dtype == torch.bfloat16
        assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters()), place


# -------------------------------------------------------------------------------------------- gains

PLAIN_LAYERS = [
    layer
    for layer in vars(norm_layers).values()
    if isinstance(layer, type)
    and issubclass(layer, norm_layers.ActivationNorm)
    and layer.__module__ == norm_layers.__name__
    and layer.gain_offset == 0
    and layer not in (norm_layers.NoNorm, norm_layers.ScaleNorm)
]


@pytest.mark.usefixtures("forget_norms")
@pytest.mark.parametrize("layer", PLAIN_LAYERS, ids=lambda layer: layer.__name__)
def test_an_offset_gain_on_every_layer(layer: Any) -> None:
    """B06: gains stored as w for 1 + w, read as plain gains (twice too large) or summed in bf16."""

    def start(self: Any, dim: int) -> None:
        layer.__init__(self, dim)

    offset_class = type(f"Offset{layer.__name__}", (layer,), {"gain_offset": 1.0, "__init__": start})
    register_norm("practice_offset")(offset_class)
    offset, plain = build_norm("practice_offset", 8), layer(8)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(offset.weight, torch.zeros(8))
    expected = plain(x)
    assert torch.equal(offset(x), expected)

    half = copy.deepcopy(offset).bfloat16()
    nn.init.constant_(half.weight, 15.8125)
    # The nearest bf16 numbers to 16.8125 are 16.75 and 16.875: a sum in bf16 would give the former.
    assert torch.equal(half.effective_gain(), torch.full((8,), 16.8125))

    for one, other in ((offset, plain), (plain, offset)):
        with pytest.raises(RuntimeError, match=r"weight: this .* stores"):
            one.load_state_dict(other.state_dict())
        assert torch.equal(one(x), expected), "what was refused has changed nothing"
    nn.init.constant_(plain.weight, 1.25)
    offset.load_state_dict(plain.state_dict() | {"weight": plain.weight - 1, "gain_offset": torch.ones(())})
    assert torch.equal(offset.effective_gain(), plain.weight)
    assert torch.equal(offset(x), plain(x))


@pytest.mark.parametrize("backend", ["composite", "fused"])
def test_an_offset_gain_is_added_in_full_precision_on_every_backend(backend: str) -> None:
    """B06: 1 + 15.8125 in the kernel, not in the dtype of the stored offset."""
    skip_without(backend)
    norm = build_norm("gemma_rmsnorm", 8, backend=backend, eps=0.0).bfloat16()
    nn.init.constant_(norm.weight, 15.8125)
    x = torch.full((1, 8), 3.0)
    x[0, ::2] *= -1
    torch.testing.assert_close(norm(x), torch.sign(x) * 16.8125, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------- zero rows


@every_arm
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_gradients_of_a_row_of_zeros(arm: Arm, dtype: torch.dtype) -> None:
    """B07: 0/0 in the backward of a row of padding, though the forward is right; in half precision too."""
    for params in [{"p": p} for p in (1.0, 0.5, 0.125)] if arm.norm == "prmsnorm" else [{}]:
        norm = arm.build(8, **params).to(dtype)
        x = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
        y = norm(x)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(y, torch.zeros_like(y))
        centred = arm.norm in ("layernorm", "layernorm_nobias", "batchnorm")
        eps = getattr(norm.params, "eps", None)
        slope = 0.0 if centred else 1.0 if eps is None else eps**-0.5
        slope *= {"scalenorm": 8**0.5, "dyt": 0.5}.get(arm.norm, 1.0)
        torch.testing.assert_close(x.grad.float(), torch.full((2, 8), slope), rtol=1e-2, atol=0)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in norm.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-5])
@pytest.mark.parametrize("p", [0.5, 0.125])
@pytest.mark.parametrize("backend", ["composite", "fused"])
def test_rows_whose_counted_part_is_zero(backend: str, p: float, eps: float, dtype: torch.dtype) -> None:
    """B07: a partial norm whose first k entries are zero, the others not."""
    skip_without(backend)
    x = torch.tensor([[0.0] * 4 + [1.0, -2.0, 0.5, 1.0]], dtype=dtype, requires_grad=True)
    y = build_norm("prmsnorm", 8, backend=backend, p=p, eps=eps)(x)
    y.sum().backward()
    scale = 0.0 if eps == 0 else eps**-0.5
    assert x.grad is not None
    torch.testing.assert_close(y.float(), x.detach().float() * scale, rtol=1e-2, atol=0)
    torch.testing.assert_close(x.grad.float(), torch.full((1, 8), scale), rtol=1e-2, atol=0)


@pytest.mark.parametrize("position", ["inside", "outside"])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-5])
def test_gradients_of_weights_that_are_zero(eps: float, position: str) -> None:
    """B07: the same for a norm of weights: a row of zeros in the matrix."""
    norm = WeightNorm(3, resolve_params("weightnorm", eps=eps, eps_position=position))
    v = torch.zeros(3, 4, requires_grad=True)
    w = norm(v)
    w.sum().backward()
    assert torch.equal(w, torch.zeros(3, 4))
    slope = 0.0 if eps == 0 else 1 / eps if position == "outside" else eps**-0.5
    assert v.grad is not None
    torch.testing.assert_close(v.grad, torch.full((3, 4), slope), rtol=1e-5, atol=0)
    assert torch.equal(norm.weight.grad, torch.zeros(3))


@everywhere
def test_a_zero_embedding_in_a_model(arm: Arm) -> None:
    """B07: a stream of zeros through a whole model, as from embeddings that start at zero."""
    skip_where_lacking(arm)
    for task, place in cells(arm, FEW):
        built = model(arm, task, place)
        with torch.no_grad():
            for key, parameter in built.named_parameters():
                if "embedding" in key:
                    parameter.zero_()
        given = inputs(task, [4, 2], 4)
        logits = built(*given)
        mean_loss(logits, given[-1]).backward()
        assert logits.isfinite().all(), place
        for key, parameter in built.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), (place, key)


# --------------------------------------------------------------------------------- entries of a part


@pytest.mark.parametrize("rule", list(KRule))
def test_the_number_of_entries_is_that_of_the_decimal_p(rule: KRule) -> None:
    """B09: 0.07 * 100 is 7.000000000000001 in binary; every p of three digits, against exact fractions."""
    rounding = math.ceil if rule is KRule.ceil else math.floor
    for dim in (1, 3, 7, 8, 16, 64, 100, 125, 300, 500, 512, 620, 1000, 1024, 4096):
        for thousandths in range(1, 1001):
            exact = rounding(Fraction(thousandths, 1000) * dim)
            assert count_entries(thousandths / 1000, dim, rule) == max(1, exact), (thousandths, dim)
    for sixteenths in range(1, 17):
        assert count_entries(sixteenths / 16, 512, rule) == 32 * sixteenths


@pytest.mark.parametrize(
    ("given", "counted"),
    [
        ({"dim": 300, "p": 0.07}, 21),
        ({"dim": 100, "p": 0.07, "k_rule": "floor"}, 7),
        ({"dim": 300, "p": 0.07, "k_rule": "floor"}, 21),
        ({"dim": 100, "variant": "authors_torch"}, 6),
        ({"dim": 100, "variant": "authors_tf"}, 6),
        ({"dim": 100, "p": 0.29, "variant": "authors_tf"}, 29),
    ],
)
@pytest.mark.parametrize("backend", ["composite", "fused"])
def test_which_entries_count_with_every_rule(backend: str, given: dict[str, Any], counted: int) -> None:
    """B09: as the norm's own outputs show it, with the rules that are presets."""
    skip_without(backend)
    params = dict(given)
    dim = params.pop("dim")
    norm = build_norm("prmsnorm", dim, backend=backend, eps=1e-5, gain=False, **params)
    scale = norm(torch.eye(dim)).diagonal()
    assert torch.equal((scale < 100).nonzero().flatten(), torch.arange(counted))


# ------------------------------------------------------------------------------------------- shapes


@every_arm
def test_gradients_that_are_no_contiguous_tensors(arm: Arm) -> None:
    """B11: a view with strides, in the input and in the gradient that comes back."""
    norm = arm.build(8)
    base = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    upstream = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    found = []
    for change in (Tensor.t, lambda one: one.t().contiguous()):
        x = change(base).detach().requires_grad_()
        y = norm(x)
        found.append([y.detach(), *torch.autograd.grad(y, [x, *norm.parameters()], change(upstream))])
    for view, plain in zip(*found, strict=True):
        torch.testing.assert_close(view, plain, rtol=1e-6, atol=1e-6)
    # A sum's gradient is one number, seen as a matrix with strides of zero.
    x = base.t().detach().requires_grad_()
    (dx,) = torch.autograd.grad(norm(x).sum(), x)
    ones = base.t().contiguous().requires_grad_()
    (expected,) = torch.autograd.grad(norm(ones), ones, torch.ones(6, 8))
    torch.testing.assert_close(dx, expected, rtol=1e-6, atol=1e-6)


@everywhere
def test_models_of_an_empty_batch(arm: Arm) -> None:
    """B11: a batch without rows goes through every norm in both models, and leaves zeros as gradients."""
    skip_where_lacking(arm)
    for task, place in cells(arm, FEW):
        built = model(arm, task, place)
        given = [one[:0] for one in inputs(task, [4, 2], 4)]
        logits = built(*given)
        assert logits.shape == (0, 5, 11)
        logits.sum().backward()
        for key, parameter in built.named_parameters():
            if parameter.grad is not None:
                assert torch.equal(parameter.grad, torch.zeros_like(parameter)), (place, key)


@everywhere
def test_a_normalised_linear_map_refuses_another_width(arm: Arm) -> None:
    """B11: the map in front of a norm, and the norm of its weights, broadcast nothing either."""
    skip_where_lacking(arm)
    module = normed_linear(nn.Linear(4, 6), NormSpec(arm.norm, backend=arm.backend))
    assert module(torch.ones(2, 4)).shape == (2, 6)
    for shape in ((2, 5), (2, 1)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(torch.ones(shape))


# ------------------------------------------------------------------------------- what is left alone


@every_arm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
def test_neither_input_nor_gradient_is_overwritten(arm: Arm, dtype: torch.dtype) -> None:
    """B12: where no cast makes a copy, a product in place would change what the residual branch holds."""
    norm = arm.build(2).to(dtype)
    for training in (True, False):
        norm.train(training)
        x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=dtype, requires_grad=True)
        upstream = torch.tensor([[1.0, -2.0], [0.5, 4.0]], dtype=dtype)
        kept = [one.detach().clone() for one in (x, upstream, *norm.parameters())]
        y = norm(x)
        given = y.detach().clone()
        y.backward(upstream)
        for one, before in zip((x, upstream, *norm.parameters()), kept, strict=True):
            assert torch.equal(one, before)
        assert torch.equal(y, given)


@everywhere
@pytest.mark.parametrize("placement", list(Placement))
def test_the_residual_is_what_came_in(arm: Arm, placement: Placement) -> None:
    """B12: x + f(n(x)) with the x that came in, in fp32, for every norm and placement."""
    skip_where_lacking(arm)
    torch.manual_seed(0)
    block = Residual(6, NormSpec(arm.norm, backend=arm.backend), placement, dropout=0.0)
    branch = nn.Linear(6, 6)
    x = torch.tensor([[3.0, 4.0, 0.0, -1.0, 2.0, 5.0], [1.0, 0.0, 2.0, 2.0, -3.0, 1.0]])
    before = x.clone()
    apart = {part: copy.deepcopy(getattr(block, part)) for part in ("norm_input", "norm_output", "norm_sum")}

    def normed(part: str, a: Tensor) -> Tensor:
        return a if apart[part] is None else apart[part](a)

    expected = normed(
        "norm_sum", before + normed("norm_output", branch(normed("norm_input", before.clone())))
    )
    torch.testing.assert_close(block(x, branch), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)
    with torch.no_grad():
        block.eval()(x, branch)
    assert torch.equal(x, before)


@every_arm
def test_summands_are_left_alone(arm: Arm) -> None:
    """B12: where a plus and a norm are one pass, both summands stay, and the sum is not the norm."""
    norm = arm.build(4)
    x, y = (torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    kept = x.clone(), y.clone()
    total, normed = add_norm(norm, x, y)
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])
    assert torch.equal(total, x + y)
    torch.testing.assert_close(normed, norm(x + y), rtol=1e-6, atol=1e-6)


@everywhere
def test_a_gru_leaves_its_inputs_alone(arm: Arm) -> None:
    """B12: the loop of a GRU adds and squashes in place; never what it was given."""
    skip_where_lacking(arm)
    layer = GRULayer(5, 8, NormSpec(arm.norm, backend=arm.backend), tuple(Site))
    x, h = torch.randn(3, 2, 5), torch.randn(2, 8)
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    kept = x.clone(), h.clone(), mask.clone()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            first = layer.eval()(x, h, mask)
            again = layer(x, h, mask)
        assert torch.equal(first, again)
        for one, before in zip((x, h, mask), kept, strict=True):
            assert torch.equal(one, before)


# ------------------------------------------------------------------------------------- weight decay


@pytest.mark.parametrize("norm", [*dict.fromkeys(arm.norm for arm in EVERYWHERE), PLAIN, MASKED, WEIGHTS])
def test_decay_moves_no_norm(norm: str) -> None:
    """B13: gains shrink because only one class of norms is known by name; users' norms are of the kind."""
    config = OptimConfig(lr=0.1, weight_decay=0.5, warmup_steps=0, schedule=Schedule.constant)
    for task, place in cells(Arm(norm, "composite"), FEW):
        built = model(Arm(norm, "composite"), task, place)
        plain = model(Arm("layernorm", "composite"), task, place)
        before = {key: value.detach().clone() for key, value in built.named_parameters()}
        optimizer, _ = build_optimizer(built, config, 10)
        for parameter in built.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        moved = {key for key, value in built.named_parameters() if not torch.equal(value, before[key])}
        assert not moved & norm_parameter_names(built)
        assert moved == {
            key
            for key, value in plain.named_parameters()
            if value.dim() > 1 and key not in norm_parameter_names(plain) and not key.endswith("bias")
        }
        for key in moved:
            torch.testing.assert_close(dict(built.named_parameters())[key].detach(), before[key] * 0.95)


def test_norms_are_masked_or_not_as_these_tests_take_it() -> None:
    """The lists above tell norms over positions apart by their registry entry: it agrees with the modules."""
    for arm in CHEAP:
        if arm.backend == "composite":
            assert takes_mask(arm.build(4)) == (cells(arm) != CELLS)
