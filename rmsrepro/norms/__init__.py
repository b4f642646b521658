"""Norms by name: `build_norm("rmsnorm", 512)`.

    params.py     what parameters each norm has (no torch)
    checks.py     checks and conversions of their values
    equations.py  the norms as equations: the ground truth
    layers.py     the norms as modules
    backends/     how they are computed
    registry.py   names, registering one's own
    factory.py    build_norm, NormSpec, the choice of a backend
    roles.py      which parameters belong to norms

Importing this package does not import torch; building a norm does.
"""

from rmsrepro.norms.backends import BackendUnavailable
from rmsrepro.norms.factory import NormSpec, build_norm, resolve_backend
from rmsrepro.norms.registry import (
    NormInfo,
    list_norms,
    norm_info,
    register_norm,
    resolve_params,
    unregister_norm,
)
from rmsrepro.norms.roles import is_norm, norm_parameter_names

__all__ = [
    "BackendUnavailable",
    "NormInfo",
    "NormSpec",
    "build_norm",
    "is_norm",
    "list_norms",
    "norm_info",
    "norm_parameter_names",
    "register_norm",
    "resolve_backend",
    "resolve_params",
    "unregister_norm",
]
