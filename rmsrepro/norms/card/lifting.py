"""The norm's casts to lower precision undone, so that a copy in float64 computes in float64 throughout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_LOWER = (torch.float32, torch.bfloat16, torch.float16)


class Lifted(TorchDispatchMode):
    """While it is on, a float64 tensor that is asked to become less precise stays float64.

    Many norms begin with `x.float()`, so that half precision is summed in fp32. The same line takes precision
    away from a float64 input. What is computed under this mode is what such a norm would give without it.
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
        if kwargs.get("dtype") in _LOWER and any(_is_wide(one) for one in args):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float64
