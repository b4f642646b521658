"""Norms compiled by Inductor, the compiler behind torch.compile, from their composite statements.

A `Compiled` has the values and gradients of the function it is made from and runs as two compiled kernels:
the function, and its gradient with the function computed anew inside, so that nothing but the inputs is kept
between the two. Only plain calls run compiled. The others go through the function as it stands:

    second derivatives (create_graph=True), since Inductor's own backward has none
    an outer torch.compile or torch.export, which then sees the function as a part of its graph
    torch.func, forward-mode derivatives, tensor subclasses, dispatch modes, meta tensors, no rows at all

Kernels are compiled when they are first called, seconds each: once for each dtype (of input, gain and bias),
for one row and for more, without and with each pattern of gradients. The number of rows does not matter
otherwise. They are kept in memory for the process, shared by all norms of equal parameters and width, and by
Inductor on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rmsrepro.norms.backends import BackendUnavailable, Kernel, Statement, composite, not_here
from rmsrepro.norms.backends.plain_tensors import in_memory, transformed
from rmsrepro.norms.params import NormParams

MOST_VARIANTS = 64
"""Most kernels of one function: dtypes of input and parameters, layouts, one row. torch's own limit is 8."""


def whole_rows(params: NormParams, dim: int) -> Kernel:
    """Return the composite kernel with no row summed in parts, which would be a loop each."""
    return composite.make_kernel(params, dim, split=False)


def make_kernel(params: NormParams, dim: int, statement: Statement = whole_rows) -> Kernel:
    """Return a compiled kernel of a built-in norm of width `dim`.

    Args:
        params: the norm's parameters.
        dim: size of the last dimension.
        statement: makes the function to compile from the same two, as `Compiled` takes it.

    Raises:
        TypeError: the statement does not cover the norm.
    """
    return compile_made(statement, params, dim)


@cache
def compile_made(statement: Statement, params: NormParams, dim: int) -> Compiled:
    """Return `statement(params, dim)` compiled; equal ones are one, and so compiled once."""
    return Compiled(statement(params, dim), (compile_made, statement, params, dim))


