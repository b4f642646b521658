"""Translation batches: sentence pairs of like length, packed to a token budget."""

from __future__ import annotations

import hashlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import TranslationDataConfig
from rmsrepro.data.batches import TranslationBatch
from rmsrepro.data.corpus import Pair
from rmsrepro.data.fingerprint import check_task, data_fingerprint
from rmsrepro.data.loaders import BatchList, ResumableData, cache_folder, tokenizer_summary
from rmsrepro.data.parallel import load_parallel
from rmsrepro.data.rows import EncodedPairs, encode_pairs
from rmsrepro.data.sampler import EpochPlan, EpochSequence, pack, plan_epoch, update_of
from rmsrepro.data.tokenizers import TextTokenizer, train_tokenizer


class TranslationData(ResumableData[TranslationBatch]):
    """Sentence pairs; row numbers are those of the pairs that were kept.

    Lengths: a source is its tokens and EOS, a target BOS, its tokens and EOS; neither may exceed
    `max_len`. A training pair that does is dropped. In validation and test nothing is dropped: the source
    is cut for the model (EOS kept), the target is cut for the forced loss, and the reference text that
    translations are scored against stays whole. All of it is counted in `summary`.

    Training: each epoch has every pair once, see `rmsrepro.data.sampler.plan_epoch`.

    Raises:
        UserError: the source cannot be read, nothing is left to train on, or a batch cannot hold one
            sentence of `max_len`.
    """

    def __init__(
        self,
        config: TranslationDataConfig,
        *,
        seed: int,
        accumulate: int,
        cache_dir: Path,
        tokenizers: tuple[TextTokenizer, TextTokenizer] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(seed=seed, accumulate=accumulate)
        check_task(config, "translation")
        if config.max_len < 3:
            raise UserError(
                f"data.max_len={config.max_len}: a sentence has a begin mark, a token, an end mark"
            )
        if config.batch_tokens < config.max_len:
            raise UserError(
                f"data.batch_tokens={config.batch_tokens} is less than one sentence "
                f"(data.max_len={config.max_len})"
            )
        if config.batch_sentences is not None and config.batch_sentences < 1:
            raise UserError(f"data.batch_sentences={config.batch_sentences}: at least 1")
        self.config = config
        cache = cache_folder(config.cache_dir, cache_dir)
        self.fingerprint = fingerprint or data_fingerprint(config, "translation")
        corpus = load_parallel(config, cache)
        self._corpus = {"source": corpus.source, "notes": corpus.notes, "versions": corpus.versions}
        self.src_tokenizer, self.tgt_tokenizer = tokenizers or _vocabularies(
            config, corpus.splits["train"], cache
        )
        self.tokenizer = self.tgt_tokenizer
        self.texts: dict[str, list[Pair]] = {split: corpus.splits[split] for split in ("val", "test")}
        self._content = hashlib.sha256()
        self._splits: dict[str, dict[str, Any]] = {}
        self._encoded: dict[str, EncodedPairs] = {}
        for split in ("train", "val", "test"):
            self._splits[split] = {"pairs_read": corpus.num_read[split]}
            self._add(split, corpus.splits[split], corpus.num_blank[split])
        self._epochs = EpochSequence(self._plan)

    @property
    def val_texts(self) -> list[Pair]:
        """(source, reference) of every validation pair, in row order, never cut."""
        return self.texts["val"]

    @property
    def test_texts(self) -> list[Pair]:
        """(source, reference) of every test pair, in row order, never cut."""
        return self.texts["test"]

    def _add(self, split: str, pairs: list[Pair], num_blank: int) -> None:
        max_len, train = self.config.max_len, split == "train"
        encoded = encode_pairs(
            pairs, self.src_tokenizer, self.tgt_tokenizer, max_len=max_len, drop_long=train
        )
        if not len(encoded):
            raise UserError(
                f"data={self.config.name}: all {len(pairs)} training pairs are longer than "
                f"data.max_len={max_len} tokens; raise it, or use data.tokenizer=bpe"
            )
        sides = [[source for source, _ in pairs], [target for _, target in pairs]]
        for text in chain(*sides):
            self._content.update(text.encode("utf-8", "replace") + b"\0")
        self._content.update(b"\1")
        if len(encoded) < len(pairs):
            sides = [[side[row] for row in encoded.kept] for side in sides]
        self._encoded[split] = encoded
        self._splits[split] |= {
            "pairs": len(encoded),
            "dropped": {"blank": num_blank, "too_long": encoded.num_long if train else 0},
            "cut": 0 if train else encoded.num_long,
            "source_characters": sum(map(len, sides[0])),
            "target_characters": sum(map(len, sides[1])),
            "source_tokens": int(encoded.sources.lengths.sum()),
            "target_tokens": int(encoded.targets.lengths.sum()),
            "unknown_characters": {
                "source": self.src_tokenizer.num_unknown(sides[0]),
                "target": self.tgt_tokenizer.num_unknown(sides[1]),
            },
        }

    def _plan(self, epoch: int) -> EpochPlan:
        train = self._encoded["train"]
        return plan_epoch(
            train.sources.lengths,
            train.targets.lengths,
            seed=self.seed,
            epoch=epoch,
            budget=self.config.batch_tokens,
            max_rows=self.config.batch_sentences,
        )

    def batch_at(self, number: int) -> TranslationBatch:
        update = sum(self._epochs.target_tokens(n) for n in update_of(number, self.accumulate))
        return self._encoded["train"].batch(self._epochs.rows(number), update)

    def epochs(self, num_batches: int) -> float:
        return self._epochs.epochs(num_batches)

    def eval_batches(self, split: str) -> BatchList[TranslationBatch]:
        encoded = self._encoded[split]
        widths = encoded.widths
        order = np.argsort(widths, kind="stable")
        cuts = pack(widths[order], self.config.batch_tokens, self.config.batch_sentences)

        def batch_at(number: int) -> TranslationBatch:
            start, end = cuts[number]
            return encoded.batch(order[start:end])

        return BatchList(batch_at, len(cuts))

    def summary(self) -> dict[str, Any]:
        return {
            **self._corpus,
            "task": "translation",
            "languages": [self.config.source_lang, self.config.target_lang],
            "fingerprint": self.fingerprint,
            "content_hash": self._content.hexdigest()[:32],
            "tokenizer": tokenizer_summary([("source", self.src_tokenizer), ("target", self.tgt_tokenizer)]),
            "max_len": self.config.max_len,
            "length_rule": (
                "a source counts its end mark, a target its begin and end marks; longer training pairs are "
                "dropped, longer validation and test sentences are cut for the model and scored whole"
            ),
            "splits": self._splits,
        }


def _vocabularies(
    config: TranslationDataConfig, train: list[Pair], cache: Path
) -> tuple[TextTokenizer, TextTokenizer]:
    sides = [[source for source, _ in train], [target for _, target in train]]
    if config.shared_vocab:
        sides = [sides[0] + sides[1]]
    made = [
        train_tokenizer(config.tokenizer, side, vocab_size=config.vocab_size, cache_dir=cache)
        for side in sides
    ]
    return made[0], made[-1]
