"""What a stored gain means, so that a state dict is never read under another convention.

Most norms store the factor itself. Gemma's stores its offset from one, a user's may store anything. A gain
of 1.5 that is read as an offset becomes 2.5 without a word; so state dicts carry the convention, and loading
one of another convention is an error that names both.

Layers of this package write their `gain_offset` beside the gain unless it is 0. A user's module that is no
such layer says nothing of its gains: its state dict's metadata has the norm's name, and its weights go to
norms of that name only. `dict(state_dict)` has no metadata, and is loaded as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from rmsrepro.norms.roles import norm_name

GAIN_OFFSET = "gain_offset"
DECLARED = "declared"
_KIND, _NAME = "_rmsrepro_gains", "_rmsrepro_norm"


def keep_offset(module: nn.Module, offset: float) -> None:
    """Let the state dicts of `module` carry its offset; nothing for 0, the common one.

    A buffer beside the class attribute of that name, which `register_buffer` would refuse: so all that reads
    and writes state dicts (functional calls, wrappers) finds a tensor under the name.
    """
    if offset:
        module._buffers[GAIN_OFFSET] = torch.tensor(offset)


def check_offset(
    module: nn.Module, state: MutableMapping[str, Any], prefix: str, own: float, errors: list[str]
) -> bool:
    """Return whether a state dict that is about to be loaded has the convention `own`.

    Where it has not, the reason goes to `errors`. The entry stays where a buffer wants it.
    """
    key = prefix + GAIN_OFFSET
    stored = state.get(key)
    if not own:
        state.pop(key, None)
    elif stored is not None and not isinstance(stored, Tensor) and _as_number(stored) is not None:
        state[key] = torch.tensor(float(stored))
    found = _as_number(stored)
    if found == own or prefix + "weight" not in state:
        return True
    if found is None:
        errors.append(f"{key}: the offset of the gains is one number, got {stored!r}")
        return False
    errors.append(
        f"{prefix}weight: this {norm_name(module)} stores {_stored(own)}, the state dict {_stored(found)}; "
        f"read as it is, every gain would be off by {abs(found - own):g}. Add {found - own:g} to each such "
        f"weight and " + (f"set {prefix}{GAIN_OFFSET} to {own:g}" if own else f"leave out {GAIN_OFFSET}")
    )
    return False


def _as_number(stored: Any) -> float | None:
    if stored is None:
        return 0.0
    if isinstance(stored, Tensor):
        return float(stored) if stored.numel() == 1 else None
    return float(stored) if isinstance(stored, int | float) else None


def _stored(offset: float) -> str:
    return f"gains as their offset from {offset:g}" if offset else "the gains themselves"


def keep_apart(module: nn.Module, kind: str) -> None:
    """Mark the state dicts of a norm with the kind of its gains, and refuse those of another kind.

    Kinds are DECLARED, for layers whose `gain_offset` says everything, and else the norm's name.
    """
    setattr(module, _KIND, kind)
    module.register_state_dict_post_hook(_write_kind)
    module.register_load_state_dict_pre_hook(_check_kind)


def _write_kind(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    metadata[_KIND] = getattr(module, _KIND)
    metadata[_NAME] = norm_name(module)


def _check_kind(
    module: nn.Module,
    state: MutableMapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Refuse gains of another kind; a state dict without a mark is a plain dict, or older than the mark."""
    own = getattr(module, _KIND)
    if metadata.get(_KIND, own) == own:
        return
    errors.append(
        f"{prefix}weight: the state dict is of the norm {metadata.get(_NAME)}, this norm is "
        f"{norm_name(module)}, and a gain stored by one may mean something else to the other. If they mean "
        "the same, load dict(state_dict), which forgets where it is from"
    )
    for key in [key for key in state if key.startswith(prefix)]:
        del state[key]
