"""What the norms' tests share: the arms (norm x backend) and a statement of the norms in plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import nn

from rmsrepro.norms import build_norm, list_norms, norm_info, unregister_norm
from rmsrepro.norms.params import BUILTIN_PARAMS, DividingParams

NORMS = tuple(name for name in BUILTIN_PARAMS if norm_info(name).scope == "activation")
"""All built-in norms that are modules on activations: one that is added is tested from then on."""
DIVIDING = tuple(name for name in NORMS if issubclass(BUILTIN_PARAMS[name], DividingParams))
"""Those with an eps, that is, all but none and dyt."""
CENTRED = ("layernorm", "layernorm_nobias", "batchnorm")
"""Those that subtract a mean: of a row, or of an entry over the rows."""
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
        arms = [arm for arm in ARMS if arm.backend == "composite" and arm.norm in DIVIDING]
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
    if norm == "dyt":
        return (1 - 2 / (np.exp(2 * 0.5 * x) + 1)) * gain + bias
    if norm == "batchnorm":
        # The columns are what the rows are to the others.
        columns = x.reshape(-1, x.shape[-1]).T
        y = numpy_norm("layernorm", columns, eps=eps, outside=outside)
        return y.T.reshape(x.shape) * gain + bias
    if norm == "gemma_rmsnorm":
        norm, gain = "rmsnorm", 1.0 + gain
    y = np.empty_like(x)
    for index in np.ndindex(x.shape[:-1]):
        a = x[index]
        if norm in ("layernorm", "layernorm_nobias"):
            a = a - a.sum() / a.size
            m = (a * a).sum() / a.size
        elif norm in ("l2norm", "scalenorm"):
            m = (a * a).sum()
        elif norm == "crmsnorm":
            m = ((a * a).sum() + a.sum() ** 2) / (a.size + 1)
        else:
            head = a[:k] if norm == "prmsnorm" else a
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
