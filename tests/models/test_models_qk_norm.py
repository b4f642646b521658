"""Norms of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.config.schema import Placement, Positions
from rmsrepro.models.attention import CrossAttention, SelfAttention, rotate, rotation
from rmsrepro.norms import NormSpec, is_norm
from tests.models.norms import EVERY, OF_WEIGHTS, users_norms

DIM, HEADS, WIDTH = 12, 3, 4
RMSNORM = NormSpec("rmsnorm", {"eps": 1e-6}, backend="composite")


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with users_norms():
        yield


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def rms(a: Tensor, gain: Any) -> Tensor:
    return a / (a.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
    """By equation, one head: query (T, E), key and value (S, E); hidden (T, S) may not be seen."""
    score = query @ key.T / query.shape[-1] ** 0.5
    if hidden is not None:
        score = score.masked_fill(hidden, -torch.inf)
    return score.softmax(-1) @ value


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_by_equations(rotary: bool, causal: bool) -> None:
    module = SelfAttention(DIM, HEADS, RMSNORM, qk_norm=True, bias=True, causal=causal).double()
    randomise(module)
    x = torch.randn(2, 5, DIM).double()
    angles = rotation(0, 5, WIDTH, torch.device("cpu")) if rotary else None
    assert module.norm_query is not None
    assert module.norm_key is not None
    hidden = torch.ones(5, 5).triu(1).bool() if causal else None
    rows = []
    for row in x:
        joint = row @ module.query_key_value.weight.T + module.query_key_value.bias
        heads = []
        for head in range(HEADS):
            q, k, v = (
                joint[:, part * DIM + head * WIDTH : part * DIM + (head + 1) * WIDTH] for part in range(3)
            )
            q, k = rms(q, module.norm_query.weight), rms(k, module.norm_key.weight)
            if angles is not None:
                q, k = rotate(q, angles), rotate(k, angles)
            heads.append(attend(q, k, v, hidden))
        rows.append(torch.cat(heads, -1) @ module.output.weight.T + module.output.bias)
    torch.testing.assert_close(module(x, rotary=angles), torch.stack(rows), atol=1e-7, rtol=0)


def test_cross_attention_by_equations() -> None:
    module = CrossAttention(DIM, HEADS, RMSNORM, qk_norm=True, bias=False).double()
    randomise(module)
    x, memory = torch.randn(1, 5, DIM).double(), torch.randn(1, 4, DIM).double()
    assert module.norm_query is not None
    assert module.norm_key is not None
    query = x[0] @ module.query.weight.T
    key, value = (memory[0] @ module.key_value.weight.T).split(DIM, -1)
    heads = [slice(head * WIDTH, (head + 1) * WIDTH) for head in range(HEADS)]
    mixed = [
        attend(
            rms(query[:, at], module.norm_query.weight),
            rms(key[:, at], module.norm_key.weight),
            value[:, at],
            None,
        )
        for at in heads
    ]
    expected = torch.cat(mixed, -1) @ module.output.weight.T
    torch.testing.assert_close(module(x, module.read(memory), None)[0], expected, atol=1e-12, rtol=0)
    # What is kept for later steps is normalised already.
    kept = module.read(memory)
    torch.testing.assert_close(
        kept.keys[0, 1], rms(key[:, heads[1]], module.norm_key.weight), atol=1e-12, rtol=0
    )


def test_scores_do_not_grow_with_the_weights() -> None:
    module = SelfAttention(
        DIM, HEADS, NormSpec("rmsnorm", {"eps": 0.0}), qk_norm=True, bias=False, causal=True
    ).double()
    randomise(module)
    x = torch.randn(2, 5, DIM).double()
    before = module(x)
    with torch.no_grad():
        module.query_key_value.weight[: 2 * DIM] *= 100.0
    torch.testing.assert_close(module(x), before, atol=1e-12, rtol=0)
    bare = SelfAttention(DIM, HEADS, RMSNORM, qk_norm=False, bias=False, causal=True).double()
    bare.load_state_dict(module.state_dict(), strict=False)
    after = bare(x)
    with torch.no_grad():
        bare.query_key_value.weight[: 2 * DIM] /= 100.0
    assert not torch.allclose(bare(x), after)


@pytest.mark.parametrize("norm", EVERY)
@pytest.mark.parametrize("placement", [Placement.pre, Placement.none])
def test_each_attention_has_two_norms_of_a_heads_width(models: Any, norm: str, placement: Placement) -> None:
    def norms(qk_norm: bool) -> dict[str, nn.Module]:
        model = models.build("transformer", "translation", norm, placement=placement, qk_norm=qk_norm)
        return {name: module for name, module in model.named_modules() if is_norm(module)}

    added = norms(True).keys() - norms(False).keys()
    attentions = [
        f"{stack}.layers.{layer}.{attention}"
        for layer in range(2)
        for stack, attention in (
            ("encoder", "self_attention"), ("decoder", "self_attention"), ("decoder", "cross_attention"),
        )
    ]  # fmt: skip
    expected = {f"{attention}.norm_{side}" for attention in attentions for side in ("query", "key")}
    # Without a norm of activations there is nothing to put there.
    assert added == (set() if norm == "none" or norm in OF_WEIGHTS else expected)
    for name in added:
        parameters = [value for _, value in norms(True)[name].named_parameters()]
        assert all(value.shape[-1] in (8, 1) for value in parameters), name


def test_prmsnorm_reads_the_first_entries_of_a_head(models: Any) -> None:
    model = models.build("transformer", "lm", "prmsnorm", qk_norm=True)
    norm = model.stack.layers[0].self_attention.norm_query
    assert norm.params.entries(8) == 4
    x = torch.ones(8)
    changed = [
        not torch.equal(norm(x + 3.0 * torch.eye(8)[place])[(place + 1) % 8], norm(x)[(place + 1) % 8])
        for place in range(8)
    ]
    assert changed == [True] * 4 + [False] * 4


@pytest.mark.parametrize("positions", list(Positions))
@pytest.mark.parametrize("norm", ["layernorm", "l2norm", "rmsnorm"])
def test_cached_keys_are_normalised_once(models: Any, norm: str, positions: Positions) -> None:
    fields = {"qk_norm": True, "positions": positions}
    model = models.build("transformer", "translation", norm, **fields)
    source, mask = models.ragged([5, 0, 2], width=6)
    target = models.tokens(3, 6)
    whole, state = model(source, mask, target), model.start(source, mask)
    for position in range(6):
        logits, state = model.step(target[:, position], state)
        torch.testing.assert_close(logits, whole[:, position], atol=1e-5, rtol=0)


def test_it_is_off_unless_asked_for(models: Any) -> None:
    model = models.build("transformer", "translation", "rmsnorm")
    assert not any("norm_query" in name or "norm_key" in name for name, _ in model.named_parameters())
