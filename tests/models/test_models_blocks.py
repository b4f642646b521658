"""Where the norms sit, and how many there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsrepro.config.schema import FeedForward as FeedForwardKind
from rmsrepro.config.schema import Placement, Site
from rmsrepro.models.blocks import FeedForward, Residual
from rmsrepro.models.embedding import PositionedEmbedding
from rmsrepro.norms import NormSpec, is_norm

DIM = 6


def num_norms(model: nn.Module) -> int:
    return sum(is_norm(module) for module in model.modules())


def test_each_dataflow() -> None:
    x = torch.randn(3, DIM)
    linear = nn.Linear(DIM, DIM)

    def rms(a: Tensor, gain: Tensor) -> Tensor:
        return a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-5) * gain

    blocks = {}
    gains = {}
    for number, placement in enumerate(Placement):
        block = Residual(DIM, NormSpec("rmsnorm", backend="composite"), placement, dropout=0.0)
        for own, parameter in enumerate(block.parameters()):
            nn.init.normal_(parameter, 1.0 + number + own)
        blocks[placement], gains[placement] = block, list(block.parameters())
    expected = {
        Placement.pre: x + linear(rms(x, gains[Placement.pre][0])),
        Placement.post: rms(x + linear(x), gains[Placement.post][0]),
        Placement.sandwich: x
        + rms(linear(rms(x, gains[Placement.sandwich][0])), gains[Placement.sandwich][-1]),
        Placement.res_post: x + rms(linear(x), gains[Placement.res_post][0]),
        Placement.none: x + linear(x),
    }
    before = x.clone()
    for placement, block in blocks.items():
        torch.testing.assert_close(block(x, linear), expected[placement])
    assert torch.equal(x, before)


NUM_LAYERS = 3


@pytest.mark.parametrize(
    ("placement", "branches", "final"),
    [
        (Placement.pre, 1, 1),
        (Placement.post, 1, 0),
        (Placement.sandwich, 2, 1),
        (Placement.res_post, 1, 0),
        (Placement.none, 0, 0),
    ],
)
def test_number_of_norms_in_a_transformer(
    models: Any, placement: Placement, branches: int, final: int
) -> None:
    lm = models.build("transformer", "lm", placement=placement, num_layers=NUM_LAYERS)
    assert num_norms(lm) == branches * 2 * NUM_LAYERS + final
    translation = models.build("transformer", "translation", placement=placement, num_layers=NUM_LAYERS)
    assert num_norms(translation) == branches * (2 + 3) * NUM_LAYERS + 2 * final
    for task in ("lm", "translation"):
        assert num_norms(models.build("transformer", task, "none", placement=placement)) == 0


@pytest.mark.parametrize("sites", [tuple(Site), (Site.gates_x, Site.cand_h), ()])
def test_number_of_norms_in_a_gru(models: Any, sites: tuple[Site, ...]) -> None:
    assert num_norms(models.build("gru", "lm", sites=sites, num_layers=2)) == 2 * len(sites)
    rnnsearch = models.build("gru", "translation", sites=sites, num_layers=2)
    assert num_norms(rnnsearch) == (2 * 2 + 2) * len(sites) + 6
    assert num_norms(models.build("gru", "translation", "none", sites=sites)) == 0


@pytest.mark.parametrize("task", ["lm", "translation"])
@pytest.mark.parametrize(
    ("kind", "placement"),
    [("transformer", placement) for placement in Placement if placement is not Placement.none]
    + [("gru", Placement.pre)],
)
def test_norms_are_called_as_often_in_training_as_in_evaluation(
    models: Any, kind: str, placement: Placement, task: str
) -> None:
    model = models.build(kind, task, "rmsnorm", placement=placement)
    calls: list[str] = []
    for name, module in model.named_modules():
        if is_norm(module):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    source, mask = models.ragged([5, 3], width=7)
    inputs = (models.tokens(2, 5),) if task == "lm" else (source, mask, models.tokens(2, 5))
    trained = model.train()(*inputs)
    in_training, calls[:] = sorted(calls), []
    with torch.no_grad():
        evaluated = model.eval()(*inputs)
    assert sorted(calls) == in_training
    assert set(calls) == {name for name, module in model.named_modules() if is_norm(module)}
    assert trained.shape == (2, 5, models.tgt_vocab)
    torch.testing.assert_close(evaluated, trained, atol=1e-5, rtol=0)


def test_feed_forward_kinds() -> None:
    x = torch.randn(4, DIM)
    gelu = FeedForward(DIM, 5, FeedForwardKind.gelu, NormSpec("layernorm"), bias=True)
    torch.testing.assert_close(gelu(x), gelu.down(F.gelu(gelu.up(x))))
    swiglu = FeedForward(DIM, 5, FeedForwardKind.swiglu, NormSpec("layernorm"), bias=False)
    gate, up = swiglu.gate_up.weight[:5], swiglu.gate_up.weight[5:]
    torch.testing.assert_close(swiglu(x), (F.silu(x @ gate.T) * (x @ up.T)) @ swiglu.down.weight.T)
    assert swiglu.down.bias is None
    assert gelu.down.bias is not None


def test_embeddings_enter_the_stream_scaled() -> None:
    embedding = PositionedEmbedding(5, 9, max_len=4, dropout=0.0)
    tokens = torch.tensor([[3, 1]])
    table, positions = embedding.token_embedding.weight, embedding.position_embedding
    assert positions is not None
    expected = 3.0 * (table[[3, 1]] + positions.weight[[2, 3]])
    torch.testing.assert_close(embedding(tokens, start=2), expected.unsqueeze(0))
