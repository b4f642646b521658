"""examples/compiled_transformer.py: one model twice, of which one will be compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsrepro.norms.targets import GivenNorm


@pytest.fixture(scope="module")
def example(load_example: Callable[[str], ModuleType]) -> ModuleType:
    return load_example("compiled_transformer")


def made(example: ModuleType, name: str, norm: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    module, x = getattr(example, name)(GivenNorm(norm, {}, "composite"))
    return module, x


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "prmsnorm"])
def test_the_two_are_one_model(example: ModuleType, norm: str) -> None:
    (eager, x), (compiled, same) = (made(example, name, norm) for name in ("eager", "compiled"))
    torch.testing.assert_close(x, same, rtol=0, atol=0)
    assert eager.state_dict().keys() == compiled.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), compiled.parameters(), strict=True))
    assert compiled._compiled_call_impl is not None
    assert eager._compiled_call_impl is None


def test_a_block_is_pre_norm(example: ModuleType) -> None:
    """Stated anew in float64, with torch's own attention and LayerNorm."""
    block = example.Block(GivenNorm("layernorm", {}, "composite")).double()
    x = torch.randn(2, 5, 256, dtype=torch.float64)
    attention = nn.MultiheadAttention(256, 4, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        attention.in_proj_weight.copy_(block.to_heads.weight)
        attention.in_proj_bias.copy_(block.to_heads.bias)
        attention.out_proj.weight.copy_(block.from_heads.weight)
        attention.out_proj.bias.copy_(block.from_heads.bias)
    normed = F.layer_norm(x, (256,))
    middle = x + attention(normed, normed, normed)[0]
    expected = middle + block.feed_forward(F.layer_norm(middle, (256,)))
    torch.testing.assert_close(block(x), expected, rtol=1e-10, atol=1e-10)
