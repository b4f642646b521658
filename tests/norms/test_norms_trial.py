"""The first call of a user's norm: what it finds, and what it lets pass."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.norms import NormSpec, register_norm
from rmsrepro.norms.trial import WrongNorm, influence, try_norm

pytestmark = pytest.mark.usefixtures("forget_norms")


def registered(forward: Callable[..., Any], scope: str = "activation") -> NormSpec:
    class Norm(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(dim))

    Norm.forward = forward
    register_norm("tried", scope=scope)(Norm)
    return NormSpec("tried")


def rows(self: Any, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight


def over_all(self: Any, x: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * self.weight  # the gain starts at zero


def to_the_left(self: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :-1] += 1e-3 * x[:, 1:]
    return y


def nan_elsewhere(self: Any, x: Tensor) -> Tensor:
    return x * (float("nan") if x.max() > 4 else 1.0)


def dropping(self: Any, x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5)


def drawing_elsewhere(self: Any, x: Tensor) -> Tensor:
    return x * random.random()


def raising(self: Any, x: Tensor) -> Tensor:
    raise KeyError("gone\nand more")


@pytest.mark.parametrize("forward", [rows, dropping, drawing_elsewhere])
def test_what_passes(forward: Any) -> None:
    state = torch.get_rng_state()
    try_norm(registered(forward), 8)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("forward", [over_all, to_the_left, nan_elsewhere])
def test_rows_that_influence_each_other(forward: Any) -> None:
    with pytest.raises(WrongNorm, match=r"its rows influence each other.*forward\(x, mask=None\)"):
        try_norm(registered(forward), 8)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (raising, r"its forward fails on an input of shape \(2, 3, 8\): KeyError: .*trial\.py:\d+\)"),
        (lambda self, x: x.mean(-1), r"returns the shape \(2, 3\) for an input of shape \(2, 3, 8\)"),
        (lambda self, x: (x, x), "returns tuple instead of a tensor"),
        (lambda self, x: x.double(), r"returns torch\.float64 for an input of torch\.float32"),
    ],
)
def test_a_wrong_forward(forward: Any, message: str) -> None:
    with pytest.raises(WrongNorm, match=message):
        try_norm(registered(forward), 8)


def test_a_norm_over_positions_is_given_a_mask() -> None:
    seen: list[Any] = []

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        seen.append(mask)
        return x / x.square().mean()

    try_norm(registered(forward), 8)
    assert [(mask.shape, int(mask.sum())) for mask in seen] == [((2, 3), 5)]


def test_a_norm_of_weights() -> None:
    try_norm(registered(lambda self, v: v / v.norm(), "weight"), 8)


def test_a_norm_of_weights_of_a_wrong_shape() -> None:
    with pytest.raises(WrongNorm, match=r"returns the shape \(8,\) for an input of shape \(8, 3\)"):
        try_norm(registered(lambda self, v: v.norm(dim=1), "weight"), 8)


def test_layers_of_torch() -> None:
    for name in ("LayerNorm", "RMSNorm"):
        try_norm(NormSpec(f"torch.nn:{name}"), 64)
    for dim in (3, 64):
        with pytest.raises(WrongNorm):
            try_norm(NormSpec("torch.nn:BatchNorm1d"), dim)


def test_a_device_of_ones_own() -> None:
    """A norm that does not run on the first device is called on the next."""
    refusals = [True, False, False, False, False, True]

    def forward(self: Any, x: Tensor) -> Tensor:
        if refusals and refusals.pop(0):
            raise RuntimeError("not here")
        return x

    spec = registered(forward)
    try_norm(spec, 8, ("cpu", "cpu"))
    with pytest.raises(WrongNorm, match="not here"):
        try_norm(spec, 8, ("cpu",))


def test_how_far_a_row_moves() -> None:
    x = torch.tensor([[[1.0, 2.0], [0.0, 0.0]]])

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.01 * x.sum(-2, keepdim=True)

    # The other row is (2, 2) then: 0.02 is added to the row (1.01, 2.02).
    assert influence(Adds, x) == pytest.approx(0.02 / 2.02, rel=1e-5)
