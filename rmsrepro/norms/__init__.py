"""Norms by name: `build_norm("rmsnorm", 512)`.

    params.py     what parameters each norm has (no torch)
    making.py     from what was given to parameters; checks.py checks and converts the values
    equations.py  the norms as equations: the ground truth
    layers.py     the norms as modules; module.py is their base, gains.py what a stored gain means
    batchnorm.py  the norm over positions
    linear.py     normed_linear, and norms of weights
    backends/     how they are computed
    registry.py   names, registering one's own; signatures.py reads the parameters of a user's class
    factory.py    build_norm, NormSpec, the choice of a backend
    settings.py   whether two settings of a norm are the same
    targets.py    models of users, which are built with a norm
    roles.py      which parameters belong to norms

Importing this package does not import torch; building a norm does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rmsrepro.norms.backends import BackendUnavailable
from rmsrepro.norms.factory import NormSpec, build_norm, choose_backend, resolve_backend
from rmsrepro.norms.registry import (
    NormInfo,
    list_norms,
    norm_info,
    register_norm,
    resolve_params,
    unregister_norm,
)
from rmsrepro.norms.roles import is_norm, norm_parameter_names, takes_mask

if TYPE_CHECKING:
    from rmsrepro.norms.batchnorm import BatchNorm, recurrence
    from rmsrepro.norms.linear import apply_norm, match_gains, normed_linear, weight_normed

__all__ = [
    "BackendUnavailable",
    "BatchNorm",
    "NormInfo",
    "NormSpec",
    "apply_norm",
    "build_norm",
    "choose_backend",
    "is_norm",
    "list_norms",
    "match_gains",
    "norm_info",
    "norm_parameter_names",
    "normed_linear",
    "recurrence",
    "register_norm",
    "resolve_backend",
    "resolve_params",
    "takes_mask",
    "unregister_norm",
    "weight_normed",
]

_WITH_TORCH = {
    "BatchNorm": "batchnorm",
    "recurrence": "batchnorm",
    "apply_norm": "linear",
    "match_gains": "linear",
    "normed_linear": "linear",
    "weight_normed": "linear",
}
"""Names that live in modules which import torch: fetched when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
