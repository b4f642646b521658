"""The fused GRU: equal to the composite loop in values and gradients, and out of the way where it must be."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import GRUConfig, Placement, Site
from rmsrepro.models import build_model, fused_gru
from rmsrepro.models.fused_gru import product
from rmsrepro.models.gru import GRULayer
from rmsrepro.norms import NormSpec
from rmsrepro.norms.backends.fused.levels import FORCED, known_levels, processor_flags
from rmsrepro.norms.backends.fused.library import why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason="no fused kernels on this machine")

ALL = tuple(Site)
SUBSETS = [sites for size in range(5) for sites in itertools.combinations(Site, size)]
NORMS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("layernorm", {}),
    ("layernorm", {"gain": False, "eps_position": "outside"}),
    ("layernorm", {"bias": False}),
    ("layernorm_nobias", {}),
    ("rmsnorm", {}),
    ("rmsnorm", {"bias": True, "eps": 0.0}),
    ("rmsnorm", {"gain": False, "variant": "authors_torch"}),
    ("prmsnorm", {"p": 0.3, "bias": True}),
    ("l2norm", {}),
    ("scalenorm", {}),
    ("llama_rmsnorm", {}),
    ("t5_rmsnorm", {}),
    ("gemma_rmsnorm", {}),
]
ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5}


def pair(
    norm: str, params: dict[str, Any], sites: Sequence[Site], dtype: torch.dtype, size: int, dim: int
) -> tuple[GRULayer, GRULayer]:
    """Return a fused and a composite layer with the same random parameters."""
    ours, theirs = (
        GRULayer(size, dim, NormSpec(norm, params, backend=backend), sites).to(dtype)
        for backend in ("fused", "composite")
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in ours.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.5 * drawn if parameter.ndim < 2 else drawn / parameter.shape[1] ** 0.5)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def weighted(states: Tensor) -> Tensor:
    """A loss in which each state counts differently."""
    return (states * torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view(states.shape)).sum()


def results(
    layer: GRULayer, x: Tensor, h: Tensor | None, mask: Tensor | None, reverse: bool
) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    h = None if h is None else h.detach().clone().requires_grad_()
    states = layer(x, h, mask, reverse=reverse)
    named = {"x": x, **dict(layer.named_parameters())} | ({} if h is None else {"h": h})
    gradients = torch.autograd.grad(weighted(states), list(named.values()))
    return {"states": states.detach(), **dict(zip(named, gradients, strict=True))}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], allowed: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        size = max(1.0, wanted.abs().max().item())
        assert ((ours[name] - wanted).abs().max() / size).item() < allowed, name


class Counter:
    """How often the fused forms ran."""

    def __init__(self) -> None:
        self.count = 0

    def counting(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return counted


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    for name in ("scan", "cell"):
        monkeypatch.setattr(fused_gru, name, counter.counting(getattr(fused_gru, name)))
    return counter


def inputs(dtype: torch.dtype, steps: int, rows: int, size: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(steps, rows, size, generator=generator, dtype=torch.float64)
    h = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    mask = torch.rand(steps, rows, generator=generator) > 0.3
    return x.to(dtype), h.to(dtype), mask


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize(("norm", "params"), NORMS, ids=str)
def test_equals_the_composite_loop(
    norm: str, params: dict[str, Any], dtype: torch.dtype, runs: Counter
) -> None:
    for number, (sites, reverse) in enumerate(itertools.product(SUBSETS, (False, True))):
        if norm != "none" and not sites:
            continue
        size, dim, steps, rows = ((5, 7, 6, 4), (3, 37, 3, 5), (4, 32, 2, 1))[number % 3]
        ours, theirs = pair(norm, params, sites, dtype, size, dim)
        x, h, mask = inputs(dtype, steps, rows, size, dim)
        for state, its_mask in ((None, None), (h, mask)):
            before = runs.count
            found = results(ours, x, state, its_mask, reverse)
            assert runs.count == before + 1
            assert_equal(found, results(theirs, x, state, its_mask, reverse), ALLOWED[dtype])


@pytest.mark.parametrize("reverse", [False, True])
def test_long_sequences_take_their_gradients_some_steps_at_a_time(reverse: bool) -> None:
    ours, theirs = pair("layernorm", {}, ALL, torch.float64, 3, 5)
    # 100 rows: six steps at once, of 17 in three parts.
    x, h, mask = inputs(torch.float64, 17, 100, 3, 5)
    for state, its_mask in ((None, None), (h, mask)):
        found = results(ours, x, state, its_mask, reverse)
        assert_equal(found, results(theirs, x, state, its_mask, reverse), 1e-11)


@pytest.mark.parametrize("scale", [1e-18, 1e-9, 1e9, 1e18])
@pytest.mark.parametrize(("norm", "params"), [("layernorm", {}), ("rmsnorm", {"eps": 0.0}), ("l2norm", {})])
def test_range_of_the_norms(norm: str, params: dict[str, Any], scale: float) -> None:
    ours, theirs = pair(norm, params, (Site.gates_x, Site.cand_x), torch.float32, 5, 7)
    x, h, _ = inputs(torch.float32, 4, 3, 5, 7)
    with torch.no_grad():
        for layer in (ours, theirs):
            layer.input_projection.bias.zero_()
    x[0, 0] = 0
    wide = copy.deepcopy(theirs).double()
    exact = results(wide, scale * x.double(), h.double(), None, False)
    found = results(ours, scale * x, h, None, False)
    for name, wanted in exact.items():
        assert found[name].isfinite().all(), name
        size = wanted.abs().max().item()
        assert ((found[name].double() - wanted).abs().max() / size).item() < 2e-5, name


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_row_of_zeros_gives_zero_and_no_gradient(norm: str) -> None:
    layer = GRULayer(3, 4, NormSpec(norm, {"eps": 0.0}, backend="fused"), ALL)
    nn.init.zeros_(layer.input_projection.bias)
    found = results(layer, torch.zeros(2, 3, 3), None, None, False)
    assert all(one.isfinite().all() for one in found.values())
    assert (found["x"] == 0).all()


def test_padding_keeps_the_state_bit_for_bit_and_gets_no_gradient() -> None:
    ours, _ = pair("rmsnorm", {}, ALL, torch.float32, 5, 7)
    x, h, _ = inputs(torch.float32, 6, 2, 5, 7)
    mask = torch.tensor([[True, False]] * 3 + [[False, False]] * 3)
    found = results(ours, x, h, mask, False)
    assert torch.equal(found["states"][3:, 0], found["states"][2, 0].expand(3, 7))
    assert torch.equal(found["states"][:, 1], h[1].expand(6, 7))
    assert (found["x"][~mask] == 0).all()


def test_a_second_backward_gives_the_same(runs: Counter) -> None:
    ours, _ = pair("layernorm", {}, ALL, torch.float32, 5, 16)
    x, h, mask = inputs(torch.float32, 6, 4, 5, 16)
    wanted = [x.requires_grad_(), h.requires_grad_(), *ours.parameters()]
    loss = weighted(ours(x, h, mask))
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    second = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert runs.count == 1
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_states_that_were_changed_in_place_are_noticed() -> None:
    ours, _ = pair("layernorm", {}, ALL, torch.float32, 5, 16)
    states = ours(torch.randn(3, 2, 5))
    states.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        states.sum().backward()


@pytest.mark.parametrize("norm", ["none", "layernorm", "prmsnorm"])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_gradients(norm: str, reverse: bool) -> None:
    params = {"p": 0.5} if norm == "prmsnorm" else {}
    ours, _ = pair(norm, params, ALL, torch.float64, 3, 4)
    x, h, _ = inputs(torch.float64, 3, 2, 3, 4)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    leaves = (x.requires_grad_(), h.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda *given: ours(*given, mask, reverse=reverse), leaves)


def test_gradients_of_gradients_of_a_cell() -> None:
    ours, _ = pair("layernorm", {}, ALL, torch.float64, 3, 4)
    x, h, _ = inputs(torch.float64, 1, 2, 3, 4)

    def step(x: Tensor, h: Tensor) -> Tensor:
        return ours.for_states(h)(x, h, None)

    leaves = (x[0].requires_grad_(), h.requires_grad_())
    assert torch.autograd.gradcheck(step, leaves)
    assert torch.autograd.gradgradcheck(step, leaves)


@pytest.mark.parametrize("frozen", ["x", "input_projection.weight", "recurrent_projection.weight", "norms"])
def test_what_needs_no_gradient_gets_none(frozen: str, runs: Counter) -> None:
    found = []
    for layer in pair("layernorm", {}, ALL, torch.float64, 5, 7):
        x, h, _ = inputs(torch.float64, 3, 4, 5, 7)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(frozen not in name and not (frozen == "norms" and "norm_" in name))
        x.requires_grad_(frozen != "x")
        weighted(layer(x, h)).backward()
        named = {"x": x, **dict(layer.named_parameters())}
        for name, one in named.items():
            assert (one.grad is None) == (not one.requires_grad), name
        found.append({name: one.grad for name, one in named.items() if one.grad is not None})
    assert runs.count == 1
    assert_equal(*found, 1e-12)


def test_runs_are_equal_bit_for_bit() -> None:
    ours, _ = pair("layernorm", {}, ALL, torch.float32, 64, 100)
    x, h, mask = inputs(torch.float32, 20, 40, 64, 100)
    first, second = (results(ours, x, h, mask, False) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_strides_of_inputs_and_gradients_do_not_matter(runs: Counter) -> None:
    ours, theirs = pair("rmsnorm", {}, ALL, torch.float64, 5, 7)
    x, h, mask = inputs(torch.float64, 4, 6, 5, 7)
    found = []
    for layer in (ours, theirs):
        given = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        states = layer(given, h.t().contiguous().t(), mask.t().contiguous().t())
        # One gradient whose batch comes first, one that is the same number throughout, one with holes.
        loss = weighted(states.transpose(0, 1).contiguous()) + states.sum() + weighted(states[..., ::2])
        dx, dweight = torch.autograd.grad(loss, (given, layer.recurrent_projection.weight))
        found.append({"x": dx, "U": dweight})
    assert runs.count == 1
    assert_equal(*found, 1e-12)


def test_copies_are_the_same_layer(runs: Counter) -> None:
    ours, theirs = pair("gemma_rmsnorm", {}, ALL, torch.float32, 5, 7)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x, h, mask = inputs(torch.float32, 4, 3, 5, 7)
    wanted = ours(x, h, mask)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(x, h, mask), wanted)
    assert runs.count == 3


# ----------------------------------------------------------------------------- where the loop runs instead


def test_nothing_to_do() -> None:
    layer, _ = pair("layernorm", {}, ALL, torch.float32, 5, 7)
    assert layer(torch.zeros(0, 4, 5), torch.zeros(4, 7)).shape == (0, 4, 7)
    x = torch.zeros(3, 0, 5, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (3, 0, 5)


def test_under_autocast(runs: Counter) -> None:
    ours, theirs = pair("layernorm", {}, ALL, torch.float32, 5, 16)
    x, _, _ = inputs(torch.float32, 3, 4, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = ours(x)
        states.float().sum().backward()
    assert states.dtype == torch.bfloat16
    assert runs.count == 0
    torch.testing.assert_close(states.float(), theirs(x), atol=0.05, rtol=0)


def test_in_half_precision(runs: Counter) -> None:
    ours, _ = pair("layernorm", {}, ALL, torch.bfloat16, 5, 16)
    assert ours(torch.randn(3, 4, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert runs.count == 0


def test_transforms_and_forward_mode(runs: Counter) -> None:
    ours, theirs = pair("layernorm", {}, ALL, torch.float64, 5, 7)
    x, h, _ = inputs(torch.float64, 3, 4, 5, 7)
    found, wanted = (torch.func.vmap(layer, 1, 1)(x.unsqueeze(2)) for layer in (ours, theirs))
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    for layer in (ours, theirs):
        torch.func.grad(lambda x, layer=layer: weighted(layer(x)))(x)
        torch.func.jvp(lambda x, layer=layer: layer(x, h), (x,), (x,))
    assert runs.count == 0


def test_compiled_and_fake(runs: Counter) -> None:
    ours, _ = pair("layernorm", {}, ALL, torch.float32, 5, 7)
    x, _, _ = inputs(torch.float32, 2, 4, 5, 7)
    wanted = ours(x)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), wanted, atol=1e-6, rtol=0)
    exported = torch.export.export(ours, (x,)).module()
    torch.testing.assert_close(exported(x), wanted, atol=1e-6, rtol=0)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert ours(mode.from_tensor(x)).shape == (2, 4, 7)
    assert runs.count == 1


@pytest.mark.parametrize("where", ["norm", "everywhere", "linear"])
def test_hooks_are_called(where: str, runs: Counter) -> None:
    ours, _ = pair("layernorm", {}, ALL, torch.float32, 5, 7)
    seen: list[nn.Module] = []

    def hook(module: nn.Module, *_: Any) -> None:
        seen.append(module)

    if where == "everywhere":
        handle = nn.modules.module.register_module_forward_hook(hook)
    else:
        part = ours.norm_gates_h if where == "norm" else ours.input_projection
        assert part is not None
        handle = part.register_forward_hook(hook)
    with handle:
        ours(torch.randn(3, 2, 5))
    assert runs.count == 0
    assert {"norm": ours.norm_gates_h, "linear": ours.input_projection}.get(where, ours) in seen


def test_other_layers_take_the_loop(runs: Counter) -> None:
    x = torch.randn(3, 2, 5)
    for name, backend in (("layernorm", "composite"), ("none", "composite"), ("weightnorm", "composite")):
        GRULayer(5, 7, NormSpec(name, backend=backend), ALL)(x)
    swapped = GRULayer(5, 7, NormSpec("layernorm", backend="fused"), ALL)
    swapped.norm_gates_h = NormSpec("rmsnorm", backend="composite").build(14)
    swapped(x)
    # A first state of one row stands for all.
    GRULayer(5, 7, NormSpec("rmsnorm", backend="fused"), ALL)(x, torch.zeros(1, 7))
    assert runs.count == 0


# ------------------------------------------------------------------------------- levels, products, models


@pytest.mark.parametrize("level", [one.name for one in known_levels() if one.needs <= processor_flags()])
def test_every_level(level: str) -> None:
    """In a process of its own, since a process has one level."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_models_fused_gru import *\n"
        "from rmsrepro.norms.backends.fused.library import kernels\n"
        f"assert kernels().level == {level!r}\n"
        "for dtype, (norm, params) in itertools.product(ALLOWED, NORMS[:2] + NORMS[6:9]):\n"
        "    ours, theirs = pair(norm, params, ALL, dtype, 5, 37)\n"
        "    x, h, mask = inputs(dtype, 3, 5, 5, 37)\n"
        "    found, wanted = (results(one, x, h, mask, False) for one in (ours, theirs))\n"
        "    assert_equal(found, wanted, ALLOWED[dtype])\n"
        "check_gates()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, FORCED: level}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def check_gates() -> None:
    """Sigmoid and tanh over their whole range, through a layer that is nothing else."""
    x = torch.cat(
        (torch.linspace(-100, 100, 40001), 10 ** torch.linspace(-30, 1.5, 3998), torch.tensor([3e38]))
    )
    x = torch.cat((x, -x)).view(1, -1, 16)
    layer = GRULayer(48, 16, NormSpec("none", backend="fused"), ())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.input_projection.weight.copy_(torch.eye(48))
        zero = torch.zeros_like(x)
        # r does not matter; u is 0 up to 1e-38: h' = n = tanh(x).
        check_ulps(layer(torch.cat((zero, zero - 3e38, x), -1)), torch.tanh(x.double()))
        # n = 0, h = 1: h' = u = sigmoid(x).
        check_ulps(layer(torch.cat((zero, x, zero), -1), zero[0] + 1), torch.sigmoid(x.double()))


