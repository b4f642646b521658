"""Norms over positions: which positions count, step by step in recurrences."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.config.schema import Placement, Site
from rmsrepro.models.gru import GRULayer
from rmsrepro.models.masks import counted_targets
from rmsrepro.norms import BatchNorm, NormSpec, is_norm
from tests.models.norms import MASKED, users_norms

EPS, MOMENTUM = 1e-5, 0.1
BATCHNORM = NormSpec("batchnorm")


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with users_norms():
        yield


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


# ---------------------------------------------------------------------------- what is counted


def test_target_tokens_count_where_their_row_has_a_source() -> None:
    target = torch.tensor([[1, 5, 0], [1, 0, 0], [1, 7, 8], [0, 0, 0]])
    source = torch.tensor([[True, True], [True, False], [False, False], [True, True]])
    expected = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]).bool()
    assert torch.equal(counted_targets(target, source, pad_id=0, bos_id=1), expected)
    # Where the first token looks like padding, it counts all the same.
    same = target.masked_fill(target == 1, 0)
    expected[3, 0] = True
    assert torch.equal(counted_targets(same, source, pad_id=0, bos_id=0), expected)
    assert not counted_targets(target, source[:, :0], pad_id=0, bos_id=1).any()


def masks_seen(model: Any) -> dict[str, list[tuple[torch.Size, Tensor | None]]]:
    return {name: module.seen for name, module in model.named_modules() if is_norm(module)}


SOURCE = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
TARGET = torch.tensor([[1, 4, 3], [1, 6, 0], [1, 2, 2]])
COUNTED = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool()


@pytest.mark.parametrize("placement", [Placement.pre, Placement.post, Placement.sandwich])
def test_masks_in_a_transformer(models: Any, placement: Placement) -> None:
    model = models.build("transformer", "translation", MASKED, placement=placement, qk_norm=True)
    source, mask = models.ragged([4, 2, 0])
    assert torch.equal(mask, SOURCE)
    model(source, mask, TARGET)
    seen = masks_seen(model)
    assert len(seen) == sum(is_norm(module) for module in model.modules()) > 20
    for name, calls in seen.items():
        [(shape, found)] = calls
        of_source = name.startswith("encoder") or name.endswith("cross_attention.norm_key")
        expected = SOURCE if of_source else COUNTED
        if "norm_query" in name or "norm_key" in name:
            assert shape == (3, 2, expected.shape[1], 8)
            expected = expected.unsqueeze(1).expand(3, 2, -1)
        assert found is not None, name
        assert torch.equal(found, expected), name


def test_masks_in_rnnsearch(models: Any) -> None:
    model = models.build("gru", "translation", MASKED)
    model(*models.ragged([4, 2, 0]), TARGET)
    steps = {"encoder": SOURCE.unbind(1), "first": COUNTED.unbind(1), "second": COUNTED.unbind(1)}
    steps["attention.query"] = COUNTED.unbind(1)
    whole = {
        "attention.key": SOURCE,
        "start_projection": SOURCE.any(1),
        **{f"readout_{part}": COUNTED for part in ("state", "word", "context")},
    }
    for name, calls in masks_seen(model).items():
        owner = next(part for part in (*steps, *whole) if name.startswith(part))
        expected = list(steps[owner]) if owner in steps else [whole[owner]]
        if "backward_layers" in name and name.endswith("_h"):
            expected.reverse()
        found = [mask for _, mask in calls]
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            assert one is not None, name
            assert torch.equal(one, other), name


def test_other_norms_are_handed_no_mask(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rmsrepro.models import rnnsearch, transformer

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("no mask is worked out for a norm that takes none")

    for module in (rnnsearch, transformer):
        monkeypatch.setattr(module, "counted_targets", forbidden)
    for kind in ("transformer", "gru"):
        model = models.build(kind, "translation", "layernorm")
        for module in model.modules():
            if is_norm(module):
                module.register_forward_pre_hook(lambda _, arguments: assert_alone(arguments))
        model(*models.ragged([4, 2, 0]), TARGET)


def assert_alone(arguments: tuple[Any, ...]) -> None:
    assert len(arguments) == 1


# ------------------------------------------------------------------------- batchnorm in a GRU


def batch_norm(x: Tensor, mask: Tensor, norm: BatchNorm, seen: list[Tensor]) -> Tensor:
    """By equation, over the rows of x (B, dim) where mask (B,) is True; `seen` collects these rows."""
    rows = x[mask]
    seen.append(rows.detach())
    mean = rows.mean(0) if len(rows) else torch.zeros_like(x[0])
    var = rows.var(0, unbiased=False) if len(rows) else torch.zeros_like(x[0])
    return (x - mean) / (var + EPS).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize("reverse", [False, True])
def test_batchnorm_in_a_gru_by_equations(reverse: bool) -> None:
    """The loop, and its running statistics: those of all steps, each about its own mean."""
    d, steps, batch = 4, 5, 6
    layer = GRULayer(3, d, BATCHNORM, tuple(Site)).double()
    randomise(layer)
    x = torch.randn(steps, batch, 3).double()
    # The last step but one has a single row, the last none.
    lengths = torch.tensor([3, 2, 4, 3, 1, 3])
    mask = torch.arange(steps).unsqueeze(1) < lengths
    states = layer(x, None, mask, reverse=reverse)

    seen: dict[str, list[Tensor]] = {"gates_x": [], "gates_h": [], "candidate_x": [], "candidate_h": []}
    norms: dict[str, Any] = {site: getattr(layer, f"norm_{site}") for site in seen}
    h, expected = torch.zeros(batch, d).double(), [torch.empty(0)] * steps
    for now in reversed(range(steps)) if reverse else range(steps):
        from_x = x[now] @ layer.input_projection.weight.T + layer.input_projection.bias
        from_h = h @ layer.recurrent_projection.weight.T
        sides = {
            "gates_x": from_x[:, : 2 * d], "candidate_x": from_x[:, 2 * d :],
            "gates_h": from_h[:, : 2 * d], "candidate_h": from_h[:, 2 * d :],
        }  # fmt: skip
        normed = {site: batch_norm(side, mask[now], norms[site], seen[site]) for site, side in sides.items()}
        r, u = (normed["gates_x"] + normed["gates_h"]).sigmoid().split(d, -1)
        n = (normed["candidate_x"] + r * normed["candidate_h"]).tanh()
        h = torch.where(mask[now].unsqueeze(1), u * h + (1 - u) * n, h)
        expected[now] = h
    torch.testing.assert_close(states, torch.stack(expected), atol=1e-10, rtol=0)

    for site, rows in seen.items():
        counting = [part for part in rows if len(part) > 1]
        assert [len(part) for part in counting if len(part)] == ([4, 5, 6] if reverse else [6, 5, 4])
        mean = torch.cat(counting).mean(0)
        squares = sum(((part - part.mean(0)) ** 2).sum(0) for part in counting)
        var = squares / sum(len(part) - 1 for part in counting)
        torch.testing.assert_close(norms[site].running_mean, MOMENTUM * mean, atol=1e-10, rtol=0)
        torch.testing.assert_close(
            norms[site].running_var, (1 - MOMENTUM) + MOMENTUM * var, atol=1e-10, rtol=0
        )


def test_one_forward_pass_of_rnnsearch_is_one_update_of_every_norm(models: Any) -> None:
    model = models.build("gru", "translation", "batchnorm", perturb=False)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}
    updates = dict.fromkeys(norms, 0)
    for name, module in norms.items():
        original = module._update

        def counting(*rest: Any, name: str = name, original: Any = original) -> None:
            updates[name] += 1
            original(*rest)

        module._update = counting  # type: ignore[method-assign]
    model(*models.ragged([4, 2, 3]), TARGET)
    assert set(updates.values()) == {1}
    model.eval()(*models.ragged([4, 2, 3]), TARGET)
    assert set(updates.values()) == {1}


def test_evaluation_with_the_statistics_of_a_batch_is_training_on_it(models: Any) -> None:
    """In a Transformer they are those of all source tokens (9 here), and of all target tokens (8)."""
    model = models.build("transformer", "translation", "batchnorm").double()
    inputs = (*models.ragged([4, 2, 3]), TARGET)
    with torch.no_grad():
        for _ in range(250):
            trained = model.train()(*inputs)
        for name, module in model.named_modules():
            if isinstance(module, BatchNorm):
                count = 9 if name.startswith("encoder") else 8
                module.running_var *= (count - 1) / count
        torch.testing.assert_close(model.eval()(*inputs), trained, atol=1e-8, rtol=0)


def test_a_copied_model_counts_in_its_own_norms(models: Any) -> None:
    model = models.build("gru", "translation", "batchnorm")
    before = {name: value.clone() for name, value in model.named_buffers()}
    twin = copy.deepcopy(model)
    twin(*models.ragged([4, 2, 3]), TARGET)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert not any(torch.equal(value, before[name]) for name, value in twin.named_buffers())
