"""The fused norms as operators that PyTorch knows: `torch.ops.rmsrepro.norm` and three more.

`torch.compile`, `torch.export`, fake tensors and dispatch modes see one operator where the kernel runs, with
its shapes, its gradient and its dtypes. Code that runs eagerly goes past them (see kernel.py), since the way
through the dispatcher costs more than a small norm.

    norm(x, gain, bias, rule...) -> y
    norm_backward(dy, x, gain, bias, rule...) -> (dx, dgain, dbias)
    add_norm(x, residual, gain, bias, rule...) -> (s, y)
    add_norm_backward(ds, dy, s, gain, bias, rule...) -> (dsum, dgain, dbias)

Of an absent parameter the gradient is an empty tensor, since an operator's results cannot be None. Autocast
changes nothing: statistics are in fp32 or wider whatever the input, and the output has the input's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsrepro.norms.backends.fused import differentiable
from rmsrepro.norms.backends.fused.launch import launcher
from rmsrepro.norms.backends.fused.rule import Rule

RULE = "int k, bool centred, float inverse_count, float eps, bool outside, bool rounded"

library = torch.library.Library("rmsrepro", "DEF")
library.define(f"norm(Tensor x, Tensor? gain, Tensor? bias, {RULE}) -> Tensor")
library.define(
    f"norm_backward(Tensor dy, Tensor x, Tensor? gain, Tensor? bias, {RULE}) -> (Tensor, Tensor, Tensor)"
)
library.define(f"add_norm(Tensor x, Tensor residual, Tensor? gain, Tensor? bias, {RULE}) -> (Tensor, Tensor)")
library.define(
    f"add_norm_backward(Tensor ds, Tensor dy, Tensor s, Tensor? gain, Tensor? bias, {RULE}) "
    "-> (Tensor, Tensor, Tensor)"
)

Triple = tuple[Tensor, Tensor, Tensor]


def numbers(rule: Rule) -> tuple[Any, ...]:
    """Return the rule as the operators' last arguments."""
    return rule.k, rule.centred, rule.inverse_count, rule.eps, rule.outside, rule.rounded


def _filled(gradients: tuple[Tensor, Tensor | None, Tensor | None]) -> Triple:
    dx, *rest = gradients
    dgain, dbias = (dx.new_empty(0) if one is None else one for one in rest)
    return dx, dgain, dbias


def _norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, *rule: Any) -> Tensor:
    return launcher(Rule(*rule), x.shape[-1]).forward(x, gain, bias)


def _norm_backward(dy: Tensor, x: Tensor, gain: Tensor | None, bias: Tensor | None, *rule: Any) -> Triple:
    dtype = None if bias is None else bias.dtype
    return _filled(launcher(Rule(*rule), x.shape[-1]).backward(dy, x, gain, dtype))


def _add_norm(
    x: Tensor, residual: Tensor, gain: Tensor | None, bias: Tensor | None, *rule: Any
) -> tuple[Tensor, Tensor]:
    return launcher(Rule(*rule), x.shape[-1]).add_forward(x, residual, gain, bias)


def _add_norm_backward(
    ds: Tensor, dy: Tensor, s: Tensor, gain: Tensor | None, bias: Tensor | None, *rule: Any
) -> Triple:
    dtype = None if bias is None else bias.dtype
    return _filled(launcher(Rule(*rule), s.shape[-1]).backward(dy, s, gain, dtype, ds))


for _key in ("CPU", "CUDA"):
    library.impl("norm", _norm, _key)
    library.impl("norm_backward", _norm_backward, _key)
    library.impl("add_norm", _add_norm, _key)
    library.impl("add_norm_backward", _add_norm_backward, _key)


# ------------------------------------------------------------------------------------- fake tensors


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_parameters(x: Tensor, gain: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    dgain, dbias = (x.new_empty(0) if one is None else one.new_empty(one.shape) for one in (gain, bias))
    return dgain, dbias


def _fake_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, *rule: Any) -> Tensor:
    return _like(x)


def _fake_norm_backward(
    dy: Tensor, x: Tensor, gain: Tensor | None, bias: Tensor | None, *rule: Any
) -> Triple:
    return _like(x), *_fake_parameters(x, gain, bias)


def _fake_add_norm(
    x: Tensor, residual: Tensor, gain: Tensor | None, bias: Tensor | None, *rule: Any
) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


def _fake_add_norm_backward(
    ds: Tensor, dy: Tensor, s: Tensor, gain: Tensor | None, bias: Tensor | None, *rule: Any
) -> Triple:
    return _like(s), *_fake_parameters(s, gain, bias)


for _name, _fake in (
    ("norm", _fake_norm),
    ("norm_backward", _fake_norm_backward),
    ("add_norm", _fake_add_norm),
    ("add_norm_backward", _fake_add_norm_backward),
):
    torch.library.register_fake(f"rmsrepro::{_name}", _fake, lib=library)


# ---------------------------------------------------------------------------------------- gradients


def _or_none(gradients: Triple, gain: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    dx, dgain, dbias = gradients
    return dx, None if gain is None else dgain, None if bias is None else dbias


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gain, bias, *ctx.rule = inputs
    ctx.save_for_backward(x, gain, bias)


def _differentiate_norm(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, gain, bias = ctx.saved_tensors
    absent = [None] * len(ctx.rule)
    if torch.is_grad_enabled():
        dtype = None if bias is None else bias.dtype
        return *differentiable.gradients(Rule(*ctx.rule), dy, x, gain, dtype, None), *absent
    found = torch.ops.rmsrepro.norm_backward(dy, x, gain, bias, *ctx.rule)
    return *_or_none(found, gain, bias), *absent


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, gain, bias, *ctx.rule = inputs
    ctx.save_for_backward(output[0], gain, bias)


def _differentiate_add_norm(ctx: Any, ds: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    s, gain, bias = ctx.saved_tensors
    found: tuple[Tensor | None, ...]
    if torch.is_grad_enabled():
        dtype = None if bias is None else bias.dtype
        found = differentiable.gradients(Rule(*ctx.rule), dy, s, gain, dtype, ds)
    else:
        operator = torch.ops.rmsrepro.add_norm_backward
        found = _or_none(operator(ds, dy, s, gain, bias, *ctx.rule), gain, bias)
    return found[0], *found, *[None] * len(ctx.rule)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "this gradient of a fused norm cannot be differentiated again; take it with create_graph=True from "
        "the norm itself, outside torch.compile"
    )


torch.library.register_autograd("rmsrepro::norm", _differentiate_norm, setup_context=_save_norm, lib=library)
torch.library.register_autograd(
    "rmsrepro::add_norm", _differentiate_add_norm, setup_context=_save_add_norm, lib=library
)
for _name in ("norm_backward", "add_norm_backward"):
    torch.library.register_autograd(f"rmsrepro::{_name}", _refuse, setup_context=_save_nothing, lib=library)
