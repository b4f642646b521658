"""The norm's casts to fp32 undone, so that a copy in float64 computes in float64 throughout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Lifted(TorchDispatchMode):
    """While it is on, a float64 tensor that is asked to become fp32 stays float64.

    Many norms begin with `x.float()`, so that half precision is summed in fp32. The same line takes precision
    away from a float64 input. What leaves this mode is what such a norm would compute without it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32 and any(_is_wide(one) for one in args):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float64
