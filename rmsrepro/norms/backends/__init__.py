"""Implementations of the norms. Each backend turns parameters into a kernel, a function of (x, gain, bias).

composite: primitive tensor operations, as the paper's own code has them; takes every norm.
torch: the functions that torch ships; takes layernorm, layernorm_nobias and rmsnorm with eps inside the root.

`refusal` answers without torch whether a backend takes a set of parameters, so that a configuration can be
checked before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from rmsrepro.norms.params import (
    Casting,
    LayerNormNoBiasParams,
    LayerNormParams,
    NoneParams,
    NormParams,
    RMSNormParams,
)

if TYPE_CHECKING:
    from torch import Tensor

Kernel: TypeAlias = "Callable[[Tensor, Tensor | None, Tensor | None], Tensor]"
"""(x (..., dim), gain (dim,) | None, bias (dim,) | None) -> (..., dim) in x's dtype."""

BACKENDS = ("torch", "composite")
"""Fastest first: the order in which `auto` tries them."""


class BackendUnavailable(ValueError):
    """The backend has no implementation of this norm with these parameters."""


def refusal(params: Any, backend: str) -> str | None:
    """Return why `backend` cannot run a built-in norm with these parameters, or None when it can."""
    if backend == "composite" or isinstance(params, NoneParams):
        return None
    if isinstance(params, LayerNormParams | LayerNormNoBiasParams):
        function = "F.layer_norm"
    elif isinstance(params, RMSNormParams):
        function = "F.rms_norm"
        if params.bias:
            return f"{function} has no bias"
        if params.casting is Casting.before_gain:
            return f"{function} casts back after the product with the gain only"
    else:
        return "torch has no function for it"
    if params.outside:
        return f"{function} has eps inside the root only"
    if params.eps == 0:
        return f"{function} gives NaN for a row whose denominator is zero, which eps=0 allows"
    return None


def make_kernel(params: NormParams, dim: int, backend: str) -> Kernel:
    """Return the kernel of a built-in norm.

    Raises:
        BackendUnavailable: the backend does not take these parameters.
    """
    reason = refusal(params, backend)
    if reason is not None:
        raise BackendUnavailable(unavailable(params.norm, backend, reason))
    # Imported here: the module above is read without torch.
    from rmsrepro.norms.backends import composite, torch_native

    makers: Mapping[str, Callable[[NormParams, int], Kernel]] = {
        "composite": composite.make_kernel,
        "torch": torch_native.make_kernel,
    }
    return makers[backend](params, dim)


def unavailable(name: str, backend: str, reason: str, *, of_user: bool = False) -> str:
    """The message of BackendUnavailable; no parameters let another backend run a module `of_user`."""
    which = "" if of_user else " with these parameters"
    return f"backend={backend} cannot run {name}{which}: {reason}; use backend=composite or auto"
