"""Norms of weights in models: which maps they reach, and that they start as no norm at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.config.schema import FeedForward, Placement, Site
from rmsrepro.models.gru import GRULayer
from rmsrepro.models.normed import effective_weight, for_loop, linear_for_loop
from rmsrepro.norms import NormSpec, is_norm, normed_linear, weight_normed
from rmsrepro.norms.linear import WeightNormLinear
from tests.models.norms import KINDS, OF_WEIGHTS, TASKS, WEIGHTS, users_norms

GATES, CANDIDATE = slice(0, 32), slice(32, 48)


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with users_norms():
        yield


def inputs_of(models: Any, task: str) -> tuple[Tensor, ...]:
    if task == "lm":
        return (models.tokens(3, 6),)
    source, mask = models.ragged([5, 0, 2], width=6)
    return source, mask, models.tokens(3, 6)


def normed_maps(model: nn.Module) -> dict[str, WeightNormLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, WeightNormLinear)}


@pytest.mark.parametrize("norm", OF_WEIGHTS)
@pytest.mark.parametrize(
    ("kind", "task", "expected"),
    [
        (
            "transformer",
            "lm",
            "stack.layers.0: self_attention.query_key_value self_attention.output feed_forward.gate_up "
            "feed_forward.down",
        ),
        (
            "transformer",
            "translation",
            "encoder.layers.0: self_attention.query_key_value self_attention.output feed_forward.gate_up "
            "feed_forward.down; decoder.layers.0: self_attention.query_key_value self_attention.output "
            "cross_attention.query cross_attention.key_value cross_attention.output feed_forward.gate_up "
            "feed_forward.down",
        ),
        ("gru", "lm", "layers.0: input_projection recurrent_projection"),
        (
            "gru",
            "translation",
            "encoder.forward_layers.0: input_projection recurrent_projection; "
            "encoder.backward_layers.0: input_projection recurrent_projection; "
            "first: input_projection recurrent_projection; second: input_projection recurrent_projection; "
            "attention: key.linear query.linear; start_projection: linear; readout_state: linear; "
            "readout_word: linear; readout_context: linear",
        ),
    ],
)
def test_the_maps_of_the_layers_are_normalised_and_no_others(
    models: Any, norm: str, kind: str, task: str, expected: str
) -> None:
    fields = {"ffn": FeedForward.swiglu, "num_layers": 1} if kind == "transformer" else {}
    model = models.build(kind, task, norm, tie_embeddings=False, **fields)
    names = {
        f"{owner.split(':')[0].strip()}.{name}"
        for owner in expected.split(";")
        for name in owner.split(":")[1].split()
    }
    assert normed_maps(model).keys() == names
    # Nothing else is a norm, and every map has one gain a row.
    assert {name for name, module in model.named_modules() if is_norm(module)} == {
        f"{name}.norm" for name in names
    }
    for name, linear in normed_maps(model).items():
        gains = linear.norm.weight
        assert isinstance(gains, Tensor)
        assert gains.shape == (linear.out_features,), name


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "place",
    [{"kind": "transformer", "placement": placement} for placement in Placement]
    + [{"kind": "transformer", "qk_norm": True}, {"kind": "gru"}, {"kind": "gru", "sites": (Site.gates_h,)}],
)
def test_weightnorm_starts_as_the_function_that_none_is(
    models: Any, task: str, place: dict[str, Any]
) -> None:
    normed = models.build(task=task, norm="weightnorm", perturb=False, **place)
    none = models.build(task=task, norm="none", perturb=False, **place)
    inputs = inputs_of(models, task)
    torch.testing.assert_close(normed(*inputs), none(*inputs), atol=1e-6, rtol=0)
    for name, linear in normed_maps(normed).items():
        torch.testing.assert_close(linear.effective_weight(), linear.weight, atol=1e-7, rtol=1e-6, msg=name)


def by_equation(v: Tensor, gains: Tensor, norm: str) -> Tensor:
    size = v.abs().sum(1) if norm == WEIGHTS else (v.square().sum(1) + 1e-5).sqrt()
    return v * (gains / size).unsqueeze(1)


ROWS = {
    (Site.gates_x,): {"input_projection": [GATES]},
    (Site.cand_h,): {"recurrent_projection": [CANDIDATE]},
    (Site.gates_h, Site.cand_x): {"input_projection": [CANDIDATE], "recurrent_projection": [GATES]},
    tuple(Site): {"input_projection": [GATES, CANDIDATE], "recurrent_projection": [GATES, CANDIDATE]},
}
"""Which rows of a GRU's matrices the sites select."""


