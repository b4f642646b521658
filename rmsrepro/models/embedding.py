"""Tokens in, logits out: the two ends that every model has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsrepro.config.errors import UserError


class PositionedEmbedding(nn.Module):
    """Token vectors plus, where `max_len` is given, learned position vectors: (B, T) -> (B, T, dim).

    The sum is multiplied by sqrt(dim) (Vaswani et al. 2017, section 3.4): a tied table has to hold small
    numbers for its work as output projection, and without the factor the stream that enters the layers
    would be as small, which learns visibly slower with every norm.
    """

    def __init__(self, vocab: int, dim: int, *, max_len: int | None, dropout: float) -> None:
        super().__init__()
        self.max_len, self.scale = max_len, dim**0.5
        self.token_embedding = nn.Embedding(vocab, dim)
        self.position_embedding = None if max_len is None else nn.Embedding(max_len, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Embed tokens that stand at positions start, start + 1, ...

        Raises:
            UserError: the last of them lies beyond the position table.
        """
        x: Tensor = self.token_embedding(tokens)
        if self.position_embedding is not None:
            end = start + tokens.shape[1]
            if self.max_len is not None and end > self.max_len:
                raise UserError(
                    f"a sequence of {end} tokens does not fit the position table, which has "
                    f"{self.max_len} positions (data.max_len when the model was made): cut the sequence, "
                    "or train with a larger data.max_len or with model.positions=rotary"
                )
            x = x + self.position_embedding.weight[start:end]
        dropped: Tensor = self.dropout(x * self.scale)
        return dropped


class OutputProjection(nn.Module):
    """Logits over the vocabulary: (..., dim) -> (..., vocab), with a bias where `bias` says so.

    Tied (Press & Wolf 2017), the matrix is the embedding's; a hidden state of another width `dim` is
    first mapped to the embedding's width.
    """

    def __init__(self, dim: int, embedding: nn.Embedding, *, tied: bool, bias: bool = False) -> None:
        super().__init__()
        vocab, width = embedding.weight.shape
        self.tied = tied
        self.resize = nn.Linear(dim, width, bias=False) if tied and dim != width else None
        if not tied:
            self.vocabulary = nn.Linear(dim, vocab, bias=False)
        # Beside the matrix and not in it: a tied matrix belongs to the embedding, which has no bias.
        self.bias = nn.Parameter(torch.zeros(vocab)) if bias else None

    def forward(self, hidden: Tensor, embedding: nn.Embedding) -> Tensor:
        """Return the logits; `embedding` is the one given at construction (it is not owned twice)."""
        if not self.tied:
            logits: Tensor = self.vocabulary(hidden)
            return logits if self.bias is None else logits + self.bias
        if self.resize is not None:
            hidden = self.resize(hidden)
        return F.linear(hidden, embedding.weight, self.bias)
