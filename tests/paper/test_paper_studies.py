"""A study's plan: which jobs it stands for, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rmsrepro.config.errors import UserError
from rmsrepro.config.study import (
    ClaimTest,
    Relation,
    StudyBench,
    StudyClaims,
    StudyConfig,
    higher_is_better,
)
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


LEVELS = replace(
    STUDY,
    norms=[*STUDY.norms, "prmsnorm_p50"],
    norm_variants={"prmsnorm_p50": {"name": "prmsnorm", "p": 0.5}},
    norm_cells={"prmsnorm_p50": ["gru/lm"]},
    benches=[
        StudyBench(level="layer", norms=["layernorm", "prmsnorm_p50"], backends=["composite", "torch"]),
        StudyBench("whole", "model", cells=["gru/lm", "transformer/lm"], overrides=["norm.p=0.0625"]),
    ],
)  # fmt: skip


def test_a_timing_gets_what_shapes_a_step_and_nothing_of_how_long_a_run_is() -> None:
    study = replace(LEVELS, overrides=["trainer.accumulate=4", "trainer.max_steps=9", "precision=bf16-mixed"])
    old, layer, gru, _ = bench_jobs(study)
    for job in (old, gru):
        assert {"trainer.accumulate=4", "precision=bf16-mixed"} <= set(job.overrides)
    assert not any(text.startswith(("trainer.", "precision")) for text in layer.overrides)
    assert not any("max_steps" in text for job in (old, layer, gru) for text in job.overrides)


def test_timings_at_several_levels() -> None:
    old, layer, gru, transformer = bench_jobs(LEVELS)
    assert (old.level, old.label, old.variants) == ("step", "step gru/lm", (("norm=prmsnorm", "norm.p=0.5"),))
    assert (layer.level, layer.cell, layer.label) == ("layer", "", "layer")
    assert layer.overrides == (
        "norm=layernorm",
        "backend=composite,torch",
        "study=quick",
        "bench=layer",
    )  # neither model nor data, and no optimiser
    assert layer.variants == (("norm=prmsnorm", "norm.p=0.5"),)
    assert (gru.label, transformer.label) == ("whole gru/lm", "whole transformer/lm")
    assert gru.overrides == (
        "norm=layernorm,prmsnorm",
        "model=gru",
        "task=lm",
        "backend=composite",
        "study=quick",
        "optim.lr=0.01",
        "data=pydoc",
        "norm.p=0.0625",  # the timing's own value
        "bench=model",
    )
    assert (gru.norms, gru.variants) == (
        ("layernorm", "prmsnorm", "prmsnorm_p50"),
        (("norm=prmsnorm", "norm.p=0.5"),),
    )
    assert (transformer.norms, transformer.variants) == (("layernorm", "prmsnorm"), ())


def test_a_norm_may_be_there_twice_and_in_some_cells_only() -> None:
    jobs = study_jobs(LEVELS)
    assert [job.norm for job in jobs if (job.cell, job.seed) == ("gru/lm", 1)] == LEVELS.norms
    assert [job.norm for job in jobs if (job.cell, job.seed) == ("gru/translation", 1)] == STUDY.norms
    twice = next(job for job in jobs if job.norm == "prmsnorm_p50")
    assert "norm=prmsnorm" in twice.overrides
    assert "norm.p=0.5" in twice.overrides
    assert LEVELS.norm_of("prmsnorm_p50") == ("prmsnorm", {"p": 0.5})
    assert LEVELS.norm_of("prmsnorm") == ("prmsnorm", {"p": 0.25})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"benches": [StudyBench(level="models", cells=["gru/lm"])]},
            "level is 'models'; it is one of",
        ),
        ({"benches": [StudyBench(level="models", cells=["gru/lm"])]}, "did you mean model"),
        (
            {"benches": [StudyBench(level="model")]},
            r"benches\[0\].cells: a timing at the level model needs at",
        ),
        (
            {"benches": [StudyBench(level="layer", cells=["gru/lm"])]},
            "a timing at the level layer has no cells",
        ),
        (
            {"benches": [StudyBench(cells=["gru/ml"])]},
            r"benches\[0\].cells names 'gru/ml'.*did you mean gru/lm",
        ),
        (
            {"benches": [StudyBench(cells=["gru/lm"], norms=["rmsnorm"])]},
            r"benches\[0\].norms names 'rmsnorm'",
        ),
        (
            {"benches": [StudyBench(level="layer", overrides=["bench=model"])]},
            r"benches\[0\].overrides has bench=model, but its level is layer",
        ),
        ({"norm_variants": {"rms": {"name": "rmsnorm"}}}, "norm_variants names 'rms'"),
        ({"norm_variants": {"prmsnorm": {"p": 0.5}}}, "norm_variants.prmsnorm needs a name and parameters"),
        ({"norm_variants": {"layernorm": {"name": "layernorm"}}}, "norm_variants names the baseline"),
        ({"norm_cells": {"prmsnorm": ["gru/ml"]}}, "norm_cells.prmsnorm names 'gru/ml'.*did you mean gru/lm"),
        ({"norm_cells": {"layernorm": ["gru/lm"]}}, "norm_cells names the baseline 'layernorm'"),
    ],
)
def test_timings_and_norms_that_a_study_cannot_have(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"study 'quick': .*{message}|study 'quick': {message}"):
        check_study(replace(STUDY, **change))


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
            "benches": [{"level": "layer", "backends": ["torch"]}],
            "claims": [{"claims": ["t2-*"], "relation": "faithful", "by": {"cell": "gru/lm"}, "why": "so"}],
        }
    )
    study = OmegaConf.to_object(OmegaConf.merge(schema, given))
    assert isinstance(study, StudyConfig)
    assert study.cell_overrides == {"gru/lm": ["optim.lr=0.01"]}
    assert study.secondary == {"translation": ["test_bleu"]}
    assert study.bench.cells == ["gru/lm"]
    assert study.primary_metric("lm") == "val_loss"
    assert [timing.level for timing in study.timings()] == ["step", "layer"]
    assert study.claims == [StudyClaims(["t2-*"], Relation.faithful, ClaimTest(cell="gru/lm"), "so")]


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
