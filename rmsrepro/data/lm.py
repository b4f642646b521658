"""Language-model batches: random windows to train, the whole split in order to evaluate."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import DataConfig
from rmsrepro.data.batches import IGNORE, LMBatch
from rmsrepro.data.fingerprint import check_task, data_fingerprint
from rmsrepro.data.loaders import BatchList, ResumableData, cache_folder, tokenizer_summary
from rmsrepro.data.sampler import window_starts
from rmsrepro.data.text import load_text
from rmsrepro.data.tokenizers import PAD, IntArray, TextTokenizer, train_tokenizer


class LMData(ResumableData[LMBatch]):
    """A text cut into windows of `max_len` tokens.

    Training: batch i has `batch_tokens // max_len` windows at random places of the training split.
    Validation and test: non-overlapping windows in order, so that every token but the very first is
    predicted exactly once; the last window is shorter (IGNORE after its end).

    Raises:
        UserError: the source cannot be read, a split is too short, or a batch cannot hold one window.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int,
        accumulate: int,
        cache_dir: Path,
        tokenizers: tuple[TextTokenizer, TextTokenizer] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(seed=seed, accumulate=accumulate)
        check_task(config, "lm")
        if config.max_len < 1:
            raise UserError(f"data.max_len={config.max_len}: a window has at least 1 token")
        if config.batch_tokens < config.max_len:
            raise UserError(
                f"data.batch_tokens={config.batch_tokens} is less than one window "
                f"(data.max_len={config.max_len})"
            )
        self.config = config
        self.rows = config.batch_tokens // config.max_len
        cache = cache_folder(config.cache_dir, cache_dir)
        self.fingerprint = fingerprint or data_fingerprint(config, "lm")
        corpus = load_text(config, cache)
        self.tokenizer = self.src_tokenizer = self.tgt_tokenizer = (
            tokenizers[1]
            if tokenizers
            else train_tokenizer(
                config.tokenizer, [corpus.splits["train"]], vocab_size=config.vocab_size, cache_dir=cache
            )
        )
        self.tokens: dict[str, IntArray] = {}
        self._bytes_per_token: dict[str, float] = {}
        self._window = np.arange(config.max_len + 1)
        self._content = hashlib.sha256()
        self._splits: dict[str, dict[str, Any]] = {}
        self._corpus = {"source": corpus.source, "notes": corpus.notes, "versions": corpus.versions}
        for split in ("train", "val", "test"):
            self._add(split, corpus.splits[split])

    def _add(self, split: str, text: str) -> None:
        tokens = self.tokenizer.encode_array(text)
        needed = self.config.max_len + 1 if split == "train" else 2
        if len(tokens) < needed:
            why = f" for one window (data.max_len={self.config.max_len})" if split == "train" else ""
            raise UserError(
                f"data={self.config.name}: the {split} split has {len(tokens)} tokens, "
                f"but at least {needed} are needed{why}"
            )
        raw = text.encode("utf-8")
        self._content.update(f"{split}\0{len(raw)}\0".encode() + raw)
        self.tokens[split] = tokens
        self._bytes_per_token[split] = (len(raw) - self.tokenizer.num_leading_bytes(text)) / (len(tokens) - 1)
        self._splits[split] = {
            "characters": len(text),
            "bytes": len(raw),
            "tokens": len(tokens),
            "predicted_tokens": len(tokens) - 1,
            "bytes_per_token": self._bytes_per_token[split],
            "dropped": {},
            "cut": 0,
            "unknown_characters": self.tokenizer.num_unknown([text]),
        }

    def bytes_per_token(self, split: str) -> float:
        """Mean UTF-8 bytes of a predicted token of a split, to turn nats a token into bits a byte."""
        return self._bytes_per_token[split]

    def batch_at(self, number: int) -> LMBatch:
        tokens, length = self.tokens["train"], self.config.max_len
        starts = window_starts(self.seed, number, self.rows, len(tokens) - length)
        windows = torch.from_numpy(tokens[starts[:, None] + self._window].astype(np.int64))
        size = self.rows * length
        return LMBatch(
            windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), size * self.accumulate, num_tokens=size
        )

    def epochs(self, num_batches: int) -> float:
        return num_batches * self.rows * self.config.max_len / (len(self.tokens["train"]) - 1)

    def eval_batches(self, split: str) -> BatchList[LMBatch]:
        tokens, length = self.tokens[split], self.config.max_len
        stride = self.rows * length
        predicted = len(tokens) - 1

        def batch_at(number: int) -> LMBatch:
            begin = number * stride
            size = min(stride, predicted - begin)
            rows = -(-size // length)
            inputs = np.full(rows * length, PAD, dtype=np.int64)
            targets = np.full(rows * length, IGNORE, dtype=np.int64)
            inputs[:size] = tokens[begin : begin + size]
            targets[:size] = tokens[begin + 1 : begin + 1 + size]
            return LMBatch(
                torch.from_numpy(inputs.reshape(rows, length)),
                torch.from_numpy(targets.reshape(rows, length)),
                size,
                num_tokens=size,
            )

        return BatchList(batch_at, -(-predicted // stride))

    def summary(self) -> dict[str, Any]:
        return {
            **self._corpus,
            "task": "lm",
            "fingerprint": self.fingerprint,
            "content_hash": self._content.hexdigest()[:32],
            "tokenizer": tokenizer_summary([("text", self.tokenizer)]),
            "max_len": self.config.max_len,
            "windows_per_batch": self.rows,
            "splits": self._splits,
        }
