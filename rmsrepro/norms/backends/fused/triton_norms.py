"""Launchers of the Triton kernels, plain functions of tensors on a CUDA device. Importing this needs triton.

Shapes: x, residual, dy, ds (..., n) with any strides, gain and bias (n,) of any floating dtype. Results are
contiguous. A gradient needs nothing but x (or the sum) and the gain: the statistics are computed again.

Results are the same from call to call. Between processes they may differ in rounding, as the fastest tiling
is found by timing; with `torch.use_deterministic_algorithms(True)` the tiling is fixed.

With TRITON_INTERPRET=1 set before the import, the kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rmsrepro.norms.backends.fused import triton_kernels as kernels
from rmsrepro.norms.backends.fused import triton_wide as wide
from rmsrepro.norms.backends.fused.rule import Rule

INTERPRETED: bool = triton.knobs.runtime.interpret

FORWARD_BYTES, BACKWARD_BYTES = 65536, 32768
"""Widest rows, in the sums' dtype, that are held as a whole: 16384 and 8192 entries of fp32. The backward
holds about twice as much besides the row."""

WIDE_BLOCK = 4096
"""Entries of a wider row that are held at a time."""

WORTH_TUNING = 1 << 20
"""With fewer entries the launch takes longer than the kernel, whatever its tiling."""

# Found by none but the tiled kernels; what is tried for one width depends on it: `_fitting`.
CONFIGS = [
    triton.Config({"ROWS": rows}, num_warps=warps) for rows in (1, 2, 4, 8, 16, 32) for warps in (1, 4, 8, 16)
]


def forward(x: Tensor, gain: Tensor | None, bias: Tensor | None, rule: Rule) -> Tensor:
    """Return norm(x) (..., n) in x's dtype.

    Raises:
        ValueError: gain or bias is not (n,), or the rule reads more than n entries.
    """
    return _forward(x, None, gain, bias, rule)[1]


def add_forward(
    x: Tensor, residual: Tensor, gain: Tensor | None, bias: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Return s = x + residual, rounded to x's dtype, and norm(s), both (..., n).

    Raises:
        ValueError: as `forward`, or x and residual differ in shape.
    """
    if residual.shape != x.shape:
        raise ValueError(f"x is {tuple(x.shape)}, residual {tuple(residual.shape)}")
    total, y = _forward(x, residual, gain, bias, rule)
    assert total is not None
    return total, y