def check_ulps(found: Tensor, wanted: Tensor) -> None:
    """Three units in the last place at most; below 1e-37 the sigmoid stays where it is."""
    unit = 2.0 ** (wanted.abs().clamp_min(1e-37).log2().floor() - 23)
    assert ((found.double() - wanted).abs() <= 3 * unit + 2e-38).all()


def test_gates_are_right_to_the_last_places() -> None:
    check_gates()


@pytest.mark.parametrize("form", product.FORMS)
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_forms_of_the_product(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(product.CHOICE, form)
    a, weight = (torch.randn(5, 7, dtype=dtype), torch.randn(6, 7, dtype=dtype))
    for backward in (False, True):
        for given in (weight, weight.t().contiguous().t()):
            found = product.product_with(given, 5, 3, backward=backward)(a)
            torch.testing.assert_close(found, a @ weight.t())


def test_the_product_is_chosen_by_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(product.CHOICE, raising=False)
    monkeypatch.setattr(product, "_works", lambda form: True)
    weight = {width: torch.empty(3 * width, width) for width in (128, 256, 512, 1024)}

    def chosen(maker: str, width: int, rows: int = 64, steps: int = 30, backward: bool = False) -> str:
        monkeypatch.setattr(product, "processor_maker", lambda: maker)
        return product._form(weight[width], rows, steps, backward)

    assert [chosen("GenuineIntel", width) for width in weight] == ["mm", "mkl", "mkl", "mkl"]
    assert [chosen("AuthenticAMD", width) for width in weight] == ["mm", "mm", "onednn", "onednn"]
    assert chosen("GenuineIntel", 512, backward=True) == "mm"
    for flags, wanted in (({"avx2"}, ["mm", "onednn"]), ({"avx2", "avx512f"}, ["onednn", "onednn"])):
        product._has_avx512.cache_clear()
        monkeypatch.setattr(product, "processor_flags", lambda flags=flags: frozenset(flags))
        assert [chosen("AuthenticAMD", width, backward=True) for width in (512, 1024)] == wanted
    product._has_avx512.cache_clear()
    assert {chosen("", 512), chosen("GenuineIntel", 512, steps=1), chosen("GenuineIntel", 512, rows=4)} == {
        "mm"
    }
    monkeypatch.setattr(product, "_works", lambda form: False)
    assert chosen("GenuineIntel", 512) == "mm"
    monkeypatch.setenv(product.CHOICE, "fast")
    with pytest.raises(UserError, match=r"RMSREPRO_GRU_GEMM=fast; the forms are mm, mkl, onednn"):
        chosen("GenuineIntel", 512)


def pair_of(norm: str) -> tuple[GRULayer, GRULayer]:
    one, other = (
        GRULayer(5, 6, NormSpec(norm, backend=backend), ALL).double() for backend in ("fused", "composite")
    )
    other.load_state_dict(one.state_dict())
    return one, other


def test_parameters_of_another_length_are_not_read_beyond_their_end() -> None:
    layers = pair_of("rmsnorm")
    for layer in layers:
        for norm in (layer.norm_gates_x, layer.norm_gates_h, layer.norm_candidate_x, layer.norm_candidate_h):
            assert norm is not None
            norm.weight = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    found = [[layer(x), *torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])] for layer in layers]
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("norm", ["layernorm", "none"])
def test_upstream_gradients_that_are_batches_views_or_nothing(norm: str) -> None:
    layers = pair_of(norm)
    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    batch = torch.randn(2, 4, 3, 6, dtype=torch.float64)
    found = []
    for layer in layers:
        y = layer(x)
        wanted = [x, *layer.parameters()]
        found.append(
            [
                *torch.autograd.grad(y, wanted, batch, is_grads_batched=True, retain_graph=True),
                *torch.autograd.grad(y, wanted, torch._neg_view(batch[0]), retain_graph=True),
                *torch.autograd.grad(y, wanted, torch._efficientzerotensor(y.shape, dtype=y.dtype)),
                layer(torch._neg_view(x.detach())),
            ]
        )
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


