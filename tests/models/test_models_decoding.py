"""Padding, empty sentences and step-by-step decoding, for every model alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import FeedForward, Placement, Positions, StartState

TRANSFORMERS: list[dict[str, Any]] = [
    {"kind": "transformer", "placement": placement} for placement in Placement
] + [
    {"kind": "transformer", "positions": Positions.rotary, "ffn": FeedForward.swiglu, "bias": False},
    {"kind": "transformer", "norm": "none", "tie_embeddings": False},
    {"kind": "transformer", "norm": "rmsnorm", "qk_norm": True, "positions": Positions.rotary},
    {"kind": "transformer", "norm": "weightnorm"},
]
GRUS: list[dict[str, Any]] = [
    {"kind": "gru", "norm": norm} for norm in ("none", "layernorm", "rmsnorm", "prmsnorm", "l2norm")
] + [
    {"kind": "gru", "num_layers": 2, "tie_embeddings": False},
    {"kind": "gru", "norm": "rmsnorm", "start_state": StartState.last},
    {"kind": "gru", "norm": "weightnorm"},
]


def name(setting: dict[str, Any]) -> str:
    return "-".join(str(getattr(value, "value", value)) for value in setting.values())


every_model = pytest.mark.parametrize("setting", TRANSFORMERS + GRUS, ids=name)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@every_model
def test_language_model_steps_equal_the_whole(models: Any, setting: dict[str, Any]) -> None:
    model = models.build(task="lm", **setting)
    tokens = models.tokens(3, 9)
    whole = model(tokens)
    assert whole.shape == (3, 9, models.tgt_vocab)
    assert whole.is_contiguous()
    state = None
    for position in range(9):
        logits, state = model.step(tokens[:, position], state)
        close(logits, whole[:, position])


@every_model
def test_language_model_sees_no_future_and_no_padding(models: Any, setting: dict[str, Any]) -> None:
    model = models.build(task="lm", **setting)
    tokens = models.tokens(2, 8)
    other = tokens.clone()
    other[:, 5:] = 0
    close(model(other)[:, :5], model(tokens)[:, :5])
    close(model(tokens[1:, :5]), model(tokens)[1:, :5])
    assert not torch.allclose(model(other)[:, 5:], model(tokens)[:, 5:])


@every_model
def test_a_sentence_alone_equals_the_same_in_a_batch(models: Any, setting: dict[str, Any]) -> None:
    model = models.build(task="translation", **setting)
    lengths = [7, 3, 1, 5]
    source, mask = models.ragged(lengths, width=9)
    target = models.tokens(4, 6)
    batch = model(source, mask, target)
    assert batch.shape == (4, 6, models.tgt_vocab)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        close(model(source[one, :length], mask[one, :length], target[one]), batch[one])
        close(model(source[one, :length], mask[one, :length], target[one, :4]), batch[one, :4])


@every_model
def test_translation_steps_equal_teacher_forcing(models: Any, setting: dict[str, Any]) -> None:
    model = models.build(task="translation", **setting)
    source, mask = models.ragged([7, 3, 0], width=8)
    target = models.tokens(3, 9)
    whole = model(source, mask, target)
    state = model.start(source, mask)
    for position in range(9):
        logits, state = model.step(target[:, position], state)
        close(logits, whole[:, position])


@every_model
def test_select_reorders_repeats_and_drops_rows(models: Any, setting: dict[str, Any]) -> None:
    model = models.build(task="translation", **setting)
    source, mask = models.ragged([7, 3, 5])
    target = models.tokens(3, 4)
    index = torch.tensor([2, 0, 0, 2])
    state = model.start(source, mask)
    _, state = model.step(target[:, 0], state)
    _, state = model.step(target[:, 1], state)
    chosen, _ = model.step(target[index, 2], state.select(index))
    straight, _ = model.step(target[:, 2], state)
    close(chosen, straight[index])
    # The state was not changed by the steps from it: the same step again gives the same logits.
    again, _ = model.step(target[:, 2], state)
    assert torch.equal(again, straight)
    # Selecting before anything was read widens a batch to beams.
    beams = model.start(source, mask).select(torch.tensor([0, 0, 1, 1]))
    logits, _ = model.step(target[[0, 0, 1, 1], 0], beams)
    close(logits, model(source, mask, target[:, :1])[[0, 0, 1, 1], 0])


@every_model
def test_language_model_states_are_selectable(models: Any, setting: dict[str, Any]) -> None:
    model = models.build(task="lm", **setting)
    tokens, index = models.tokens(3, 3), torch.tensor([1, 1, 0])
    _, state = model.step(tokens[:, 0], None)
    chosen, _ = model.step(tokens[index, 1], state.select(index))
    close(chosen, model(tokens)[index, 1])


@every_model
@pytest.mark.parametrize("training", [True, False])
def test_an_empty_sentence_harms_nobody(models: Any, setting: dict[str, Any], training: bool) -> None:
    model = models.build(task="translation", **setting).train(training)
    source, mask = models.ragged([3, 0, 2], width=4)
    target = models.tokens(3, 5)
    logits = model(source, mask, target)
    F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    assert logits.isfinite().all()
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()
    close(logits[[0, 2]], model(source[[0, 2], :3], mask[[0, 2], :3], target[[0, 2]]))
    # Its own result does not depend on how it was padded, not even on having a column at all.
    close(logits[1:2], model(source[1:2, :1], mask[1:2, :1], target[1:2]))
    alone = model(source[1:2, :0], mask[1:2, :0], target[1:2])
    close(logits[1:2], alone)
    model.zero_grad()
    alone.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("norm", ["none", "layernorm", "rmsnorm", "prmsnorm"])
def test_rnnsearch_attends_to_nothing_in_an_empty_sentence(models: Any, norm: str) -> None:
    model = models.build("gru", "translation", norm)
    for width in (0, 3):
        state = model.start(*models.ragged([0, 0], width=width))
        assert torch.equal(model.attention.prepare(state)(torch.randn(2, 16), None), torch.zeros(2, 32))


@pytest.mark.parametrize("setting", [*TRANSFORMERS, *GRUS], ids=name)
@pytest.mark.parametrize("task", ["lm", "translation"])
def test_bf16_autocast(models: Any, setting: dict[str, Any], task: str) -> None:
    model = models.build(task=task, **setting, perturb=False)
    source, mask = models.ragged([5, 0, 2], width=6)
    target = models.tokens(3, 7)
    inputs = (target,) if task == "lm" else (source, mask, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(*inputs)
    loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten())
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(logits.float(), model(*inputs), atol=0.1, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = None if task == "lm" else model.start(source, mask)
        dtypes = set()
        for position in range(3):
            stepped, state = model.step(target[:, position], state)
            dtypes.add(stepped.dtype)
    assert dtypes == {torch.bfloat16}
    torch.testing.assert_close(stepped, logits[:, 2], atol=0.1, rtol=0)


def test_the_position_table_is_a_limit(models: Any) -> None:
    lm = models.build("transformer", "lm")
    limit = models.max_len
    assert lm.position_limit == limit
    assert lm(models.tokens(1, limit)).shape == (1, limit, models.tgt_vocab)
    with pytest.raises(UserError, match=r"sequence of 13 tokens.*12 positions.*data\.max_len.*rotary"):
        lm(models.tokens(1, limit + 1))
    state = None
    for position in range(limit):
        _, state = lm.step(models.tokens(1, limit)[:, position], state)
    with pytest.raises(UserError, match=r"sequence of 13 tokens.*12 positions"):
        lm.step(models.tokens(1), state)

    translation = models.build("transformer", "translation")
    long_source, long_mask = models.ragged([13])
    source, mask = models.ragged([4])
    with pytest.raises(UserError, match="13 tokens"):
        translation(long_source, long_mask, models.tokens(1, 3))
    with pytest.raises(UserError, match="13 tokens"):
        translation.start(long_source, long_mask)
    with pytest.raises(UserError, match="13 tokens"):
        translation(source, mask, models.tokens(1, 13))


@pytest.mark.parametrize("setting", [{"kind": "gru"}, {"kind": "transformer", "positions": Positions.rotary}])
def test_other_models_have_no_position_limit(models: Any, setting: dict[str, Any]) -> None:
    model = models.build(task="lm", **setting)
    assert model.position_limit is None
    assert model(models.tokens(1, 40)).isfinite().all()


def test_rotary_scores_depend_on_the_distance_only() -> None:
    from rmsrepro.models.attention import rotate, rotation

    query, key = torch.randn(8).double(), torch.randn(8).double()

    def score(i: int, j: int) -> float:
        cpu = torch.device("cpu")
        q = rotate(query.view(1, 8), rotation(i, 1, 8, cpu))
        k = rotate(key.view(1, 8), rotation(j, 1, 8, cpu))
        return float((q * k).sum())

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-5)
    assert score(0, 0) == pytest.approx(float(query @ key), abs=1e-6)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)
