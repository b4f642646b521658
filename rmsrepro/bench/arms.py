"""Which norms a bench times, and against which baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rmsrepro.bench.cells import Arm, Contestant
from rmsrepro.config.errors import UserError
from rmsrepro.norms import BackendUnavailable, NormSpec, choose_backend, resolve_backend
from rmsrepro.norms.given import check_task

BASELINE = "layernorm"
REFERENCE_BACKEND = "composite"
"""The backend whose first loss the other backends of a norm must reproduce."""


def arrange_arms(norms: Iterable[Mapping[str, Any]], task: str | None = None) -> tuple[list[Arm], list[str]]:
    """Return the arms for `norms` ({"name", "params", "backend"}), baselines first, and notes.

    A norm that a backend does not have, or that does not suit the `task`, is an arm that is unavailable.

    Every backend gets a baseline of its own: the first layernorm asked for with it, else one that is
    added. `auto` becomes the fastest backend that all arms asking for `auto`, and layernorm, have.

    Raises:
        UserError, ValueError, TypeError: an unknown norm, or wrong parameters.
    """
    asked = [(str(norm["name"]), dict(norm.get("params") or {}), str(norm["backend"])) for norm in norms]
    notes: list[str] = []
    automatic = [NormSpec(name, params) for name, params, backend in asked if backend == "auto"]
    if automatic:
        choice = choose_backend([NormSpec(BASELINE), *automatic], "auto")
        why = f" ({choice.note})" if choice.note else ""
        notes.append(f"backend=auto is {choice.backend}: the fastest that all arms have{why}")
        asked = [
            (name, params, choice.backend if backend == "auto" else backend)
            for name, params, backend in asked
        ]
    arms: list[Arm] = []
    for backend in dict.fromkeys(backend for _, _, backend in asked):
        own = [(name, params) for name, params, used in asked if used == backend]
        if all(name != BASELINE for name, _ in own):
            notes.append(f"{BASELINE}/{backend} was added: it is the baseline")
            own.insert(0, (BASELINE, {}))
        unique = [norm for place, norm in enumerate(own) if norm not in own[:place]]
        baseline = next(norm for norm in unique if norm[0] == BASELINE)
        repeated = Counter(name for name, _ in unique)
        for norm in [baseline, *(norm for norm in unique if norm is not baseline)]:
            name, params = norm
            given = ",".join(f"{key}={value}" for key, value in sorted(params.items()))
            label = f"{name}({given})" if repeated[name] > 1 and given else name
            arms.append(
                Arm(
                    label=f"{label}/{backend}",
                    norm=name,
                    params=params,
                    backend=backend,
                    is_baseline=norm is baseline,
                    unavailable=_why_unavailable(name, params, backend, task),
                )
            )
    return arms, notes


def _why_unavailable(name: str, params: Mapping[str, Any], backend: str, task: str | None) -> str | None:
    try:
        resolve_backend([NormSpec(name, params)], backend)
        if task is not None:
            check_task(name, task)
    except (BackendUnavailable, UserError) as error:
        return str(error)
    return None


def contestants(arms: Sequence[Arm]) -> list[Contestant]:
    """Say of each arm what it is compared with, and which loss it must reproduce."""
    baselines = {arm.backend: arm.label for arm in arms if arm.is_baseline}
    references = {_computes(arm): arm.label for arm in arms if arm.backend == REFERENCE_BACKEND}
    found = []
    for arm in arms:
        is_norm = arm.role == "norm"
        other = next(iter(arm.against), None)
        reference = references.get(_computes(arm)) if is_norm else other
        found.append(
            Contestant(
                label=arm.label,
                twins=arm.twins,
                baseline=baselines.get(arm.backend, arm.label) if is_norm else other,
                reference=None if reference == arm.label else reference,
            )
        )
    return found


def _computes(arm: Arm) -> tuple[str, str, str]:
    return arm.role, arm.norm, repr(sorted(arm.params.items()))
