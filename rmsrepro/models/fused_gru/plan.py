"""What the four sites of a GRU compute, as the kernels take it, and which layers and inputs they take."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rmsrepro.norms.adding import watched
from rmsrepro.norms.backends.fused.launch import CODES, RuleFields, rule_fields
from rmsrepro.norms.backends.fused.rule import Rule
from rmsrepro.norms.backends.plain_tensors import in_memory, transformed
from rmsrepro.norms.layers import LAYERS
from rmsrepro.norms.module import ActivationNorm

if TYPE_CHECKING:
    from rmsrepro.models.gru import GRULayer

DTYPES = {dtype: CODES[dtype] for dtype in (torch.float32, torch.float64)}
"""What the kernels of a GRU read."""
ABSENT = -1


class _SiteFields(RuleFields):
    """`struct GruSite` of gru.hpp, which begins with its rule."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("normed", "gain", "bias"))


@dataclass(frozen=True)
class SitePlan:
    """One site: entries `start` to `start + width` of a product's row."""

    start: int
    width: int
    rule: Rule | None
    """None: no norm."""
    gain: int
    """Where the gain begins in the vector of parameters; ABSENT without."""
    bias: int
    """Likewise. A site of the state without a norm has a bias too."""


class Plan:
    """All sites: gates and candidate of the input, gates and candidate of the state.

    Attributes:
        width: d, of the state.
        sites: in that order.
        size: length of the vector of parameters.
        address: of the sites in the memory that the kernels read them from.
    """

    def __init__(self, width: int, sites: Sequence[SitePlan], size: int) -> None:
        self.width, self.sites, self.size = width, tuple(sites), size
        self._memory = (_SiteFields * len(self.sites))(*(_fields(site) for site in self.sites))
        self.address = ctypes.addressof(self._memory)


@dataclass(frozen=True)
class Fused:
    """A layer as the kernels take it."""

    plan: Plan
    input_weight: Tensor
    """(3 d, input_dim)"""
    input_bias: Tensor | None
    """(3 d,)"""
    weight: Tensor
    """(3 d, d), of the product with the state."""
    parameters: Tensor
    """(size,): all gains and biases one after the other."""


def fused(layer: GRULayer, *inputs: Tensor | None) -> Fused | None:
    """Return `layer` for the kernels, or None where they do not take it or the inputs, or must not be used.

    They are for CPU tensors in fp32 or fp64 and for fused norms, or for none where the layer was asked for
    that in this backend. They must not be used where somebody watches operations or modules (torch.compile,
    export and jit, torch.func, forward-mode derivatives, modes, hooks), nor under autocast, where the state
    is in half precision.
    """
    linear, recurrent = layer.input_projection, layer.recurrent_projection
    if not _plain_linear(linear) or not _plain_linear(recurrent) or not _alone():
        return None
    weight = recurrent.weight
    tensors = [one for one in (weight, linear.weight, linear.bias, *inputs) if one is not None]
    if weight.dtype not in DTYPES or not all(in_memory(one) and one.is_cpu for one in tensors):
        return None
    if any(one.dtype != weight.dtype for one in tensors if one.is_floating_point()):
        return None
    d = layer.dim
    sites = (
        (layer.norm_gates_x, None, 0, 2 * d),
        (layer.norm_candidate_x, None, 2 * d, d),
        (layer.norm_gates_h, layer.gates_h_bias, 0, 2 * d),
        (layer.norm_candidate_h, layer.candidate_h_bias, 2 * d, d),
    )
    norms: list[ActivationNorm[Any] | None] = []
    parameters: list[Tensor] = []
    pairs: list[tuple[Tensor | None, Tensor | None]] = []
    for norm, bias, _, width in sites:
        if norm is None:
            pairs.append((None, bias))
        elif isinstance(norm, ActivationNorm) and _taken(norm, width):
            pairs.append((None if norm.weight is None else norm.effective_gain(), norm.bias))
        else:
            return None
        norms.append(norm)
        parameters += [one for one in pairs[-1] if one is not None]
    if not layer.fuses_none and all(norm is None for norm in norms):
        return None
    if any(not in_memory(one) or one.dtype != weight.dtype or not one.is_cpu for one in parameters):
        return None
    for pair, (_, _, _, width) in zip(pairs, sites, strict=True):
        # Somebody may have put another parameter in a norm's place, and the kernels read so many.
        if any(one is not None and one.shape != (width,) for one in pair):
            return None
    packed = torch.cat(parameters) if parameters else weight.new_empty(0)
    key = [
        (None if norm is None else norm.params, *(one is None for one in pair))
        for norm, pair in zip(norms, pairs, strict=True)
    ]
    plan = _PLANS.get(layer)
    if plan is None or plan[0] != key:
        made = [
            (start, width, None if norm is None else Rule.of(norm.params, width), pair)
            for norm, (_, _, start, width), pair in zip(norms, sites, pairs, strict=True)
        ]
        _PLANS[layer] = plan = (key, _plan(d, made))
    return Fused(plan[1], linear.weight, linear.bias, weight, packed)


_PLANS: WeakKeyDictionary[nn.Module, tuple[list[Any], Plan]] = WeakKeyDictionary()
"""The plan of a layer, with what it was made of: not in the layer, which is copied and pickled."""


def _plan(width: int, sites: Sequence[tuple[int, int, Rule | None, Sequence[Tensor | None]]]) -> Plan:
    """Give each site's gain and bias their places."""
    made: list[SitePlan] = []
    size = 0
    for start, count, rule, pair in sites:
        places = []
        for one in pair:
            places.append(ABSENT if one is None else size)
            size += 0 if one is None else count
        made.append(SitePlan(start, count, rule, *places))
    return Plan(width, made, size)


def fused_for(layer: GRULayer, x: Tensor, h: Tensor | None, mask: Tensor | None) -> Fused | None:
    """Return `fused` for a sequence: None too where there is nothing in it, or shapes are not as expected."""
    if x.ndim != 3 or not x.numel():
        return None
    steps, rows = x.shape[:2]
    if h is not None and h.shape != (rows, layer.dim):
        return None
    if mask is not None and (mask.shape != (steps, rows) or mask.dtype != torch.bool):
        return None
    return fused(layer, x, h, mask)


def _plain_linear(linear: nn.Linear) -> bool:
    return type(linear) is nn.Linear and not watched(linear)


def _taken(norm: ActivationNorm[Any], width: int) -> bool:
    return (
        # Its kernel is a fused one. A subclass may do anything else.
        norm.adds and type(norm) is LAYERS.get(norm.params.norm) and norm.dim == width and not watched(norm)
    )


def _alone() -> bool:
    """Whether operations run eagerly, on tensors as they are, and nobody watches them.

    Hooks, global ones among them, are looked for at each module: `watched`.
    """
    return not (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or transformed()
        or torch._C._get_tracing_state() is not None
    )


def _fields(site: SitePlan) -> _SiteFields:
    rule = site.rule or Rule(site.width, False, 1.0, 0.0, False, False)
    return _SiteFields(*rule_fields(rule, site.width), site.rule is not None, site.gain, site.bias)
