"""One seed, three streams: initial weights, data order, dropout.

The streams are separate, so that a model with more or fewer random draws in one of them (another norm,
another dropout rate) leaves the others alone: all norms of a seed start from the same shared weights and
see the same batches.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, cast

import numpy as np
import torch

STREAMS = ("init", "data", "dropout")


def stream_seed(seed: int, stream: str) -> int:
    """Return the 63-bit seed of one of the `STREAMS` of a run's `seed`."""
    if stream not in STREAMS:
        raise ValueError(f"no stream {stream!r}; there are {', '.join(STREAMS)}")
    digest = hashlib.sha256(f"{stream}:{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_dropout(seed: int, rank: int = 0) -> None:
    """Seed torch's global generators, from which dropout draws; nothing else in a run uses them.

    Those of Python and NumPy are seeded with them, for a norm of the user's that draws from them.

    Args:
        rank: number of the process, where several train a run together: each draws masks of its own.
    """
    number = stream_seed(seed, "dropout")
    if rank:
        number = stream_seed(number + rank, "dropout")
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def rng_state() -> dict[str, object]:
    """Return the state of all global generators in types that torch.load takes by default."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state()
    state: dict[str, object] = {
        "cpu": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys, np.int64)), int(place), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, object]) -> None:
    """Restore what `rng_state` returned (CUDA's part only where there are as many devices)."""
    cpu = state["cpu"]
    assert isinstance(cpu, torch.Tensor)
    torch.set_rng_state(cpu)
    if "python" in state:  # not in the checkpoints of older versions
        version, words, gauss = cast(list[Any], state["python"])
        random.setstate((version, tuple(words), gauss))
        keys, place, has_gauss, cached = cast(list[Any], state["numpy"])
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), place, has_gauss, cached))
    cuda = state.get("cuda")
    if isinstance(cuda, list) and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
