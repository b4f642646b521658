from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rmsrepro.bench import measuring as measuring_module
from rmsrepro.bench import run_bench
from rmsrepro.bench import runner as runner_module
from rmsrepro.bench.arms import arrange_arms, contestants
from rmsrepro.bench.cells import Arm
from rmsrepro.bench.step import StepLevel, TrainingStep
from rmsrepro.bench.task_step import arm_config, prepare_data
from rmsrepro.bench.trainer_step import (
    RECORDS,
    THREAD,
    TRAINER,
    HeldBatches,
    TrainerStep,
    TrainingOver,
    framework_arms,
    kind_of,
)
from rmsrepro.bench.worker import measure
from rmsrepro.config.bench import BenchConfig, check_bench_config
from rmsrepro.config.errors import UserError
from rmsrepro.config.resolve import resolve
from rmsrepro.config.schema import (
    Backend,
    LMConfig,
    PydocConfig,
    TrainConfig,
    TrainerConfig,
    TransformerConfig,
)
from rmsrepro.runs.records import read_metrics
from rmsrepro.runs.trainer import quiet_lightning

CPU = torch.device("cpu")
ARM = Arm("layernorm/composite", "layernorm", {}, "composite", is_baseline=True)


def base(out_dir: Path, *, accumulate: int = 1) -> TrainConfig:
    return resolve(
        TrainConfig(
            norm={"name": "layernorm"},
            model=TransformerConfig(d_model=16, num_layers=1, num_heads=2, d_ff=32, dropout=0.1),
            task=LMConfig(),
            data=PydocConfig(max_len=16, batch_tokens=64),
            trainer=TrainerConfig(max_steps=10, accumulate=accumulate, log_every=4, accelerator="cpu"),
            backend=Backend.composite,
            out_dir=str(out_dir),
        )
    )


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet_lightning():
        yield
    assert THREAD not in {one.name for one in threading.enumerate()}


# ------------------------------------------------------------------------------------- the arms


def test_the_framework_stands_beside_the_first_baseline() -> None:
    arms, _ = arrange_arms(
        [{"name": "rmsnorm", "backend": backend} for backend in ("composite", "torch")], "lm"
    )
    found = framework_arms(arms)
    assert [(arm.label, arm.role, list(arm.against), kind_of(arm)) for arm in found] == [
        ("layernorm+trainer/composite", "framework", ["layernorm/composite"], TRAINER),
        (
            "layernorm+records/composite",
            "framework",
            ["layernorm/composite", "layernorm+trainer/composite"],
            RECORDS,
        ),
    ]
    told = {one.label: (one.baseline, one.reference) for one in contestants([*arms, *found])}
    assert told["layernorm+records/composite"] == ("layernorm/composite", "layernorm/composite")
    assert framework_arms([replace(ARM, unavailable="gone")]) == []


def test_it_is_there_only_when_asked_for(tmp_path: Path) -> None:
    norms = [{"name": "rmsnorm", "backend": "composite"}]
    level = StepLevel()
    without, _ = level.arrange(BenchConfig(), base(tmp_path), norms)
    assert {arm.role for arm in without} == {"norm"}
    config = BenchConfig(framework=True)
    found, _ = level.arrange(config, base(tmp_path), norms)
    assert [arm.role for arm in found] == ["norm", "norm", "framework", "framework"]
    assert level.steps_multiple(BenchConfig(), base(tmp_path)) == 1
    assert level.steps_multiple(config, base(tmp_path)) == 4
    with pytest.raises(UserError, match=r"bench\.framework=true: only bench=step .* bench=model has none"):
        check_bench_config(BenchConfig(name="model", framework=True))


# ------------------------------------------------------------------------------------- the steps


def test_batches_are_held_until_they_are_released() -> None:
    held, seen = HeldBatches("abc"), list[str]()

    def take() -> None:
        try:
            for batch in held:
                seen.append(batch)
        except TrainingOver:
            seen.append("over")

    thread = threading.Thread(target=take)
    thread.start()
    held.wait()
    assert seen == []
    held.release(2)
    assert seen == ["a", "b"]
    held.release(3)
    assert seen == ["a", "b", "c", "a", "b"]
    held.end()
    thread.join(10)
    assert seen[-1] == "over"
    held.report_end(ValueError("no more"))
    with pytest.raises(RuntimeError, match="the Trainer has ended: ValueError: no more"):
        held.wait()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [TRAINER, RECORDS])
