"""A study's plan: which jobs it stands for, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rmsrepro.config.errors import UserError
from rmsrepro.config.study import StudyBench, StudyConfig, higher_is_better
from rmsrepro.paper import HEADLINE, bench_jobs, check_study, study_jobs

STUDY = StudyConfig(
    name="quick",
    norms=["layernorm", "prmsnorm"],
    models=["gru", "transformer"],
    tasks=["lm", "translation"],
    seeds=[1, 2],
    primary={"lm": "val_loss", "translation": "val_loss"},
    margin={"val_loss": 0.05},
    overrides=["optim.lr=0.001", "trainer.max_steps=300"],
    task_overrides={"lm": ["data=pydoc"], "translation": ["data=cldr"]},
    cell_overrides={"gru/lm": ["optim.lr=0.01"]},
    norm_overrides={"prmsnorm": ["norm.p=0.25", "optim.warmup_steps=50"]},
    bench=StudyBench(cells=["gru/lm"], overrides=["bench=step", "bench.budget_s=10"]),
)


def test_jobs_cover_the_grid_in_whole_pairs() -> None:
    jobs = study_jobs(STUDY)
    assert len(jobs) == 16
    assert [(job.cell, job.seed, job.norm) for job in jobs[:4]] == [
        ("gru/lm", 1, "layernorm"),
        ("gru/lm", 1, "prmsnorm"),
        ("gru/lm", 2, "layernorm"),
        ("gru/lm", 2, "prmsnorm"),
    ]


def test_the_nearer_override_wins() -> None:
    job = study_jobs(STUDY)[1]
    assert job.overrides == (
        "norm=prmsnorm",
        "model=gru",
        "task=lm",
        "seed=1",
        "backend=composite",
        "study=quick",
        "optim.lr=0.01",
        "trainer.max_steps=300",
        "data=pydoc",
        "norm.p=0.25",
        "optim.warmup_steps=50",
    )


def test_a_bench_shares_what_shapes_the_step() -> None:
    (job,) = bench_jobs(STUDY)
    assert job.norms == ("layernorm", "prmsnorm")
    assert job.overrides == (
        "norm=layernorm,prmsnorm",
        "model=gru",
        "task=lm",
        "backend=composite",
        "study=quick",
        "optim.lr=0.01",
        "data=pydoc",
        "norm.p=0.25",
        "bench=step",
        "bench.budget_s=10",
    )


def test_a_bench_has_the_plugins_and_overlays_of_its_study() -> None:
    more = ["plugins=[my_norms]", "debug=fast", "tracker=none"]
    (job,) = bench_jobs(replace(STUDY, overrides=[*STUDY.overrides, *more]))
    assert {"plugins=[my_norms]", "debug=fast"} <= set(job.overrides)
    assert "tracker=none" not in job.overrides


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norms": []}, "norms is empty"),
        ({"seeds": [1, 1]}, "seeds names 1 more than once"),
        ({"baseline": "rmsnorm"}, "the baseline 'rmsnorm' is not among its norms"),
        ({"learned": {"gur/lm": 2.0}}, "learned names 'gur/lm'.*did you mean gru/lm"),
        ({"target": {"gru": 2.0}}, "target names 'gru'"),
        ({"task_overrides": {"lmm": []}}, "task_overrides names 'lmm'"),
        ({"norm_overrides": {"rmsnorm": []}}, "norm_overrides names 'rmsnorm'"),
        ({"bench": StudyBench(cells=["gru/x"])}, "bench.cells names 'gru/x'"),
        ({"margin": {}}, "primary metric 'val_loss' of task 'lm' has no margin"),
        ({"margin": {"val_loss": 0.0}}, "margin.val_loss is 0.0"),
        ({"margin": {"val_loss": float("nan")}}, "margin.val_loss is nan"),
    ],
)
def test_a_study_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"study 'quick': .*{message}|study 'quick': {message}"):
        check_study(replace(STUDY, **change))


def test_a_study_without_verdict_needs_no_margin() -> None:
    check_study(replace(STUDY, margin={}, verdict=False))


def test_a_study_is_a_structured_config() -> None:
    schema = OmegaConf.structured(StudyConfig)
    given = OmegaConf.create(
        {
            "name": "mine",
            "norms": ["layernorm"],
            "cell_overrides": {"gru/lm": ["optim.lr=0.01"]},
            "secondary": {"translation": ["test_bleu"]},
            "bench": {"cells": ["gru/lm"]},
        }
    )
    study = OmegaConf.to_object(OmegaConf.merge(schema, given))
    assert isinstance(study, StudyConfig)
    assert study.cell_overrides == {"gru/lm": ["optim.lr=0.01"]}
    assert study.secondary == {"translation": ["test_bleu"]}
    assert study.bench.cells == ["gru/lm"]
    assert study.primary_metric("lm") == "val_loss"


@pytest.mark.parametrize(
    ("metric", "higher"),
    [
        ("val_loss", False),
        ("val_perplexity", False),
        ("test_bleu", True),
        ("val_chrf", True),
        ("val_accuracy", True),
    ],
)
def test_the_better_direction_follows_from_the_metric(metric: str, higher: bool) -> None:
    assert higher_is_better(metric) is higher


def test_the_papers_headline_is_split_by_norm() -> None:
    assert (HEADLINE.low, HEADLINE.high) == (7.0, 64.0)
    assert HEADLINE.by_norm == {"rmsnorm": (6.9, 40.8), "prmsnorm": (9.3, 63.9)}
    lows, highs = zip(*HEADLINE.by_norm.values(), strict=True)
    assert (round(min(lows)), round(max(highs))) == (HEADLINE.low, HEADLINE.high)
