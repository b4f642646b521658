"""The fused norms in autograd: a callable of x, gain and bias, by the shortest way that the moment allows.

eagerly        the kernels, through an autograd.Function of our own
traced         under torch.compile, torch.export, a dispatch mode, of fake tensors or other subclasses:
               the operators of ops.py
transformed    under torch.func's transforms and forward-mode derivatives: primitive operations
twice          a gradient that is differentiated itself (create_graph=True): the equation, by autograd
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsrepro.norms.backends import Kernel, composite
from rmsrepro.norms.backends.fused import differentiable, ops
from rmsrepro.norms.backends.fused.launch import launcher
from rmsrepro.norms.backends.fused.rule import Rule
from rmsrepro.norms.backends.plain_tensors import in_memory, straight, transformed, unwrapped
from rmsrepro.norms.params import NoneParams, NormParams


def make_kernel(params: NormParams, dim: int) -> Kernel:
    """Return the fused kernel of a built-in norm of width `dim`.

    Raises:
        TypeError: the formula of the kernels does not cover the norm.
    """
    if isinstance(params, NoneParams):
        return composite.identity
    rule = Rule.of(params, dim)
    if rule is None:
        raise TypeError(f"no fused kernel for {params.norm}")
    return FusedNorm(params, rule, dim)


class FusedNorm:
    """A norm of rows of `dim` entries: (x (..., dim), gain, bias) -> (..., dim) in x's dtype.

    `add(x, residual, gain, bias)` adds first and returns the sum as well.

    Raises:
        TypeError: a dtype that the kernels do not read.
        RuntimeError: tensors of a device without kernels.
    """

    def __init__(self, params: NormParams, rule: Rule, dim: int) -> None:
        self.params, self.rule, self.dim = params, rule, dim
        self._shape = torch.Size((dim,))
        self._launcher = launcher(rule, dim)
        self._numbers = ops.numbers(rule)
        self._primitive = composite.make_kernel(params, dim)

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedNorm, (self.params, self.rule, self.dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedNorm:
        return self

    def __call__(self, x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return norm(x)."""
        if _eager(x):
            gain, bias = self._parameters(x, gain, bias)
            if torch.is_grad_enabled() and _wants_gradient(x, gain, bias):
                y: Tensor = _apply_norm(self, x, gain, bias)
                return y
            return self._launcher.forward(x, gain, bias)
        if _transformed():
            return self._primitive(x, gain, bias)
        if (inside := unwrapped(x)) is not x:
            return self(inside, gain, bias)
        traced: Tensor = torch.ops.rmsrepro.norm(x, *self._parameters(x, gain, bias), *self._numbers)
        return traced

    def add(
        self, x: Tensor, residual: Tensor, gain: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return s = x + residual, rounded to their dtype, and norm(s), both (..., dim).

        Raises:
            ValueError: x and residual differ in shape, dtype or device.
        """
        if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
            raise ValueError(
                f"x is {tuple(x.shape)} {x.dtype} on {x.device}, residual {tuple(residual.shape)} "
                f"{residual.dtype} on {residual.device}; they must be alike"
            )
        if _eager(x) and in_memory(residual):
            gain, bias = self._parameters(x, gain, bias)
            if torch.is_grad_enabled() and (residual.requires_grad or _wants_gradient(x, gain, bias)):
                total, y = _apply_add_norm(self, x, residual, gain, bias)
                return total, y
            return self._launcher.add_forward(x, residual, gain, bias)
        if _transformed():
            total = x + residual
            return total, self._primitive(total, gain, bias)
        inside, other = unwrapped(x), unwrapped(residual)
        if inside is not x or other is not residual:
            return self.add(inside, other, gain, bias)
        parameters = self._parameters(x, gain, bias)
        traced: tuple[Tensor, Tensor] = torch.ops.rmsrepro.add_norm(x, residual, *parameters, *self._numbers)
        return traced

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        gain: Tensor | None,
        bias: torch.dtype | None,
        extra: Tensor | None = None,
    ) -> differentiable.Gradients:
        """Return the gradients as `Launcher.backward` does; differentiable if autograd is on."""
        if torch.is_grad_enabled() or not in_memory(dy) or not (extra is None or in_memory(extra)):
            return differentiable.gradients(self.rule, dy, x, gain, bias, extra)
        return self._launcher.backward(dy, x, gain, bias, extra)

    def _parameters(
        self, x: Tensor, gain: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return gain and bias as the kernels read them: dense, of one dtype, on the device of x.

        Raises:
            ValueError: another device, or not one number for each entry of a row.
        """
        if gain is not None:
            gain = self._parameter(x, gain)
        if bias is not None:
            bias = self._parameter(x, bias)
            if gain is not None and gain.dtype != bias.dtype:
                wide = torch.promote_types(torch.promote_types(gain.dtype, bias.dtype), torch.float32)
                gain, bias = gain.to(wide), bias.to(wide)
        return gain, bias

    def _parameter(self, x: Tensor, one: Tensor) -> Tensor:
        if one.device != x.device:
            raise ValueError(f"the input is on {x.device}, the norm's parameters on {one.device}")
        if one.shape != self._shape:
            one = one.expand(self.dim)
        return one.contiguous().resolve_neg()


def _wants_gradient(x: Tensor, gain: Tensor | None, bias: Tensor | None) -> bool:
    return (
        x.requires_grad
        or (gain is not None and gain.requires_grad)
        or (bias is not None and bias.requires_grad)
    )


def _eager(x: Tensor) -> bool:
    """Whether x is a tensor with numbers in it and nobody watches what is done with it."""
    return (
        # First, since what follows cannot be traced.
        not torch.compiler.is_compiling()
        and in_memory(x)
        and (x.is_cpu or x.is_cuda)
        and not torch._C._len_torch_dispatch_stack()
        and not transformed()
        and torch._C._get_tracing_state() is None
    )


def _transformed() -> bool:
    return not torch.compiler.is_compiling() and transformed()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: FusedNorm, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.kept = kernel, None if bias is None else bias.dtype
        ctx.save_for_backward(x, gain)
        return kernel._launcher.forward(x, gain, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gain = ctx.saved_tensors
        kernel, bias = ctx.kept
        return None, *kernel.gradients(dy, x, gain, bias)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: FusedNorm, x: Tensor, residual: Tensor, gain: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        total, y = kernel._launcher.add_forward(x, residual, gain, bias)
        ctx.kept = kernel, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, gain)
        return total, y

    @staticmethod
    def backward(ctx: Any, ds: Tensor | None, dy: Tensor | None) -> Any:
        total, gain = ctx.saved_tensors
        if dy is None:  # only the sum was used
            return None, ds, ds, None, None
        kernel, bias = ctx.kept
        dsum, dgain, dbias = kernel.gradients(dy, total, gain, bias, ds)
        return None, dsum, dsum, dgain, dbias


_apply_norm, _apply_add_norm = straight(_Norm), straight(_AddNorm)