@pytest.mark.parametrize("norm", OF_WEIGHTS)
@pytest.mark.parametrize(
    ("kind", "sites"), [("transformer", tuple(Site)), *[("gru", sites) for sites in ROWS]]
)
@pytest.mark.parametrize("task", TASKS)
def test_the_model_is_none_with_normalised_weights(
    models: Any, norm: str, kind: str, task: str, sites: tuple[Site, ...]
) -> None:
    normed = models.build(kind, task, norm, sites=sites).double()
    none = models.build(kind, task, "none", sites=sites).double()
    values = normed.state_dict()
    rows = {name: ROWS[sites].get(name.rpartition(".")[2], [slice(None)]) for name in normed_maps(normed)}
    for name, chosen in rows.items():
        v, gains = values[f"{name}.weight"].clone(), values.pop(f"{name}.norm.weight")
        if chosen == [slice(None)] or len(chosen) == 2:
            v = by_equation(v, gains, norm)
        else:
            [part] = chosen
            assert gains.shape == (len(v[part]),)
            v[part] = by_equation(v[part], gains, norm)
        values[f"{name}.weight"] = v
    none.load_state_dict(dict(values))
    inputs = inputs_of(models, task)
    torch.testing.assert_close(normed(*inputs), none(*inputs), atol=1e-12, rtol=0)
    if kind == "gru" and sites != tuple(Site):
        untouched = {"input_projection", "recurrent_projection"} - ROWS[sites].keys()
        assert not any(name.rpartition(".")[2] in untouched for name in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_directions_get_no_gradient_along_themselves(models: Any, kind: str) -> None:
    model = models.build(kind, "translation", "weightnorm", perturb=False).double()
    model(*inputs_of(models, "translation")).square().sum().backward()
    for name, linear in normed_maps(model).items():
        assert linear.weight.grad is not None
        # eps = 1e-5 leaves a little.
        along = (linear.weight.grad * linear.weight).sum(1)
        limit = 1e-3 * linear.weight.grad.norm(dim=1) * linear.weight.norm(dim=1) + 1e-12
        assert (along.abs() <= limit).all(), name
        gains = linear.norm.weight.grad
        assert isinstance(gains, Tensor)
        assert (gains != 0).any(), name


def test_a_placement_does_not_concern_a_norm_of_weights(models: Any) -> None:
    pre = models.build("transformer", "lm", "weightnorm", placement=Placement.pre)
    for placement in Placement:
        other = models.build("transformer", "lm", "weightnorm", placement=placement)
        assert {name for name, _ in other.named_parameters()} == {name for name, _ in pre.named_parameters()}
        other.load_state_dict(pre.state_dict().copy())
        tokens = models.tokens(2, 5)
        assert torch.equal(other(tokens), pre(tokens))


def test_weights_prepared_for_a_loop_are_those_of_the_module() -> None:
    x = torch.randn(3, 5)
    spec = NormSpec("weightnorm")
    for bias in (True, False):
        linear = weight_normed(nn.Linear(5, 4, bias=bias), spec, [slice(1, 3)])
        torch.testing.assert_close(linear_for_loop(linear, torch.float32)(x), linear(x))
        normed = normed_linear(nn.Linear(5, 4, bias=bias), spec)
        torch.testing.assert_close(for_loop(normed, torch.float32)(x, None), normed(x))
        assert linear_for_loop(linear, torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    plain = nn.Linear(5, 4)
    assert linear_for_loop(plain, torch.float32) is plain
    assert effective_weight(plain) is plain.weight
    other = normed_linear(plain, NormSpec("layernorm"))
    assert for_loop(other, torch.float32) is other


def test_a_gru_computes_its_weights_once_a_sequence() -> None:
    layer = GRULayer(5, 8, NormSpec("weightnorm"), tuple(Site))
    calls: list[str] = []
    for name, module in layer.named_modules():
        if is_norm(module):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    layer(torch.randn(7, 2, 5))
    assert sorted(calls) == ["input_projection.norm", "recurrent_projection.norm"]
