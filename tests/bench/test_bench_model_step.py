from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rmsrepro.bench import measuring as measuring_module
from rmsrepro.bench import run_bench
from rmsrepro.bench import runner as runner_module
from rmsrepro.bench.cells import Arm, Cell
from rmsrepro.bench.gate import NoReference
from rmsrepro.bench.levels import get_level
from rmsrepro.bench.model_gate import ModelGate, distance, first_rows
from rmsrepro.bench.model_step import ModelLevel, ModelStep
from rmsrepro.bench.task_step import arm_config, prepare_data, task_gate
from rmsrepro.bench.worker import measure
from rmsrepro.config.bench import BenchConfig, check_bench_config
from rmsrepro.config.errors import UserError
from rmsrepro.config.resolve import resolve
from rmsrepro.config.schema import (
    CldrConfig,
    GRUConfig,
    LMConfig,
    Placement,
    PydocConfig,
    TrainConfig,
    TrainerConfig,
    TransformerConfig,
    TranslationConfig,
)
from rmsrepro.norms import NormSpec
from rmsrepro.tasks import build_task

CPU = torch.device("cpu")
ARM = Arm("rmsnorm/composite", "rmsnorm", {}, "composite")


def lm(out_dir: Path, *, accumulate: int = 1, dropout: float = 0.1, precision: str = "32") -> TrainConfig:
    return resolve(
        TrainConfig(
            norm={"name": "layernorm"},
            model=TransformerConfig(d_model=16, num_layers=1, num_heads=2, d_ff=32, dropout=dropout),
            task=LMConfig(),
            data=PydocConfig(max_len=16, batch_tokens=64),
            trainer=TrainerConfig(max_steps=10, accumulate=accumulate, accelerator="cpu"),
            precision=precision,
            out_dir=str(out_dir),
        )
    )


def translation(out_dir: Path) -> TrainConfig:
    return resolve(
        TrainConfig(
            norm={"name": "layernorm"},
            model=GRUConfig(d_model=16, d_embed=8, num_layers=1),
            task=TranslationConfig(),
            data=CldrConfig(num_train=200, num_val=20, num_test=20, batch_tokens=200),
            trainer=TrainerConfig(accelerator="cpu"),
            out_dir=str(out_dir),
        )
    )