def test_another_default_device_changes_nothing() -> None:
    layer, _ = pair_of("layernorm")
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    expected = layer(x)
    with torch.device("meta"):
        found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_wrong_product_is_refused_when_the_layer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(product.CHOICE, "mkk")
    with pytest.raises(UserError, match=r"RMSREPRO_GRU_GEMM=mkk; did you mean mkl"):
        pair_of("rmsnorm")


def whole(task: str, norm: str, backend: str, **fields: Any) -> Any:
    return build_model(
        GRUConfig(**{"d_model": 16, "d_embed": 12, "num_layers": 2, "dropout": 0.0, **fields}),
        task,
        src_vocab=13,
        tgt_vocab=11,
        max_len=12,
        norm=NormSpec(norm, {"p": 0.5} if norm == "prmsnorm" else {}, backend=backend),
        placement=Placement.pre,
        sites=ALL,
        seed=1,
    )


@pytest.mark.parametrize("norm", ["none", "layernorm", "prmsnorm", "gemma_rmsnorm"])
@pytest.mark.parametrize("task", ["lm", "translation"])
def test_whole_models(task: str, norm: str, runs: Counter) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 11, (3, 7), generator=generator)
    source = torch.randint(1, 13, (3, 5), generator=generator)
    mask = torch.arange(5) < torch.tensor([5, 2, 4]).unsqueeze(1)
    found = []
    for backend in ("fused", "composite"):
        model = whole(task, norm, backend).double()
        logits = model(tokens) if task == "lm" else model(source, mask, tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        found.append({"loss": loss.detach(), "logits": logits.detach(), **gradients})
        if backend == "fused":
            # Two layers; two directions of two layers, and two cells a step.
            assert runs.count == (2 if task == "lm" else 4 + 2 * 7)
    assert_equal(*found, 1e-11)


def test_decoding_step_by_step_equals_the_whole() -> None:
    lm = whole("lm", "layernorm", "fused").eval()
    tokens = torch.randint(1, 11, (3, 5))
    state, logits = None, []
    with torch.no_grad():
        for now in tokens.unbind(1):
            step, state = lm.step(now, state)
            logits.append(step)
        torch.testing.assert_close(torch.stack(logits, 1), lm(tokens), atol=1e-5, rtol=0)
