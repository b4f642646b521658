from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rmsrepro.bench.arms import arrange_arms, contestants
from rmsrepro.bench.cells import Arm
from rmsrepro.bench.identity import bench_key, find_reusable
from rmsrepro.bench.step import TrainingStep
from rmsrepro.bench.task_step import PreparedData, arm_config, check_base, prepare_data
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.errors import UserError
from rmsrepro.config.resolve import resolve
from rmsrepro.config.schema import (
    Backend,
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
from rmsrepro.runs.files import to_json
from rmsrepro.runs.seeding import seed_dropout
from rmsrepro.tasks import build_optimizer, build_task

CPU = torch.device("cpu")


def lm_base(out_dir: Path, *, accumulate: int = 1, precision: str = "32") -> TrainConfig:
    return resolve(
        TrainConfig(
            norm={"name": "layernorm"},
            model=TransformerConfig(d_model=16, num_layers=1, num_heads=2, d_ff=32, dropout=0.1),
            task=LMConfig(),
            data=PydocConfig(max_len=16, batch_tokens=64),
            trainer=TrainerConfig(max_steps=10, accumulate=accumulate),
            precision=precision,
            backend=Backend.composite,
            out_dir=str(out_dir),
        )
    )


def translation_base(out_dir: Path) -> TrainConfig:
    return resolve(
        TrainConfig(
            norm={"name": "layernorm"},
            model=GRUConfig(d_model=16, d_embed=8, num_layers=1, dropout=0.0),
            task=TranslationConfig(),
            data=CldrConfig(num_train=200, num_val=20, num_test=20, batch_tokens=200),
            out_dir=str(out_dir),
        )
    )


# ------------------------------------------------------------------------------- which arms


def test_each_backend_has_its_baseline_first_and_missing_ones_are_added() -> None:
    arms, notes = arrange_arms(
        [
            {"name": "rmsnorm", "params": {"eps": 1e-6}, "backend": "composite"},
            {"name": "layernorm", "params": {}, "backend": "composite"},
            {"name": "rmsnorm", "backend": "torch"},
            {"name": "prmsnorm", "backend": "torch"},
        ]
    )
    assert [(arm.label, arm.is_baseline) for arm in arms] == [
        ("layernorm/composite", True),
        ("rmsnorm/composite", False),
        ("layernorm/torch", True),
        ("rmsnorm/torch", False),
        ("prmsnorm/torch", False),
    ]
    assert notes == ["layernorm/torch was added: it is the baseline"]
    assert arms[0].twins == ["layernorm/composite#1", "layernorm/composite#2"]
    assert arms[1].twins == ["rmsnorm/composite"]
    assert arms[1].params == {"eps": 1e-6}
    assert [arm.label for arm in arms if arm.unavailable] == ["prmsnorm/torch"]
    assert "prmsnorm" in (arms[4].unavailable or "")


def test_the_same_arm_twice_is_one_and_the_same_norm_with_other_parameters_is_another() -> None:
    arms, _ = arrange_arms(
        [
            {"name": "layernorm", "backend": "composite"},
            {"name": "prmsnorm", "params": {"p": 0.25}, "backend": "composite"},
            {"name": "prmsnorm", "params": {"p": 0.5}, "backend": "composite"},
            {"name": "prmsnorm", "params": {"p": 0.25}, "backend": "composite"},
        ]
    )
    assert [arm.label for arm in arms] == [
        "layernorm/composite",
        "prmsnorm(p=0.25)/composite",
        "prmsnorm(p=0.5)/composite",
    ]


@pytest.mark.usefixtures("fused_kernels")
def test_auto_is_fused_where_the_kernels_can_be_had() -> None:
    arms, notes = arrange_arms(
        [{"name": name, "backend": "auto"} for name in ("layernorm", "prmsnorm", "none")]
    )
    assert [arm.label for arm in arms] == ["layernorm/fused", "prmsnorm/fused", "none/fused"]
    assert notes == ["backend=auto is fused: the fastest that all arms have"]
    arms, _ = arrange_arms([{"name": name, "backend": "auto"} for name in ("layernorm", "crmsnorm")])
    assert [arm.label for arm in arms] == ["layernorm/composite", "crmsnorm/composite"]


@pytest.mark.usefixtures("no_fused_kernels")
def test_auto_is_one_backend_that_all_arms_have() -> None:
    arms, notes = arrange_arms(
        [{"name": name, "backend": "auto"} for name in ("layernorm", "prmsnorm", "none")]
    )
    assert [arm.label for arm in arms] == ["layernorm/composite", "prmsnorm/composite", "none/composite"]
    assert notes == [
        "backend=auto is composite: the fastest that all arms have "
        "(not the fused kernels: no kernels in this test)"
    ]
    arms, _ = arrange_arms([{"name": name, "backend": "auto"} for name in ("layernorm", "rmsnorm")])
    assert [arm.label for arm in arms] == ["layernorm/torch", "rmsnorm/torch"]


def test_an_unknown_norm_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="rmsnrom"):
        arrange_arms([{"name": "rmsnrom", "backend": "composite"}])


