"""The norm that is measured: fresh modules of it, and what its values are compared with."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from rmsrepro.norms.card.drawing import generator, normal, rows_of, seeded
from rmsrepro.norms.card.lifting import Lifted
from rmsrepro.norms.equations import affine, divide, equation, weightnorm
from rmsrepro.norms.factory import NormSpec, build_weight_norm
from rmsrepro.norms.linear import NormedLinear, WeightNormLinear, normed_linear
from rmsrepro.norms.params import BatchNormParams, NormParams, WeightNormParams
from rmsrepro.norms.registry import NormInfo, norm_info, resolve_params


@dataclass(frozen=True)
class Subject:
    """A norm at one width.

    Attributes:
        name: a registered name or an import string.
        params: parameters as given.
        backend: one of `BACKENDS`.
        dim: size of the last dimension.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "composite"
    dim: int = 64

    @cached_property
    def info(self) -> NormInfo:
        return norm_info(self.name)

    @cached_property
    def resolved(self) -> Any:
        """The norm's parameter dataclass."""
        return resolve_params(self.name, **self.params)

    @property
    def of_weights(self) -> bool:
        """Whether the norm reparametrises the weights of a linear map."""
        return self.info.scope == "weight"

    @cached_property
    def constant(self) -> bool:
        """Whether the output does not depend on the input, as that of a layernorm of a single entry."""
        if self.dim > 1:
            return False
        norm = self.direct()
        with torch.no_grad():
            return torch.equal(
                norm(normal(*self.sheet(4)).float()), norm(normal(*self.sheet(4), number=1).float())
            )

    @property
    def built_in(self) -> bool:
        return self.info.factory is None

    def has(self, parameter: str) -> bool:
        """Return whether the norm has this parameter."""
        return parameter in vars(self.resolved)

    def at(self, **changes: Any) -> Subject:
        """Return the subject with other parameters."""
        return replace(self, params={**self.params, **changes})

    # ---------------------------------------------------------------------------------- modules

    @property
    def spec(self) -> NormSpec:
        return NormSpec(self.name, self.params, self.backend)

    def build(self, dim: int | None = None) -> nn.Module:
        """Return a fresh module on (..., dim): the norm, or for a norm of weights a linear map with it.

        Raises:
            Exception: whatever the norm's constructor raises.
        """
        size = self.dim if dim is None else dim
        with seeded():
            if self.of_weights:
                return normed_linear(nn.Linear(size, size, bias=False), self.spec)
            return self.spec.build(size)

    def direct(self, dim: int | None = None) -> nn.Module:
        """Return a fresh norm by itself: of weights, a module on the matrix (dim, in)."""
        if not self.of_weights:
            return self.build(dim)
        with seeded():
            return build_weight_norm(self.spec, self.dim if dim is None else dim)

    def sheet(self, rows: int, dim: int | None = None) -> tuple[int, int]:
        """Return the shape that `direct(dim)` takes for `rows` rows: a norm of weights has `dim` of them."""
        size = self.dim if dim is None else dim
        return (size, rows) if self.of_weights else (rows, size)

    def lively(self, dim: int | None = None) -> nn.Module:
        """Return a module whose gains and biases would show up if they were left out or exchanged."""
        return enliven(self.build(dim))

    def normed(self, in_features: int, out_features: int) -> tuple[NormedLinear, nn.Linear]:
        """Return n(W x) in float64 without a bias of the map, and the linear map that holds W."""
        with seeded():
            module = normed_linear(nn.Linear(in_features, out_features, bias=False), self.spec)
        module.double()
        with torch.no_grad():
            module.linear.weight.copy_(normal(out_features, in_features, number=1) / in_features**0.5)
            for gain in gains_of(module).values() if self.of_weights else ():
                gain.fill_(1.0)  # built, it was the length of a row that is gone, eps included
        enliven(module)
        return module, module.linear

    # -------------------------------------------------------------------------------- references

    @property
    def reference_name(self) -> str:
        """What the norm's values are compared with, in words."""
        if self._equation_fits:
            return "its equation in float64"
        if self.lifted:
            return "its own copy in float64, casts lifted"
        return "its own copy in float64"

    @cached_property
    def _equation_fits(self) -> bool:
        return self.built_in and isinstance(self.resolved, NormParams)

    @cached_property
    def lifted(self) -> bool:
        """Whether the norm casts to a lower precision inside, which its reference undoes."""
        try:
            return not self._equation_fits and not self.keeps_float64
        except KeyboardInterrupt:
            raise
        except BaseException:
            return False  # the check of float64 says what it raises

    @cached_property
    def inner_precision(self) -> float:
        """The relative rounding of what the norm computes from a float64 input; about 1e-16 in float64."""
        return measure_precision(self.lively(self.dim).double(), self.dim)

    @property
    def keeps_float64(self) -> bool:
        return self.inner_precision < 1e-11

    def reference(self, module: nn.Module) -> Callable[[Tensor], tuple[Tensor, list[Tensor]]]:
        """Return f(x in float64) -> (y, leaves): `module` in float64, and its `learned` parameters.

        What the norm remembers of its inputs is remembered as it is now: ask for the reference before a call.
        """
        if not self._equation_fits:
            twin = copy.deepcopy(module).double()

            def own_copy(x: Tensor) -> tuple[Tensor, list[Tensor]]:
                return twin(x), list(learned(twin).values())

            return own_copy
        leaves = {
            name: parameter.detach().double().requires_grad_()
            for name, parameter in module.named_parameters()
        }
        params, dim = self.resolved, getattr(module, "dim", self.dim)
        running = {} if module.training else {name: one.double() for name, one in module.named_buffers()}

        def exact(x: Tensor) -> tuple[Tensor, list[Tensor]]:
            if isinstance(params, WeightNormParams):
                rows = partial(weightnorm, eps=params.eps, outside=params.outside)
                if "weight" in leaves:
                    return rows(x, leaves["weight"]), list(leaves.values())
                matrix = rows(leaves["linear.weight"], leaves["linear.norm.weight"])
                return x @ matrix.T, list(leaves.values())
            if isinstance(params, BatchNormParams) and running:
                mean, variance = running["running_mean"], running["running_var"]
                y = divide(x - mean, variance, eps=params.eps, outside=params.outside)
                return affine(y, leaves.get("weight"), leaves.get("bias")), list(leaves.values())
            return equation(params, dim)(x, **leaves), list(leaves.values())

        return exact

    @contextlib.contextmanager
    def in_float64(self) -> Iterator[None]:
        """Surround what a reference computes, its gradients included."""
        with Lifted() if self.lifted else contextlib.nullcontext():
            yield


