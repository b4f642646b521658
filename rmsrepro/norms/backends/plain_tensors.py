"""Whether a kernel may read a tensor where it lies, or primitive operations alone follow what is done.

And the short way into autograd for kernels that read only such tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

PLAIN = frozenset({Tensor, nn.Parameter})
"""Types of tensors that are no subclass of somebody's."""

_keys = torch._C._dispatch_keys
_functorch_active = torch._C._are_functorch_transforms_active


def _usual_keys() -> frozenset[int]:
    with torch.inference_mode():
        inference = torch.empty(0, device="cpu")
    with torch.inference_mode(False):
        usual = torch.empty(0, device="cpu")
    return frozenset(_keys(one).raw_repr() for one in (usual, inference) if type(one) in PLAIN)


USUAL_KEYS = _usual_keys()
"""The dispatch keys, as numbers, of dense CPU tensors without anything lazy or wrapped about them."""


def in_memory(x: Tensor) -> bool:
    """Whether x, a tensor with storage on a device, is no subclass, no batch of several and no lazy view.

    Batched gradients (`is_grads_batched=True`) come as the older kind of batched tensors; a view may be
    marked to be negated when it is read, and a tensor of zeros need not have any memory.
    """
    return type(x) in PLAIN and (
        # One look for the many: each question below costs a small norm a microsecond.
        _keys(x).raw_repr() in USUAL_KEYS
        or not (
            x.is_neg()
            or x._is_zerotensor()
            or torch._C._functorch.is_legacy_batchedtensor(x)
            or torch._C._functorch.is_functorch_wrapped_tensor(x)
        )
    )


def unwrapped(x: Tensor) -> Tensor:
    """Return the tensor inside of x where x was left behind by a transform that is over; else x itself."""
    if torch.compiler.is_compiling():
        return x
    inside: Tensor = torch._C._functorch.unwrap_if_dead(x)
    return inside


def transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is under way."""
    return _functorch_active() or forward_ad._current_level >= 0


def straight(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` for plain tensors (`in_memory`) where nothing is `transformed`.

    torch's own looks at every call for keyword arguments, transforms and tensors that those left behind, and
    at every backward for another way to state the gradient: together as long as a small norm takes. Where a
    release of torch has not what this needs, it is torch's own.
    """
    usual: Callable[..., Any] = function.apply
    base = vars(torch._C._FunctionBase).get("apply")
    backward_class = getattr(function, "_backward_cls", None)
    if base is None or backward_class is None or getattr(backward_class, "apply", None) is None:
        return usual
    backward_class.apply = function.backward
    short: Callable[..., Any] = base.__get__(None, function)
    return short