def test_the_trainer_trains_as_the_bare_loop_does(tmp_path: Path, kind: str, accumulate: int) -> None:
    config = base(tmp_path, accumulate=accumulate)
    data = prepare_data(config, 3)
    losses: dict[str, list[float | None]] = {}
    steps: dict[str, Any] = {
        "bare": TrainingStep(arm_config(config, ARM), data, CPU),
        kind: TrainerStep(arm_config(config, ARM), data, CPU, kind),
    }
    for name, step in steps.items():
        step.seed()
        losses[name] = []
        for _ in range(5):
            step()
            losses[name].append(step.loss())
        step.tidy()
    steps[kind].close()
    assert losses[kind] == losses["bare"]
    assert len(set(losses["bare"])) == 5


def test_steps_are_done_when_their_batches_are(tmp_path: Path) -> None:
    config = base(tmp_path)
    step = TrainerStep(arm_config(config, ARM), prepare_data(config, 2), CPU, RECORDS)
    try:
        trainer = step._task.trainer
        assert trainer.global_step == 0
        step.repeat(3)
        assert trainer.global_step == 3
        step()
        assert trainer.global_step == 4
        step.tidy()
        step.repeat(9)
        assert trainer.global_step == 13
        assert step._folder is not None
        folder = Path(step._folder.name)
        rows = read_metrics(folder / "metrics.jsonl")
        # The row of step 12 is held back until a later one shows that it is complete.
        assert [row["step"] for row in rows] == [4, 8]
        assert set(rows[0]) == {"step", "train_seconds", "tokens", "train_loss", "grad_norm", "lr"}
        assert rows[1]["tokens"] == 2 * rows[0]["tokens"]
    finally:
        step.close()
    assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_step_passes_through_one_hook_of_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = base(tmp_path)
    step = TrainerStep(arm_config(config, ARM), prepare_data(config, 2), CPU, RECORDS)
    profiler, seen = step._task.trainer.profiler, list[str]()
    profile = profiler.profile

    def watched(name: str) -> Any:
        seen.append(name)
        return profile(name)

    monkeypatch.setattr(profiler, "profile", watched)
    step.repeat(2)
    step.close()
    steps = [name for name in seen if "RunCallback" in name and "exception" not in name]
    assert steps == ["[Callback]RunCallback.on_train_batch_end"] * 2


def test_a_trainer_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = base(tmp_path)
    step = TrainerStep(arm_config(config, ARM), prepare_data(config, 2), CPU, TRAINER)
    step()

    def fail(*rest: Any) -> None:
        raise ValueError("out of ideas")

    monkeypatch.setattr(step._task, "training_step", fail)
    with pytest.raises(RuntimeError, match="the Trainer has ended: ValueError: out of ideas"):
        step.repeat(2)
    step.close()


# --------------------------------------------------------------------------------- a whole bench


def test_a_bench_with_the_framework_has_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "machine_lock_path", lambda: tmp_path / "bench.lock")

    def in_this_process(spec: dict[str, Any], folder: Path, **others: Any) -> dict[str, Any]:
        return measure({**spec, "spawned_at": 0.0})

    monkeypatch.setattr(measuring_module, "run_worker", in_this_process)
    config = BenchConfig(processes=2, rounds=2, warmup_s=0.01, block_s=0.001, num_batches=2, framework=True)
    norms = [{"name": "layernorm", "backend": "composite"}]
    found = run_bench(config, base=base(tmp_path / "outputs"), norms=norms).result
    assert found["status"] == "completed"
    assert found["comparisons"] == []
    assert [(row["arm"], row["role"], row["status"]) for row in found["arms"]] == [
        ("layernorm/composite", "norm", "measured"),
        ("layernorm+trainer/composite", "framework", "measured"),
        ("layernorm+records/composite", "framework", "measured"),
    ]
    assert [row["peak_bytes"] is None for row in found["arms"]] == [False, True, True]
    (cell,) = found["plan"]["cells"].values()
    assert set(cell["steps_in_block"].values()) == {4}
    assert [(row["arm"], row["baseline"]) for row in found["extras"]] == [
        ("layernorm+trainer/composite", "layernorm/composite"),
        ("layernorm+records/composite", "layernorm/composite"),
        ("layernorm+records/composite", "layernorm+trainer/composite"),
    ]
    for row in found["extras"]:
        low, high = row["difference_ci"]
        assert low <= row["difference_s"] <= high
        assert (row["mode"], row["role"], row["n_processes"]) == ("step", "framework", 2)