def backward(
    dy: Tensor,
    x: Tensor,
    gain: Tensor | None,
    has_bias: bool,
    rule: Rule,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x (..., n), gain (n,) and bias (n,); None for what is not there.

    Args:
        dy: gradient of the output.
        has_bias: whether the bias's gradient is wanted.
        bias_dtype: its dtype; left out, the gain's, or x's without a gain.

    Raises:
        ValueError: gain is not (n,), or dy has not x's shape.
    """
    return _backward(None, dy, x, gain, has_bias, rule, bias_dtype)


def add_backward(
    ds: Tensor | None,
    dy: Tensor,
    s: Tensor,
    gain: Tensor | None,
    has_bias: bool,
    rule: Rule,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x (and residual: it is the same one), gain and bias of `add_forward`.

    Args:
        ds: gradient of the sum s from elsewhere, None for 0. The rest is as in `backward`.
    """
    return _backward(ds, dy, s, gain, has_bias, rule, bias_dtype)


# ------------------------------------------------------------------------------------------- launching


def _forward(
    x: Tensor, residual: Tensor | None, gain: Tensor | None, bias: Tensor | None, rule: Rule
) -> tuple[Tensor | None, Tensor]:
    _check(x, {"gain": gain, "bias": bias}, rule)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(y)
    if x.numel() == 0:
        return total, y
    n = x.shape[-1]
    x = _rows(x)
    rows = x.shape[0]
    residual = None if residual is None else _rows(residual)
    residual_stride = 0 if residual is None else residual.stride(0)
    tensors = (x, residual, _dense(gain), _dense(bias), total, y)
    strides = (x.stride(0), residual_stride)
    constants = _constants(rule, x)
    with _on(x):
        if n * _width(x) > FORWARD_BYTES:
            wide.forward_wide[(rows,)](*tensors, *strides, **constants, BLOCK=WIDE_BLOCK, num_warps=8)
        else:
            launch, tiling = _tiled("forward", rows, n)
            launch[lambda meta: (triton.cdiv(rows, meta["ROWS"]),)](
                *tensors, rows, *strides, **constants, **tiling
            )
    return total, y


def _backward(
    ds: Tensor | None,
    dy: Tensor,
    x: Tensor,
    gain: Tensor | None,
    has_bias: bool,
    rule: Rule,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    _check(x, {"gain": gain}, rule)
    for name, gradient in {"dy": dy, "ds": ds}.items():
        if gradient is not None and gradient.shape != x.shape:
            raise ValueError(f"{name} is {tuple(gradient.shape)}, x {tuple(x.shape)}")
    n = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    make = torch.zeros if x.numel() == 0 else torch.empty
    dgain = None if gain is None else make(n, dtype=gain.dtype, device=x.device)
    bias_dtype = bias_dtype or (x.dtype if gain is None else gain.dtype)
    dbias = make(n, dtype=bias_dtype, device=x.device) if has_bias else None
    if x.numel() == 0:
        return dx, dgain, dbias
    x, dy, ds = _rows(x), _rows(dy), None if ds is None else _rows(ds)
    rows = x.shape[0]
    programs = min(rows, _programs(x.device, n))
    sums_dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    partials = [
        None if wanted is None else torch.empty(programs, n, dtype=sums_dtype, device=x.device)
        for wanted in (dgain, dbias)
    ]
    tensors = (dy, x, _dense(gain), ds, dx, *partials)
    strides = (dy.stride(0), x.stride(0), 0 if ds is None else ds.stride(0))
    constants = _constants(rule, x)
    with _on(x):
        if n * _width(x) > BACKWARD_BYTES:
            wide.backward_wide[(programs,)](
                *tensors, rows, *strides, **constants, BLOCK=WIDE_BLOCK, num_warps=8
            )
        else:
            launch, tiling = _tiled("backward", rows, n)
            launch[(programs,)](*tensors, rows, *strides, **constants, **tiling)
        if dgain is not None or dbias is not None:
            columns = 1024 if INTERPRETED else 32
            kernels.sum_partials[(triton.cdiv(n, columns),)](
                *partials, dgain, dbias, programs, N=n, ROWS=128, COLUMNS=columns, num_warps=8
            )
    return dx, dgain, dbias


def _check(x: Tensor, parameters: dict[str, Tensor | None], rule: Rule) -> None:
    """Refuse what would be read out of bounds."""
    n = x.shape[-1]
    if rule.k > n:
        raise ValueError(f"the rule reads {rule.k} entries, rows have {n}")
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != (n,):
            raise ValueError(f"{name} is {tuple(parameter.shape)}, rows have {n} entries")


def _rows(x: Tensor) -> Tensor:
    """Return x as (rows, n) with dense rows, a view where it can be one."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _dense(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _width(x: Tensor) -> int:
    """Bytes of an entry in the sums' dtype."""
    return 8 if x.dtype is torch.float64 else 4


def _constants(rule: Rule, x: Tensor) -> dict[str, Any]:
    return {
        "N": x.shape[-1],
        "K": rule.k,
        "INVERSE": rule.inverse_count,
        "ADDED": rule.eps if rule.outside else math.sqrt(rule.eps),
        "CENTRED": rule.centred,
        "OUTSIDE": rule.outside,
        "ROUNDED": rule.rounded,
        "ACC": tl.float64 if x.dtype is torch.float64 else tl.float32,
    }


def _on(x: Tensor) -> Any:
    """Triton launches on the current device, whichever the tensors are on."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@cache
def _processors(device: torch.device) -> int:
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def _programs(device: torch.device, n: int) -> int:
    """Programs of a backward: all that run at once. With more, only the partial sums would grow."""
    return _processors(device) * max(1, min(4, 8192 // n))


# -------------------------------------------------------------------------------------------- tilings


def _tiled(name: str, rows: int, n: int) -> tuple[Any, dict[str, int]]:
    """Return the kernel, tuned or not, and the constants of its tiling that are then left."""
    block = triton.next_power_of_2(n)
    if INTERPRETED or rows * n < WORTH_TUNING or torch.are_deterministic_algorithms_enabled():
        return getattr(kernels, name), {"BLOCK": block, **_fixed(block, ENTRIES[name])}
    return _tuned(name), {"BLOCK": block}


ENTRIES = {"forward": (8, 32), "backward": (4, 16)}
"""Fewest and most entries of a tile that a thread holds: 16-byte loads, and what fits its registers."""


def _fixed(block: int, entries: tuple[int, int]) -> dict[str, int]:
    """Return a tiling that is good for most shapes: four warps, or one row with more."""
    a_thread = entries[1] // 2
    rows = max(1, min(16, 128 * a_thread // block))
    warps = max(1, min(16, rows * block // (32 * a_thread)))
    return {"ROWS": rows, "num_warps": triton.next_power_of_2(warps)}


def _fitting(entries: tuple[int, int]) -> Callable[..., list[Any]]:
    """Return the function by which the tuner leaves out tilings of too few or too many entries a thread."""

    def prune(configs: list[Any], _: Any, *, BLOCK: int, **__: Any) -> list[Any]:
        held = {one: one.kwargs["ROWS"] * BLOCK / (32 * one.num_warps) for one in configs}
        fitting = [one for one in configs if entries[0] <= held[one] <= entries[1]]
        return fitting or [min(configs, key=lambda one: abs(held[one] - entries[0]))]

    return prune


@cache
def _tuned(name: str) -> Any:
    """Return the kernel with a tuner, which times tilings for each width (up to a power of two) and dtype."""
    pruning = {"early_config_prune": _fitting(ENTRIES[name])}
    return triton.autotune(CONFIGS, ["BLOCK", "CENTRED"], prune_configs_by=pruning)(getattr(kernels, name))
