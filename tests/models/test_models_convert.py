"""A converted model computes what its source does, in whole sequences and step by step, for every option."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import FeedForward, GRUConfig, Placement, Positions, TransformerConfig
from rmsrepro.models import build_model
from rmsrepro.models.convert import Conversion, check_convertible, convert_to_rmsnorm
from rmsrepro.norms import NormSpec, is_norm
from rmsrepro.tasks import beam_search

SRC_VOCAB, TGT_VOCAB, MAX_LEN = 13, 11, 12
BASE = TransformerConfig(d_model=16, num_layers=2, num_heads=2, d_ff=24, dropout=0.0)
LAYERNORM = NormSpec("layernorm", backend="composite")
EXACT, ROUNDED = 1e-12, 1e-5

OPTIONS = [
    {},
    {"bias": False},
    {"tie_embeddings": False},
    {"ffn": FeedForward.swiglu},
    {"positions": Positions.rotary},
    {"qk_norm": True},
    {"qk_norm": True, "bias": False, "positions": Positions.rotary},
    {"output_bias": True, "empty_source": True},
    {"bias": False, "tie_embeddings": False, "ffn": FeedForward.swiglu, "positions": Positions.rotary},
    {"dropout": 0.3},
]
NORMS = [
    LAYERNORM,
    NormSpec("layernorm", {"gain": False}, "composite"),
    NormSpec("layernorm", {"bias": False, "eps": 1e-2}, "composite"),
    NormSpec("layernorm", {"eps": 0.5, "eps_position": "outside"}, "composite"),
    NormSpec("layernorm", {"eps": 0.0}, "composite"),
    NormSpec("layernorm", backend="torch"),
    NormSpec("layernorm_nobias", {"eps": 1e-3}, "composite"),
]


def named(value: Any) -> str:
    if isinstance(value, NormSpec):
        return " ".join([value.name, *(f"{key}={item}" for key, item in value.params.items()), value.backend])
    return " ".join(f"{key}={getattr(item, 'value', item)}" for key, item in value.items()) or "plain"


def build(config: TransformerConfig, task: str, norm: NormSpec, *, perturbed: float = 0.0) -> Any:
    """Build a model; with `perturbed`, every parameter is moved by noise of that size."""
    model = build_model(
        config, task, src_vocab=SRC_VOCAB, tgt_vocab=TGT_VOCAB, max_len=MAX_LEN, norm=norm,
        placement=Placement.pre, sites=[], seed=1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(perturbed * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def converted(model: Any, config: TransformerConfig, norm: NormSpec) -> Conversion:
    return convert_to_rmsnorm(config, norm, Placement.pre, model.state_dict())


def rebuilt(conversion: Conversion, task: str, dtype: torch.dtype) -> Any:
    """Build the new model in `dtype`: strict loading checks that no weight is missing and none is left."""
    model = build(conversion.model, task, conversion.norm).to(dtype)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in conversion.state.items()})
    return model


def inputs(task: str) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    target = torch.randint(0, TGT_VOCAB, (4, MAX_LEN), generator=draw)
    if task == "lm":
        return (target,)
    source = torch.randint(0, SRC_VOCAB, (4, 9), generator=draw)
    # A whole row, an empty sentence, and two that are padded.
    return source, torch.arange(9) < torch.tensor([9, 0, 4, 1])[:, None], target


def stepwise(model: Any, task: str, given: tuple[Tensor, ...]) -> Tensor:
    state = None if task == "lm" else model.start(*given[:2])
    logits = []
    for position in range(MAX_LEN):
        one, state = model.step(given[-1][:, position], state)
        logits.append(one)
    return torch.stack(logits, 1)


@torch.no_grad()
def assert_equal(model: Any, conversion: Conversion, task: str) -> None:
    """Both models give the same logits, for whole sequences and for steps, in both precisions."""
    for dtype, tolerance in ((torch.float32, ROUNDED), (torch.float64, EXACT)):
        new = rebuilt(conversion, task, dtype)
        model.to(dtype)
        expected = model(*inputs(task))
        scale = max(1.0, float(expected.abs().max()))
        assert expected.std() > 1e-3  # not trivially equal
        torch.testing.assert_close(new(*inputs(task)), expected, atol=tolerance * scale, rtol=0)
        found = stepwise(new, task, inputs(task))
        torch.testing.assert_close(found, stepwise(model, task, inputs(task)), atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=named)
@pytest.mark.parametrize("task", ["lm", "translation"])
def test_the_same_logits_for_every_option(task: str, options: dict[str, Any]) -> None:
    config = replace(BASE, **options)
    model = build(config, task, LAYERNORM, perturbed=0.3)
    assert_equal(model, converted(model, config, LAYERNORM), task)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("norm", NORMS, ids=named)
@pytest.mark.parametrize("task", ["lm", "translation"])
def test_the_same_logits_for_every_layernorm(task: str, norm: NormSpec, qk_norm: bool) -> None:
    config = replace(BASE, qk_norm=qk_norm)
    model = build(config, task, norm, perturbed=0.3)
    conversion = converted(model, config, norm)
    eps = {key: norm.params[key] for key in ("eps", "eps_position") if key in norm.params}
    for key, value in eps.items():
        assert conversion.norm.resolved_params[key] == value
    assert_equal(model, conversion, task)


@settings(max_examples=25, deadline=None)
@given(
    task=st.sampled_from(["lm", "translation"]),
    heads=st.integers(1, 3),
    width=st.integers(1, 5),
    layers=st.integers(1, 3),
    inner=st.integers(1, 9),
    eps=st.one_of(st.just(0.0), st.floats(1e-12, 10.0)),
    size=st.floats(0.01, 2.0),
    flags=st.tuples(*[st.booleans()] * 4),
)
def test_the_same_logits_for_any_shape(
    task: str,
    heads: int,
    width: int,
    layers: int,
    inner: int,
    eps: float,
    size: float,
    flags: tuple[bool, ...],
) -> None:
    config = replace(
        BASE, d_model=2 * heads * width, num_heads=heads, num_layers=layers, d_ff=inner,
        bias=flags[0], tie_embeddings=flags[1],
        positions=Positions.rotary if flags[2] else Positions.learned,
        ffn=FeedForward.swiglu if flags[3] else FeedForward.gelu,
    )  # fmt: skip
    norm = NormSpec("layernorm", {"eps": eps}, "composite")
    model = build(config, task, norm, perturbed=size).double()
    new = rebuilt(converted(model, config, norm), task, torch.float64)
    with torch.no_grad():
        expected, found = model(*inputs(task)), new(*inputs(task))
    # Two units and eps=0 is the sign of their difference: rounding is magnified where they nearly agree.
    torch.testing.assert_close(found, expected, atol=1e-8 * max(1.0, float(expected.abs().max())), rtol=0)


# --------------------------------------------------------------------------- an independent statement


def rmsnorm(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps)


def language_model(state: dict[str, Tensor], config: TransformerConfig, tokens: Tensor, eps: float) -> Tensor:
    """A pre-norm RMSNorm language model from formulas alone: one row, one head at a time, no gains at all."""
    width, heads = config.d_model or 0, config.num_heads or 0
    x = math.sqrt(width) * (
        state["embedding.token_embedding.weight"][tokens]
        + state["embedding.position_embedding.weight"][: len(tokens)]
    )
    for number in range(config.num_layers or 0):
        layer = f"stack.layers.{number}"

        def linear(y: Tensor, name: str, layer: str = layer) -> Tensor:
            return y @ state[f"{layer}.{name}.weight"].T + state[f"{layer}.{name}.bias"]

        query, key, value = linear(rmsnorm(x, eps), "self_attention.query_key_value").chunk(3, -1)
        mixed = []
        for part in range(heads):
            own = slice(part * width // heads, (part + 1) * width // heads)
            scores = query[:, own] @ key[:, own].T / math.sqrt(width // heads)
            hidden = torch.triu(torch.ones(len(tokens), len(tokens)), 1).bool()
            mixed.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[:, own])
        x = x + linear(torch.cat(mixed, -1), "self_attention.output")
        inner = linear(rmsnorm(x, eps), "feed_forward.up")
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        x = x + linear(inner, "feed_forward.down")
        assert x.mean(-1).abs().max() < 1e-13  # the stream has no mean
    return rmsnorm(x, eps) @ state["output.vocabulary.weight"].T + state["output.bias"]


def test_formulas_of_rmsnorm_give_the_layernorm_models_logits() -> None:
    norm = NormSpec("layernorm", {"eps": 0.01}, "composite")
    model = build(BASE, "lm", norm, perturbed=0.3).double()
    conversion = converted(model, BASE, norm)
    (tokens,) = inputs("lm")
    for name, tensor in conversion.state.items():
        if name.endswith(("norm_input.weight", "final_norm.weight")):
            assert torch.equal(tensor, torch.ones(16, dtype=torch.float64)), name
    with torch.no_grad():
        expected = model(tokens)
    for row, logits in zip(tokens, expected, strict=True):
        found = language_model(conversion.state, BASE, row, 0.01)
        torch.testing.assert_close(found, logits, atol=1e-12, rtol=0)


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_every_norm_of_the_stream_reads_rows_of_mean_zero(task: str) -> None:
    model = build(BASE, task, LAYERNORM, perturbed=0.3).double()
    new = rebuilt(converted(model, BASE, LAYERNORM), task, torch.float64)
    means: dict[Any, list[float]] = {model: [], new: []}
    for owner, found in means.items():
        for module in owner.modules():
            if is_norm(module):
                module.register_forward_pre_hook(
                    lambda _, given, found=found: found.append(float(given[0].mean(-1).abs().max()))
                )
        with torch.no_grad():
            owner(*inputs(task))
    assert len(means[new]) == len(means[model]) == (5 if task == "lm" else 12)
    assert max(means[new]) < 1e-13
    assert min(means[model]) > 1e-2


# --------------------------------------------------------------------------------- trained weights


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_trained_weights(task: str) -> None:
    model = build(BASE, task, LAYERNORM).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(20):
        target = torch.randint(0, TGT_VOCAB, (8, MAX_LEN), generator=torch.Generator().manual_seed(seed))
        rest = (torch.ones(8, 5, dtype=torch.long), torch.ones(8, 5, dtype=torch.bool))
        logits = model(*(() if task == "lm" else rest), target)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), target.roll(-1, 1).flatten()).backward()
        optimizer.step()
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    conversion = converted(model, BASE, LAYERNORM)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (conversion.model.tie_embeddings, conversion.model.output_bias) == (False, True)
    assert conversion.model.empty_source == (task == "translation")
    assert_equal(model, conversion, task)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_beam_search_finds_the_same(beam_size: int) -> None:
    model = build(BASE, "translation", LAYERNORM, perturbed=0.3)
    new = rebuilt(converted(model, BASE, LAYERNORM), "translation", torch.float32)
    source, mask, _ = inputs("translation")
    with torch.no_grad():
        found, expected = (
            beam_search(one, source, mask, max_len=10, beam_size=beam_size, length_penalty=1.0)
            for one in (new, model)
        )
    assert found == expected


# ------------------------------------------------------------------------- what the new model needs


def needs(options: dict[str, Any], norm: NormSpec, task: str, change: dict[str, float]) -> dict[str, Any]:
    """The differences between the configurations where, of a fresh model, only `change` was moved."""
    config = replace(BASE, **options)
    model = build(config, task, norm)
    with torch.no_grad():
        for name, size in change.items():
            model.get_parameter(name)[0] += size
    conversion = converted(model, config, norm)
    assert_equal(model, conversion, task)
    new = {
        f"model.{key}": value for key, value in vars(conversion.model).items() if value != vars(config)[key]
    }
    return new | {f"norm.{key}": value for key, value in conversion.norm.params.items()}


@pytest.mark.parametrize(
    ("options", "norm", "task", "change", "expected"),
    [
        ({}, LAYERNORM, "lm", {}, {}),
        ({"bias": False}, LAYERNORM, "translation", {}, {}),
        ({}, LAYERNORM, "lm", {"stack.final_norm.weight": 0.5}, {"model.tie_embeddings": False}),
        ({"tie_embeddings": False}, LAYERNORM, "lm", {"stack.final_norm.weight": 0.5}, {}),
        ({}, LAYERNORM, "lm", {"stack.final_norm.bias": 0.5}, {"model.output_bias": True}),
        ({}, LAYERNORM, "translation", {"decoder.final_norm.bias": 0.5}, {"model.output_bias": True}),
        ({}, LAYERNORM, "translation", {"encoder.final_norm.bias": 0.5}, {"model.empty_source": True}),
        ({}, LAYERNORM, "translation", {"encoder.final_norm.weight": 0.5}, {}),
        (
            {"bias": False}, LAYERNORM, "translation", {"encoder.final_norm.bias": 0.5},
            {"model.bias": True, "model.empty_source": True},
        ),
        (
            {"bias": False}, LAYERNORM, "lm",
            {"stack.layers.1.feed_forward_residual.norm_input.bias": 0.5}, {"model.bias": True},
        ),
        (
            {"qk_norm": True}, LAYERNORM, "lm",
            {"stack.layers.0.self_attention.norm_query.bias": 0.5}, {"norm.bias": True},
        ),
        ({}, NormSpec("layernorm_nobias", {"eps": 1e-4}), "lm", {}, {"norm.eps": 1e-4}),
        ({}, NormSpec("layernorm", {"gain": False}), "lm", {}, {"norm.gain": False}),
        ({}, NormSpec("layernorm", {"eps_position": "outside"}), "lm", {}, {"norm.eps_position": "outside"}),
    ],
)  # fmt: skip
def test_only_what_is_needed_changes(
    options: dict[str, Any], norm: NormSpec, task: str, change: dict[str, float], expected: dict[str, Any]
) -> None:
    assert needs(options, norm, task, change) == expected


def test_the_backend_stays_where_rmsnorm_has_it() -> None:
    for backend, options, expected in (
        ("composite", {}, "composite"),
        ("torch", {}, "torch"),
        ("auto", {}, "auto"),
        ("torch", {"qk_norm": True}, "auto"),  # torch's RMSNorm has no bias
    ):
        config, norm = replace(BASE, **options), NormSpec("layernorm", backend=backend)
        assert converted(build(config, "lm", norm, perturbed=0.3), config, norm).norm.backend == expected


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model", "norm", "placement", "to", "message"),
    [
        (BASE, "layernorm", Placement.pre, "rmsnrom", "to=rmsnrom: .*; did you mean rmsnorm"),
        (BASE, "layernorm", Placement.pre, "layernorm", "to=layernorm: there is no conversion to it"),
        (BASE, "rmsnorm", Placement.pre, "rmsnorm", "norm=rmsnorm already"),
        (GRUConfig(), "layernorm", Placement.pre, "rmsnorm", "model=gru: .*model=transformer"),
        (BASE, "prmsnorm", Placement.pre, "rmsnorm", "norm=prmsnorm: .*norm=layernorm"),
        (BASE, "batchnorm", Placement.pre, "rmsnorm", "norm=batchnorm: .*norm=layernorm"),
        (BASE, "none", Placement.none, "rmsnorm", "norm=none: .*norm=layernorm"),
        (BASE, "layernorm", Placement.post, "rmsnorm", "placement=post: .*placement=pre"),
        (BASE, "layernorm", Placement.sandwich, "rmsnorm", "placement=sandwich: .*placement=pre"),
        (BASE, "layernorm", Placement.res_post, "rmsnorm", "placement=res_post: .*placement=pre"),
        (BASE, "layernorm", Placement.none, "rmsnorm", "placement=none: .*placement=pre"),
    ],
)
def test_what_cannot_be_converted(model: Any, norm: str, placement: Placement, to: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_convertible(model, NormSpec(norm), placement, to)


def test_weights_of_another_model_are_noticed() -> None:
    state = build(BASE, "lm", LAYERNORM).state_dict()
    more = {**state, "stack.layers.0.adapter.weight": torch.ones(2)}
    with pytest.raises(ValueError, match=r"stack\.layers\.0\.adapter\.weight"):
        convert_to_rmsnorm(BASE, LAYERNORM, Placement.pre, more)
    fewer = {name: tensor for name, tensor in state.items() if "layers.1.feed_forward.up.weight" not in name}
    with pytest.raises(ValueError, match=r"stack\.layers\.1\.feed_forward\.up\.weight is missing"):
        convert_to_rmsnorm(BASE, LAYERNORM, Placement.pre, fewer)
