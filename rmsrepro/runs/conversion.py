"""From a checkpoint to that of an equal model with another norm; the rewriting itself is `models/convert.py`.

The result is a folder of its own, `outputs/converted/NAME`, and no run: it was not trained, so no report
counts it. NAME is the source's run id, the norm, and a hash of the source's weights.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmsrepro.config.errors import UserError
from rmsrepro.config.plain import plain, yaml_text
from rmsrepro.config.schema import Backend, TrainConfig
from rmsrepro.models.convert import Conversion, check_convertible, convert_to_rmsnorm
from rmsrepro.models.interface import LanguageModel, TranslationModel
from rmsrepro.runs.callbacks import STATE_KEY
from rmsrepro.runs.checkpoints import Checkpoint, load_checkpoint, restore
from rmsrepro.runs.files import to_json, write_atomic
from rmsrepro.tasks import Task, build_optimizer, norm_spec

CONVERSION_VERSION = 1
"""Raised whenever the same source becomes other weights."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest difference of two logits that counts as rounding, relative to the largest logit or to 1."""
_PREFIX = "model."


class NotEqual(RuntimeError):
    """The converted model's outputs are not those of the source."""


@dataclass(frozen=True)
class Difference:
    """How far the logits of both models are apart on the same inputs."""

    largest: float
    """The largest absolute difference."""
    logits: float
    """The largest absolute logit of the source."""
    limit: float
    """What counts as rounding."""


@dataclass(frozen=True)
class Converted:
    """What became of a checkpoint."""

    folder: Path
    config: TrainConfig
    differences: dict[str, Difference]
    """By dtype: float64 (before the weights are rounded) and float32 (the file's weights)."""
    rounding: float
    """How far the source's own logits in float32 are from those in float64."""
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
    differences, rounding = _compare(trained.module, restore(made).module, conversion, config)
    result = Converted(folder, config, differences, rounding, existed=folder.exists())
    if result.existed:
        _check_same(made, folder)
    else:
        _write(made, folder, source, result)
    return result


def _digest(source: Checkpoint, weights: Mapping[str, Tensor]) -> str:
    """Return a hash of what decides the result: the source's model and weights, and where its training is."""
    config = source.config
    described = [CONVERSION_VERSION, source.run_id, source.step, plain(config.model), plain(config.norm)]
    digest = hashlib.sha256(to_json(described, indent=None).encode())
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


# ------------------------------------------------------------------------------------- comparing


def _compare(
    source: Task, made: Task, conversion: Conversion, config: TrainConfig
) -> tuple[dict[str, Difference], float]:
    """Compare the logits of both models; raise NotEqual beyond the tolerance.

    In float32 with the weights as they are written. In float64 with those before they were rounded, so that
    a fault of the rewriting shows itself far above all rounding.
    """
    logits: dict[torch.dtype, list[Tensor]] = {}
    differences: dict[str, Difference] = {}
    for dtype in (torch.float32, torch.float64):
        source.to(dtype)
        made.to(dtype)
        if dtype is torch.float64:
            made.model.load_state_dict(conversion.state)
        logits[dtype] = list(_logits(source.model, config))
        pairs = list(zip(logits[dtype], _logits(made.model, config), strict=True))
        scale = max(float(expected.abs().max()) for expected, _ in pairs)
        largest = max(float((found - expected).abs().max()) for expected, found in pairs)
        differences[str(dtype).removeprefix("torch.")] = Difference(
            largest, scale, TOLERANCE[dtype] * max(1.0, scale)
        )
    rounding = max(
        float((rough - exact).abs().max())
        for rough, exact in zip(logits[torch.float32], logits[torch.float64], strict=True)
    )
    for name, found in differences.items():
        # A model that rounding alone moves further than the tolerance cannot be equal to it more closely.
        limit = max(found.limit, 4 * rounding) if name == "float32" else found.limit
        if not found.largest <= limit:
            raise NotEqual(
                f"in {name} the logits (up to {found.logits:.3g}) differ by up to {found.largest:.3g}, more "
                f"than rounding explains ({limit:.3g}); nothing was written"
            )
    return differences, rounding


def _logits(model: Any, config: TrainConfig) -> Iterator[Tensor]:
    """Yield the logits of whole sequences and of the first steps of decoding, for random tokens."""
    draw = torch.Generator().manual_seed(0)
    limit = model.position_limit or config.data.max_len
    # As many positions as the model has, unless the logits would take more than some 100 MB.
    written = _table(model, "embedding" if isinstance(model, LanguageModel) else "tgt_embedding")
    length = max(2, min(limit, 256, 2**22 // written.num_embeddings))

    def tokens(rows: int, size: int, table: torch.nn.Embedding) -> Tensor:
        return torch.randint(0, table.num_embeddings, (rows, size), generator=draw)

    with torch.no_grad():
        if isinstance(model, LanguageModel):
            text = tokens(3, length, written)
            yield model(text)
            state = None
            for position in range(min(length, 8)):
                logits, state = model.step(text[:, position], state)
                yield logits
            return
        assert isinstance(model, TranslationModel)
        # Lengths of all kinds; the last row is an empty sentence.
        lengths = torch.tensor([length, (length + 1) // 2, 1, 0])
        sources = tokens(4, length, _table(model, "src_embedding"))
        mask = torch.arange(length) < lengths.unsqueeze(1)
        target = tokens(4, length, written)
        yield model(sources, mask, target)
        state = model.start(sources, mask)
        for position in range(min(length, 8)):
            logits, state = model.step(target[:, position], state)
            yield logits


def _table(model: torch.nn.Module, embedding: str) -> torch.nn.Embedding:
    table = model.get_submodule(f"{embedding}.token_embedding")
    assert isinstance(table, torch.nn.Embedding)
    return table


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
        "differences": {
            name: {"largest": found.largest, "logits": found.logits, "limit": found.limit}
            for name, found in result.differences.items()
        },
        "rounding_of_source": result.rounding,
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
