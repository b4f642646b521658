"""Faults of Transformers, met in practice: B23, B25."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from rmsrepro.config.schema import Placement
from rmsrepro.norms import is_norm, norm_info
from tests.norms.conftest import Arm, skip_without
from tests.practice.arms import EVERYWHERE, cells, inputs, mean_loss, model, name, skip_where_lacking

everywhere = pytest.mark.parametrize("arm", EVERYWHERE, ids=name)
PLACES: list[dict[str, Any]] = [
    *({"kind": "transformer", "placement": placement} for placement in Placement),
    {"kind": "transformer", "qk_norm": True},
]


def over_positions(arm: Arm) -> bool:
    return norm_info(arm.norm).takes_mask


@everywhere
def test_no_warning_and_every_norm_called_in_both_modes(arm: Arm) -> None:
    """B23: a fused path of evaluation passes the norms by; a library warns that it cannot take it."""
    skip_where_lacking(arm)
    for task, place in cells(arm):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            built = model(arm, task, place)
            given = inputs(task, [3, 2], 5)  # the last two columns are padding
            plain = built.train()(*given)
            with torch.no_grad():
                evaluated = built.eval()(*given)
        assert plain.shape == (2, 5, 11)
        if not over_positions(arm):
            torch.testing.assert_close(evaluated, plain, atol=1e-5, rtol=0)
        calls: list[str] = []
        norms = {key: module for key, module in built.named_modules() if is_norm(module)}
        for key, module in norms.items():
            module.register_forward_hook(lambda *_, key=key, calls=calls: calls.append(key))
        watched = built.train()(*given)
        in_training, calls[:] = sorted(calls), []
        with torch.no_grad():
            built.eval()(*given)
        assert sorted(calls) == in_training
        assert set(calls) == norms.keys()
        # Watched or not, it is the same function.
        torch.testing.assert_close(watched, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "prmsnorm"])
@pytest.mark.parametrize("backend", ["composite", "torch", "fused"])
def test_a_norm_that_is_swapped_in_is_used(norm: str, backend: str) -> None:
    """B23: a module put into a built model in the place of its norm decides what comes out, in both modes."""
    if backend == "torch" and norm == "prmsnorm":
        pytest.skip("torch has no function for it")
    skip_without(backend)

    class Zero(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.0 * x

    built = model(Arm(norm, backend), "lm", {"kind": "transformer", "placement": Placement.pre})
    built.stack.final_norm = Zero()
    for training in (True, False):
        logits = built.train(training)(*inputs("lm", [5, 5], 5))
        # A stream of zeros at the end: all positions have the logits of the output alone.
        assert torch.equal(logits, logits[:1, :1].expand_as(logits))


@everywhere
@pytest.mark.parametrize("training", [True, False])
def test_a_sentence_of_padding_spoils_nothing(arm: Arm, training: bool) -> None:
    """B25: softmax over no keys is NaN, and from one row it gets into every gradient."""
    skip_where_lacking(arm)
    # Backends differ in whether a plus and a norm are one pass: in post and sandwich, both kinds.
    for place in PLACES if arm.backend == "composite" and training else PLACES[1:3]:
        built = model(arm, "translation", place).double().train(training)
        source, mask, target = inputs("translation", [3, 0, 2], 3)
        logits = built(source, mask, target)
        loss = mean_loss(logits, target)
        loss.backward()
        assert loss.isfinite()
        assert logits.isfinite().all()
        for key, parameter in built.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), (place, key)
        kept = torch.tensor([0, 2])
        others = built(source[kept], mask[kept], target[kept])
        torch.testing.assert_close(logits[kept], others, atol=1e-9, rtol=0)


@pytest.mark.parametrize("backend", ["composite", "fused"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_sentence_of_padding_in_mixed_precision(backend: str, dtype: torch.dtype) -> None:
    """B25: a mask's fill must fit a narrow dtype: infinite less infinite is NaN."""
    skip_without(backend)
    for place in [*PLACES, {"kind": "gru"}]:
        built = model(Arm("rmsnorm", backend), "translation", place)
        given = inputs("translation", [3, 0, 2], 3)
        with torch.autocast("cpu", dtype=dtype):
            logits = built(*given)
        mean_loss(logits, given[-1]).backward()
        assert logits.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in built.parameters())
