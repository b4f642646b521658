"""The plus of a residual block and the norm after it as one pass: the same numbers, and when it is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rmsrepro.config.schema import Placement, TransformerConfig
from rmsrepro.models import build_model
from rmsrepro.norms import NormSpec, build_norm
from rmsrepro.norms.adding import add_norm
from rmsrepro.norms.backends.fused.kernel import FusedNorm

NORMS: list[tuple[str, dict[str, Any]]] = [
    ("layernorm", {}),
    ("rmsnorm", {}),
    ("prmsnorm", {"p": 0.3}),
    ("l2norm", {"eps_position": "outside"}),
    ("gemma_rmsnorm", {}),
    ("none", {}),
]
LAYERS = 2


def model(task: str, norm: str, params: dict[str, Any], placement: Placement, backend: str) -> nn.Module:
    config = TransformerConfig(
        d_model=20, num_layers=LAYERS, num_heads=2, d_ff=24, dropout=0.0, tie_embeddings=True
    )
    built = build_model(
        config,
        task,
        src_vocab=11,
        tgt_vocab=11,
        max_len=9,
        norm=NormSpec(norm, params, backend),
        placement=placement,
        sites=[],
        seed=3,
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in built.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return built


def run(built: nn.Module, task: str) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 11, (3, 7), generator=generator)
    if task == "lm":
        return built(tokens)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, 4:] = False
    return built(tokens, mask, tokens.flip(1))


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the fused sums."""
    counted: list[int] = []
    add = FusedNorm.add

    def counting(self: FusedNorm, x: Tensor, *rest: Any) -> Any:
        counted.append(x.numel())
        return add(self, x, *rest)

    monkeypatch.setattr(FusedNorm, "add", counting)
    return counted


