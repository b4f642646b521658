from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import OptimConfig, TrainerConfig
from rmsrepro.tasks.base import evaluate
from rmsrepro.tasks.language_modelling import LanguageModelling
from rmsrepro.tasks.metrics import TokenMeter, bits_per_byte, perplexity
from tests.tasks.fakes import Bigram, FakeData, lm_batch, lm_config, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")

LONG, SHORT = [4, 5, 6, 4, 4, 6, 5], [6, 5, 4]


def _task(val: list[Any] | None = None, **changes: Any) -> LanguageModelling:
    data = FakeData(val or [], [], [], [])
    return LanguageModelling(lm_config(**changes), Bigram(), data)


def _nll(model: Bigram, row: list[int]) -> float:
    """Sum over the row's tokens but the first, in float64."""
    logits = model.table.detach().double()[torch.tensor(row[:-1])]
    return float(F.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum"))


def test_a_step_returns_the_mean_over_tokens_and_padding_does_not_count() -> None:
    task = _task()
    loss = task.training_step(lm_batch([LONG, SHORT]), 0)
    expected = (_nll(task.model, LONG) + _nll(task.model, SHORT)) / 8
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert loss.requires_grad
    assert task.last_loss is not None
    assert task.last_loss.item() == pytest.approx(expected, rel=1e-6)
    assert not task.last_loss.requires_grad


def test_accumulated_batches_follow_the_gradient_of_the_joined_batch() -> None:
    """Unequal batches: 6 and 2 target tokens. A mean of batch means would weigh the short one thrice."""
    joined = _task(optim=OptimConfig(clip_norm=None))
    trainer(max_steps=1).fit(joined, loader([lm_batch([LONG, SHORT])]))
    split = _task(optim=OptimConfig(clip_norm=None), trainer=TrainerConfig(accumulate=2))
    batches = [lm_batch([LONG], update_tokens=8), lm_batch([SHORT], update_tokens=8)]
    trainer(max_steps=1, accumulate_grad_batches=2).fit(split, loader(batches))
    torch.testing.assert_close(split.model.table.grad, joined.model.table.grad, rtol=1e-6, atol=1e-8)
    first, second = joined.pop_training_metrics(), split.pop_training_metrics()
    assert second == {name: pytest.approx(value, rel=1e-6) for name, value in first.items()}
    torch.testing.assert_close(split.model.table, joined.model.table, rtol=1e-5, atol=1e-6)


def test_training_metrics_are_token_weighted_and_popped() -> None:
    task = _task()
    assert task.pop_training_metrics() == {}
    assert task.last_loss is None
    task.training_step(lm_batch([LONG]), 0)
    task.training_step(lm_batch([SHORT]), 1)
    expected = (_nll(task.model, LONG) + _nll(task.model, SHORT)) / 8
    assert task.pop_training_metrics() == {"train_loss": pytest.approx(expected, rel=1e-6)}
    assert task.pop_training_metrics() == {}
    # Where training stands is still known.
    assert task.last_loss.item() == pytest.approx(_nll(task.model, SHORT) / 2, rel=1e-6)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("clip", [1e-3, None])
def test_the_gradient_norm_is_that_before_clipping(clip: float | None, precision: Any) -> None:
    optim = OptimConfig(lr=0.5, warmup_steps=4, clip_norm=clip)
    task = _task(optim=optim)
    twin = Bigram()
    batch = lm_batch([LONG, SHORT])
    F.cross_entropy(twin(batch.inputs).flatten(0, 1), batch.targets.flatten()).backward()
    trainer(max_steps=1, precision=precision).fit(task, loader([batch]))
    metrics = task.pop_training_metrics()
    assert metrics["grad_norm"] == pytest.approx(float(twin.table.grad.norm()), rel=1e-5)
    assert metrics["lr"] == pytest.approx(0.5 / 4)
    if clip is not None:
        assert float(task.model.table.grad.norm()) == pytest.approx(clip, rel=1e-2)


@pytest.mark.parametrize("clip", [1.0, None])
def test_infinite_gradients_do_not_become_nan_unseen(clip: float | None) -> None:
    task = _task(optim=OptimConfig(clip_norm=clip))
    optimizer = task.configure_optimizers()["optimizer"]
    task.model.table.grad = torch.full_like(task.model.table, torch.inf)
    task.configure_gradient_clipping(optimizer)
    task.training_step(lm_batch([SHORT]), 0)
    assert not math.isfinite(task.pop_training_metrics()["grad_norm"])


def test_validation_weighs_by_tokens_and_counts_bytes() -> None:
    val = [lm_batch([LONG]), lm_batch([SHORT])]
    task = _task(val)
    trainer().validate(task, loader(val), verbose=False)
    loss = (_nll(task.model, LONG) + _nll(task.model, SHORT)) / 8
    assert task.validation_metrics == {
        "val_loss": pytest.approx(loss, rel=1e-6),
        "val_perplexity": pytest.approx(math.exp(loss), rel=1e-6),
        # Two bytes a token.
        "val_bits_per_byte": pytest.approx(loss / math.log(2) / 2, rel=1e-6),
    }
    # A second validation starts from nothing.
    first = task.validation_metrics
    trainer().validate(task, loader(val), verbose=False)
    assert task.validation_metrics == first


def test_plain_evaluation_agrees_with_the_validation_loop() -> None:
    val = [lm_batch([LONG]), lm_batch([SHORT])]
    task = _task(val)
    trainer().validate(task, loader(val), verbose=False)
    data = FakeData(val, [lm_batch([SHORT])], [], [])
    task.train()
    assert evaluate(task, data, "val") == task.validation_metrics
    assert evaluate(task, data, "test", "cpu") == {
        "test_loss": pytest.approx(_nll(task.model, SHORT) / 2, rel=1e-6),
        "test_perplexity": pytest.approx(math.exp(_nll(task.model, SHORT) / 2), rel=1e-6),
        "test_bits_per_byte": pytest.approx(_nll(task.model, SHORT) / 2 / math.log(2) / 4, rel=1e-6),
    }
    assert task.training
    with pytest.raises(UserError, match=r"unknown split 'tets'.*did you mean test"):
        evaluate(task, data, "tets")


def test_a_hopeless_model_has_infinite_perplexity_and_no_error() -> None:
    assert perplexity(1000.0) == math.inf
    assert perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))
    task = _task()
    with torch.no_grad():
        task.model.table.copy_(torch.eye(7) * 1e4)
    metrics = evaluate(task, FakeData([lm_batch([SHORT])], [], [], []), "val")
    assert metrics["val_loss"] == pytest.approx(1e4)
    assert metrics["val_perplexity"] == math.inf


def test_bits_per_byte_by_hand() -> None:
    # A byte model that is uniform over 256 bytes needs 8 bits for each.
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8.0)
    assert bits_per_byte(math.log(256), 4.0) == pytest.approx(2.0)


def test_a_meter_without_tokens_has_no_loss() -> None:
    meter = TokenMeter()
    meter.update(torch.zeros(1, 2, 3), torch.full((1, 2), -100))
    assert math.isnan(meter.compute()["loss"])


def test_a_long_split_loses_no_precision() -> None:
    meter = TokenMeter()
    logits, targets = torch.zeros(1, 64, 5), torch.zeros(1, 64, dtype=torch.long)
    for _ in range(500):
        meter.update(logits, targets)
    assert meter.compute()["loss"] == pytest.approx(math.log(5), rel=1e-7)
    assert meter.compute()["tokens"] == 32000


def test_metrics_leave_no_trace_in_the_weights() -> None:
    assert set(_task().state_dict()) == {"model.table"}
