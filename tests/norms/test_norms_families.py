"""The conventions: the model families' spellings, casting, and the authors' own code, pinned by values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rmsrepro.norms import build_norm

HALF = [torch.bfloat16, torch.float16]


def exact_rows(dtype: torch.dtype, gain_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and gains as stored, and the rows normalised in float64 at eps = 1e-6."""
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(64, 32, generator=generator)).to(dtype)
    gain = (1 + 0.3 * torch.randn(32, generator=generator)).to(gain_dtype)
    wide = x.double()
    return x, gain, wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def assert_equal_but_for_ties(y: Tensor, expected: Tensor) -> None:
    """fp32 statistics move a value across a rounding boundary now and then, never by two steps."""
    different = y != expected
    assert different.float().mean() < 0.01
    torch.testing.assert_close(y, expected, rtol=2 * torch.finfo(y.dtype).eps, atol=0)


@pytest.mark.parametrize("gain_dtype", [torch.float32, None], ids=["fp32 gain", "half gain"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("norm", ["llama_rmsnorm", "mistral_rmsnorm", "qwen_rmsnorm", "t5_rmsnorm"])
def test_llama_and_t5_round_before_and_after_the_gain(
    norm: str, dtype: torch.dtype, gain_dtype: torch.dtype | None
) -> None:
    x, gain, normalised = exact_rows(dtype, gain_dtype or dtype)
    module = build_norm(norm, 32, eps=1e-6).to(gain.dtype)
    module.weight.data = gain
    twice = (normalised.to(dtype).double() * gain.double()).to(dtype)
    once = (normalised * gain.double()).to(dtype)
    y = module(x)
    assert y.dtype == dtype
    assert_equal_but_for_ties(y, twice)
    assert (y != once).float().mean() > 0.1, "the two spellings differ visibly"


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gemma_rounds_once(dtype: torch.dtype) -> None:
    x, gain, normalised = exact_rows(dtype)
    module = build_norm("gemma_rmsnorm", 32)
    module.weight.data = gain - 1
    assert_equal_but_for_ties(module(x), (normalised * (1 + (gain - 1).double())).to(dtype))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("norm", ["rmsnorm", "prmsnorm"])
def test_casting_is_a_parameter_of_rmsnorm(norm: str, dtype: torch.dtype) -> None:
    x, gain, normalised = exact_rows(dtype)
    whole: dict[str, Any] = {"p": 1.0} if norm == "prmsnorm" else {}
    for casting, expected in (
        ("before_gain", (normalised.to(dtype).double() * gain.double()).to(dtype)),
        ("after_gain", (normalised * gain.double()).to(dtype)),
    ):
        module = build_norm(norm, 32, eps=1e-6, casting=casting, **whole)
        module.weight.data = gain
        assert_equal_but_for_ties(module(x), expected)
    # In fp32 there is nothing to round.
    wide = x.float()
    before, after = (
        build_norm(norm, 32, casting=c, backend="composite") for c in ("before_gain", "after_gain")
    )
    assert torch.equal(before(wide), after(wide))


def test_casting_before_the_gain_rounds_the_bias_too() -> None:
    x, gain, normalised = exact_rows(torch.bfloat16)
    module = build_norm("llama_rmsnorm", 32, bias=True)
    module.weight.data = gain
    nn.init.constant_(module.bias, 0.7)
    product = (normalised.bfloat16().double() * gain.double()).bfloat16().double()
    expected = (product + module.bias.detach().double()).bfloat16()
    assert_equal_but_for_ties(module(x), expected)


def test_families_bring_their_eps() -> None:
    # A row of RMS 1e-3: eps 1e-6 damps it by sqrt(2), 1e-5 by sqrt(11).
    row = torch.full((1, 8), 1e-3, dtype=torch.float64)
    shown = {
        norm: build_norm(norm, 8).double()(row)[0, 0].item()
        for norm in (
            "llama_rmsnorm",
            "qwen_rmsnorm",
            "t5_rmsnorm",
            "gemma_rmsnorm",
            "mistral_rmsnorm",
            "rmsnorm",
        )
    }
    assert shown == pytest.approx(
        dict.fromkeys(list(shown)[:4], 2**-0.5) | dict.fromkeys(list(shown)[4:], 11**-0.5), rel=1e-12
    )


@pytest.mark.parametrize(
    ("variant", "eps", "outside", "k"),
    [("paper", 1e-5, False, 7), ("authors_torch", 1e-8, True, 6), ("authors_tf", 1e-8, False, 6)],
)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-8])
def test_variants_by_values(variant: str, eps: float, outside: bool, k: int, scale: float) -> None:
    """As the authors' code and the paper's text have it, at d = 100 where ceil and floor of 6.25 differ."""
    x = np.random.default_rng(0).normal(size=(5, 100)) * scale
    for norm, head in (("rmsnorm", x), ("prmsnorm", x[:, :k])):
        mean = (head**2).mean(-1, keepdims=True)
        expected = x / (np.sqrt(mean) + eps) if outside else x / np.sqrt(mean + eps)
        y = build_norm(norm, 100, variant=variant).double()(torch.from_numpy(x))
        np.testing.assert_allclose(y.detach().numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("norm", ["llama_rmsnorm", "gemma_rmsnorm", "t5_rmsnorm", "rmsnorm", "prmsnorm"])
def test_half_precision_squares_do_not_overflow(norm: str) -> None:
    x = torch.full((2, 8), 300.0, dtype=torch.float16)
    assert torch.equal(build_norm(norm, 8)(x), torch.ones_like(x))


def test_crmsnorm_is_the_layernorm_of_the_whole_row() -> None:
    """Of a row with mean zero the compressed norm gives what LayerNorm gives, without its last entry."""
    whole = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = whole - whole.mean(-1, keepdim=True)
    expected = build_norm("layernorm_nobias", 9, backend="composite").double()(whole)[:, :-1]
    y = build_norm("crmsnorm", 8).double()(whole[:, :-1])
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-14)


def test_scalenorm_has_one_gain_and_starts_as_rmsnorm() -> None:
    x = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    norm = build_norm("scalenorm", 64, eps=0.0).double()
    assert [tuple(p.shape) for p in norm.parameters()] == [(1,)]
    torch.testing.assert_close(norm(x), build_norm("rmsnorm", 64, eps=0.0).double()(x), rtol=1e-12, atol=0)


def test_dyt_has_its_alpha_from_the_parameter() -> None:
    x = torch.tensor([[-2.0, 0.0, 1.0]])
    norm = build_norm("dyt", 3, alpha=0.8)
    torch.testing.assert_close(norm(x), torch.tanh(0.8 * x))
    norm(x).sum().backward()
    torch.testing.assert_close(norm.alpha.grad, (x / torch.cosh(0.8 * x) ** 2).sum().reshape(1))