@pytest.mark.parametrize("make", [lm, translation])
def test_a_pass_gives_the_loss_and_the_gradients_and_keeps_nothing(
    tmp_path: Path, make: Callable[[Path], TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make(tmp_path)
    data = prepare_data(base, 2)
    config = arm_config(base, ARM)
    step = ModelStep(config, data, CPU, backward=True)
    before = {name: value.clone() for name, value in step._task.state_dict().items()}
    seen: list[dict[str, bool]] = []
    backward = torch.Tensor.backward

    def watched(self: torch.Tensor, *rest: Any, **named: Any) -> None:
        backward(self, *rest, **named)
        seen.append({name: one.grad is not None for name, one in step._task.named_parameters()})

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    step.seed()
    step()
    first = step.loss()
    assert all(seen[0].values())
    assert all(one.grad is None for one in step._task.parameters())
    step.seed()
    task = build_task(config, data)
    task.train()
    task.training_step(data.batches[0], 0)
    assert task.last_loss is not None
    assert first == pytest.approx(float(task.last_loss), rel=1e-6)
    step()
    assert step.loss() != first  # the next batch
    step.tidy()
    after = step._task.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_forward_alone_makes_no_graph_and_the_same_loss(tmp_path: Path) -> None:
    base = lm(tmp_path)
    data = prepare_data(base, 2)
    steps = [ModelStep(arm_config(base, ARM), data, CPU, backward=backward) for backward in (False, True)]
    losses = []
    for step in steps:
        step.seed()
        step()
        losses.append(step.loss())
    assert losses[0] == losses[1]


def test_batches_do_not_add_up(tmp_path: Path) -> None:
    level = get_level("model")
    assert isinstance(level, ModelLevel)
    config = BenchConfig(name="model", num_batches=3)
    base = lm(tmp_path, accumulate=2)
    data = level.prepare(config, base)
    assert len(data.batches) == 3  # type: ignore[union-attr]
    assert level.identity(base) == level.identity(lm(tmp_path))
    assert level.identity(base) != level.identity(replace(base, seed=2))
    (cell,) = level.cells(config, base, data)
    assert cell == Cell("model", "4x16", "fwd_bwd", "float32")
    both = level.cells(BenchConfig(name="model", modes=["fwd", "fwd_bwd"]), base, data)
    assert [one.mode for one in both] == ["fwd", "fwd_bwd"]
    assert level.cells(config, lm(tmp_path, precision="bf16-mixed"), data)[0].dtype == "bf16-mixed"
    assert level.facts(base, cell) == {
        "model": "transformer", "size": "tiny", "task": "lm", "data": "pydoc", "placement": "pre",
    }  # fmt: skip


def test_what_cannot_be_timed_is_refused(tmp_path: Path) -> None:
    level = get_level("model")
    with pytest.raises(UserError, match="has no norm in it"):
        level.check(BenchConfig(name="model"), replace(lm(tmp_path), placement=Placement.none), [])
    with pytest.raises(UserError, match=r"bench\.modes: 'step'.*bench=model has fwd, fwd_bwd"):
        check_bench_config(BenchConfig(name="model", modes=["step"]))


def test_a_bench_of_models_has_a_cell_for_each_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "machine_lock_path", lambda: tmp_path / "bench.lock")
    monkeypatch.setattr(
        measuring_module, "run_worker", lambda spec, folder, **others: measure({**spec, "spawned_at": 0.0})
    )
    config = BenchConfig(
        name="model", modes=["fwd", "fwd_bwd"], processes=2, rounds=2, warmup_s=0.01, block_s=0.001,
        num_batches=2,
    )  # fmt: skip
    norms = [{"name": "rmsnorm", "backend": backend} for backend in ("composite", "torch")]
    found = run_bench(config, base=lm(tmp_path / "outputs"), norms=norms).result
    assert found["status"] == "completed"
    assert [(row["arm"], row["mode"]) for row in found["comparisons"]] == [
        (f"rmsnorm/{backend}", mode) for mode in ("fwd", "fwd_bwd") for backend in ("composite", "torch")
    ]
    for row in found["comparisons"]:
        assert (row["level"], row["model"], row["task"], row["shape"]) == (
            "model", "transformer", "lm", "4x16",
        )  # fmt: skip
    assert {row["status"] for row in found["arms"]} == {"measured"}
    peaks = {(row["arm"], row["mode"]): row["peak_bytes"] for row in found["arms"]}
    assert peaks["layernorm/composite", "fwd"] < peaks["layernorm/composite", "fwd_bwd"]


# --------------------------------------------------------------------------------------- the gate


def test_models_are_held_against_float64(tmp_path: Path) -> None:
    for base in (lm(tmp_path), translation(tmp_path), lm(tmp_path, precision="bf16-mixed")):
        data = prepare_data(base, 1)
        gate = task_gate(base, data, CPU)
        for norm, backend in (("layernorm", "torch"), ("layernorm", "composite"), ("none", "composite")):
            arm = Arm(f"{norm}/{backend}", norm, {}, backend)
            step = ModelStep(arm_config(base, arm), data, CPU, gate, backward=True)
            step.seed()
            step()
            assert step.check() is None
            assert list(step.remarks) == []
            assert step._task.training
        assert len(gate._references) == 2
        gate.forget()
        assert gate._references == {}


def test_a_model_that_computes_something_else_is_found(tmp_path: Path) -> None:
    base = lm(tmp_path)
    data = prepare_data(base, 1)
    step = ModelStep(arm_config(base, ARM), data, CPU, task_gate(base, data, CPU), backward=False)
    step()
    norm = next(one for one in step._task.modules() if getattr(one, "_rmsrepro_norm", None) == "rmsnorm")
    norm.register_forward_hook(lambda module, given, output: 1.01 * output)
    found = step.check()
    assert found is not None
    assert found.startswith("it computes something else than in float64: off by 0.0")
    assert step._task.training


def test_a_model_that_takes_no_float64_is_told(tmp_path: Path) -> None:
    def build(spec: NormSpec) -> nn.Module:
        raise TypeError("float32 only\nand more")

    gate = ModelGate(True, build)
    with pytest.raises(NoReference, match=r"does not run in float64 \(TypeError: float32 only\)$"):
        gate.wrong(NormSpec("rmsnorm"), nn.Linear(2, 2), lambda model: [], lambda model: [])
    base = lm(tmp_path)
    data = prepare_data(base, 1)
    step = ModelStep(arm_config(base, ARM), data, CPU, gate, backward=False)
    step()
    assert step.check() is None
    assert list(step.remarks) == ["not checked: it does not run in float64 (TypeError: float32 only)"]


def test_rounding_that_is_amplified_is_no_error() -> None:
    class Steep(nn.Module):
        """Amplifies the rounding of its weight; `off` is added to what it computes."""

        def __init__(self, slope: float, off: float) -> None:
            super().__init__()
            self.weight, self.off = nn.Parameter(torch.ones(1)), off
            self.slope = slope

        def forward(self) -> torch.Tensor:
            return 1 + self.slope * (self.weight - 1) + self.off

    def wrong(slope: float, off: float, *, wide: bool) -> str | None:
        gate = ModelGate(wide, lambda spec: Steep(slope, 0.0))
        return gate.wrong(NormSpec("none"), Steep(slope, off), lambda one: [one()], lambda one: [one()])

    assert wrong(1.0, 0.5e-3, wide=True) is None
    assert wrong(1.0, 2e-3, wide=True) is not None
    assert wrong(1e5, 2e-3, wide=True) is None
    assert wrong(1.0, 2e-3, wide=False) is None
    with pytest.raises(NoReference, match="nothing but rounding"):
        wrong(1e5, 0.0, wide=False)


def test_distances() -> None:
    one = torch.tensor([3.0, 4.0])
    assert distance([one], [one.double()]) == 0
    assert distance([one * 1.5, one], [one, one]) == pytest.approx(0.5 / 2**0.5)
    assert distance([one], [torch.zeros(2)]) == 5
    assert distance([one], [one, one]) == float("inf")
    assert distance([one], [one[:1]]) == float("inf")
    assert not distance([one * float("nan")], [one]) <= 1e9


def test_the_first_rows_of_a_batch(tmp_path: Path) -> None:
    batch = prepare_data(lm(tmp_path), 1).batches[0]
    rows = first_rows(batch)
    assert rows.inputs.shape == (2, 16)
    assert torch.equal(rows.targets, batch.targets[:2])
    assert rows.num_tokens == 32
    pairs = prepare_data(translation(tmp_path), 1).batches[0]
    rows = first_rows(pairs, 1)
    assert [len(part) for part in (rows.src, rows.src_mask, rows.tgt_in, rows.tgt_out, rows.index)] == [1] * 5
