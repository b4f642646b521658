"""Fill what was left open, check what no single field can know, and settle what makes runs identical."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.schema import (
    DataConfig,
    GRUConfig,
    OptimConfig,
    Placement,
    Positions,
    Site,
    Strategy,
    TrainConfig,
    TrainerConfig,
    TransformerConfig,
    TranslationConfig,
    TranslationDataConfig,
)
from rmsrepro.config.sizes import resolve_model

PRECISIONS = ("32", "bf16-mixed")
ACCELERATORS = ("auto", "cpu", "gpu")


def resolve(config: TrainConfig) -> TrainConfig:
    """Return `config` with size presets and intervals filled in and every rule checked.

    Raises:
        UserError: all broken rules, one a line.
    """
    placement = Placement.none if config.norm["name"] == "none" else config.placement
    sites = [] if config.norm["name"] == "none" else list(dict.fromkeys(config.sites))
    trainer = config.trainer
    if trainer.val_every is None:
        trainer = replace(trainer, val_every=max(1, math.ceil(trainer.max_steps / 10)))
    if trainer.checkpoint_every is None:
        trainer = replace(trainer, checkpoint_every=trainer.val_every)
    precision = {"bf16": "bf16-mixed", "fp32": "32"}.get(config.precision, config.precision)
    resolved = replace(
        config,
        model=resolve_model(config.model),
        trainer=trainer,
        placement=placement,
        sites=sites,
        precision=precision,
    )
    problems = check(resolved)
    if problems:
        raise UserError("\n".join(problems))
    if isinstance(resolved.model, GRUConfig):
        # A GRU has sites instead of a placement; any two placements are the same run.
        resolved = replace(resolved, placement=Placement.none if not sites else Placement.pre)
    else:
        resolved = replace(resolved, sites=[] if placement is Placement.none else list(Site))
    return resolved


def check(config: TrainConfig) -> list[str]:
    """Return one message for each rule that `config` (with sizes filled in) breaks."""
    return [
        *_check_model(config),
        *_check_task(config),
        *_check_data(config.data),
        *_check_optim(config.optim),
        *_check_trainer(config.trainer),
        *_check_run(config),
    ]


def _check_model(config: TrainConfig) -> list[str]:
    model = config.model
    problems = _positive(model, "model", "d_model", "num_layers")
    if model.dropout is not None and not 0 <= model.dropout < 1:
        problems.append(f"model.dropout={model.dropout}: expected a probability in [0, 1)")
    if isinstance(model, TransformerConfig):
        problems += _positive(model, "model", "num_heads", "d_ff")
        d_model, num_heads = model.d_model or 0, model.num_heads or 0
        if d_model > 0 and num_heads > 0 and d_model % num_heads:
            near = max(num_heads, round(d_model / num_heads) * num_heads)
            problems.append(
                f"model.d_model={d_model}: not divisible by model.num_heads={num_heads}; "
                f"the nearest width that is: {near}"
            )
        elif (
            d_model > 0
            and num_heads > 0
            and model.positions is Positions.rotary
            and (d_model // num_heads) % 2
        ):
            problems.append(
                f"model.positions=rotary needs an even width of a head, but model.d_model / model.num_heads "
                f"= {d_model // num_heads}"
            )
    if isinstance(model, GRUConfig):
        problems += _positive(model, "model", "d_embed")
        if config.placement not in (Placement.pre, Placement.none):
            problems.append(
                f"placement={config.placement.value}: a GRU has no placement; choose where it is normalised "
                f"with sites=[{','.join(site.value for site in Site)}]"
            )
        if model.builtin and (config.norm["name"] != "none" or config.task.name != "lm"):
            problems.append("model.builtin=true: torch's own GRU has no norm; it needs norm=none and task=lm")
        if config.task.name == "translation" and (model.num_layers or 1) != 1:
            problems.append(
                f"model.num_layers={model.num_layers}: RNNSearch (model=gru task=translation) has one layer"
            )
        if not config.sites and config.norm["name"] != "none":
            problems.append(
                f"sites=[]: nothing is left for norm={config.norm['name']} to do; write norm=none"
            )
    return problems


def _check_task(config: TrainConfig) -> list[str]:
    task, problems = config.task, []
    parallel = isinstance(config.data, TranslationDataConfig)
    if parallel != isinstance(task, TranslationConfig):
        fit = (
            "cldr, multi30k, wmt14, parallel_files"
            if not parallel
            else "pydoc, tinyshakespeare, wikitext, text_files"
        )
        problems.append(f"data={config.data.name} does not fit task={task.name}; data of this task: {fit}")
    if isinstance(task, TranslationConfig):
        problems += _positive(task, "task", "beam_size", "max_decode_len", "score_sentences")
        if not 0 <= task.label_smoothing < 1:
            problems.append(f"task.label_smoothing={task.label_smoothing}: expected a value in [0, 1)")
        if not math.isfinite(task.length_penalty):
            problems.append(f"task.length_penalty={task.length_penalty}: expected a finite number")
    return problems


def _check_data(data: DataConfig) -> list[str]:
    sizes = ("max_len", "batch_tokens", "vocab_size", "batch_sentences")
    counts = ("num_train", "num_val", "num_test", "max_train_pairs")
    problems = _positive(data, "data", *sizes, *counts)
    shortest = 3 if isinstance(data, TranslationDataConfig) else 2
    if 0 < data.max_len < shortest:
        problems.append(f"data.max_len={data.max_len}: expected at least {shortest}")
    if 0 < data.batch_tokens < data.max_len:
        problems.append(
            f"data.batch_tokens={data.batch_tokens}: too few for one row of data.max_len={data.max_len}; "
            f"set data.batch_tokens to a multiple of {data.max_len}"
        )
    return problems


def _check_optim(optim: OptimConfig) -> list[str]:
    problems = []
    if not (math.isfinite(optim.lr) and optim.lr >= 0):
        problems.append(f"optim.lr={optim.lr}: expected a finite number, zero or more")
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        problems.append(
            f"optim.betas={optim.betas}: expected two numbers in [0, 1), as in optim.betas=[0.9,0.98]"
        )
    if not (math.isfinite(optim.eps) and optim.eps > 0):
        problems.append(f"optim.eps={optim.eps}: expected a positive number")
    if not (math.isfinite(optim.weight_decay) and optim.weight_decay >= 0):
        problems.append(f"optim.weight_decay={optim.weight_decay}: expected a finite number, zero or more")
    if optim.warmup_steps < 0:
        problems.append(f"optim.warmup_steps={optim.warmup_steps}: expected zero or more")
    if not 0 <= optim.final_lr_fraction <= 1:
        problems.append(f"optim.final_lr_fraction={optim.final_lr_fraction}: expected a value in [0, 1]")
    if optim.clip_norm is not None and not optim.clip_norm > 0:
        problems.append(
            f"optim.clip_norm={optim.clip_norm}: expected a positive number, or null for no clipping"
        )
    return problems


def _check_trainer(trainer: TrainerConfig) -> list[str]:
    intervals = ("val_every", "log_every", "checkpoint_every")
    problems = _positive(trainer, "trainer", "max_steps", "accumulate", *intervals, "num_threads", "devices")
    if trainer.accelerator not in ACCELERATORS:
        problems.append(
            f"trainer.accelerator={trainer.accelerator}: not known"
            f"{nearest(trainer.accelerator, ACCELERATORS)} (one of: {', '.join(ACCELERATORS)})"
        )
    if trainer.devices > 1 and trainer.strategy is Strategy.single:
        problems.append(
            f"trainer.devices={trainer.devices}: a process uses one device; add trainer=ddp for a process a "
            "device, each with its part of every batch"
        )
    if not trainer.divergence_factor > 1:
        problems.append(f"trainer.divergence_factor={trainer.divergence_factor}: expected a number above 1")
    return problems


def _check_run(config: TrainConfig) -> list[str]:
    problems = []
    if config.precision not in PRECISIONS:
        problems.append(
            f"precision={config.precision}: not supported{nearest(config.precision, PRECISIONS)} "
            f"(one of: {', '.join(PRECISIONS)})"
        )
    if not 0 <= config.seed < 2**63:
        problems.append(f"seed={config.seed}: expected a whole number from 0 to 2^63 - 1")
    if not config.out_dir.strip():
        problems.append("out_dir='': expected a folder")
    return problems


def _positive(node: Any, prefix: str, *names: str) -> list[str]:
    known = {item.name for item in dataclasses.fields(node)}
    return [
        f"{prefix}.{name}={value}: expected a whole number above zero"
        for name in names
        if name in known and (value := getattr(node, name)) is not None and value <= 0
    ]
