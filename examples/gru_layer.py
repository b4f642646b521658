r"""One GRU layer with norms at all four sites, beside the GRU that torch ships, which has none.

    cd examples
    rmsrepro bench bench=model norm=layernorm,rmsnorm,prmsnorm,none backend=fused,torch,composite \
        model=gru_layer:width_256

On the backends `fused` and `composite` each norm is the layer that this package's models are made of, `none`
among them. On the backend `torch`, `none` is torch.nn.GRU, and the others are the composite layer's loop with
torch's own norm in it. Sizes are (steps, batch, width): (30, 64, 128), (30, 64, 256), (30, 80, 512) and
(30, 80, 1024), the input as wide as the state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rmsrepro.config.schema import Site
from rmsrepro.models.gru import BuiltinGRULayer, GRULayer
from rmsrepro.norms.targets import GivenNorm

STEPS = 30


def layer(norm: GivenNorm, batch: int, width: int) -> tuple[nn.Module, Tensor]:
    """Return the layer and an input (STEPS, batch, width)."""
    own = GRULayer(width, width, norm, list(Site))
    for projection in (own.input_projection, own.recurrent_projection):
        nn.init.orthogonal_(projection.weight)
    x = torch.randn(STEPS, batch, width)
    if not (norm.is_none and norm.backend == "torch"):
        return own, x
    builtin = BuiltinGRULayer(width, width)
    with torch.no_grad():
        builtin.weight_ih_l0.copy_(own.input_projection.weight)
        builtin.weight_hh_l0.copy_(own.recurrent_projection.weight)
        builtin.bias_ih_l0.copy_(own.input_projection.bias)
        builtin.bias_hh_l0.zero_()
    return builtin, x


def width_128(norm: GivenNorm) -> tuple[nn.Module, Tensor]:
    """Return the layer for (30, 64, 128)."""
    return layer(norm, 64, 128)


def width_256(norm: GivenNorm) -> tuple[nn.Module, Tensor]:
    """Return the layer for (30, 64, 256)."""
    return layer(norm, 64, 256)


def width_512(norm: GivenNorm) -> tuple[nn.Module, Tensor]:
    """Return the layer for (30, 80, 512)."""
    return layer(norm, 80, 512)


def width_1024(norm: GivenNorm) -> tuple[nn.Module, Tensor]:
    """Return the layer for (30, 80, 1024)."""
    return layer(norm, 80, 1024)
