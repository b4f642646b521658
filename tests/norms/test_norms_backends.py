from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.config.schema import Backend
from rmsrepro.norms import (
    BackendUnavailable,
    NormSpec,
    build_norm,
    norm_info,
    register_norm,
    resolve_backend,
    resolve_params,
)
from rmsrepro.norms.backends import BACKENDS, refusal
from rmsrepro.norms.factory import Choice, choose_backend
from rmsrepro.norms.layers import RMSNorm
from rmsrepro.norms.params import BUILTIN_PARAMS

FUSED = (
    "layernorm", "layernorm_nobias", "rmsnorm", "prmsnorm", "l2norm", "scalenorm", "llama_rmsnorm",
    "mistral_rmsnorm", "qwen_rmsnorm", "t5_rmsnorm", "gemma_rmsnorm",
)  # fmt: skip


@pytest.mark.usefixtures("no_fused_kernels")
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
        (["layernorm", "batchnorm", "dyt"], "compiled", "compiled"),
    ],
)
@pytest.mark.usefixtures("no_fused_kernels")
def test_one_backend_for_all_arms_without_fused_kernels(norms: list[str], wanted: str, used: str) -> None:
    assert resolve_backend([NormSpec(norm) for norm in norms], wanted) == used


@pytest.mark.usefixtures("fused_kernels")
@pytest.mark.parametrize(
    ("norms", "wanted", "used"),
    [
        (["layernorm"], "auto", "fused"),
        (["none", "layernorm", "rmsnorm", "prmsnorm"], "auto", "fused"),
        (["rmsnorm"], "auto", "fused"),
        (["none"], "auto", "composite"),
        (["layernorm", "rmsnorm", "dyt"], "auto", "composite"),
        (["layernorm", "batchnorm"], "auto", "composite"),
        (list(FUSED), "fused", "fused"),
        (["layernorm", "rmsnorm"], "torch", "torch"),
    ],
)
def test_one_backend_for_all_arms_with_fused_kernels(norms: list[str], wanted: str, used: str) -> None:
    choice = choose_backend([NormSpec(norm) for norm in norms], wanted)
    assert (choice.backend, choice.note) == (used, None)


@pytest.mark.usefixtures("no_fused_kernels")
def test_auto_says_why_it_is_not_fused() -> None:
    lacking = "not the fused kernels: no kernels in this test"
    assert NormSpec("layernorm").backend_note == lacking
    assert choose_backend([NormSpec("layernorm"), NormSpec("prmsnorm")], "auto") == Choice(
        "composite", lacking
    )
    # Nothing is lacking for what was asked for, or for norms that fused kernels do not have.
    assert NormSpec("layernorm", {}, "torch").backend_note is None
    assert NormSpec("dyt").backend_note is None
    assert NormSpec("none").backend_note is None


@pytest.mark.usefixtures("no_fused_kernels")
def test_fused_without_kernels_says_what_to_do() -> None:
    message = "backend=fused cannot run here: no kernels in this test; or use backend=composite"
    for attempt in (
        lambda: build_norm("rmsnorm", 8, backend="fused"),
        lambda: RMSNorm(8, backend="fused"),
        lambda: NormSpec("rmsnorm", {}, "fused").backend_used,
    ):
        with pytest.raises(BackendUnavailable) as caught:
            attempt()
        assert str(caught.value) == message
    assert torch.equal(build_norm("none", 8, backend="fused")(torch.ones(8)), torch.ones(8))


@pytest.mark.parametrize("norm", ["crmsnorm", "dyt", "batchnorm", "weightnorm"])
def test_fused_says_what_it_does_not_cover(norm: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"cannot run {norm}: the fused kernels do not cover it"):
        _ = NormSpec(norm, {}, "fused").backend_used
    assert refusal(resolve_params(norm), "compiled") is None


@pytest.mark.usefixtures("no_fused_kernels")
def test_auto_looks_at_the_parameters_of_each_arm() -> None:
    arms = [NormSpec("layernorm"), NormSpec("rmsnorm", {"variant": "authors_torch"})]
    assert resolve_backend(arms, "auto") == "composite"
    with pytest.raises(BackendUnavailable, match="rmsnorm"):
        resolve_backend(arms, "torch")


@pytest.mark.usefixtures("no_fused_kernels")
def test_auto_builds_what_it_says() -> None:
    assert build_norm("layernorm", 8).backend == "torch"
    assert build_norm("layernorm", 8, eps=0.0).backend == "composite"
    assert build_norm("prmsnorm", 8).backend == "composite"
    assert NormSpec("rmsnorm", backend="torch").build(8).backend == "torch"


def test_known_backends() -> None:
    assert BACKENDS == ("fused", "torch", "compiled", "composite")
    assert norm_info("rmsnorm").backends == BACKENDS
    assert norm_info("prmsnorm").backends == ("fused", "compiled", "composite")
    for name in ("crmsnorm", "dyt", "batchnorm", "weightnorm"):
        assert norm_info(name).backends == ("compiled", "composite")
    assert [name for name in BUILTIN_PARAMS if "fused" in norm_info(name).backends] == ["none", *FUSED]
    assert {one.value for one in Backend} == {"auto", *BACKENDS}


def test_a_user_norm_counts_as_composite(forget_norms: None) -> None:
    @register_norm("halved")
    class Halved(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    assert NormSpec("halved").backend_used == "composite"
    assert torch.equal(build_norm("halved", 3, backend="composite")(torch.ones(3)), torch.full((3,), 0.5))
    for backend in ("torch", "compiled", "fused"):
        with pytest.raises(BackendUnavailable, match="user's module"):
            build_norm("halved", 3, backend=backend)
    assert resolve_backend([NormSpec("layernorm"), NormSpec("halved")], "auto") == "composite"
