"""One seed, three streams: initial weights, data order, dropout.

The streams are separate, so that a model with more or fewer random draws in one of them (another norm,
another dropout rate) leaves the others alone: all norms of a seed start from the same shared weights and
see the same batches.
"""

from __future__ import annotations

import hashlib

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

    Args:
        rank: number of the process, where several train a run together: each draws masks of its own.
    """
    own = stream_seed(seed, "dropout")
    torch.manual_seed(stream_seed(own + rank, "dropout") if rank else own)


def rng_state() -> dict[str, object]:
    """Return the state of torch's global generators in types that torch.load takes by default."""
    state: dict[str, object] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, object]) -> None:
    """Restore what `rng_state` returned (CUDA's part only where there are as many devices)."""
    cpu = state["cpu"]
    assert isinstance(cpu, torch.Tensor)
    torch.set_rng_state(cpu)
    cuda = state.get("cuda")
    if isinstance(cuda, list) and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
