"""examples/gru_layer.py: what stands for torch.nn.GRU is that, and all arms are what they are named for."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.models.gru import BuiltinGRULayer, GRULayer
from rmsrepro.norms.targets import GivenNorm


@pytest.fixture(scope="module")
def example(load_example: Callable[[str], ModuleType]) -> ModuleType:
    return load_example("gru_layer")


def made(example: ModuleType, norm: str, backend: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    module, x = example.layer(GivenNorm(norm, {}, backend), batch=3, width=9)
    return module, x


def test_all_backends_of_a_norm_are_one_function(example: ModuleType) -> None:
    for norm, backends in (("none", ("torch", "fused", "composite")), ("layernorm", ("torch", "fused"))):
        outputs = []
        for backend in backends:
            module, x = made(example, norm, backend)
            is_builtin = (norm, backend) == ("none", "torch")
            assert isinstance(module, BuiltinGRULayer if is_builtin else GRULayer)
            outputs.append(module(x))
        for other in outputs[1:]:
            torch.testing.assert_close(other, outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("width_128", (30, 64, 128)),
        ("width_256", (30, 64, 256)),
        ("width_512", (30, 80, 512)),
        ("width_1024", (30, 80, 1024)),
    ],
)
def test_sizes(example: ModuleType, name: str, shape: tuple[int, int, int]) -> None:
    assert getattr(example, name)(GivenNorm("none", {}, "torch"))[1].shape == shape
