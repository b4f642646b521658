"""Filling what was left open, and every rule between fields with its message."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from rmsrepro.config.errors import UserError
from rmsrepro.config.resolve import resolve
from rmsrepro.config.schema import (
    Backend,
    CldrConfig,
    GRUConfig,
    LMConfig,
    ModelConfig,
    OptimConfig,
    ParallelFilesConfig,
    Placement,
    Positions,
    PydocConfig,
    Site,
    Size,
    TrainConfig,
    TrainerConfig,
    TransformerConfig,
    TranslationConfig,
)
from rmsrepro.config.sizes import GRU_SIZES, TRANSFORMER_SIZES, resolve_model

LM = TrainConfig(norm={"name": "layernorm"}, model=TransformerConfig(), task=LMConfig(), data=PydocConfig())
GRU = replace(LM, model=GRUConfig())
TRANSLATION = replace(LM, task=TranslationConfig(), data=CldrConfig())
RNNSEARCH = replace(TRANSLATION, model=GRUConfig())
NONE = {"name": "none"}


def changed(base: TrainConfig, **values: Any) -> TrainConfig:
    """`base` with dotted fields replaced: `changed(LM, optim__lr=1)`."""
    for name, value in values.items():
        part, _, leaf = name.partition("__")
        base = replace(base, **{part: replace(getattr(base, part), **{leaf: value}) if leaf else value})
    return base


def message(base: TrainConfig, **values: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolve(changed(base, **values))
    return str(caught.value)


# ------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("size", "d_model", "num_layers", "num_heads", "d_ff", "dropout"),
    [(Size.tiny, 64, 2, 4, 256, 0.0), (Size.small, 256, 3, 4, 1024, 0.1), (Size.paper, 512, 6, 8, 2048, 0.1)],
)
def test_transformer_sizes(
    size: Size, d_model: int, num_layers: int, num_heads: int, d_ff: int, dropout: float
) -> None:
    model = resolve_model(TransformerConfig(size=size))
    assert isinstance(model, TransformerConfig)
    assert (model.d_model, model.num_layers, model.num_heads, model.d_ff, model.dropout) == (
        d_model, num_layers, num_heads, d_ff, dropout,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "d_model", "d_embed", "dropout"),
    [(Size.tiny, 64, 64, 0.0), (Size.small, 256, 256, 0.2), (Size.paper, 1024, 512, 0.0)],
)
def test_gru_sizes(size: Size, d_model: int, d_embed: int, dropout: float) -> None:
    model = resolve_model(GRUConfig(size=size))
    assert isinstance(model, GRUConfig)
    assert (model.d_model, model.d_embed, model.num_layers, model.dropout) == (d_model, d_embed, 1, dropout)


def test_presets_name_every_open_field_and_no_other() -> None:
    for kind, sizes in ((TransformerConfig, TRANSFORMER_SIZES), (GRUConfig, GRU_SIZES)):
        open_fields = {item.name for item in dataclasses.fields(kind) if getattr(kind(), item.name) is None}
        assert set(sizes) == set(Size)
        assert all(set(preset) == open_fields for preset in sizes.values())


def test_an_explicit_width_goes_before_the_preset() -> None:
    model = resolve_model(TransformerConfig(size=Size.paper, d_model=96, dropout=0.0))
    assert (model.d_model, model.num_layers, model.dropout) == (96, 6, 0.0)
    with pytest.raises(TypeError, match="no size presets for ModelConfig"):
        resolve_model(ModelConfig(name="mlp"))


# ---------------------------------------------------------------------------------------- filling


@pytest.mark.parametrize(
    ("max_steps", "given", "expected"),
    [
        (300, None, 30), (1, None, 1), (6, None, 1), (11, None, 2), (1600, None, 160), (300, 7, 7),
        (300, 999, 999),
    ],
)  # fmt: skip
def test_intervals(max_steps: int, given: int | None, expected: int) -> None:
    trainer = resolve(changed(LM, trainer=TrainerConfig(max_steps=max_steps, val_every=given))).trainer
    assert (trainer.val_every, trainer.checkpoint_every) == (expected, expected)
    trainer = resolve(
        changed(LM, trainer=TrainerConfig(max_steps=max_steps, val_every=given, checkpoint_every=5))
    ).trainer
    assert trainer.checkpoint_every == 5


def test_short_names_of_precisions() -> None:
    assert resolve(changed(LM, precision="bf16")).precision == "bf16-mixed"
    assert resolve(changed(LM, precision="fp32")).precision == "32"
    assert resolve(LM).precision == "32"


def test_resolving_changes_nothing_twice_and_not_its_argument() -> None:
    for base in (LM, GRU, TRANSLATION, RNNSEARCH, replace(LM, norm=NONE), replace(GRU, norm=NONE)):
        before = dataclasses.asdict(base)
        once = resolve(base)
        assert dataclasses.asdict(base) == before
        assert resolve(once) == once


def test_placement_and_sites_that_mean_nothing_are_settled() -> None:
    assert resolve(replace(LM, placement=Placement.post)).placement is Placement.post
    assert resolve(replace(LM, sites=[Site.gates_x])).sites == list(Site)
    assert resolve(replace(GRU, sites=[Site.cand_h, Site.gates_x, Site.cand_h])).sites == [
        Site.cand_h,
        Site.gates_x,
    ]
    assert resolve(replace(GRU, placement=Placement.none)).placement is Placement.pre
    for base in (LM, GRU):
        for placement in Placement:
            ignored = resolve(replace(base, norm=NONE, placement=placement, sites=[Site.cand_x]))
            assert ignored == resolve(replace(base, norm=NONE))
            assert (ignored.placement, ignored.sites) == (Placement.none, [])


@pytest.mark.parametrize("placement", [Placement.post, Placement.sandwich, Placement.res_post])
def test_a_gru_has_no_placement(placement: Placement) -> None:
    assert message(GRU, placement=placement) == (
        f"placement={placement.value}: a GRU has no placement; choose where it is normalised with "
        "sites=[gates_x,gates_h,cand_x,cand_h]"
    )


# ------------------------------------------------------------------------------------------ rules

WHOLE = "expected a whole number above zero"
RULES: list[tuple[TrainConfig, dict[str, Any], str]] = [
    (LM, {"model__d_model": 0}, f"model.d_model=0: {WHOLE}"),
    (LM, {"model__d_model": -4}, f"model.d_model=-4: {WHOLE}"),
    (LM, {"model__num_layers": 0}, f"model.num_layers=0: {WHOLE}"),
    (LM, {"model__num_heads": 0}, f"model.num_heads=0: {WHOLE}"),
    (LM, {"model__d_ff": 0}, f"model.d_ff=0: {WHOLE}"),
    (GRU, {"model__d_embed": 0}, f"model.d_embed=0: {WHOLE}"),
    (LM, {"model__dropout": 1.0}, "model.dropout=1.0: expected a probability in [0, 1)"),
    (LM, {"model__dropout": -0.1}, "model.dropout=-0.1: expected a probability in [0, 1)"),
    (LM, {"model__dropout": float("nan")}, "model.dropout=nan: expected a probability in [0, 1)"),
    (
        LM,
        {"model__d_model": 15},
        "model.d_model=15: not divisible by model.num_heads=4; the nearest width that is: 16",
    ),
    (
        LM,
        {"model__d_model": 2},
        "model.d_model=2: not divisible by model.num_heads=4; the nearest width that is: 4",
    ),
    (
        LM,
        {"model__d_model": 12, "model__positions": Positions.rotary},
        "model.positions=rotary needs an even width of a head, but model.d_model / model.num_heads = 3",
    ),
    (
        GRU,
        {"model__builtin": True},
        "model.builtin=true: torch's own GRU has no norm; it needs norm=none and task=lm",
    ),
    (
        RNNSEARCH,
        {"model__builtin": True, "norm": NONE},
        "model.builtin=true: torch's own GRU has no norm; it needs norm=none and task=lm",
    ),
    (
        RNNSEARCH,
        {"model__num_layers": 2},
        "model.num_layers=2: RNNSearch (model=gru task=translation) has one layer",
    ),
    (GRU, {"sites": []}, "sites=[]: nothing is left for norm=layernorm to do; write norm=none"),
    (
        LM,
        {"data": CldrConfig()},
        "data=cldr does not fit task=lm; data of this task: pydoc, tinyshakespeare, wikitext, text_files",
    ),
    (
        TRANSLATION,
        {"data": PydocConfig()},
        "data=pydoc does not fit task=translation; data of this task: cldr, multi30k, wmt14, parallel_files",
    ),
    (TRANSLATION, {"task__beam_size": 0}, f"task.beam_size=0: {WHOLE}"),
    (TRANSLATION, {"task__max_decode_len": 0}, f"task.max_decode_len=0: {WHOLE}"),
    (TRANSLATION, {"task__score_sentences": 0}, f"task.score_sentences=0: {WHOLE}"),
    (TRANSLATION, {"task__label_smoothing": 1.0}, "task.label_smoothing=1.0: expected a value in [0, 1)"),
    (
        TRANSLATION,
        {"task__length_penalty": float("inf")},
        "task.length_penalty=inf: expected a finite number",
    ),
    (LM, {"data__max_len": 0}, f"data.max_len=0: {WHOLE}"),
    (LM, {"data__max_len": 1}, "data.max_len=1: expected at least 2"),
    (TRANSLATION, {"data__max_len": 2}, "data.max_len=2: expected at least 3"),
    (LM, {"data__vocab_size": 0}, f"data.vocab_size=0: {WHOLE}"),
    (LM, {"data__batch_sentences": 0}, f"data.batch_sentences=0: {WHOLE}"),
    (TRANSLATION, {"data__num_test": 0}, f"data.num_test=0: {WHOLE}"),
    (TRANSLATION, {"data__max_train_pairs": 0}, f"data.max_train_pairs=0: {WHOLE}"),
    (
        LM,
        {"data__batch_tokens": 8},
        "data.batch_tokens=8: too few for one row of data.max_len=64; set data.batch_tokens to a multiple",
    ),
    (LM, {"optim__lr": -1.0}, "optim.lr=-1.0: expected a finite number, zero or more"),
    (LM, {"optim__lr": float("nan")}, "optim.lr=nan: expected a finite number, zero or more"),
    (LM, {"optim__lr": float("inf")}, "optim.lr=inf: expected a finite number, zero or more"),
    (
        LM,
        {"optim__betas": [0.9]},
        "optim.betas=[0.9]: expected two numbers in [0, 1), as in optim.betas=[0.9,0.98]",
    ),
    (LM, {"optim__betas": [0.9, 1.0]}, "optim.betas=[0.9, 1.0]: expected two numbers in [0, 1)"),
    (LM, {"optim__eps": 0.0}, "optim.eps=0.0: expected a positive number"),
    (LM, {"optim__weight_decay": -1.0}, "optim.weight_decay=-1.0: expected a finite number, zero or more"),
    (LM, {"optim__warmup_steps": -1}, "optim.warmup_steps=-1: expected zero or more"),
    (LM, {"optim__final_lr_fraction": 1.5}, "optim.final_lr_fraction=1.5: expected a value in [0, 1]"),
    (
        LM,
        {"optim__clip_norm": 0.0},
        "optim.clip_norm=0.0: expected a positive number, or null for no clipping",
    ),
    (LM, {"trainer__max_steps": 0}, f"trainer.max_steps=0: {WHOLE}"),
    (LM, {"trainer__accumulate": 0}, f"trainer.accumulate=0: {WHOLE}"),
    (LM, {"trainer__val_every": 0, "trainer__checkpoint_every": 1}, f"trainer.val_every=0: {WHOLE}"),
    (LM, {"trainer__log_every": 0}, f"trainer.log_every=0: {WHOLE}"),
    (LM, {"trainer__checkpoint_every": 0}, f"trainer.checkpoint_every=0: {WHOLE}"),
    (LM, {"trainer__num_threads": 0}, f"trainer.num_threads=0: {WHOLE}"),
    (LM, {"trainer__devices": 0}, f"trainer.devices=0: {WHOLE}"),
    (
        LM,
        {"trainer__accelerator": "cuda"},
        "trainer.accelerator=cuda: not known (one of: auto, cpu, gpu)",
    ),
    (LM, {"trainer__divergence_factor": 1.0}, "trainer.divergence_factor=1.0: expected a number above 1"),
    (LM, {"precision": "16"}, "precision=16: not supported (one of: 32, bf16-mixed)"),
    (
        LM,
        {"precision": "bf16-mixd"},
        "precision=bf16-mixd: not supported; did you mean bf16-mixed? (one of: 32, bf16-mixed)",
    ),
    (LM, {"seed": -1}, "seed=-1: expected a whole number from 0 to 2^63 - 1"),
    (LM, {"seed": 2**63}, f"seed={2**63}: expected a whole number from 0 to 2^63 - 1"),
    (LM, {"out_dir": " "}, "out_dir='': expected a folder"),
]


@pytest.mark.parametrize(("base", "values", "expected"), RULES, ids=[rule[2][:40] for rule in RULES])
def test_a_broken_rule_is_named(base: TrainConfig, values: dict[str, Any], expected: str) -> None:
    found = message(base, **values)
    assert found.startswith(expected)
    assert "\n" not in found


def test_all_broken_rules_are_named_at_once() -> None:
    found = message(LM, model__d_model=15, optim__lr=-1.0, seed=-1).splitlines()
    assert [line.split("=")[0] for line in found] == ["model.d_model", "optim.lr", "seed"]


@pytest.mark.parametrize(
    ("base", "values"),
    [
        (LM, {"optim__lr": 0.0}),
        (LM, {"optim__clip_norm": None}),
        (LM, {"optim__betas": [0.0, 0.0]}),
        (LM, {"optim__warmup_steps": 0}),
        (LM, {"optim__final_lr_fraction": 1.0}),
        (LM, {"model__dropout": 0.0}),
        (LM, {"data__max_len": 2, "data__batch_tokens": 2}),
        (TRANSLATION, {"data__max_len": 3, "data__batch_tokens": 3}),
        (TRANSLATION, {"task__length_penalty": -1.0}),
        (LM, {"seed": 0}),
        (LM, {"seed": 2**63 - 1}),
        (GRU, {"model__num_layers": 3}),
        (GRU, {"model__builtin": True, "norm": NONE}),
        (GRU, {"norm": NONE, "sites": []}),
        (LM, {"model__d_model": 12, "model__num_heads": 3, "model__positions": Positions.rotary}),
        (LM, {"trainer__val_every": 10**6}),
        (LM, {"backend": Backend.torch}),
        (TRANSLATION, {"data": ParallelFilesConfig(train_src="a", train_tgt="b")}),
    ],
)
def test_values_at_the_edge_are_fine(base: TrainConfig, values: dict[str, Any]) -> None:
    resolved = resolve(changed(base, **values))
    for name, value in values.items():
        part, _, leaf = name.partition("__")
        if part not in ("placement", "sites"):
            assert (getattr(getattr(resolved, part), leaf) if leaf else getattr(resolved, part)) == value


def test_an_optimiser_of_the_defaults_breaks_no_rule() -> None:
    assert resolve(LM).optim == OptimConfig()
