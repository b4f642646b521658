"""From a checkpoint to that of an equal model with another norm; the rewriting itself is `models/convert.py`.

The result is a folder of its own, `outputs/converted/NAME`, and no run: it was not trained, so no report
counts it. NAME is the source's run id, the norm, and a hash of the source's weights.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmsrepro.config.errors import UserError
from rmsrepro.config.plain import plain, yaml_text
from rmsrepro.config.schema import Backend, TrainConfig
from rmsrepro.models.convert import Conversion, check_convertible, convert_to_rmsnorm
from rmsrepro.runs.callbacks import STATE_KEY
from rmsrepro.runs.checkpoints import Checkpoint, load_checkpoint, restore
from rmsrepro.runs.comparison import Comparison, compare
from rmsrepro.runs.files import to_json, write_atomic
from rmsrepro.tasks import Task, build_optimizer, norm_spec

CONVERSION_VERSION = 1
"""Raised whenever the same source becomes other weights."""
_PREFIX = "model."


@dataclass(frozen=True)
class Converted:
    """What became of a checkpoint."""

    folder: Path
    config: TrainConfig
    comparison: Comparison
    existed: bool
    """The folder was there already, with the same content."""

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"


def convert_checkpoint(source: Checkpoint, to: str, out_dir: Path) -> Converted:
    """Convert, compare, and write the folder; nothing is written where the models are not equal.

    Args:
        source: the checkpoint of a pre-norm LayerNorm Transformer.
        to: the norm to convert to.
        out_dir: where `converted/NAME` goes.

    Raises:
        UserError: the model cannot be converted, or the folder exists with another content.
        NotEqual: the outputs are further apart than rounding explains.
    """
    old = source.config
    spec = norm_spec(old)
    try:
        check_convertible(old.model, spec, old.placement, to)
    except UserError as error:
        raise UserError(f"ckpt={source.path}: {error}") from error
    trained = restore(source)
    weights = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in source.content["state_dict"].items()
        if name.startswith(_PREFIX)
    }
    conversion = convert_to_rmsnorm(old.model, spec, old.placement, weights)
    name = f"{source.run_id}-{to}-{_digest(source, weights)}"
    config = replace(
        old,
        norm={"name": conversion.norm.name, **conversion.norm.params},
        model=conversion.model,
        backend=Backend(conversion.norm.backend),
        out_dir=str(out_dir),
        ckpt=None,
        study_name=None,
        experiment=None,
        rerun=False,
    )
    folder = out_dir / "converted" / name
    made = Checkpoint(folder / "checkpoints" / "last.ckpt", _content(source, config, conversion, name))
    comparison = compare(trained.module, restore(made).module, conversion.state, config)
    result = Converted(folder, config, comparison, existed=folder.exists())
    if result.existed:
        _check_same(made, folder)
    else:
        _write(made, folder, source, result)
    return result


def _digest(source: Checkpoint, weights: Mapping[str, Tensor]) -> str:
    """Return a hash of what is converted: the run, how far it was, and the weights."""
    described = to_json([CONVERSION_VERSION, source.run_id, source.step], indent=None)
    digest = hashlib.sha256(described.encode())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:10]


def _content(source: Checkpoint, config: TrainConfig, conversion: Conversion, name: str) -> dict[str, Any]:
    """Return the checkpoint of the converted model: as its source's, with a fresh optimiser."""
    content, state = dict(source.content), source.state
    content[STATE_KEY] = {
        **state,
        "run_id": name,
        "config": plain(config),
        "pending_row": None,
        "rows": None,
        "training_buffer": {"losses": [], "update": {}},
        "converted_from": {"run_id": source.run_id, "norm": plain(source.config.norm), "step": source.step},
    }
    weights = {f"{_PREFIX}{name}": tensor.float() for name, tensor in conversion.state.items()}
    content["state_dict"] = weights
    module = restore(Checkpoint(source.path, content)).module
    # A task's own state dict, because it notes the norm.
    content["state_dict"] = module.state_dict()
    content["optimizer_states"] = [
        _fresh_optimizer(module, config, old) for old in source.content.get("optimizer_states", [])
    ]
    return content


def _fresh_optimizer(module: Task, config: TrainConfig, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimiser's state without moments, at the learning rate where the source's training is.

    AdamW's moments belong to the old parameters: the second one is no linear function of the gradients.
    """
    optimizer, _ = build_optimizer(module.model, config.optim, config.trainer.max_steps)
    fresh = optimizer.state_dict()
    groups = [
        {**before, "params": group["params"]}
        for before, group in zip(old["param_groups"], fresh["param_groups"], strict=True)
    ]
    return {"state": {}, "param_groups": groups}


# --------------------------------------------------------------------------------------- writing


def _write(made: Checkpoint, folder: Path, source: Checkpoint, result: Converted) -> None:
    """Write the folder under another name and move it to its own: it is whole, or it is not there."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        (temporary / "checkpoints").mkdir(parents=True)
        torch.save(made.content, temporary / "checkpoints" / made.path.name)
        write_atomic(temporary / "config.yaml", yaml_text(result.config))
        write_atomic(temporary / "conversion.json", to_json(_record(made, source, result)))
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            _check_same(made, folder)  # another process was faster
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _record(made: Checkpoint, source: Checkpoint, result: Converted) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "name": made.run_id,
        "from": {
            "ckpt": str(source.path),
            "run_id": source.run_id,
            "step": source.step,
            "norm": plain(source.config.norm),
        },
        "norm": plain(result.config.norm),
        "comparison": asdict(result.comparison),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _check_same(made: Checkpoint, folder: Path) -> None:
    """Raise UserError unless the folder holds this very model (up to the last bits: machines round apart)."""
    try:
        there = load_checkpoint(folder)
        same = there.run_id == made.run_id and _alike(there.content["state_dict"], made.content["state_dict"])
    except (UserError, KeyError):
        same = False
    if not same:
        raise UserError(
            f"{folder} exists and does not hold this conversion (damaged, or changed by hand); move it away "
            "and convert again"
        )


def _alike(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].shape == second[name].shape
        and torch.allclose(first[name], second[name], rtol=1e-5, atol=1e-6)
        for name in first
    )