@pytest.mark.parametrize("task", ["lm", "translation"])
@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize(("norm", "params"), NORMS, ids=[name for name, _ in NORMS])
def test_fused_transformer_is_the_composite_one(
    norm: str, params: dict[str, Any], placement: Placement, task: str, sums: list[int]
) -> None:
    results = {}
    for dtype in (torch.float64, torch.float32):
        for backend in ("composite", "fused"):
            built = model(task, norm, params, placement, backend).to(dtype)
            logits = run(built, task)
            upstream = torch.linspace(-1, 1, logits.numel(), dtype=dtype).view_as(logits)
            gradients = torch.autograd.grad(logits, list(built.parameters()), upstream)
            results[backend, dtype] = [logits.detach(), *gradients]
    exact = results["composite", torch.float64]
    for one, other in zip(results["fused", torch.float64], exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    # In fp32 a whole model makes rounding larger, in any backend; fused stays as near the truth as composite.
    for one, other, truth in zip(
        results["fused", torch.float32], results["composite", torch.float32], exact, strict=True
    ):
        scale = truth.abs().max().item()
        assert (one - truth).abs().max() <= 4 * (other - truth).abs().max() + 1e-6 * scale + 1e-9
    # Two branches a layer; encoder and decoder, with attention between, have five.
    branches = LAYERS * (2 if task == "lm" else 5)
    fused = norm != "none" and placement in (Placement.pre, Placement.post, Placement.sandwich)
    assert len(sums) == (2 * branches if fused else 0)


@pytest.mark.parametrize("placement", [Placement.pre, Placement.post, Placement.sandwich])
def test_decoding_step_by_step_gives_the_logits_of_the_whole(placement: Placement) -> None:
    built: Any = model("lm", "rmsnorm", {}, placement, "fused").eval()
    tokens = torch.randint(3, 11, (3, 7), generator=torch.Generator().manual_seed(2))
    whole, state = built(tokens), None
    for position in range(tokens.shape[1]):
        logits, state = built.step(tokens[:, position], state)
        torch.testing.assert_close(logits, whole[:, position], rtol=1e-5, atol=1e-5)


def test_a_watched_norm_is_called_as_a_module(sums: list[int]) -> None:
    norm = build_norm("rmsnorm", 8, backend="fused")
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    total, normed = add_norm(norm, x, y)
    assert len(sums) == 1
    seen: list[Tensor] = []
    handle = norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    again = add_norm(norm, x, y)
    assert len(sums) == 1
    assert len(seen) == 1
    torch.testing.assert_close(again, (total, normed), rtol=0, atol=0)
    handle.remove()
    add_norm(norm, x, y)
    assert len(sums) == 2


def test_summands_of_different_dtypes_take_two_steps(sums: list[int]) -> None:
    norm = build_norm("rmsnorm", 8, backend="fused")
    x, y = torch.randn(3, 8), torch.randn(3, 8).bfloat16()
    total, normed = add_norm(norm, x, y)
    assert not sums
    assert torch.equal(total, x + y)
    assert torch.equal(normed, norm(x + y))


@pytest.mark.parametrize("placement", [Placement.pre, Placement.post])
def test_under_autocast_and_compiled(placement: Placement) -> None:
    built = model("lm", "layernorm", {}, placement, "fused")
    plain = model("lm", "layernorm", {}, placement, "composite")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(built, "lm"), run(plain, "lm"), rtol=0.05, atol=0.05)
    compiled = torch.compile(built, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, "lm"), run(plain, "lm"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("placement", [Placement.pre, Placement.sandwich])
def test_layers_that_are_watched_wrapped_or_called_alone_give_tensors(placement: Placement) -> None:
    plain, built = (model("lm", "rmsnorm", {}, placement, backend) for backend in ("composite", "fused"))
    expected = run(plain, "lm")
    layers = list(built.stack.layers)
    seen: list[Any] = []
    backwards: list[Any] = []
    handles = [
        layers[0].register_forward_hook(lambda module, inputs, output: seen.extend((*inputs, output))),
        layers[1].register_full_backward_hook(lambda module, inputs, outputs: backwards.extend(outputs)),
        layers[1].feed_forward_residual.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])),
    ]
    logits = run(built, "lm")
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    logits.sum().backward()
    assert len(seen) == 3
    assert len(backwards) == 1
    assert all(type(one) is Tensor for one in (*seen, *backwards))
    for handle in handles:
        handle.remove()
    x = torch.randn(2, 3, 20, requires_grad=True)
    assert type(layers[0](x, rotary=None)) is Tensor
    gradients = []
    for reentrant in (True, False):
        for parameter in layers[0].parameters():
            parameter.grad = None
        y = (
            checkpoint(layers[0], x, rotary=None, use_reentrant=reentrant)
            if not reentrant
            else checkpoint(lambda x: layers[0](x, rotary=None), x, use_reentrant=True)
        )
        y.sum().backward()
        assert all(parameter.grad is not None for parameter in layers[0].parameters())
        gradients.append([parameter.grad for parameter in layers[0].parameters()])
    torch.testing.assert_close(*gradients)
    built.stack.layers[0] = Wrapped(layers[0])
    torch.testing.assert_close(run(built, "lm"), expected, rtol=1e-5, atol=1e-5)


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        assert type(x) is Tensor
        y = self.layer(x, **given)
        assert type(y) is Tensor
        return y


def test_only_one_of_sum_and_norm_used() -> None:
    norm = build_norm("rmsnorm", 8, backend="fused").double()
    x, y = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    upstream = torch.randn(3, 8, dtype=torch.float64)
    total, normed = add_norm(norm, x, y)
    for output, expected in ((total, x + y), (normed, norm(x + y))):
        found = torch.autograd.grad(output, [x, y], upstream, retain_graph=True)
        wanted = torch.autograd.grad(expected, [x, y], upstream)
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_second_derivatives_of_sum_and_norm() -> None:
    norm = build_norm("layernorm", 5, backend="fused").double()
    x, y = (torch.randn(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, y: add_norm(norm, x, y), (x, y))
    assert torch.autograd.gradgradcheck(lambda x, y: add_norm(norm, x, y), (x, y))
