"""Small stand-ins for models and data, so that a task's own arithmetic is what a test sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from rmsrepro.config.schema import (
    DataConfig,
    LMConfig,
    OptimConfig,
    TrainConfig,
    TrainerConfig,
    TranslationConfig,
)
from rmsrepro.data.batches import (
    IGNORE,
    LMBatch,
    TranslationBatch,
    pad_rows,
    source_row,
    target_row,
    translation_batch,
)
from rmsrepro.data.loaders import BatchList

VOCAB = 7
"""The four marks and three words."""


class Bigram(nn.Module):
    """Logits of the next token from the last one alone, as a table."""

    position_limit: int | None = None

    def __init__(self, vocab: int = VOCAB, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(vocab, vocab, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.table[tokens], (state or 0) + 1


@dataclass
class Rows:
    """A state that is one tensor with a row a hypothesis."""

    hidden: Tensor

    def select(self, index: Tensor) -> Rows:
        return Rows(self.hidden[index])


class RandomTranslator(nn.Module):
    """A random recurrent model whose distributions depend on the source and on all tokens so far."""

    position_limit: int | None = None

    def __init__(self, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(vocab, 16, generator=generator, dtype=torch.float64))
        self.recur = nn.Parameter(torch.randn(16, 16, generator=generator, dtype=torch.float64) / 4)
        self.out = nn.Parameter(torch.randn(16, vocab, generator=generator, dtype=torch.float64) * scale / 4)

    def start(self, src: Tensor, src_mask: Tensor) -> Rows:
        return Rows((self.embed[src] * src_mask[:, :, None]).sum(1))

    def step(self, tokens: Tensor, state: Rows) -> tuple[Tensor, Rows]:
        hidden = torch.tanh(state.hidden @ self.recur + self.embed[tokens])
        return hidden @ self.out, Rows(hidden)

    def forward(self, src: Tensor, src_mask: Tensor, tgt_in: Tensor) -> Tensor:
        state, logits = self.start(src, src_mask), []
        for tokens in tgt_in.unbind(1):
            step_logits, state = self.step(tokens, state)
            logits.append(step_logits)
        return torch.stack(logits, 1)


class Words:
    """A tokenizer of one lower-case letter a token: a is 4, b is 5, ..."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self.vocab = vocab

    def encode(self, text: str) -> list[int]:
        tokens = [ord(letter) - ord("a") + 4 for letter in text]
        return [token if 4 <= token < self.vocab else 3 for token in tokens]

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token - 4 + ord("a")) for token in tokens if token >= 4)


@dataclass
class FakeData:
    val: list[Any]
    test: list[Any]
    val_texts: list[tuple[str, str]]
    test_texts: list[tuple[str, str]]
    src_vocab: int = VOCAB
    tgt_vocab: int = VOCAB

    def __post_init__(self) -> None:
        self.src_tokenizer = self.tgt_tokenizer = self.tokenizer = Words(self.tgt_vocab)

    def val_dataloader(self) -> list[Any]:
        return self.val

    def test_dataloader(self) -> list[Any]:
        return self.test

    def bytes_per_token(self, split: str) -> float:
        return {"val": 2.0, "test": 4.0}[split]


def lm_config(**changes: Any) -> TrainConfig:
    config = TrainConfig(
        norm={"name": "rmsnorm"},
        task=LMConfig(),
        data=DataConfig(max_len=6),
        optim=OptimConfig(warmup_steps=0),
        trainer=TrainerConfig(max_steps=4),
    )
    return replace(config, **changes)


def translation_config(**changes: Any) -> TrainConfig:
    return replace(lm_config(task=TranslationConfig(label_smoothing=0.1)), **changes)


def lm_batch(rows: list[list[int]], update_tokens: int | None = None) -> LMBatch:
    """Windows of different lengths, padded; each predicts all its tokens but the first."""
    inputs, _ = pad_rows([row[:-1] for row in rows])
    targets, _ = pad_rows([row[1:] for row in rows], fill=IGNORE)
    count = int((targets != IGNORE).sum())
    return LMBatch(inputs, targets, count if update_tokens is None else update_tokens)


def text_batch(pairs: list[tuple[str, str]]) -> TranslationBatch:
    words = Words()
    return translation_batch(
        [source_row(words.encode(source), 99) for source, _ in pairs],
        [target_row(words.encode(target), 99) for _, target in pairs],
        index=range(len(pairs)),
    )


def loader(batches: list[Any]) -> BatchList[Any]:
    """Ready-made batches as Lightning wants them (a plain list would be a list of loaders)."""
    return BatchList(batches.__getitem__, len(batches))


def trainer(**options: Any) -> L.Trainer:
    """A Trainer that writes nothing."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return L.Trainer(**{**quiet, **options})
