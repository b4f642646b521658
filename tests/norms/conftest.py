"""What the norms' tests share: the arms (norm x backend) and a statement of the norms in plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import nn

from rmsrepro.norms import build_norm, list_norms, unregister_norm

NORMS = ("none", "layernorm", "layernorm_nobias", "rmsnorm", "prmsnorm", "l2norm")
TORCH = ("layernorm", "layernorm_nobias", "rmsnorm")


@dataclass(frozen=True)
class Arm:
    norm: str
    backend: str

    def build(self, dim: int, **params: Any) -> nn.Module:
        return build_norm(self.norm, dim, backend=self.backend, **params)

    def with_zero_eps(self) -> Arm:
        """torch's functions refuse eps=0."""
        return Arm(self.norm, "composite")


ARMS = [Arm(norm, "composite") for norm in NORMS] + [Arm(norm, "torch") for norm in TORCH]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arm" in metafunc.fixturenames:
        metafunc.parametrize("arm", ARMS, ids=[f"{arm.norm}-{arm.backend}" for arm in ARMS])
    if "composite" in metafunc.fixturenames:
        arms = [arm for arm in ARMS if arm.backend == "composite" and arm.norm != "none"]
        metafunc.parametrize("composite", arms, ids=[arm.norm for arm in arms])


def numpy_norm(
    norm: str,
    x: np.ndarray,
    gain: np.ndarray | float = 1.0,
    bias: np.ndarray | float = 0.0,
    *,
    eps: float = 1e-5,
    outside: bool = False,
    k: int | None = None,
) -> np.ndarray:
    """The norms once more, row by row in float64, written apart from the package."""
    x = np.asarray(x, dtype=np.float64)
    if norm == "none":
        return x
    y = np.empty_like(x)
    for index in np.ndindex(x.shape[:-1]):
        a = x[index]
        if norm in ("layernorm", "layernorm_nobias"):
            a = a - a.sum() / a.size
            m = (a * a).sum() / a.size
        elif norm == "l2norm":
            m = (a * a).sum()
        else:
            head = a if norm == "rmsnorm" else a[:k]
            m = (head * head).sum() / head.size
        denominator = np.sqrt(m) + eps if outside else np.sqrt(m + eps)
        y[index] = (a / denominator if denominator > 0 else 0.0 * a) * gain + bias
    return y


@pytest.fixture
def numpy_reference() -> Callable[..., np.ndarray]:
    return numpy_norm


@pytest.fixture
def forget_norms() -> Iterator[None]:
    """Unregister afterwards what a test registers."""
    before = set(list_norms())
    yield
    for name in set(list_norms()) - before:
        unregister_norm(name)
