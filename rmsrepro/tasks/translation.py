"""Sequence-to-sequence translation: teacher forcing in training, search and BLEU at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import TrainConfig, TranslationConfig
from rmsrepro.data.batches import pad_rows, source_row
from rmsrepro.data.tokenizers import TextTokenizer
from rmsrepro.models.interface import TranslationModel
from rmsrepro.tasks.base import Task, check_split
from rmsrepro.tasks.metrics import perplexity
from rmsrepro.tasks.scoring import corpus_scores
from rmsrepro.tasks.search import beam_search, greedy_search

ROWS_TOGETHER = 128
"""Most hypotheses that are searched for at the same time."""
TOKENS_TOGETHER = 8192
"""Most source tokens that are searched for at the same time, each beam counted."""


class Tokenizers(Protocol):
    """The part of a data module, or of a trained model, that translating needs."""

    @property
    def src_tokenizer(self) -> TextTokenizer: ...
    @property
    def tgt_tokenizer(self) -> TextTokenizer: ...


class TranslationData(Tokenizers, Protocol):
    """The part of a data module that scoring needs."""

    @property
    def val_texts(self) -> Sequence[tuple[str, str]]: ...
    @property
    def test_texts(self) -> Sequence[tuple[str, str]]: ...


class Translation(Task):
    """Cross-entropy of the target sentence given the source, with label smoothing.

    Training minimises (1 - e) * nll + e * (mean over the whole vocabulary of -log p) per target token
    (Szegedy et al. 2016, section 7; Vaswani et al. 2017, section 5.4), e = task.label_smoothing.
    Padded positions have no loss; padding, begin and unknown mark are classes like any other, so the even
    share covers them too. `train_loss` is that loss; validation and test report plain nll.
    """

    def __init__(self, config: TrainConfig, model: TranslationModel[Any]) -> None:
        super().__init__(config, model)
        self.model: TranslationModel[Any]
        if not isinstance(config.task, TranslationConfig):
            raise TypeError(f"expected a TranslationConfig as task, got {type(config.task).__name__}")
        self.task = config.task
        self.label_smoothing = config.task.label_smoothing

    def logits_and_targets(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.model(batch.src, batch.src_mask, batch.tgt_in), batch.tgt_out

    def split_metrics(self, split: str, sums: dict[str, float]) -> dict[str, float]:
        """`_loss` in nats a token without smoothing, `_perplexity`, and `_accuracy` of forced tokens."""
        return {
            f"{split}_loss": sums["loss"],
            f"{split}_perplexity": perplexity(sums["loss"]),
            f"{split}_accuracy": sums["accuracy"],
        }

    def final_scores(
        self, data: TranslationData, split: str, *, limit: int | None = None
    ) -> dict[str, float | str]:
        """Translate a split and score it on plain text.

        Keys: `{split}_bleu` and `{split}_chrf` (numbers), `{split}_bleu_signature` and
        `{split}_chrf_signature` (texts), and, where not the whole split was scored, `{split}_sentences`
        (a text, "n/N"). At most `limit` sentences are used, or task.score_sentences when not given. The
        translations stay in `self.hypotheses[split]`.

        Raises:
            UserError: an unknown or empty split, or a limit below 1.
        """
        check_split(split)
        pairs = data.val_texts if split == "val" else data.test_texts
        limit = self.task.score_sentences if limit is None else limit
        if limit is not None and limit < 1:
            raise UserError(f"limit={limit}: expected at least one sentence to score")
        chosen = pairs[:limit]
        hypotheses = translate_texts(self, data, [source for source, _ in chosen])
        self.hypotheses[split] = hypotheses
        scores = corpus_scores(hypotheses, [reference for _, reference in chosen])
        named: dict[str, float | str] = {
            f"{split}_bleu": scores["bleu"],
            f"{split}_chrf": scores["chrf"],
            f"{split}_bleu_signature": scores["bleu_signature"],
            f"{split}_chrf_signature": scores["chrf_signature"],
        }
        if len(chosen) < len(pairs):
            named[f"{split}_sentences"] = f"{len(chosen)}/{len(pairs)}"
        return named


def translate_texts(
    module: Translation,
    data: Tokenizers,
    texts: Sequence[str],
    *,
    beam_size: int | None = None,
    length_penalty: float | None = None,
    max_len: int | None = None,
) -> list[str]:
    """Translate plain texts; line i of the result translates text i.

    Sentences of like length are searched for together, on the module's device and in its precision. A
    blank text is translated by an empty one; a source longer than data.max_len is cut as in training.
    What is left None comes from the task's configuration; `max_len` counts begin and end mark, as
    data.max_len does.

    Raises:
        UserError: a beam below 1, or a `max_len` that the model's position table does not hold.
    """
    task = module.task
    width = task.beam_size if beam_size is None else beam_size
    penalty = task.length_penalty if length_penalty is None else length_penalty
    if width < 1:
        raise UserError(f"beam_size={width}: expected 1 (greedy search) or more")
    source_len = module.config.data.max_len
    # The begin mark is read, not written.
    steps = max(1, (max_len or task.max_decode_len or source_len) - 1)
    limit = module.model.position_limit
    if limit is not None and steps > limit:
        raise UserError(f"max_len={max_len}: the model has positions for {limit + 1} at most, marks included")
    written = [number for number, text in enumerate(texts) if text.strip()]
    encoded = data.src_tokenizer.encode_many([texts[number] for number in written])
    sources = {
        number: source_row(tokens, source_len) for number, tokens in zip(written, encoded, strict=True)
    }
    translations = [""] * len(texts)
    with module.evaluating():
        for numbers in _alike(sources, width):
            src, src_mask = (
                part.to(module.device) for part in pad_rows([sources[number] for number in numbers])
            )
            if width == 1:
                found = greedy_search(module.model, src, src_mask, max_len=steps)
            else:
                found = beam_search(
                    module.model, src, src_mask, max_len=steps, beam_size=width, length_penalty=penalty
                )
            for number, tokens in zip(numbers, found, strict=True):
                translations[number] = data.tgt_tokenizer.decode(tokens)
    return translations


def _alike(sources: dict[int, list[int]], width: int) -> Iterator[list[int]]:
    """Yield the keys of `sources` in batches of like length, longest first."""
    batch: list[int] = []
    for number in sorted(sources, key=lambda number: len(sources[number]), reverse=True):
        if batch:
            # The first one is the longest.
            rows = (len(batch) + 1) * width
            if rows > ROWS_TOGETHER or rows * len(sources[batch[0]]) > TOKENS_TOGETHER:
                yield batch
                batch = []
        batch.append(number)
    if batch:
        yield batch