def test_a_norm_that_does_not_suit_the_task_is_unavailable() -> None:
    norms = [{"name": "batchnorm", "backend": "composite"}]
    arms, _ = arrange_arms(norms, "lm")
    assert [arm.unavailable is None for arm in arms] == [True, False]
    assert "norm=batchnorm: its statistics would see the tokens to come" in (arms[1].unavailable or "")
    arms, _ = arrange_arms(norms, "translation")
    assert [arm.unavailable for arm in arms] == [None, None]


def test_the_first_loss_is_checked_against_the_composite_backend() -> None:
    arms, _ = arrange_arms(
        [
            {"name": name, "backend": backend}
            for backend in ("torch", "composite")
            for name in ("layernorm", "rmsnorm")
        ]
    )
    found = {one.label: (one.baseline, one.reference) for one in contestants(arms)}
    assert found == {
        "layernorm/torch": ("layernorm/torch", "layernorm/composite"),
        "rmsnorm/torch": ("layernorm/torch", "rmsnorm/composite"),
        "layernorm/composite": ("layernorm/composite", None),
        "rmsnorm/composite": ("layernorm/composite", None),
    }


def test_a_model_without_a_place_for_norms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no norm in it"):
        check_base(replace(lm_base(tmp_path), placement=Placement.none))
    with pytest.raises(UserError, match="has no norm in it"):
        check_base(replace(translation_base(tmp_path), sites=[]))


# --------------------------------------------------------------------------------- the step


def reference_losses(config: TrainConfig, data: PreparedData, updates: int) -> list[float]:
    """The losses of a plain training loop, written out here once more."""
    task = build_task(config, data)
    optimizer, schedule = build_optimizer(task.model, config.optim, config.trainer.max_steps)
    seed_dropout(config.seed)
    batches, losses = iter(data.batches * updates), []
    for _ in range(updates):
        optimizer.zero_grad()
        for _ in range(config.trainer.accumulate):
            batch = next(batches)
            logits, targets = task.logits_and_targets(batch)
            summed = nn.functional.cross_entropy(
                logits.flatten(0, 1),
                targets.flatten(),
                ignore_index=-100,
                reduction="sum",
                label_smoothing=task.label_smoothing,
            )
            (summed / batch.update_tokens).backward()
            losses.append(float(summed.detach()) / batch.num_tokens)
        assert config.optim.clip_norm is not None
        nn.utils.clip_grad_norm_(task.model.parameters(), config.optim.clip_norm)
        optimizer.step()
        schedule.step()
    return losses


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_timed_step_trains_like_a_plain_loop(tmp_path: Path, accumulate: int) -> None:
    base = lm_base(tmp_path, accumulate=accumulate)
    data = prepare_data(base, 2)
    assert len(data.batches) == 2 * accumulate
    assert data.shape == "4x16"
    arm = Arm("rmsnorm/composite", "rmsnorm", {}, "composite")
    step = TrainingStep(arm_config(base, arm), data, CPU)
    step.seed()
    losses = []
    for _ in range(5):
        step()
        losses.append(step.loss())
    expected = reference_losses(arm_config(base, arm), data, 5)
    assert losses == pytest.approx(expected[accumulate - 1 :: accumulate], rel=1e-5)
    assert losses[0] == pytest.approx(math.log(data.tgt_vocab), rel=0.2)
    step.tidy()


def test_a_translation_step_learns(tmp_path: Path) -> None:
    base = translation_base(tmp_path)
    data = prepare_data(base, 3)
    assert "->" in data.shape
    step = TrainingStep(arm_config(base, Arm("layernorm/composite", "layernorm", {}, "composite")), data, CPU)
    step.seed()
    step()
    first = step.loss()
    for _ in range(29):
        step()
    assert math.isfinite(first)
    assert step.loss() < first


def test_all_norms_see_the_same_weights_and_twins_the_same_loss(tmp_path: Path) -> None:
    base = lm_base(tmp_path)
    data = prepare_data(base, 1)
    losses = []
    for _ in range(2):
        step = TrainingStep(arm_config(base, Arm("layernorm/torch", "layernorm", {}, "torch")), data, CPU)
        step.seed()
        step()
        losses.append(step.loss())
    assert losses[0] == losses[1]


