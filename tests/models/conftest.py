"""Small models of every kind, built the way the tasks build them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rmsrepro.config.schema import GRUConfig, ModelConfig, Placement, Site, TransformerConfig
from rmsrepro.models import build_model
from rmsrepro.norms import NormSpec

SRC_VOCAB, TGT_VOCAB, MAX_LEN = 13, 11, 12


class Factory:
    """`models.build(...)` and the ragged batch that the tests share."""

    src_vocab, tgt_vocab, max_len = SRC_VOCAB, TGT_VOCAB, MAX_LEN

    def build(
        self,
        kind: str,
        task: str,
        norm: str = "layernorm",
        *,
        placement: Placement = Placement.pre,
        sites: Sequence[Site] = tuple(Site),
        seed: int = 1,
        perturb: bool = True,
        max_len: int = MAX_LEN,
        vocab: int = TGT_VOCAB,
        **fields: Any,
    ) -> Any:
        """Build a tiny model; `perturb` moves all vectors (biases, gains) off their initial 0 and 1."""
        config: ModelConfig
        if kind == "transformer":
            sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 24, "dropout": 0.0}
            config = TransformerConfig(**{**sizes, **fields})
        else:
            sizes = {"d_model": 16, "d_embed": 12, "num_layers": 1, "dropout": 0.0}
            config = GRUConfig(**{**sizes, **fields})
        model = build_model(
            config,
            task,
            src_vocab=SRC_VOCAB,
            tgt_vocab=vocab,
            max_len=max_len,
            # With the default p, the RMS of these widths would be that of a single unit, and divide
            # by nearly nothing now and then: no test of the model could tell rounding from a fault.
            norm=NormSpec(norm, {"p": 0.5} if norm == "prmsnorm" else {}, backend="composite"),
            placement=placement,
            sites=sites,
            seed=seed,
        )
        if perturb:
            generator = torch.Generator().manual_seed(99)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() < 2:
                        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        return model

    def tokens(self, *shape: int, vocab: int = TGT_VOCAB, seed: int = 0) -> Tensor:
        """Draw tokens that are no padding."""
        return torch.randint(1, vocab, shape, generator=torch.Generator().manual_seed(seed))

    def ragged(self, lengths: Sequence[int], width: int | None = None) -> tuple[Tensor, Tensor]:
        """Draw sources of these lengths, padded with 0 to `width`; return them and their mask."""
        width = max(lengths) if width is None else width
        mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
        return self.tokens(len(lengths), width, vocab=SRC_VOCAB, seed=5).masked_fill(~mask, 0), mask


@pytest.fixture(scope="session")
def models() -> Factory:
    return Factory()
