"""What the built-in norms of activations share: parameters, gain and bias, the check of the shape."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from rmsrepro.norms.backends import Kernel, make_kernel
from rmsrepro.norms.backends.composite import LOW_PRECISION
from rmsrepro.norms.gains import DECLARED, GAIN_OFFSET, check_offset, keep_apart, keep_offset
from rmsrepro.norms.making import plain
from rmsrepro.norms.params import NormParams
from rmsrepro.norms.roles import mark_norm, norm_takes_mask

Params = TypeVar("Params", bound=NormParams)


def check_dim(dim: Any) -> int:
    """Return `dim` as an int.

    Raises:
        TypeError: not a whole number (a tuple of dimensions is not supported).
        ValueError: not positive.
    """
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim is one whole number, the size of the last dimension; got {dim!r}")
    size = operator.index(dim)
    if size < 1:
        raise ValueError(f"dim must be positive, got {size}")
    return size


class NormModule(nn.Module, Generic[Params]):
    """Base of all built-in norms of activations: their parameters, and the check of the input's shape.

    Args:
        dim: size of the last dimension of the input.
        params: the norm's parameters; the class's defaults when None.
        backend: one of `BACKENDS`.

    Attributes:
        weight: gain (dim,), stored as its difference to `gain_offset`; None without gain.
        bias: bias (dim,), zeros at start; None without bias.

    Raises:
        TypeError, ValueError: `dim` is no positive whole number.
    """

    params_class: type[Params]
    gain_offset: ClassVar[float] = 0.0
    """What is added to the stored gain: set in the class's body. State dicts carry it, and one with another
    offset is refused."""
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, dim: int, params: Params | None = None, *, backend: str = "composite") -> None:
        super().__init__()
        self.dim = check_dim(dim)
        self.params = self.params_class() if params is None else params
        self.backend = backend
        # layernorm_nobias has a gain and no field `bias`; none has neither.
        has_gain: bool = getattr(self.params, "gain", False)
        has_bias: bool = getattr(self.params, "bias", False)
        self.weight = nn.Parameter(torch.empty(self.dim)) if has_gain else None
        self.bias = nn.Parameter(torch.empty(self.dim)) if has_bias else None
        if has_gain:
            keep_offset(self, self.gain_offset)
        self.reset_parameters()
        mark_norm(self, self.params.norm, takes_mask=norm_takes_mask(type(self)))
        # A subclass may turn its weight into a gain in another way: then only its name tells how.
        self._declared = type(self).effective_gain.__module__.startswith(__package__)
        keep_apart(self, DECLARED if self._declared else type(self).__qualname__)

    def reset_parameters(self) -> None:
        """Set gains to one (or what the norm starts with) and biases to zero."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.gain_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def effective_gain(self) -> Tensor:
        """Return the factor (dim,) that multiplies the normalised input: ones where there is no gain.

        A gain stored as an offset is added up in fp32 or wider: 1 + 15.8125 is not a number of bf16.
        """
        if self.weight is None:
            return torch.ones(self.dim, device=None if self.bias is None else self.bias.device)
        if self.gain_offset == 0.0:
            return self.weight
        weight = self.weight.float() if self.weight.dtype in LOW_PRECISION else self.weight
        return weight + self.gain_offset

    def check_input(self, x: Tensor) -> None:
        """Refuse what is no row of `dim` numbers; nothing is broadcast.

        Raises:
            ValueError: the last dimension is not `dim`.
            TypeError: whole numbers, truth values or complex numbers.
        """
        if not x.is_floating_point():
            raise TypeError(f"{self.params.norm} takes floating-point numbers, got {x.dtype}")
        shape = x.shape
        if not shape or shape[-1] != self.dim:
            raise ValueError(
                f"{self.params.norm} was built for a last dimension of {self.dim}, "
                f"got the shape {tuple(x.shape)}"
            )

    def extra_repr(self) -> str:
        values = [f"{key}={value}" for key, value in plain(self.params).items()]
        return ", ".join([str(self.dim), *values, f"backend={self.backend}"])

    def __setattr__(self, name: str, value: Any) -> None:
        if name == GAIN_OFFSET:
            raise AttributeError(
                f"{GAIN_OFFSET} belongs to the class, since the norm is built by it: write "
                f"{GAIN_OFFSET} = {value} in the body of {type(self).__name__}"
            )
        super().__setattr__(name, value)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if check_offset(self, state_dict, prefix, self.gain_offset, error_msgs):
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )


class ActivationNorm(NormModule[Params]):
    """Base of the norms that a backend's kernel computes from x, gain and bias.

    Raises:
        BackendUnavailable: the backend does not take these parameters.
    """

    _kernel: Kernel

    def __init__(self, dim: int, params: Params | None = None, *, backend: str = "composite") -> None:
        super().__init__(dim, params, backend=backend)
        self._kernel = make_kernel(self.params, self.dim, backend)
        # The plain case, most norms', skips a call.
        self._gain_is_weight = self._declared and self.gain_offset == 0.0

    @property
    def adds(self) -> bool:
        """Whether the backend adds two inputs and normalises the sum in one pass: see `add`."""
        return hasattr(self._kernel, "add")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., dim) over its last dimension.

        Raises:
            ValueError: the last dimension is not `dim`; nothing is broadcast.
            TypeError: no floating-point numbers.
        """
        self.check_input(x)
        return self._kernel(x, self._gain(), self.bias)

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + y and its norm, all (..., dim); `rmsrepro.norms.adding.add_norm` chooses when.

        Raises:
            ValueError, TypeError: as `forward`; also where x and y are not alike.
            AttributeError: the backend has no such pass.
        """
        self.check_input(x)
        total, normed = self._kernel.add(x, y, self._gain(), self.bias)  # type: ignore[attr-defined]
        return total, normed

    def _gain(self) -> Tensor | None:
        # Past the search in Python by which a module finds its parameters, which a small norm would feel; one
        # that something else has replaced (a parametrization) is found by it.
        own = self._parameters
        gain = own["weight"] if "weight" in own else self.weight  # noqa: SIM401 (which would search always)
        return gain if gain is None or self._gain_is_weight else self.effective_gain()
