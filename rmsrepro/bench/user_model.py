"""A model of the user's own, `model=package.module:factory`, built with the norm of an arm.

`factory(norm)` returns a module and its inputs; `norm.build(dim)` makes a layer of the norm that is timed.
For each arm, and each twin of the baseline, the factory is called anew, after the same seed.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rmsrepro.bench.cells import Arm
from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import TrainConfig
from rmsrepro.norms import BackendUnavailable, NormSpec, is_norm, norm_info, resolve_params
from rmsrepro.norms.making import plain
from rmsrepro.norms.roles import norm_name
from rmsrepro.norms.targets import GivenNorm, load_model
from rmsrepro.runs.seeding import stream_seed


def make(target: str, spec: NormSpec, seed: int) -> tuple[nn.Module, Any]:
    """Call the factory with a norm, after seeding what it may draw from.

    Raises:
        UserError: it cannot be imported, raises, gives no module or no inputs, or uses another norm.
        BackendUnavailable: the norm's backend does not have it at a width of this model.
    """
    _seed(seed)
    given = GivenNorm(spec.name, spec.params, spec.backend)
    try:
        module, inputs = load_model(target, given)
    except UserError as error:
        if isinstance(error.__cause__, BackendUnavailable):
            raise error.__cause__ from None
        raise
    if inputs is None:
        raise UserError(
            f"{target}: a factory that is timed returns a pair, the module and its inputs (a tensor, a tuple "
            "of arguments, or a dict of keyword arguments); it returned a module alone"
        )
    problem = _wrong_norm(module, spec)
    if problem is not None:
        raise UserError(f"{target}: {problem}; layers of the norm are made by its argument: norm.build(dim)")
    return module, inputs


def _seed(seed: int) -> None:
    initial = stream_seed(seed, "init")
    torch.manual_seed(initial)
    random.seed(initial)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(initial % 2**32)


def _wrong_norm(module: nn.Module, spec: NormSpec) -> str | None:
    """Return what is wrong with the norms of a module that was to be built with `spec`, or None."""
    if spec.is_none:
        return None
    name = norm_info(spec.name).name
    own = [one for one in module.modules() if is_norm(one) and norm_name(one) == name]
    if not own:
        return f"the module it returned with norm={spec.name} has no layer of that norm"
    if norm_info(spec.name).factory is not None:
        return None  # a norm of a user does not say what it was built with
    wanted = resolve_params(spec.name, **spec.params)
    for one in own:
        if one.params != wanted:
            return f"called with norm={name} and {_told(wanted)}, it built one with {_told(one.params)}"
        if getattr(one, "backend", spec.backend) != spec.backend:
            return f"called with norm={name} on backend={spec.backend}, it built one on {one.backend}"
    return None


def _told(params: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in plain(params).items()) or "no parameters"


def check_arms(base: TrainConfig, arms: Sequence[Arm]) -> None:
    """Build the model of each arm once, before anything starts.

    Raises:
        UserError: a factory that raises, gives no module or no inputs, or builds without the arm's norm.
    """
    for arm in arms:
        if arm.unavailable is None:
            # Where the backend lacks it, the processes that meet it show it as unavailable.
            with contextlib.suppress(BackendUnavailable):
                make(base.model.name, spec_of(arm), base.seed)


def spec_of(arm: Arm) -> NormSpec:
    """Return the norm of an arm."""
    return NormSpec(arm.norm, arm.params, arm.backend)
