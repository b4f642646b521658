"""What records say to the paper's claims: from made folders to verdicts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.config.study import ClaimTest, StudyBench, StudyClaims, StudyConfig
from rmsrepro.paper import ClaimOutcome, ClaimVerdict
from rmsrepro.report.build import build_report

Made = Callable[..., Any]

TIMED = ["t2-rmsnorm-time", "t2-prmsnorm-time"]
TRAINED = ["t2-rmsnorm-test14", "t2-prmsnorm-test14"]


@pytest.fixture
def study(made: Made) -> StudyConfig:
    by = ClaimTest(cell="gru/lm")
    declared: StudyConfig = made(
        "study",
        benches=[StudyBench(level="model", cells=["gru/lm"], backends=["composite", "torch"])],
        claims=[StudyClaims(claims=claims, by=by, why="small") for claims in (TIMED, TRAINED)],
    )
    return declared


def model_level(made: Made, norm: str = "rmsnorm", ratio: float = 0.9, **changes: Any) -> dict[str, Any]:
    made_row: dict[str, Any] = made("comparison", norm, ratio=ratio, level="model", mode="fwd_bwd", **changes)
    return made_row


def judged(out_dir: Path, study: StudyConfig | None) -> dict[str, ClaimVerdict]:
    return {one.claim.id: one for one in build_report(out_dir, study=study).claims}


def test_verdicts_from_runs_timings_and_cards(tmp_path: Path, made: Made, study: StudyConfig) -> None:
    made("arm", tmp_path, "layernorm", [2.0, 2.1, 2.2])
    made("arm", tmp_path, "rmsnorm", [2.0, 2.101, 2.199])
    made("arm", tmp_path, "prmsnorm", [2.5, 2.62, 2.71])
    made("bench", tmp_path, [model_level(made), model_level(made, "prmsnorm", 1.3)])
    (tmp_path / "cards").mkdir()
    card = {"name": "rmsnorm", "invariances": {"dataset_rescaling": True}}
    (tmp_path / "cards" / "rmsnorm.json").write_text(json.dumps(card))
    found = judged(tmp_path, study)
    assert found["t2-rmsnorm-time"].verdict is ClaimOutcome.direction_only
    assert found["t2-rmsnorm-time"].interval == pytest.approx((8.0, 12.0))
    assert found["t2-prmsnorm-time"].verdict is ClaimOutcome.not_reproduced
    assert found["t2-rmsnorm-test14"].verdict is ClaimOutcome.direction_only
    assert found["t2-rmsnorm-test14"].unit == "val_loss"
    assert found["t2-prmsnorm-test14"].verdict is ClaimOutcome.not_reproduced
    assert found["t1-rmsnorm-dataset-re-scaling"].verdict is ClaimOutcome.reproduced
    # Without a study nothing but the cards is judged.
    alone = judged(tmp_path, None)
    assert [claim for claim, one in alone.items() if one.verdict is not ClaimOutcome.not_run] == [
        "t1-rmsnorm-dataset-re-scaling"
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"level": "step", "mode": "step"},
        {"mode": "fwd"},
        {"model": "transformer"},
        {"task": "translation"},
        {"baseline": "layernorm/torch"},
        {"baseline": "none/composite"},
        {"arm": "rmsnorm/torch", "baseline": "layernorm/torch"},
    ],
)
def test_other_timings_decide_nothing(
    tmp_path: Path, made: Made, study: StudyConfig, row: dict[str, Any]
) -> None:
    made("bench", tmp_path, [model_level(made) | row])
    assert judged(tmp_path, study)["t2-rmsnorm-time"].verdict is ClaimOutcome.not_run


def test_a_timing_has_to_be_of_what_was_trained(tmp_path: Path, made: Made, study: StudyConfig) -> None:
    made("bench", tmp_path, [model_level(made)], "own", config={"model": {"d_model": 64}})
    assert judged(tmp_path, study)["t2-rmsnorm-time"].verdict is ClaimOutcome.direction_only
    made("arm", tmp_path, "layernorm", [2.0, 2.1, 2.2])
    assert judged(tmp_path, study)["t2-rmsnorm-time"].verdict is ClaimOutcome.direction_only
    larger = made(
        "bench", tmp_path, [model_level(made, ratio=1.4)], "larger", config={"model": {"d_model": 512}}
    )
    os.utime(larger / "result.json", (2e9, 2e9))  # the newest, of another model
    assert judged(tmp_path, study)["t2-rmsnorm-time"].verdict is ClaimOutcome.direction_only


def test_before_anything_was_trained_a_timing_has_to_be_the_studys_own(
    tmp_path: Path, made: Made, study: StudyConfig
) -> None:
    made("bench", tmp_path, [model_level(made)], study="another")
    assert judged(tmp_path, study)["t2-rmsnorm-time"].verdict is ClaimOutcome.not_run


def test_the_newest_timing_counts_and_one_without_trust_decides_nothing(
    tmp_path: Path, made: Made, study: StudyConfig
) -> None:
    made("bench", tmp_path, [model_level(made)], "old")
    newer = made("bench", tmp_path, [model_level(made, trusted=False, flags=["A/A: 1.2"])], "new")
    os.utime(newer / "result.json", (2e9, 2e9))
    found = judged(tmp_path, study)["t2-rmsnorm-time"]
    assert (found.verdict, found.reason) == (
        ClaimOutcome.undecided,
        "The bench does not trust this timing: A/A: 1.2.",
    )


def test_an_arm_that_could_not_be_timed_says_why(tmp_path: Path, made: Made, study: StudyConfig) -> None:
    facts = {"level": "model", "mode": "fwd_bwd", "model": "gru", "task": "lm", "device": "cpu"}
    arm = facts | {"arm": "prmsnorm/composite", "status": "failed", "reason": "it gave nan"}
    made("bench", tmp_path, [model_level(made)], arms=[arm])
    found = judged(tmp_path, study)["t2-prmsnorm-time"]
    assert (found.verdict, found.reason) == (ClaimOutcome.not_run, "It could not be timed: it gave nan.")


def test_runs_that_are_missing_or_diverged(tmp_path: Path, made: Made, study: StudyConfig) -> None:
    assert judged(tmp_path, study)["t2-rmsnorm-test14"].verdict is ClaimOutcome.not_run
    made("arm", tmp_path, "layernorm", [2.0, 2.1, 2.2])
    made("arm", tmp_path, "rmsnorm", [2.0, 2.1, None])
    found = judged(tmp_path, study)["t2-rmsnorm-test14"]
    assert (found.verdict, found.reason) == (ClaimOutcome.not_run, "Runs are missing: incomplete (2 of 3).")
    assert found.command == "rmsrepro reproduce study=quick"
    made("run", tmp_path, "rmsnorm", seed=3, status="diverged", val_loss=math.inf)
    assert judged(tmp_path, study)["t2-rmsnorm-test14"].verdict is ClaimOutcome.not_reproduced