def test_mixed_precision_runs_and_stays_close(tmp_path: Path) -> None:
    data = prepare_data(lm_base(tmp_path), 1)
    arm = Arm("layernorm/composite", "layernorm", {}, "composite")
    losses = {}
    for precision in ("32", "bf16-mixed"):
        step = TrainingStep(arm_config(lm_base(tmp_path, precision=precision), arm), data, CPU)
        step.seed()
        step()
        losses[precision] = step.loss()
    assert losses["bf16-mixed"] != losses["32"]
    assert losses["bf16-mixed"] == pytest.approx(losses["32"], rel=2e-2)


# ---------------------------------------------------------------------------------- the key


NORMS = [{"name": "layernorm", "backend": "composite"}, {"name": "rmsnorm", "backend": "composite"}]


def test_the_key_changes_with_what_decides_the_numbers_and_with_nothing_else(tmp_path: Path) -> None:
    base, config = lm_base(tmp_path), BenchConfig()
    key = bench_key(config, base, NORMS)
    assert bench_key(BenchConfig(), lm_base(tmp_path), [dict(norm) for norm in NORMS]) == key
    same = [
        bench_key(replace(config, timeout_s=99.0, lock_wait_s=1.0, reuse=True, norms=[]), base, NORMS),
        bench_key(config, replace(base, out_dir="elsewhere", study_name="quick"), NORMS),
        bench_key(config, replace(base, norm={"name": "rmsnorm"}, backend=Backend.torch), NORMS),
    ]
    assert same == [key] * 3
    other = [
        bench_key(replace(config, processes=3), base, NORMS),
        bench_key(replace(config, budget_s=1.0), base, NORMS),
        bench_key(replace(config, num_threads=7), base, NORMS),
        bench_key(config, replace(base, model=replace(base.model, d_model=32)), NORMS),
        bench_key(config, replace(base, placement=Placement.post), NORMS),
        bench_key(config, replace(base, precision="bf16-mixed"), NORMS),
        bench_key(config, replace(base, data=replace(base.data, batch_tokens=128)), NORMS),
        bench_key(config, base, [*NORMS, {"name": "none", "backend": "composite"}]),
        bench_key(config, base, [NORMS[0], {"name": "rmsnorm", "backend": "torch"}]),
        bench_key(
            config, base, [NORMS[0], {"name": "rmsnorm", "params": {"eps": 0.1}, "backend": "composite"}]
        ),
    ]
    assert len({key, *other}) == 1 + len(other)


def test_threads_of_the_environment_enter_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = bench_key(BenchConfig(), lm_base(tmp_path), NORMS)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert bench_key(BenchConfig(), lm_base(tmp_path), NORMS) != one


def test_the_newest_complete_bench_of_a_key_is_found(tmp_path: Path) -> None:
    def record(name: str, *, samples: bool = True, **content: str) -> Path:
        folder = tmp_path / "bench" / name
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(to_json(content))
        if samples:
            (folder / "samples.csv").write_text("process\n")
        return folder

    assert find_reusable(tmp_path, "k") is None
    record("old", key="k", status="completed", created="2025-01-01T00:00:00")
    newest = record("new", key="k", status="completed", created="2025-02-01T00:00:00")
    record("broken", key="k", status="incomplete", created="2025-03-01T00:00:00")
    record("other", key="other", status="completed", created="2025-03-01T00:00:00")
    record("bare", samples=False, key="k", status="completed", created="2025-03-01T00:00:00")
    record(".unfinished", key="k", status="completed", created="2025-03-01T00:00:00")
    (tmp_path / "bench" / "old" / "result.json").with_name("notes.txt").write_text("x")
    (tmp_path / "bench" / "damaged").mkdir()
    (tmp_path / "bench" / "damaged" / "result.json").write_text("{")
    assert find_reusable(tmp_path, "k") == newest
    assert find_reusable(tmp_path, "unknown") is None


def test_a_users_module_is_not_blamed_on_its_parameters() -> None:
    norms = [{"name": name, "params": {}, "backend": "torch"} for name in ("torch.nn:LayerNorm", "prmsnorm")]
    arms, _ = arrange_arms(norms)
    reasons = {arm.norm: arm.unavailable for arm in arms}
    assert str(reasons["torch.nn:LayerNorm"]).startswith("backend=torch cannot run torch.nn:LayerNorm: ")
    assert str(reasons["prmsnorm"]).startswith("backend=torch cannot run prmsnorm: ")
