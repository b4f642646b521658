"""Whether two models compute the same: their logits on the same random tokens, in float32 and in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rmsrepro.config.schema import TrainConfig
from rmsrepro.models.interface import LanguageModel, TranslationModel
from rmsrepro.tasks import Task

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest difference of two logits that counts as rounding, relative to the largest logit or to 1."""


class NotEqual(RuntimeError):
    """The converted model's outputs are not those of the source."""


@dataclass(frozen=True)
class Difference:
    """How far the logits of both models are apart on the same inputs."""

    largest: float
    """The largest absolute difference."""
    limit: float
    """What counts as rounding."""


@dataclass(frozen=True)
class Comparison:
    """What was found in both precisions."""

    float64: Difference
    """With the weights before they were rounded: a fault of the rewriting stands far above all rounding."""
    float32: Difference
    """With the weights as they are written."""
    logits: float
    """The largest absolute logit of the source."""
    rounding: float
    """How far the source's own logits in float32 are from those in float64."""


def compare(source: Task, made: Task, exact: Mapping[str, Tensor], config: TrainConfig) -> Comparison:
    """Compare the logits of two models; both are in float64 afterwards.

    Args:
        source: the original, in float32.
        made: the model that should be equal to it, in float32.
        exact: the weights of `made` in float64.
        config: of either; it says how long sequences are.

    Raises:
        NotEqual: they are further apart than rounding explains.
    """
    rough, rough_made = list(_logits(source.model, config)), list(_logits(made.model, config))
    source.double()
    made.double()
    made.model.load_state_dict(exact)
    fine, fine_made = list(_logits(source.model, config)), list(_logits(made.model, config))
    scale, rounding = _largest(fine), _largest(_apart(rough, fine))
    limits = {dtype: tolerance * max(1.0, scale) for dtype, tolerance in TOLERANCE.items()}
    # A model that rounding itself moves further cannot be met more closely.
    limits[torch.float32] = max(limits[torch.float32], 4 * rounding)
    found = Comparison(
        Difference(_largest(_apart(fine, fine_made)), limits[torch.float64]),
        Difference(_largest(_apart(rough, rough_made)), limits[torch.float32]),
        scale,
        rounding,
    )
    for name, one in (("float64", found.float64), ("float32", found.float32)):
        if not one.largest <= one.limit:
            raise NotEqual(
                f"in {name} the logits (up to {scale:.3g}) differ by up to {one.largest:.3g}, more than "
                f"rounding explains ({one.limit:.3g}); nothing was written"
            )
    return found


def _apart(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    return [one - other for one, other in zip(first, second, strict=True)]


def _largest(tensors: list[Tensor]) -> float:
    """The largest absolute value; NaN where there is one."""
    return float(torch.stack([one.abs().max().double() for one in tensors]).max())


def _logits(model: Any, config: TrainConfig) -> Iterator[Tensor]:
    """Yield the logits of whole sequences and of the first steps of decoding, for random tokens."""
    draw = torch.Generator().manual_seed(0)
    limit = model.position_limit or config.data.max_len
    # As many positions as the model has, unless the logits would take more than some 100 MB.
    written = _table(model, "embedding" if isinstance(model, LanguageModel) else "tgt_embedding")
    length = max(2, min(limit, 256, 2**22 // written.num_embeddings))

    def tokens(rows: int, size: int, table: torch.nn.Embedding) -> Tensor:
        return torch.randint(0, table.num_embeddings, (rows, size), generator=draw)

    with torch.no_grad():
        if isinstance(model, LanguageModel):
            text = tokens(3, length, written)
            yield model(text)
            state = None
            for position in range(min(length, 8)):
                logits, state = model.step(text[:, position], state)
                yield logits
            return
        assert isinstance(model, TranslationModel)
        # Lengths of all kinds; the last row is an empty sentence.
        lengths = torch.tensor([length, (length + 1) // 2, 1, 0])
        sources = tokens(4, length, _table(model, "src_embedding"))
        mask = torch.arange(length) < lengths.unsqueeze(1)
        target = tokens(4, length, written)
        yield model(sources, mask, target)
        state = model.start(sources, mask)
        for position in range(min(length, 8)):
            logits, state = model.step(target[:, position], state)
            yield logits


def _table(model: torch.nn.Module, embedding: str) -> torch.nn.Embedding:
    table = model.get_submodule(f"{embedding}.token_embedding")
    assert isinstance(table, torch.nn.Embedding)
    return table
