from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.norms import (
    BackendUnavailable,
    NormSpec,
    build_norm,
    norm_info,
    register_norm,
    resolve_backend,
)


@pytest.mark.parametrize(
    ("norm", "given", "reason"),
    [
        ("prmsnorm", {}, "torch has no function"),
        ("l2norm", {}, "torch has no function"),
        ("layernorm", {"eps_position": "outside"}, "F.layer_norm has eps inside the root only"),
        ("rmsnorm", {"variant": "authors_torch"}, "F.rms_norm has eps inside the root only"),
        ("rmsnorm", {"bias": True}, "F.rms_norm has no bias"),
        ("rmsnorm", {"eps": 0}, "eps=0"),
        ("layernorm", {"eps": 0.0}, "gives NaN"),
    ],
)
def test_torch_says_what_it_cannot_do(norm: str, given: dict[str, Any], reason: str) -> None:
    for attempt in (
        lambda: build_norm(norm, 8, backend="torch", **given),
        lambda: NormSpec(norm, given, "torch").backend_used,
    ):
        with pytest.raises(BackendUnavailable) as caught:
            attempt()
        message = str(caught.value)
        assert reason in message
        assert f"backend=torch cannot run {norm}" in message
        assert "use backend=composite" in message
    assert isinstance(caught.value, ValueError)
    assert NormSpec(norm, given).backend_used == "composite"


def test_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"there is no backend 'compsite'; did you mean composite"):
        build_norm("rmsnorm", 8, backend="compsite")


@pytest.mark.parametrize(
    ("norms", "wanted", "used"),
    [
        (["layernorm"], "auto", "torch"),
        (["layernorm_nobias"], "auto", "torch"),
        (["layernorm", "rmsnorm"], "auto", "torch"),
        (["none", "layernorm", "rmsnorm"], "auto", "torch"),
        (["layernorm", "rmsnorm", "prmsnorm"], "auto", "composite"),
        (["rmsnorm"], "auto", "composite"),
        (["none"], "auto", "composite"),
        (["none", "layernorm", "rmsnorm"], "torch", "torch"),
        (["layernorm", "prmsnorm"], "composite", "composite"),
    ],
)
def test_one_backend_for_all_arms(norms: list[str], wanted: str, used: str) -> None:
    assert resolve_backend([NormSpec(norm) for norm in norms], wanted) == used


def test_auto_looks_at_the_parameters_of_each_arm() -> None:
    arms = [NormSpec("layernorm"), NormSpec("rmsnorm", {"variant": "authors_torch"})]
    assert resolve_backend(arms, "auto") == "composite"
    with pytest.raises(BackendUnavailable, match="rmsnorm"):
        resolve_backend(arms, "torch")


def test_auto_builds_what_it_says() -> None:
    assert build_norm("layernorm", 8).backend == "torch"
    assert build_norm("layernorm", 8, eps=0.0).backend == "composite"
    assert build_norm("prmsnorm", 8).backend == "composite"
    assert NormSpec("rmsnorm", backend="torch").build(8).backend == "torch"


def test_known_backends() -> None:
    assert norm_info("rmsnorm").backends == ("torch", "composite")
    assert norm_info("prmsnorm").backends == ("composite",)


def test_a_user_norm_counts_as_composite(forget_norms: None) -> None:
    @register_norm("halved")
    class Halved(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    assert NormSpec("halved").backend_used == "composite"
    assert torch.equal(build_norm("halved", 3, backend="composite")(torch.ones(3)), torch.full((3,), 0.5))
    with pytest.raises(BackendUnavailable, match="user's module"):
        build_norm("halved", 3, backend="torch")
    assert resolve_backend([NormSpec("layernorm"), NormSpec("halved")], "auto") == "composite"
