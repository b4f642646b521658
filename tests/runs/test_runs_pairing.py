"""All norms of one seed start from the same shared weights and see the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rmsrepro.config.schema import TrainConfig
from rmsrepro.data import build_data
from rmsrepro.norms import norm_parameter_names
from rmsrepro.runs.seeding import stream_seed
from rmsrepro.tasks import build_task

Make = Callable[..., TrainConfig]
NORMS = ("none", "layernorm", "layernorm_nobias", "rmsnorm", "prmsnorm", "l2norm")


def start(config: TrainConfig) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    data = build_data(
        config.data,
        config.task.name,
        seed=stream_seed(config.seed, "data"),
        accumulate=1,
        cache_dir=Path("cache"),
    )
    batches = iter(data.train_dataloader())
    seen = []
    for _ in range(4):
        batch = next(batches)
        seen += (
            [batch.inputs, batch.targets]
            if config.task.name == "lm"
            else [batch.src, batch.tgt_in, batch.tgt_out]
        )
    return build_task(config, data).model, seen


@pytest.mark.parametrize("model", ["gru", "transformer"])
@pytest.mark.parametrize("task", ["lm", "translation"])
def test_norms_share_weights_and_batches(make_config: Make, model: str, task: str) -> None:
    reference, batches = start(make_config(model, task, "norm=layernorm", "seed=5"))
    shared = dict(reference.named_parameters())
    for norm in NORMS:
        other, seen = start(make_config(model, task, f"norm={norm}", "seed=5"))
        assert all(torch.equal(one, two) for one, two in zip(batches, seen, strict=True))
        own = norm_parameter_names(other)
        common = {
            name: value for name, value in other.named_parameters() if name in shared and name not in own
        }
        assert len(common) >= len(shared) - len(norm_parameter_names(reference)) - 12
        for name, value in common.items():
            assert torch.equal(value, shared[name]), f"{norm}: {name}"


def test_another_seed_changes_weights_and_batches(make_config: Make) -> None:
    one, first = start(make_config("gru", "lm", "seed=1"))
    two, second = start(make_config("gru", "lm", "seed=2"))
    assert not torch.equal(first[0], second[0])
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_streams_are_separate_and_stable() -> None:
    assert len({stream_seed(1, name) for name in ("init", "data", "dropout")}) == 3
    assert stream_seed(1, "data") == stream_seed(1, "data") != stream_seed(2, "data")
    # Pinned: a change of the rule would change every recorded run.
    assert stream_seed(1, "data") == 2384769743551950431
    with pytest.raises(ValueError, match="no stream"):
        stream_seed(1, "other")
