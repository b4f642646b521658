"""Which modules are norms: a mark that `build_norm` sets, so that no rule depends on class names."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

MARK = "_rmsrepro_norm"
TAKES_MASK = "_rmsrepro_takes_mask"


def mark_norm(module: nn.Module, name: str, *, takes_mask: bool = False) -> None:
    """Mark `module` as the norm `name`. The mark survives deepcopy and pickling.

    Args:
        module: the norm.
        name: as `build_norm` was given it.
        takes_mask: whether its statistics are over positions, and its forward is (x, mask).
    """
    setattr(module, MARK, name)
    setattr(module, TAKES_MASK, takes_mask)


def norm_takes_mask(cls: type[Any]) -> bool:
    """Return whether the forward of a norm's class has a parameter `mask`."""
    try:
        return "mask" in inspect.signature(cls.forward).parameters
    except (TypeError, ValueError):  # a forward written in C tells nothing
        return False


def is_norm(module: nn.Module) -> bool:
    """Return whether `module` was made by `build_norm` (or is one of the package's layers)."""
    return getattr(module, MARK, None) is not None


def norm_name(module: nn.Module) -> str:
    """Return the name of the norm `module`, as `build_norm` was given it; its class's name for others."""
    return str(getattr(module, MARK, type(module).__name__))


def takes_mask(module: nn.Module) -> bool:
    """Return whether the norm `module` looks at other positions: it is given the mask of those that count."""
    return bool(getattr(module, TAKES_MASK, False))


def norm_parameter_names(model: nn.Module) -> set[str]:
    """Return the full names of all parameters that belong to norms, those of their submodules included.

    A parameter shared by several modules appears under each of its names.
    """
    return {
        name
        for prefix, module in model.named_modules(remove_duplicate=False)
        if is_norm(module)
        for name, _ in module.named_parameters(prefix=prefix, remove_duplicate=False)
    }
