"""The verb convert: a trained model with another norm that computes the same."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, split_override
from rmsrepro.config.paths import expanded
from rmsrepro.config.schema import TrainConfig
from rmsrepro.config.shell import command, typed
from rmsrepro.verbs.common import composer, only_options, say

GROUPS = ("model", "task", "data")


@dataclass
class ConvertVerb:
    ckpt: str | None = None
    to: str = "rmsnorm"
    out_dir: str = "outputs"


def convert(overrides: list[Override]) -> int:
    """Write the checkpoint of an equal model with another norm."""
    options = only_options(ConvertVerb, overrides, "convert")
    if options.ckpt is None:
        raise UserError("convert needs ckpt=RUN, a run's folder or a .ckpt file of a LayerNorm Transformer")
    if not options.out_dir.strip():
        raise UserError("out_dir='': expected a folder")
    # Not before the command is known to be right: importing torch takes seconds.
    from rmsrepro.runs.checkpoints import load_checkpoint
    from rmsrepro.runs.comparison import NotEqual
    from rmsrepro.runs.conversion import convert_checkpoint

    source = load_checkpoint(options.ckpt)
    try:
        done = convert_checkpoint(source, options.to, expanded(options.out_dir))
    except NotEqual as error:
        say(f"error: ckpt={options.ckpt}: {error}", stderr=True)
        return 1
    except OSError as error:
        raise UserError(f"out_dir={options.out_dir}: cannot be written ({error})") from error
    found = done.comparison
    say(f"{source.run_id} at step {source.step}: {source.config.norm['name']} to {options.to}")
    say(
        f"largest difference of logits (up to {found.logits:.3g}): {found.float64.largest:.2g} in float64,\n"
        f"  {found.float32.largest:.2g} in float32, where the original's own rounding is {found.rounding:.2g}"
    )
    if done.existed:
        say("it is there already, and the same: nothing was written")
    say(f"checkpoint: {done.checkpoint}")
    say(f"train it on, with a fresh optimiser: {train_command(done.config, done.folder)}")
    return 0


def train_command(config: TrainConfig, ckpt: Path) -> str:
    """Return the command that trains a checkpoint of this config on, with all that is no default."""
    from rmsrepro.config.compose import to_train_config
    from rmsrepro.config.plain import plain
    from rmsrepro.config.resolve import resolve

    wanted = plain(config)
    choices = {"norm": config.norm["name"], **{group: wanted[group]["name"] for group in GROUPS}}
    choices["model.size"] = wanted["model"]["size"]
    needed = {
        f"data.{item.name}": wanted["data"][item.name]
        for item in dataclasses.fields(config.data)
        if item.default == "???"
    }
    overrides = [split_override(typed(key, value)) for key, value in (choices | needed).items()]
    with composer(overrides) as opened:
        default = plain(resolve(to_train_config(opened.raw(overrides))))
    values = {f"norm.{key}": value for key, value in wanted["norm"].items() if key != "name"}
    for part in (*GROUPS, "optim"):
        for key, value in wanted[part].items():
            if value != default[part][key]:
                values[f"{part}.{key}"] = value
    for key in ("precision", "seed", "backend"):
        if wanted[key] != default[key]:
            values[key] = wanted[key]
    if wanted["trainer"]["accumulate"] != default["trainer"]["accumulate"]:
        values["trainer.accumulate"] = wanted["trainer"]["accumulate"]
    if choices["model.size"] == "tiny":
        del choices["model.size"]
    words = {**choices, **needed, **values, "ckpt": str(ckpt)}
    return f"{command('train', **words)} trainer.max_steps=N"
