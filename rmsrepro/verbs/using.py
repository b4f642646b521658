"""The verbs that use a trained model: eval, translate, sample."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.imports import importing
from rmsrepro.config.overrides import Override, check_single, override_text, unquote
from rmsrepro.config.shell import word
from rmsrepro.verbs.common import only_options, say, take_options

Options = TypeVar("Options")
NORMALISATION = ("norm", "placement", "sites")
"""Keys, or groups of keys, that say how a model is normalised."""


@dataclass
class EvalVerb:
    ckpt: str | None = None
    split: str = "both"
    num_threads: int | None = None


def evaluate(overrides: list[Override]) -> int:
    """Loss and scores of a checkpoint on the data of its run, or on other data of the same kind."""
    from rmsrepro.config.plain import plain
    from rmsrepro.data import build_data

    with importing("lightning"):
        import torch

        from rmsrepro.runs.checkpoints import restore
        from rmsrepro.runs.execution import tokenizer_cache
        from rmsrepro.runs.seeding import stream_seed
        from rmsrepro.tasks import evaluate as evaluate_split

    options, rest = take_options(EvalVerb, overrides)
    splits = {"both": ["val", "test"], "val": ["val"], "test": ["test"]}
    if options.split not in splits:
        raise UserError(f"split={options.split}: expected val, test or both{nearest(options.split, splits)}")
    if options.num_threads is not None:
        if options.num_threads < 1:
            raise UserError(f"num_threads={options.num_threads}: expected a whole number above zero")
        torch.set_num_threads(options.num_threads)
    checkpoint = _checkpoint(options.ckpt, "eval")
    config = changed(checkpoint.config, rest, options.ckpt)
    checkpoint.state["config"] = plain(config)
    trained = restore(checkpoint)
    data = build_data(
        config.data,
        config.task.name,
        seed=stream_seed(config.seed, "data"),
        accumulate=config.trainer.accumulate,
        cache_dir=tokenizer_cache(config),
        tokenizers=(trained.src_tokenizer, trained.tgt_tokenizer),
    )
    data.setup("fit")
    figures: dict[str, Any] = {}
    for split in splits[options.split]:
        figures |= evaluate_split(trained.module, data, split)
        figures |= trained.module.final_scores(data, split)
    say(f"{checkpoint.run_id} at step {checkpoint.step}")
    for name, value in figures.items():
        say(f"  {name:<22} {value:.4f}" if isinstance(value, float) else f"  {name:<22} {value}")
    return 0


@dataclass
class TranslateVerb:
    ckpt: str | None = None
    beam_size: int | None = None
    length_penalty: float | None = None


def translate(overrides: list[Override]) -> int:
    """Translate the lines of the standard input."""
    with importing("lightning"):
        from rmsrepro.runs.checkpoints import restore
        from rmsrepro.tasks import Translation, translate_texts

    options = _own_options(TranslateVerb, overrides, "translate")
    if options.length_penalty is not None and not math.isfinite(options.length_penalty):
        raise UserError(f"length_penalty={options.length_penalty}: expected a finite number")
    checkpoint = _checkpoint(options.ckpt, "translate")
    trained = restore(checkpoint)
    if not isinstance(trained.module, Translation):
        raise UserError(
            f"ckpt={options.ckpt}: a model of task={trained.config.task.name} does not translate; "
            "use rmsrepro sample, or a run of task=translation"
        )
    if sys.stdin is None:
        raise UserError(
            "translate reads the standard input, which is closed: rmsrepro translate ckpt=RUN < file"
        )
    if sys.stdin.isatty():
        say("reading sentences from the keyboard, one a line; end with Ctrl-D", stderr=True)
    raw = sys.stdin.buffer.read()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UserError(f"standard input, line {line}: not UTF-8 (byte {error.start})") from error
    lines = text.replace("\r\n", "\n").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    translations = translate_texts(
        trained.module, trained, lines, beam_size=options.beam_size, length_penalty=options.length_penalty
    )
    for line in translations:
        sys.stdout.write(line.replace("\r", " ").replace("\n", " ") + "\n")
    _tell_cut_lines(trained.src_tokenizer.encode_many(lines), trained.config.data.max_len)
    return 0


def _tell_cut_lines(sources: Sequence[Sequence[int]], max_len: int) -> None:
    """Say how many lines were translated in part only; a source counts its end mark."""
    long = [number for number, tokens in enumerate(sources, 1) if len(tokens) >= max_len]
    if long:
        say(
            f"note: {len(long)} of {len(sources)} lines cut to the model's data.max_len={max_len} tokens "
            f"(the first is line {long[0]}); what lies behind is not translated",
            stderr=True,
        )


@dataclass
class SampleVerb:
    ckpt: str | None = None
    prompt: str = ""
    num_tokens: int = 200
    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0


def sample(overrides: list[Override]) -> int:
    """Write text with a language model."""
    with importing("lightning"):
        from rmsrepro.runs.checkpoints import restore
        from rmsrepro.tasks import sample as draw

    options = _own_options(SampleVerb, overrides, "sample")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"seed={options.seed}: expected a whole number from 0 to 2^63 - 1")
    checkpoint = _checkpoint(options.ckpt, "sample")
    trained = restore(checkpoint)
    config = trained.config
    if config.task.name != "lm":
        raise UserError(
            f"ckpt={options.ckpt}: a model of task={config.task.name} writes no free text; "
            "use rmsrepro translate, or a run of task=lm"
        )
    # A Transformer was never shown more tokens than its windows hold; a GRU carries its state on.
    context = config.data.max_len if config.model.name == "transformer" else None
    text = draw(
        cast(Any, trained.module.model),
        trained.tokenizer,
        options.prompt,
        options.num_tokens,
        options.temperature,
        options.top_k,
        options.seed,
        context=context,
    )
    sys.stdout.write(text + "\n")
    return 0


def changed(config: Any, overrides: Sequence[Override], path: str | None = None) -> Any:
    """Apply overrides of `data` and `task` to a trained config: what else it is, is trained into it.

    Args:
        config: of the checkpoint.
        overrides: all but the verb's own options.
        path: where the checkpoint lies, for messages.

    Raises:
        UserError: an override of anything else, or one that fits no field.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from rmsrepro.config.explain import explain
    from rmsrepro.config.resolve import check

    data, task = OmegaConf.structured(config.data), OmegaConf.structured(config.task)
    fixed = ("data.name", "data.tokenizer", "data.vocab_size", "data.max_len", "task.name")
    for item in overrides:
        group, _, name = item.key.partition(".")
        node = {"data": data, "task": task}.get(group)
        if item.key == "out_dir":
            config = replace(config, out_dir=unquote(item.value))
            continue
        if node is None or not name or item.key in fixed:
            refuse_other_norm(config, [item], "eval", path)
            raise UserError(
                f"{item.text}: eval takes ckpt, split and keys of data and task that leave the model "
                "as it is (data.path, data.batch_tokens, task.beam_size, ...)"
            )
        if name not in node:
            names = [str(key) for key in node]
            hint = f"{nearest(name, names)} (keys there: {', '.join(names)})"
            raise UserError(f"{item.text}: there is no key {item.key}{hint}")
        check_single([item], "eval takes one value", "")
        try:
            node[name] = OverridesParser.create().parse_override(item.text).value()
        except OmegaConfBaseException as error:
            raise UserError(f"{group}.{explain(error)}") from error
    config = replace(config, data=OmegaConf.to_object(data), task=OmegaConf.to_object(task))
    problems = check(config)
    if problems:
        raise UserError("\n".join(problems))
    return config


