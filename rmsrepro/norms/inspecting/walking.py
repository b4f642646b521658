"""Walk through a model and probe what might be a norm."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence

from torch import nn

from rmsrepro.config.errors import first_line
from rmsrepro.norms.inspecting.report import Inspection, Layer
from rmsrepro.norms.inspecting.running import Run, run_model
from rmsrepro.norms.probing import Finding, NotANorm, probe
from rmsrepro.norms.probing.dimensions import dimensions_read
from rmsrepro.norms.probing.subject import undisturbed

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
LARGEST_GUESS = 1 << 16
"""A parameter of more numbers is no gain, so its shape is not tried as the shape of a row."""


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
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    run = Run() if inputs is None else run_model(model, inputs)
    layers = _layers(model, "", run, set())
    calls_outside = [call for call in run.calls if not any(_inside(call.path, one.path) for one in layers)]
    return Inspection(
        class_name=type(model).__name__,
        num_modules=sum(1 for _ in model.modules()),
        layers=tuple(layers),
        calls=tuple(calls_outside),
        modes=tuple(run.counts),
        notes=tuple(run.notes),
    )


def _layers(module: nn.Module, path: str, run: Run, seen: set[int]) -> list[Layer]:
    """Return the norms in `module`: itself, unless it holds several norms, which are then no part of one."""
    if id(module) in seen:
        return []
    seen.add(id(module))
    inner = [
        layer
        for name, child in module.named_children()
        for layer in _layers(child, f"{path}.{name}" if path else name, run, seen)
    ]
    found = None if len(inner) > 1 else _probe(module, path, run.shapes.get(path, ()), run.notes)
    if found is None:
        return inner
    calls = {mode: counts.get(path, 0) for mode, counts in run.counts.items()} or None
    return [Layer(path, type(module).__name__, found, calls)]


def _inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _probe(
    module: nn.Module, path: str, shapes: Sequence[tuple[int, ...]], notes: list[str]
) -> Finding | None:
    """Probe a module with each likely width until it is a norm."""
    if not _takes_one_argument(module) or _lazy(module):
        return None
    try:
        return _first_norm(module, shapes)
    except Exception as error:  # a module may do anything when it is called with something strange
        notes.append(
            f"{path or 'the module itself'} was not probed: {type(error).__name__}: {first_line(error)}"
        )
        return None


def _first_norm(module: nn.Module, shapes: Sequence[tuple[int, ...]]) -> Finding | None:
    numbers = sum(one.numel() for one in (*module.parameters(), *module.buffers()))
    widths = [
        width
        for width in likely_widths(module, shapes)[:MOST_WIDTHS]
        if numbers <= MOST_PARAMETERS * math.prod(width)
    ]
    # A group of one channel shows with channels first only.
    orders = (False, True) if widths and not shapes else (False,)
    for always, width in itertools.product(orders, widths):
        channels_first = (
            always
            or any(_channels_first(shape, math.prod(width)) for shape in shapes)
            or isinstance(module, nn.modules.instancenorm._InstanceNorm)
        )
        found = probe(module, width, channels_first=channels_first, shapes=shapes)
        if isinstance(found, Finding):
            return _at_its_row(module, found, shapes)
    row = _other_row(module, shapes) if widths else None
    found = NotANorm("it has no other row") if row is None else probe(module, row, shapes=shapes)
    return found if isinstance(found, Finding) else None


def _at_its_row(module: nn.Module, found: Finding, shapes: Sequence[tuple[int, ...]]) -> Finding:
    """Probe a norm over another dimension than the last with that one's size, if it takes rows of it."""
    if not shapes or len(found.dimensions) != 1:
        return found
    size = found.input_shape[found.dimensions[0]]
    again = probe(module, size, shapes=shapes) if size != found.width else found
    return again if isinstance(again, Finding) else found


def _other_row(module: nn.Module, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape of what shares a statistic; None where that is the last dimension, or nothing."""
    shapes = [shape for shape in shapes if len(shape) > 2]
    with undisturbed():
        read = dimensions_read(module, (), shapes) if shapes else None
    if read is None or read.last_only or 0 in read.read:
        return None
    row = tuple(read.shape[one] for one in read.read)
    return row if 1 < math.prod(row) <= LARGEST_GUESS else None


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
        sizes = {getattr(module, name, None) for name in SIZES[1:]} | {
            one.numel() for one in module.parameters()
        }
        if len(shape) > 2 and shape[1] in sizes:
            found.append(shape[1:2])  # channels first
        found.append(shape[-1:])
    own = [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]
    found += [tuple(one.shape) for one in own if one.ndim >= 1 and 1 < one.numel() <= LARGEST_GUESS]
    for name in SIZES:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            found.append((value,))
    below = [one for one in (*module.parameters(), *module.buffers()) if one.ndim == 1 and one.numel() > 1]
    found += [tuple(one.shape) for one in below]
    return list(dict.fromkeys(shape for shape in found if shape)) or [(ANY_WIDTH,)]


def _takes_one_argument(module: nn.Module) -> bool:
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return True  # a scripted module does not tell
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def _lazy(module: nn.Module) -> bool:
    return any(nn.parameter.is_lazy(one) for one in (*module.parameters(), *module.buffers()))
