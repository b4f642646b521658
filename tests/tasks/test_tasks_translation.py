from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import TranslationConfig
from rmsrepro.data.batches import pad_rows, source_row
from rmsrepro.tasks.search import greedy_search
from rmsrepro.tasks.translation import Translation, translate_texts
from tests.tasks.fakes import (
    FakeData,
    RandomTranslator,
    Words,
    lm_config,
    loader,
    text_batch,
    trainer,
    translation_config,
)

PAIRS = [("abc", "ca"), ("b", "abcab"), ("cc", "b")]


def _task(**changes: Any) -> Translation:
    return Translation(translation_config(**changes), RandomTranslator().float())


def _log_probs(task: Translation, source: str, target: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one pair alone: log p (T, V) in float64, and the targets (T,)."""
    batch = text_batch([(source, target)])
    logits = task.model(batch.src, batch.src_mask, batch.tgt_in)[0]
    return logits.detach().double().log_softmax(-1), batch.tgt_out[0]


def test_the_smoothed_loss_by_its_definition() -> None:
    task = _task()
    loss = task.training_step(text_batch(PAIRS), 0)
    total, tokens = 0.0, 0
    for source, target in PAIRS:
        log_probs, wanted = _log_probs(task, source, target)
        nll = -log_probs[torch.arange(len(wanted)), wanted]
        total += float((0.9 * nll - 0.1 * log_probs.mean(-1)).sum())
        tokens += len(target) + 1
    assert tokens == 11
    assert loss.item() == pytest.approx(total / tokens, rel=1e-5)
    # What is reported as the training loss is what is minimised.
    assert task.pop_training_metrics()["train_loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_validation_is_without_smoothing() -> None:
    val = [text_batch(PAIRS[:2]), text_batch(PAIRS[2:])]
    task = _task()
    trainer().validate(task, loader(val), verbose=False)
    nll, correct = 0.0, 0
    for source, target in PAIRS:
        log_probs, wanted = _log_probs(task, source, target)
        nll -= float(log_probs[torch.arange(len(wanted)), wanted].sum())
        correct += int((log_probs.argmax(-1) == wanted).sum())
    assert task.validation_metrics == {
        "val_loss": pytest.approx(nll / 11, rel=1e-5),
        "val_perplexity": pytest.approx(math.exp(nll / 11), rel=1e-5),
        "val_accuracy": pytest.approx(correct / 11),
    }


def test_texts_come_back_in_their_order_and_blank_ones_empty() -> None:
    task = _task()
    data = FakeData([], [], [], [])
    texts = ["abcabc", "", "a", "cc", "   ", "bca", "a"]
    found = translate_texts(task, data, texts, max_len=7)
    assert [text == "" for text in found] == [not text.strip() for text in texts]
    assert found[2] == found[6]
    for text, translation in zip(texts, found, strict=True):
        if text.strip():
            src, mask = pad_rows([source_row(Words().encode(text), 6)])
            with torch.inference_mode():
                (tokens,) = greedy_search(task.model, src, mask, max_len=6)
            assert translation == Words().decode(tokens)
    assert translate_texts(task, data, []) == []


def test_small_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    task = _task()
    data = FakeData([], [], [], [])
    texts = [text * times for times in (1, 2, 3) for text in ("a", "bc", "ab", "cba")]
    for beam_size in (1, 3):
        together = translate_texts(task, data, texts, beam_size=beam_size)
        for name, value in (("ROWS_TOGETHER", 4), ("TOKENS_TOGETHER", 9)):
            with monkeypatch.context() as patch:
                patch.setattr(f"rmsrepro.tasks.translation.{name}", value)
                assert translate_texts(task, data, texts, beam_size=beam_size) == together


def test_lengths_count_both_marks_and_fit_the_positions() -> None:
    task = _task()
    data = FakeData([], [], [], [])
    with torch.no_grad():
        task.model.out[:, 2] = 0
        task.model.out.mul_(10)
    texts = ["a", "b", "c", "ab", "bc"]
    assert max(map(len, translate_texts(task, data, texts, max_len=9))) == 8
    # data.max_len is 6 here.
    assert max(map(len, translate_texts(task, data, texts))) == 5
    task.model.position_limit = 6
    with pytest.raises(UserError, match="max_len=9: the model has positions for 7"):
        translate_texts(task, data, texts, max_len=9)
    with pytest.raises(UserError, match="beam_size=0"):
        translate_texts(task, data, texts, beam_size=0)


def test_final_scores_of_a_whole_and_of_a_limited_split() -> None:
    task = _task()
    sources = ["abc", "b", "cc", ""]
    perfect = translate_texts(task, FakeData([], [], [], []), sources[:3])
    # BLEU needs sentences of four words or more; here the texts are single words, so chrF it is.
    texts = [*zip(sources[:3], perfect, strict=True), ("", "abcabcabc")]
    data = FakeData([], [], texts[:3], texts)
    scores = task.final_scores(data, "val")
    assert set(scores) == {"val_bleu", "val_chrf", "val_bleu_signature", "val_chrf_signature"}
    assert scores["val_chrf"] == pytest.approx(100.0)
    assert "tok:13a" in scores["val_bleu_signature"]
    assert task.hypotheses["val"] == perfect

    # The blank source is not dropped: its reference lowers the score.
    assert task.final_scores(data, "test")["test_chrf"] < 100
    assert task.hypotheses["test"] == [*perfect, ""]

    limited = task.final_scores(data, "test", limit=3)
    assert limited["test_sentences"] == "3/4"
    assert limited["test_chrf"] == pytest.approx(100.0)
    task.task = TranslationConfig(score_sentences=2)
    assert task.final_scores(data, "test")["test_sentences"] == "2/4"


def test_what_cannot_be_scored_is_refused() -> None:
    task, data = _task(), FakeData([], [], [], [])
    with pytest.raises(UserError, match="unknown split"):
        task.final_scores(data, "train")
    with pytest.raises(UserError, match="limit=0"):
        task.final_scores(data, "val", limit=0)
    with pytest.raises(UserError, match="nothing to score"):
        task.final_scores(data, "val")
    with pytest.raises(TypeError, match="LMConfig"):
        Translation(lm_config(), RandomTranslator())
