"""From tensors to the kernels of their device: addresses, strides and dtypes, and memory for the results.

Nothing here knows of autograd. Results are contiguous; rows of an input may be any constant number of entries
apart, so that a part of a wider tensor is read in place.
"""

from __future__ import annotations

import ctypes
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rmsrepro.norms.backends.fused.library import kernels
from rmsrepro.norms.backends.fused.rule import Rule

CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""The dtypes that the kernels read, as calls.hpp numbers them."""


class RuleFields(ctypes.Structure):
    """`struct Rule` of calls.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "k", "centred", "outside", "rounded")),
        ("inverse_count", ctypes.c_double),
        ("eps", ctypes.c_double),
    )


def rule_fields(rule: Rule, n: int) -> tuple[int | float, ...]:
    """Return the values of `RuleFields` for rows of n entries."""
    return n, rule.k, rule.centred, rule.outside, rule.rounded, rule.inverse_count, rule.eps


class Launcher:
    """Runs the kernels of one rule on rows of n entries.

    Shapes: x, residual, dy, ds (..., n); gain and bias (n,) or None, both of one dtype.

    Raises:
        KernelsUnavailable: the kernels cannot be built; a device without kernels: RuntimeError.
        TypeError: a dtype that the kernels do not read.
    """

    def __init__(self, rule: Rule, n: int) -> None:
        self.rule, self.n = rule, n
        self._fields = RuleFields(*rule_fields(rule, n))
        self._address = ctypes.addressof(self._fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return Launcher, (self.rule, self.n)

    def forward(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return norm(x)."""
        if not x.is_cpu:
            return _triton(x).forward(x, gain, bias, self.rule)
        dtype = _code(x)
        if x.is_contiguous():
            stride, y = self.n, torch.empty_like(x)
        else:
            y = x.new_empty(x.shape)
            x, stride = _rows(x, self.n)
        loaded = kernels()
        failed = loaded.call(
            loaded.forward,
            self._address,
            dtype,
            _parameter_code(gain, bias),
            y.numel() // self.n,
            torch.get_num_threads(),
            x.data_ptr(),
            stride,
            0,
            0,
            0 if gain is None else gain.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0,
            y.data_ptr(),
        )
        if failed:
            _fail()
        return y

    def add_forward(
        self, x: Tensor, residual: Tensor, gain: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return s = x + residual and norm(s)."""
        if not x.is_cpu:
            return _triton(x).add_forward(x, residual, gain, bias, self.rule)
        dtype = _code(x)
        total = x.new_empty(x.shape)
        y = torch.empty_like(total)
        x, stride = _rows(x, self.n)
        residual, residual_stride = _rows(residual, self.n)
        loaded = kernels()
        failed = loaded.call(
            loaded.forward,
            self._address,
            dtype,
            _parameter_code(gain, bias),
            y.numel() // self.n,
            torch.get_num_threads(),
            x.data_ptr(),
            stride,
            residual.data_ptr(),
            residual_stride,
            0 if gain is None else gain.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            total.data_ptr(),
            y.data_ptr(),
        )
        if failed:
            _fail()
        return total, y

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        gain: Tensor | None,
        bias: torch.dtype | None,
        extra: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of x, gain and bias for the upstream gradient dy; None for what is not there.

        Args:
            dy: gradient of norm(x).
            x: what the norm was of (the sum, after `add_forward`).
            gain: as in `forward`.
            bias: its dtype; None without bias.
            extra: added to the gradient of x.
        """
        if not x.is_cpu:
            launchers, has_bias = _triton(x), bias is not None
            if extra is None:
                return launchers.backward(dy, x, gain, has_bias, self.rule, bias)
            return launchers.add_backward(extra, dy, x, gain, has_bias, self.rule, bias)
        dtype = _code(x)
        stride = dy_stride = self.n
        if x.is_contiguous():
            dx = torch.empty_like(x)
        else:
            dx = x.new_empty(x.shape)
            x, stride = _rows(x, self.n)
        if not dy.is_contiguous():
            dy, dy_stride = _rows(dy, self.n)
        more, more_stride = (None, 0) if extra is None else _rows(extra, self.n)
        dgain = None if gain is None else torch.empty_like(gain)
        dbias = None if bias is None else x.new_empty(self.n, dtype=bias)
        loaded = kernels()
        failed = loaded.call(
            loaded.backward,
            self._address,
            dtype,
            _parameter_code(gain, dbias),
            dx.numel() // self.n,
            torch.get_num_threads(),
            x.data_ptr(),
            stride,
            dy.data_ptr(),
            dy_stride,
            0 if more is None else more.data_ptr(),
            more_stride,
            0 if gain is None else gain.data_ptr(),
            dx.data_ptr(),
            0 if dgain is None else dgain.data_ptr(),
            0 if dbias is None else dbias.data_ptr(),
        )
        if failed:
            _fail()
        return dx, dgain, dbias


@cache
def launcher(rule: Rule, n: int) -> Launcher:
    """Return the launcher of `rule` for rows of n entries, one for all who ask."""
    return Launcher(rule, n)


def _code(x: Tensor) -> int:
    code = CODES.get(x.dtype)
    if code is None:
        raise TypeError(f"the fused kernels read float32, float64, bfloat16 and float16, not {x.dtype}")
    return code


def _parameter_code(gain: Tensor | None, bias: Tensor | None) -> int:
    one = bias if gain is None else gain
    return 0 if one is None else _code(one)


def _rows(x: Tensor, n: int) -> tuple[Tensor, int]:
    """Return x and the entries from one row to the next; a contiguous copy where no one number says that."""
    if x.is_contiguous():
        return x, n
    if x.ndim > 1 and x.stride(-1) == 1:
        sizes, strides = x.shape, x.stride()
        if all(strides[axis] == strides[axis + 1] * sizes[axis + 1] for axis in range(x.ndim - 2)):
            return x, strides[-2]
    return x.contiguous(), n


def _triton(x: Tensor) -> ModuleType:
    if x.is_cuda:
        from importlib import import_module

        return import_module(f"{__package__}.triton_norms")
    raise RuntimeError(
        f"backend=fused has kernels for CPU and CUDA tensors, not for {x.device.type}; use backend=composite"
    )


def _fail() -> None:
    raise MemoryError("no memory for the sums over the rows of a norm")
