"""Walk through a model and probe what might be a norm."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

from torch import nn

from rmsrepro.norms.inspecting.report import Inspection, Layer
from rmsrepro.norms.inspecting.running import Run, run_model
from rmsrepro.norms.probing import Finding, NotANorm, probe

SIZES = (
    "normalized_shape", "dim", "d_model", "hidden_size", "num_features", "num_channels", "features",
    "embed_dim", "embedding_dim", "d", "n", "size", "width", "in_features", "channels", "ndim",
)  # fmt: skip
"""Attributes in which modules keep the size of a row; they suggest a width to try, and prove nothing."""

ANY_WIDTH = 64
"""Tried where a module has no parameter and no size: a norm without gain takes any width."""

MOST_PARAMETERS = 8
"""A module with more numbers than so many times its width is no norm; its submodules may be."""

MOST_WIDTHS = 5


def inspect_model(model: nn.Module, inputs: object = None) -> Inspection:
    """Find every norm in `model` by probing copies of its submodules; the model itself is left as it is.

    Args:
        model: any module; it may be on the meta device, whose parameters are then drawn at random.
        inputs: what the model is called with, a tensor, a tuple of arguments or a dict of keyword arguments.
            With them a copy of the model runs once in training and once in evaluation, and the inspection
            says which norms are called and what is normalised outside of any norm.

    Raises:
        ValueError: the model does not run on `inputs`.
    """
    run = Run() if inputs is None else run_model(model, inputs)
    layers: list[Layer] = []
    for path, module in model.named_modules():
        if any(_inside(path, layer.path) for layer in layers):
            continue
        found = _probe(module, run.shapes.get(path, ()))
        if found is not None:
            calls = {mode: counts.get(path, 0) for mode, counts in run.counts.items()} or None
            layers.append(Layer(path, type(module).__name__, found, calls))
    calls_outside = [call for call in run.calls if not any(_inside(call.path, one.path) for one in layers)]
    return Inspection(
        class_name=type(model).__name__,
        num_modules=sum(1 for _ in model.modules()),
        layers=tuple(layers),
        calls=tuple(calls_outside),
        modes=tuple(run.counts),
        notes=tuple(run.notes),
    )


def _inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _probe(module: nn.Module, shapes: Sequence[tuple[int, ...]]) -> Finding | None:
    """Probe a module with each likely width until it is a norm."""
    if not _takes_one_argument(module) or _lazy(module):
        return None
    numbers = sum(one.numel() for one in (*module.parameters(), *module.buffers()))
    for width in likely_widths(module, shapes)[:MOST_WIDTHS]:
        size = math.prod(width)
        if numbers > MOST_PARAMETERS * size:
            continue
        channels_first = any(_channels_first(shape, size) for shape in shapes) or isinstance(
            module, nn.modules.instancenorm._InstanceNorm
        )
        found = probe(module, width, channels_first=channels_first)
        if not isinstance(found, NotANorm):
            return found
    return None


def _channels_first(shape: tuple[int, ...], size: int) -> bool:
    return len(shape) > 2 and shape[1] == size != shape[-1]


def likely_widths(module: nn.Module, shapes: Sequence[tuple[int, ...]] = ()) -> list[tuple[int, ...]]:
    """Return shapes of a row that `module` may take, the likeliest first.

    Args:
        shapes: of the inputs that it was seen to be called with.
    """
    found: list[tuple[int, ...]] = []
    shaped = getattr(module, "normalized_shape", None)
    if isinstance(shaped, tuple | list) and all(isinstance(one, int) for one in shaped):
        found.append(tuple(shaped))
    for shape in shapes:
        if len(shape) > 2 and any(one.shape == shape[1:2] for one in module.parameters()):
            found.append(shape[1:2])  # channels first
        found.append(shape[-1:])
    own = [*module._parameters.values(), *module._buffers.values()]
    found += [tuple(one.shape) for one in own if one is not None and one.ndim >= 1 and one.numel() > 1]
    for name in SIZES:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            found.append((value,))
    below = [one for one in (*module.parameters(), *module.buffers()) if one.ndim == 1 and one.numel() > 1]
    found += [tuple(one.shape) for one in below]
    return list(dict.fromkeys(shape for shape in found if shape)) or [(ANY_WIDTH,)]


def _takes_one_argument(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind(None)
    except (TypeError, ValueError):
        return False
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def _lazy(module: nn.Module) -> bool:
    return any(nn.parameter.is_lazy(one) for one in (*module.parameters(), *module.buffers()))
