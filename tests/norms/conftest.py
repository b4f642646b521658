"""What the norms' tests share: the arms (norm x backend) and a statement of the norms in plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import nn

from rmsrepro.norms import build_norm, list_norms, norm_info, unregister_norm
from rmsrepro.norms.backends import missing
from rmsrepro.norms.params import BUILTIN_PARAMS, DividingParams

NORMS = tuple(name for name in BUILTIN_PARAMS if norm_info(name).scope == "activation")
"""All built-in norms that are modules on activations: one that is added is tested from then on."""
DIVIDING = tuple(name for name in NORMS if issubclass(BUILTIN_PARAMS[name], DividingParams))
"""Those with an eps, that is, all but none and dyt."""
CENTRED = ("layernorm", "layernorm_nobias", "batchnorm")
"""Those that subtract a mean: of a row, or of an entry over the rows."""
THOROUGH = ("composite", "compiled", "fused")
"""The backends that keep every convention and the whole range; torch's functions do not."""


def skip_without(backend: str) -> None:
    """Skip the test where the machine cannot run the backend."""
    lacking = missing(backend)
    if lacking is not None:
        pytest.skip(f"{backend}: {lacking}")


@dataclass(frozen=True)
class Arm:
    norm: str
    backend: str

    def build(self, dim: int, **params: Any) -> nn.Module:
        if self.norm != "none":
            skip_without(self.backend)
        return build_norm(self.norm, dim, backend=self.backend, **params)


ARMS = [Arm(norm, backend) for norm in NORMS for backend in norm_info(norm).backends]
DIVIDING_ARMS = [arm for arm in ARMS if arm.norm in DIVIDING and arm.backend in THOROUGH]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests their arms. Compiling takes seconds for each norm, width, dtype and parameter.

    So those tests are slow on the compiled backend that do not use the kernels of all others, which are of
    width 8, in fp32, with default parameters. The tests that do are marked `shares_kernels`.
    """
    shared = metafunc.definition.get_closest_marker("shares_kernels") is not None
    for name, arms in (("arm", ARMS), ("dividing", DIVIDING_ARMS)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(
                name,
                [
                    pytest.param(
                        arm,
                        id=f"{arm.norm}-{arm.backend}",
                        marks=[pytest.mark.slow] if arm.backend == "compiled" and not shared else [],
                    )
                    for arm in arms
                ],
            )


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
