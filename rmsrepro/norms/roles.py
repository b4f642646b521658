"""Which modules are norms: a mark that `build_norm` sets, so that no rule depends on class names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

MARK = "_rmsrepro_norm"


def mark_norm(module: nn.Module, name: str) -> None:
    """Mark `module` as the norm `name`. The mark survives deepcopy and pickling."""
    setattr(module, MARK, name)


def is_norm(module: nn.Module) -> bool:
    """Return whether `module` was made by `build_norm` (or is one of the package's layers)."""
    return getattr(module, MARK, None) is not None


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