def linear_of(module: nn.Module) -> nn.Linear:
    """Return the linear map inside what `build` makes of a norm of weights."""
    assert isinstance(module, NormedLinear)
    return module.linear


def learned(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that get gradients, by name: neither frozen ones nor whole numbers."""
    return {name: one for name, one in module.named_parameters() if one.requires_grad}


def enliven(module: nn.Module) -> nn.Module:
    """Move the norms' parameters off their initial values, keeping signs; leave a linear map's weight."""
    draw = generator(2)
    linear = {id(one.weight) for one in module.modules() if isinstance(one, nn.Linear)}
    with torch.no_grad():
        for parameter in module.parameters():
            if id(parameter) not in linear and parameter.is_floating_point():
                step = (0.2 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)).clamp(
                    -0.4, 0.4
                )
                size = torch.where(parameter == 0, torch.ones_like(parameter), parameter.abs())
                parameter.add_(step.to(parameter.dtype) * size)
    return module


def measure_precision(module: nn.Module, dim: int) -> float:
    """Return the relative rounding inside a module on float64 inputs: 0 to 1e-15 in float64, 3e-8 in fp32.

    Seen in two ways: as the distance to what it gives when its casts are lifted; and, for kernels that take
    no part in that, as noise in differences over small steps. Over a step of 1e-6 they equal those over 1e-5
    but for rounding divided by the step: 1e-10 in float64, 0.1 in fp32. The median leaves out kinks.
    """
    x, direction = rows_of(6, dim, number=3), normal(6, dim, number=4)

    def call(x: Tensor) -> Tensor:
        y: Tensor = copy.deepcopy(module)(x)  # what a call leaves behind is no rounding of the next
        return y

    with torch.no_grad():
        y = call(x.clone())
        with Lifted():
            exact = call(x.clone())
        size = float(exact.abs().max()) or 1.0
        steps = [
            (call(x + step * direction) - call(x - step * direction)).double() / (2 * step)
            for step in (1e-6, 1e-5)
        ]
        noise = 1e-6 * float((steps[0] - steps[1]).abs().median())
        return max(float((y.double() - exact).abs().max()), noise) / size


def gains_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters `weight` (gain) and `bias` of the norm inside a `NormedLinear`."""
    norm = module.linear.norm if isinstance(module.linear, WeightNormLinear) else module.norm
    found = (
        {} if norm is None else {"gain": getattr(norm, "weight", None), "bias": getattr(norm, "bias", None)}
    )
    return {name: one for name, one in found.items() if isinstance(one, nn.Parameter)}
