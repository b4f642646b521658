"""Next-token prediction."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from rmsrepro.config.schema import TrainConfig
from rmsrepro.models.interface import LanguageModel
from rmsrepro.tasks.base import Task
from rmsrepro.tasks.metrics import bits_per_byte, perplexity


class LanguageModelData(Protocol):
    """The part of a data module that the task needs beyond its loaders."""

    def bytes_per_token(self, split: str) -> float:
        """Mean UTF-8 bytes of a target token of the split."""


class LanguageModelling(Task):
    """Cross-entropy of the next token: nats a token, perplexity, bits a byte."""

    def __init__(self, config: TrainConfig, model: LanguageModel[Any], data: LanguageModelData) -> None:
        super().__init__(config, model)
        self.model: LanguageModel[Any]
        self._bytes_per_token = data.bytes_per_token

    def logits_and_targets(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.model(batch.inputs), batch.targets

    def split_metrics(self, split: str, sums: dict[str, float]) -> dict[str, float]:
        """`_loss` in nats a token, `_perplexity`, and `_bits_per_byte`, which compares tokenizers."""
        loss = sums["loss"]
        return {
            f"{split}_loss": loss,
            f"{split}_perplexity": perplexity(loss),
            f"{split}_bits_per_byte": bits_per_byte(loss, self._bytes_per_token(split)),
        }
