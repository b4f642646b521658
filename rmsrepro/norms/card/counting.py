"""Parameters, and the operations and bytes of what really runs, at several sizes.

Counted below autograd, one tensor operation at a time:

* elementwise: one operation an output element; a reduction: one an input element; a matrix product: two a
  multiplication. Copies, casts and fills compute nothing. A fused kernel counts what its parts would.
* bytes: all inputs read and all outputs written, as if nothing stayed in a cache.
* views cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._decomp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rmsrepro.norms.card.drawing import normal
from rmsrepro.norms.card.subject import Subject, linear_of

_COPIES = frozenset(
    {
        *("_to_copy", "clone", "copy", "copy_", "lift_fresh", "lift_fresh_copy", "contiguous"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "arange"),
        *("zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "new_ones", "scalar_tensor"),
        *("full", "full_like", "new_full", "fill_", "constant_pad_nd", "cat", "index_select", "embedding"),
        *("slice_backward", "select_backward", "_local_scalar_dense"),
    }
)
"""Operations that move numbers and compute none."""


@dataclass
class Cost:
    """What an execution took."""

    flops: int = 0
    bytes: int = 0
    operations: int = 0
    """Calls of tensor operations that are no views."""


class Counter(TorchDispatchMode):
    """While it is on, adds up the cost of all tensor operations, those of a backward pass too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = Cost()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        outputs = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        if (
            func.is_view
            or func is torch.ops.aten._unsafe_view.default
            or func.namespace == "prim"
            or not outputs
        ):
            return out
        self.cost.operations += 1
        self.cost.bytes += sum(_bytes(one) for one in (*inputs, *outputs))
        self.cost.flops += _flops(func, args, kwargs, inputs, outputs, out)
        return out


def _bytes(tensor: Tensor) -> int:
    """Bytes that lie behind a tensor: an expanded one is stored once."""
    stored = math.prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size
    )
    return stored * tensor.element_size()


def _flops(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[Tensor],
    outputs: list[Tensor],
    out: Any,
) -> int:
    name = func.overloadpacket.__name__
    if name in _COPIES:
        return 0
    if func.overloadpacket in flop_registry:  # matrix products
        return int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
    read = max((one.numel() for one in inputs), default=0)
    written = max(one.numel() for one in outputs)
    if torch.Tag.pointwise in func.tags:
        return written
    if torch.Tag.reduction in func.tags or written < read:
        return read
    split = torch._decomp.decomposition_table.get(func)
    if split is None:
        return written
    parts = Counter()
    with parts, torch.no_grad():
        split(*args, **kwargs)
    return parts.cost.flops


# -------------------------------------------------------------------------------------- what is counted

ROWS = (32, 64, 128)


def widths(subject: Subject) -> list[int]:
    """Return the widths at which the cost is counted: multiples of the one asked for.

    Narrow norms are counted a little wider, where what is done once a row weighs less.
    """
    if subject.of_weights:
        return [64, 128, 256]  # of square matrices
    unit = subject.dim * math.ceil(32 / subject.dim)
    return [unit * one for one in ((4, 8, 16) if unit <= 256 else (1, 2, 4))]


def cost(subject: Subject, rows: int, dim: int, *, backward: bool) -> Cost:
    """Return what a norm of (rows, dim) takes in fp32; of a norm of weights, without the matrix product."""
    module = subject.build(dim)
    x = normal(rows, dim).float().requires_grad_(backward)
    upstream = torch.ones(rows, dim)
    if subject.of_weights:
        # The map costs the same with the norm and without: what is counted is the making of its matrix.
        linear: Any = linear_of(module)
        upstream = torch.ones(dim, dim)

        def forward() -> Tensor:
            matrix: Tensor = linear.effective_weight()
            return matrix
    else:

        def forward() -> Tensor:
            y: Tensor = module(x)
            return y

    leaves = [one for one in (x, *module.parameters()) if one.requires_grad]
    counter = Counter()
    with counter, torch.set_grad_enabled(backward):
        y = forward()
        if backward and y.requires_grad:
            torch.autograd.grad(y, leaves, upstream, allow_unused=True)
    return counter.cost


def count(subject: Subject) -> dict[str, Any]:
    """Return parameters, cost at several sizes, and the exponents with which they grow."""
    module = subject.build()
    extra = _norm_parameters(subject, module)
    dims, tables = widths(subject), []
    for rows in ROWS:
        for dim in dims:
            forward = cost(subject, rows, dim, backward=False)
            both = cost(subject, rows, dim, backward=True)
            tables.append(
                {
                    "rows": rows,
                    "dim": dim,
                    "flops": forward.flops,
                    "bytes": forward.bytes,
                    "operations": forward.operations,
                    "flops_with_backward": both.flops,
                    "bytes_with_backward": both.bytes,
                    "operations_with_backward": both.operations,
                }
            )
    states = [_state(subject, dim) for dim in dims]
    middle_rows, middle_dim = ROWS[1], dims[1]
    exponents: dict[str, Any] = {"state_d": exponent(dims, states)}
    for key in ("flops", "bytes", "flops_with_backward", "bytes_with_backward"):
        by_rows = [one[key] for one in tables if one["dim"] == middle_dim]
        by_dim = [one[key] for one in tables if one["rows"] == middle_rows]
        exponents[f"{key}_n"] = exponent(ROWS, by_rows)
        exponents[f"{key}_d"] = exponent(dims, by_dim)
    return {
        "parameters": [
            {"name": name, "shape": list(one.shape), "count": one.numel()} for name, one in extra.items()
        ],
        "parameter_count": sum(one.numel() for one in extra.values()),
        "buffer_count": sum(one.numel() for one in module.buffers()),
        "state": [{"dim": dim, "count": one} for dim, one in zip(dims, states, strict=True)],
        "cost": tables,
        "exponents": exponents,
    }


def _norm_parameters(subject: Subject, module: nn.Module) -> dict[str, nn.Parameter]:
    """The norm's own parameters: of a norm of weights, those that the linear map does not have anyway."""
    own = {id(linear_of(module).weight)} if subject.of_weights else set()
    return {name: one for name, one in module.named_parameters() if id(one) not in own}


def _state(subject: Subject, dim: int) -> int:
    """Numbers that a norm of width `dim` keeps: parameters and buffers."""
    module = subject.build(dim)
    parameters = _norm_parameters(subject, module).values()
    return sum(one.numel() for one in parameters) + sum(one.numel() for one in module.buffers())


def exponent(sizes: Sequence[int], counts: Sequence[int]) -> float | None:
    """Return e of the best fit counts ~ sizes^e, by least squares of the logarithms; None where all are 0."""
    if not all(counts):
        return None
    logs = torch.tensor([[math.log(size), math.log(one)] for size, one in zip(sizes, counts, strict=True)])
    centred = logs.double() - logs.double().mean(0)
    return round(float((centred[:, 0] * centred[:, 1]).sum() / centred[:, 0].square().sum()), 3)
