"""What the tasks may ask of a model: two abstract classes, one a task.

B is the batch, T and S the lengths of target and source in tokens, V the target vocabulary. Token ids
are int64. A model returns raw logits: no softmax, no temperature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from rmsrepro.models.normalisation import KnowsItsNorm


class DecodingState(Protocol):
    """What a model remembers between two calls of `step`. `step` never changes a state it was given."""

    def select(self, index: Tensor) -> Self:
        """Return the state whose row i is row `index[i]` of this one.

        `index` is (N,) int64 on the model's device; rows may be reordered, repeated and left out.
        """


State = TypeVar("State", bound=DecodingState)


class LanguageModel(KnowsItsNorm, ABC, Generic[State]):
    """Predicts each token from those before it."""

    position_limit: int | None = None
    """The most tokens that one sequence may have; None: no limit."""
    pad_id: int = 0
    bos_id: int = 1
    """Ids of the padding token and of the token that a sequence begins with."""

    @abstractmethod
    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to the logits (B, T, V) of the token after each."""

    @abstractmethod
    def step(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Read one token a row, (B,), after `state` (None: at the start); return logits (B, V) and state."""


class TranslationModel(KnowsItsNorm, ABC, Generic[State]):
    """Predicts each target token from the source sentence and the target tokens before it.

    `src_mask` is True where the source has a token. Padding stands on the right and never changes the
    result of a row; a row without any token is an empty sentence.
    """

    position_limit: int | None = None
    """The most tokens that a source or a target sentence may have; None: no limit."""
    pad_id: int = 0
    bos_id: int = 1
    """Ids of the padding token and of the token that a sequence begins with."""

    @abstractmethod
    def forward(self, src: Tensor, src_mask: Tensor, tgt_in: Tensor) -> Tensor:
        """Map src (B, S), src_mask (B, S) bool and tgt_in (B, T) to the next tokens' logits (B, T, V)."""

    @abstractmethod
    def start(self, src: Tensor, src_mask: Tensor) -> State:
        """Read the source, (B, S) and its mask; return the state before the first target token."""

    @abstractmethod
    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one target token a row, (B,), after `state`; return logits (B, V) and the next state."""