def refuse_other_norm(config: Any, overrides: Sequence[Override], verb: str, path: str | None) -> None:
    """Refuse an override that asks for another normalisation than the checkpoint's, naming both.

    Raises:
        UserError: `overrides` has one of the norm, its parameters or its places.
    """
    from rmsrepro.tasks import normalisation

    trained = normalisation(config)
    own = {f"norm.{key}": value for key, value in trained.params.items()}
    own |= {"placement": trained.placement, "sites": None if trained.sites is None else list(trained.sites)}
    for item in overrides:
        if item.key.partition(".")[0] not in NORMALISATION:
            continue
        told = [f"norm={trained.name}"]
        if own.get(item.key) is not None:
            told.append(f"{item.key}={override_text(own[item.key])}")
        asked = unquote(item.value) if item.key == "norm" else ""
        advice = "leave it out" if item.text in told else trained.advice(asked, str(path))
        raise UserError(
            f"{item.text}: ckpt={path} was trained with {' '.join(told)}, and {verb} uses a model as it was "
            f"trained; {advice}"
        )


def _own_options(kind: type[Options], overrides: Sequence[Override], verb: str) -> Options:
    """As `only_options`, for a verb that uses a checkpoint: another norm is refused by the norm's name."""
    options, rest = take_options(kind, overrides)
    path = getattr(options, "ckpt", None)
    if path is not None and any(item.key.partition(".")[0] in NORMALISATION for item in rest):
        refuse_other_norm(_checkpoint(path, verb).config, rest, verb, path)
    return only_options(kind, overrides, verb)


def _checkpoint(path: str | None, verb: str) -> Any:
    from rmsrepro.runs.checkpoints import load_checkpoint

    if path is None:
        runs = sorted(
            Path("outputs/runs").glob("*/checkpoints/last.ckpt"), key=lambda file: file.stat().st_mtime
        )
        hint = f", for instance {word('ckpt', runs[-1])}" if runs else ""
        raise UserError(f"{verb} needs ckpt=RUN, a run's folder or a .ckpt file{hint}")
    return load_checkpoint(path)
