"""Every norm in every model, task and placement, those of users among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import Placement, Site
from rmsrepro.models.gru import GRULayer
from rmsrepro.norms import NormSpec, is_norm, norm_parameter_names
from rmsrepro.tasks import decayed_parameter_names
from tests.models.norms import EVERY, KINDS, OF_WEIGHTS, OVER_POSITIONS, TASKS, suits, users_norms

PLACES = [
    *[{"kind": "transformer", "placement": placement, "num_layers": 1} for placement in Placement],
    {"kind": "transformer", "qk_norm": True, "num_layers": 1},
    {"kind": "gru"},
    {"kind": "gru", "sites": (Site.gates_h, Site.cand_x)},
]


def place_name(place: dict[str, Any]) -> str:
    if "sites" in place:
        return "gru-two-sites"
    return str(place["kind"]) + (
        "-qk" if "qk_norm" in place else f"-{place['placement'].value}"[:9] if "placement" in place else ""
    )


in_every_place = pytest.mark.parametrize("place", PLACES, ids=place_name)
with_every_norm = pytest.mark.parametrize("norm", EVERY)
in_every_task = pytest.mark.parametrize("task", TASKS)


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with users_norms():
        yield


def inputs_of(models: Any, task: str) -> tuple[Tensor, ...]:
    if task == "lm":
        return (models.tokens(3, 6),)
    source, mask = models.ragged([5, 0, 2], width=6)
    return source, mask, models.tokens(3, 6)


def close(a: Tensor, b: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("task", "norm"), [(task, norm) for task in TASKS for norm in EVERY if suits(norm, task)]
)
@in_every_place
def test_trains_evaluates_and_decodes(models: Any, norm: str, task: str, place: dict[str, Any]) -> None:
    model = models.build(task=task, norm=norm, **place)
    calls: list[str] = []
    for name, module in model.named_modules():
        if is_norm(module):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    inputs = inputs_of(models, task)
    target = inputs[-1]

    logits = model.train()(*inputs)
    in_training, calls[:] = sorted(calls), []
    assert logits.isfinite().all()
    F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name

    with torch.no_grad():
        evaluated = model.eval()(*inputs)
        assert sorted(calls) == in_training
        names = {name for name, module in model.named_modules() if is_norm(module)}
        assert set(calls) == names
        if norm in OF_WEIGHTS:
            # Once a forward pass, also where a loop over time uses the weights.
            assert len(calls) == len(names) > 0
        if norm not in OVER_POSITIONS:
            close(evaluated, logits)
        state = None if task == "lm" else model.start(*inputs[:2])
        for position in range(target.shape[1]):
            step, state = model.step(target[:, position], state)
            close(step, evaluated[:, position])


@pytest.mark.parametrize("norm", OVER_POSITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_norms_over_positions_are_refused_where_a_future_is_hidden(models: Any, kind: str, norm: str) -> None:
    with pytest.raises(UserError, match=rf"^norm={norm}: .*tokens to come.*task=lm.*use task=translation"):
        models.build(kind, "lm", norm)


# ----------------------------------------------------------------------- padding (B19, B23, B25)


def padded(
    source: Tensor, mask: Tensor, target: Tensor, last_target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Two more columns of padding on both sides, and one more row, whose source is all padding."""
    rows, width = source.shape
    wide_source = source.new_zeros(rows + 1, width + 2)
    wide_source[:rows, :width] = source
    wide_mask = mask.new_zeros(rows + 1, width + 2)
    wide_mask[:rows, :width] = mask
    wide_target = target.new_zeros(rows + 1, target.shape[1] + 2)
    wide_target[:rows, : target.shape[1]] = target
    wide_target[rows, : len(last_target)] = last_target
    return wide_source, wide_mask, wide_target