class Compiled:
    """A function of tensors, compiled.

    Args:
        function: (x (rows, n), others: Tensor | None ...) -> Tensor (rows, n), or a tuple of it and of
            tensors that have no gradient. It depends on its arguments alone.
        origin: what makes this object: a callable and its arguments. Copies and pickles go through it.

    Raises:
        BackendUnavailable: on a call, when the compiler fails.
    """

    def __init__(self, function: Callable[..., Any], origin: tuple[Any, ...]) -> None:
        self.function = function
        self._origin = origin
        self._forward = _compile(function)
        self._gradients: dict[tuple[bool, ...], Callable[..., Any]] = {}

    def __call__(self, x: Tensor, *others: Tensor | None) -> Any:
        """Return function(x, *others), the leading dimensions of x (..., n) taken as one."""
        if torch.compiler.is_compiling() or not _plain((x, *others)):
            return self.function(x, *others)
        apply: Callable[..., Any] = _Call.apply
        if x.ndim == 2:
            return apply(self, x, *others)
        found = apply(self, x.reshape(-1, x.shape[-1]), *others)
        if isinstance(found, tuple):
            return found[0].view(x.shape), *found[1:]
        return found.view(x.shape)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._origin[0], self._origin[1:]

    def run(self, args: Sequence[Tensor | None]) -> Any:
        """Return the function's value, without a graph."""
        return _run(self._forward, args)

    def gradient(
        self, needs: tuple[bool, ...], upstream: Tensor, args: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of those arguments that need one, None for the others."""
        if torch.is_grad_enabled() or not _plain((upstream, *args)):
            found = self._eager_gradient(needs, upstream, args)
        else:
            if needs not in self._gradients:
                self._gradients[needs] = _compile(_gradient_of(self.function, needs))
            found = _run(self._gradients[needs], (upstream, *args))
        each = iter(found)
        return [next(each) if need else None for need in needs]

    def _eager_gradient(
        self, needs: tuple[bool, ...], upstream: Tensor, args: Sequence[Tensor | None]
    ) -> Sequence[Tensor]:
        """Return the gradients as functions of `upstream` and `args`, if gradients are enabled."""
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            # Aliases: one tensor may be two of the arguments.
            own = [None if one is None else one.view_as(one) for one in args]
            wanted = [
                one if one.requires_grad else one.requires_grad_()
                for one, need in zip(own, needs, strict=True)
                if need and one is not None
            ]
            value = _first(self.function(*own))
            return torch.autograd.grad(value, wanted, upstream, create_graph=differentiable)


class _Call(torch.autograd.Function):
    """A compiled function as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: FunctionCtx, compiled: Compiled, *args: Tensor | None) -> Any:
        ctx.compiled = compiled  # type: ignore[attr-defined]
        # All that a backward pass may ask for. Each smaller selection would be a kernel of its own.
        ctx.needs = ctx.needs_input_grad[1:]  # type: ignore[attr-defined]
        ctx.save_for_backward(*args)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        found = compiled.run(args)
        if isinstance(found, tuple):
            ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> Any:
        if upstream is None:
            return None, *(None for _ in ctx.needs)
        return None, *ctx.compiled.gradient(ctx.needs, upstream, ctx.saved_tensors)


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def _gradient_of(function: Callable[..., Any], needs: tuple[bool, ...]) -> Callable[..., Any]:
    """Return (upstream, *args) -> the gradients of the arguments that need one."""

    def gradient(upstream: Tensor, *args: Tensor | None) -> Any:
        def of_wanted(*wanted: Tensor) -> Any:
            each = iter(wanted)
            return _first(
                function(*[next(each) if need else one for one, need in zip(args, needs, strict=True)])
            )

        wanted = [one for one, need in zip(args, needs, strict=True) if need]
        return torch.func.vjp(of_wanted, *wanted)[1](upstream)

    return gradient


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled for itself: the kernels of other functions count towards no limit of it."""

    def call(*args: Tensor | None) -> Any:
        return function(*args)

    # The overloads leave out two of its arguments.
    compiled: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]
        call,
        fullgraph=True,
        recompile_limit=MOST_VARIANTS,
        isolate_recompiles=True,
        options={"guard_filter_fn": _guards, "emulate_precision_casts": True},
    )
    return compiled


def _guards(entries: Sequence[Any]) -> list[bool]:
    """Check the tensors and torch's state on each call, not the function, which never changes."""
    return [not entry.is_global and "function" not in entry.name for entry in entries]


def _run(compiled: Callable[..., Any], args: Sequence[Tensor | None]) -> Any:
    """Call compiled code, without a graph, with the number of rows left open."""
    plain = [None if one is None else one.detach() for one in args]
    for one in plain:
        # What has an entry for each row: x, the gradient of y, a mask. The rest are vectors of parameters.
        if one is not None and (one.ndim == 2 or one.dtype is torch.bool):
            torch._dynamo.maybe_mark_dynamic(one, 0)
    x = args[0]
    assert x is not None
    try:
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return compiled(*plain)
        return compiled(*plain)
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        line = str(error).strip().partition("\n")[0]
        reason = f"Inductor failed ({line}); see that a C++ compiler works, and on a GPU triton"
        raise BackendUnavailable(not_here("compiled", reason)) from error


def _plain(args: Sequence[Tensor | None]) -> bool:
    """Whether a call has nothing that only primitive operations follow: see the module's docstring."""
    if transformed():
        return False
    if _get_current_dispatch_mode() is not None:
        return False
    return all(one is None or _is_plain_tensor(one) for one in args)


def _is_plain_tensor(one: Tensor) -> bool:
    return in_memory(one) and not one.is_meta and one.numel() > 0
