"""Runs of several processes: the same losses, scores and weights as of one, and one set of records."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import TrainConfig, TrainerConfig
from rmsrepro.data.batches import IGNORE, LMBatch, translation_batch
from rmsrepro.data.loaders import BatchList
from rmsrepro.runs.building import build
from rmsrepro.runs.checkpoints import load_checkpoint
from rmsrepro.runs.planning import plan_sweep
from rmsrepro.runs.processes import Followers, Ranks, own_state, process_count, threads_each
from rmsrepro.runs.seeding import seed_dropout
from rmsrepro.runs.train import check_hardware, plan, train

DDP = ["trainer=ddp", "trainer.accelerator=cpu"]
Make = Callable[..., TrainConfig]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(config: TrainConfig) -> Path:
    before = dict(os.environ)
    result = train(config, console=Console(quiet=True))
    assert (result.status, result.error) == ("completed", None)
    assert not torch.distributed.is_initialized()
    assert dict(os.environ) == before
    return result.path


@pytest.mark.parametrize(
    ("model", "task", "more"),
    [
        ("transformer", "lm", []),
        pytest.param("gru", "translation", ["trainer.accumulate=2"], marks=pytest.mark.slow),
        pytest.param(
            "transformer", "translation", ["norm=layernorm", "backend=torch"], marks=pytest.mark.slow
        ),
        # Batches of one sentence: the second process has nothing that counts.
        pytest.param("gru", "translation", ["data.batch_tokens=48"], marks=pytest.mark.slow),
        pytest.param("transformer", "lm", ["trainer.devices=3"], marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(make_config: Make, model: str, task: str, more: list[str]) -> None:
    given = ["norm=rmsnorm", "backend=composite", *more]
    one = run(make_config(model, task, *(key for key in given if "devices" not in key), "out_dir=one"))
    two = run(make_config(model, task, *DDP, *given, "out_dir=two"))
    assert [path.name for path in Path("two/runs").iterdir()] == [two.name] != [one.name]
    alone, together = rows(one), rows(two)
    assert [row["step"] for row in together] == [row["step"] for row in alone] == list(range(1, 7))
    for row, other in zip(alone, together, strict=True):
        assert row.keys() == other.keys()
        for name in set(row) - {"train_seconds"}:
            if isinstance(row[name], str):
                assert row[name] == other[name]
            else:
                assert other[name] == pytest.approx(row[name], rel=1e-5, abs=1e-5), name
    assert {"val_loss", "test_loss"} <= together[-1].keys()
    result, reference = (json.loads((folder / "result.json").read_text()) for folder in (two, one))
    assert result["tokens"] == reference["tokens"] == together[-1]["tokens"]
    for name in ("steps", "n_parameters", "status", "data_hash"):
        assert result[name] == reference[name]
    weights, expected = (load_checkpoint(folder).content["state_dict"] for folder in (two, one))
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        if tensor.dim() > 1:  # Adam makes steps of the noise where a gradient is zero, as a key's bias has
            assert float((tensor - expected[name]).norm() / expected[name].norm()) < 1e-4, name
    written = {path.name for path in two.iterdir()}
    assert written == {path.name for path in one.iterdir()}


def test_every_process_goes_on_with_the_same_batches(make_config: Make) -> None:
    """Where a checkpoint is continued with other accumulation, its updates do not tell the batches."""
    first = run(make_config("gru", "lm", "trainer.accumulate=1", "trainer.max_steps=3"))
    more = make_config("gru", "lm", "trainer.accumulate=2", f"ckpt={first}", "trainer.max_steps=5")
    start, fingerprint = load_checkpoint(first), plan(more)[0].content["data"]
    for rank in range(2):
        module, data = build(
            more, cache_dir=Path("cache"), fingerprint=fingerprint, start=start, ranks=Ranks(rank, 2)
        )
        assert module.processes == 2
        # Three batches are used up; the next update of two begins with the fifth.
        assert (data.start_batch, data.state_dict()) == (4, {"batches": 4, "updates": 3})


def test_parts_make_the_whole_batch() -> None:
    inputs = torch.arange(12).reshape(3, 4)
    batch = LMBatch(inputs, inputs + 1, update_tokens=24)
    first, second = batch.part(0, 2), batch.part(1, 2)
    assert first.inputs.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert second.inputs.tolist() == [[4, 5, 6, 7]]
    assert (first.num_tokens, second.num_tokens) == (8, 4)
    assert {part.whole_tokens for part in (first, second, first.to("cpu"))} == {12}
    assert {part.update_tokens for part in (first, second)} == {24}
    spare = batch.part(3, 4)
    assert spare.inputs.tolist() == [[0, 1, 2, 3]]
    assert (spare.targets == IGNORE).all()
    assert (spare.num_tokens, spare.whole_tokens) == (0, 12)


def test_parts_of_unequal_sentences() -> None:
    batch = translation_batch([[5, 3], [5, 6, 3], [3]], [[7, 8, 9, 3], [3], [7, 3]], index=[4, 5, 6])
    parts = [batch.part(rank, 2) for rank in range(2)]
    assert [part.num_tokens for part in parts] == [6, 1]
    assert [part.index for part in parts] == [[4, 6], [5]]
    assert parts[0].src.shape[1] == parts[1].src.shape[1] == 3
    assert {part.whole_tokens for part in parts} == {7}
    assert batch.part(5, 6).index == []


def test_loaders_of_a_process() -> None:
    batch = LMBatch(torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long), 6)
    whole = BatchList(lambda number: batch, 4)
    ranks = Ranks(1, 2)
    part = ranks.part_of(whole)
    assert len(part) == 4
    assert [one.num_tokens for one in part] == [3] * 4
    assert Ranks().part_of(whole) is whole


def test_each_process_draws_its_own_dropout() -> None:
    drawn = []
    for rank in (0, 1, 2):
        seed_dropout(1, rank)
        drawn.append(torch.rand(4).tolist())
    seed_dropout(1)
    assert torch.rand(4).tolist() == drawn[0]
    assert len({tuple(one) for one in drawn}) == 3


def test_the_state_of_a_process() -> None:
    alone = {"rng": 0}
    assert own_state(alone, Ranks(0, 2)) is alone
    assert own_state(alone, Ranks(1, 2)) is None
    both = {"rng": 0, "ranks": [{"rng": 0}, {"rng": 1}]}
    assert own_state(both, Ranks(1, 2)) == {"rng": 1}
    assert own_state(both, Ranks(2, 3)) is None
    assert own_state(both, Ranks()) == {"rng": 0}


def test_threads_of_each_process(monkeypatch: pytest.MonkeyPatch, make_config: Make) -> None:
    monkeypatch.setattr("rmsrepro.runs.processes.available_cores", lambda: 8)
    two = make_config("gru", "lm", *DDP).trainer
    assert (process_count(two), threads_each(two)) == (2, 4)
    assert threads_each(make_config("gru", "lm", *DDP, "trainer.num_threads=3").trainer) == 3
    assert (process_count(TrainerConfig()), threads_each(TrainerConfig())) == (1, None)


def test_which_runs_are_the_same(make_config: Make) -> None:
    def run_id(*overrides: str) -> str:
        return plan(make_config("gru", "lm", "backend=composite", *overrides))[0].run_id

    assert run_id() == run_id("trainer=ddp", "trainer.devices=1")
    several = [run_id(*DDP), run_id(*DDP, "trainer.devices=3")]
    assert len({run_id(), *several}) == 3


def test_what_a_process_that_ended_says() -> None:
    others = Followers(Ranks(0, 2), 0)
    others.begin(1)
    try:
        others._processes[0].kill()
        with pytest.raises(RuntimeError, match=r"process 1 of 2 \(counted from 0\) was ended by SIGKILL"):
            others.go({})
    finally:
        others.end(patience_s=0)


def test_devices_without_processes(make_config: Make) -> None:
    with pytest.raises(UserError, match=r"^trainer.devices=2: a process uses one device; add trainer=ddp "):
        make_config("gru", "lm", "trainer.devices=2")


def test_what_several_processes_cannot_do(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    batchnorm = make_config("gru", "translation", *DDP, "norm=batchnorm")
    with pytest.raises(UserError, match=r"norm=batchnorm: trainer=ddp .* those of a part"):
        plan(batchnorm)
    sharded = make_config("gru", "lm", "trainer=fsdp")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"^trainer=fsdp: it needs a GPU for each"):
        check_hardware(sharded.trainer)
    with pytest.raises(UserError, match=r"trainer.accelerator=cpu; use trainer=ddp"):
        check_hardware(make_config("gru", "lm", "trainer=fsdp", "trainer.accelerator=cpu").trainer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_hardware(sharded.trainer)
    with pytest.raises(UserError, match=r"trainer.devices=2: torch sees 1 GPU"):
        check_hardware(make_config("gru", "lm", "trainer=ddp").trainer)


def test_plan_of_a_sweep(tmp_path: Path) -> None:
    from rmsrepro.config.overrides import split_override
    from rmsrepro.verbs.common import composer

    jobs = [[split_override(text) for text in ("norm=rmsnorm", "trainer=ddp", "out_dir=x", "seed=2")]]
    with composer(jobs[0]) as opened, pytest.raises(UserError) as refused:
        plan_sweep(opened, jobs)
    assert "rmsrepro train norm=rmsnorm trainer=ddp out_dir=x seed=2" in str(refused.value)
    assert not Path("x").exists()