@with_every_norm
@pytest.mark.parametrize(
    ("place", "training"),
    [(place, True) for place in PLACES] + [(PLACES[0], False), (PLACES[-1], False)],
    ids=[place_name(place) for place in PLACES] + ["transformer-eval", "gru-eval"],
)
def test_padding_changes_nothing(models: Any, norm: str, place: dict[str, Any], training: bool) -> None:
    source, mask = models.ragged([5, 2, 4])
    target = models.tokens(3, 6)
    target[1, 4:] = target[2, 2:] = 0
    # The row of padding may have a target of its own, or none.
    extremes = (models.tokens(8, seed=3), torch.zeros(8, dtype=torch.long))
    found = []
    for inputs in ((source, mask, target), *(padded(source, mask, target, last) for last in extremes)):
        model = models.build(task="translation", norm=norm, **place).double().train(training)
        logits = model(*inputs)
        assert logits.shape == (*inputs[2].shape, models.tgt_vocab)
        assert logits.isfinite().all()
        own = logits[:3, :6]
        loss = F.cross_entropy(own.flatten(0, 1), target.flatten(), ignore_index=0)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append((own[target != 0], gradients, dict(model.named_buffers())))
    for logits, gradients, buffers in found[1:]:
        close(logits, found[0][0], 1e-10)
        for name, gradient in gradients.items():
            assert gradient.isfinite().all()
            close(gradient, found[0][1][name], 1e-8)
        for name, buffer in buffers.items():
            close(buffer.double(), found[0][2][name].double(), 1e-10)


@with_every_norm
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_row_of_padding_is_finite_too(models: Any, norm: str, kind: str) -> None:
    for lengths in ([3, 0, 2], [0, 0]):
        model = models.build(kind, "translation", norm)
        source, mask = models.ragged(lengths, width=4)
        target = models.tokens(len(lengths), 5)
        logits = model(source, mask, target)
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        assert logits.isfinite().all()
        for parameter in model.parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all()


# ------------------------------------------------------------------- what norms must not change


@in_every_task
@in_every_place
def test_all_norms_start_from_the_same_weights_and_decay_the_same(
    models: Any, task: str, place: dict[str, Any]
) -> None:
    def places(model: nn.Module) -> set[str]:
        return {name for name, module in model.named_modules() if is_norm(module)}

    reference = places(models.build(task=task, norm="layernorm", perturb=False, **place))
    none = models.build(task=task, norm="none", perturb=False, **place)
    assert places(none) == set()
    shared = dict(none.named_parameters())
    decayed = decayed_parameter_names(none)
    assert decayed
    for norm in EVERY:
        if not suits(norm, task):
            continue
        model = models.build(task=task, norm=norm, perturb=False, **place)
        of_norms = norm_parameter_names(model)
        own = {name: value for name, value in model.named_parameters() if name not in of_norms}
        # A normalised state of a GRU has no bias of its own, whatever the norm of activations.
        assert own.keys() <= shared.keys(), norm
        assert all(name.endswith("_h_bias") for name in shared.keys() - own.keys()), norm
        if norm in OF_WEIGHTS:
            assert own.keys() == shared.keys(), norm
            assert of_norms, norm
        elif norm != "none":
            assert places(model) == reference, norm
        assert all(torch.equal(value, shared[name]) for name, value in own.items()), norm
        assert decayed_parameter_names(model) == decayed, norm


# -------------------------------------------------------------------------------- the GRU (B21)


@with_every_norm
@pytest.mark.parametrize("masked", [False, True])
def test_the_state_keeps_its_dtype_under_autocast(norm: str, masked: bool) -> None:
    layer = GRULayer(5, 8, NormSpec(norm, backend="composite"), tuple(Site))
    mask = torch.tensor([[True] * 4, [True] * 4, [True, False, True, False]]) if masked else None
    seen: list[torch.dtype] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gates, candidate = layer.project(torch.randn(3, 4, 5), mask)
        project, step = layer.prepare_projection(gates.dtype), layer.prepare(gates.dtype)
        h = torch.zeros(4, 8, dtype=gates.dtype)
        for now in range(3):
            h = step(gates[now], candidate[now], h, None if mask is None else mask[now])
            seen.append(h.dtype)
        pair = project(torch.randn(4, 5), None)
        states = layer(torch.randn(3, 4, 5), torch.zeros(4, 8), mask)
    assert {*seen, states.dtype, gates.dtype, pair[0].dtype, pair[1].dtype} == {torch.bfloat16}
    assert states.isfinite().all()


@with_every_norm
def test_one_step_at_a_time_projects_as_all_at_once(norm: str) -> None:
    layer = GRULayer(5, 8, NormSpec(norm), tuple(Site)).double().eval()
    x = torch.randn(3, 4, 5).double()
    gates, candidate = layer.project(x)
    project = layer.prepare_projection(torch.float64)
    for now in range(3):
        own = project(x[now], None)
        close(own[0], gates[now], 1e-12)
        close(own[1], candidate[now], 1e-12)
