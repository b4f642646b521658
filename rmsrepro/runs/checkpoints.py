"""Checkpoints: Lightning's own, plus what is needed to go on or to use the model without its run folder.

They hold tensors, numbers, strings, lists and dicts only, so `torch.load` takes them with its safe default.
"""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rmsrepro.config.errors import UserError, first_line, nearest
from rmsrepro.config.paths import expanded
from rmsrepro.config.plain import from_plain
from rmsrepro.config.plugins import load_plugins
from rmsrepro.config.schema import TrainConfig
from rmsrepro.data.tokenizers import tokenizer_from_json
from rmsrepro.models.normalisation import NOTE
from rmsrepro.runs.callbacks import STATE_KEY
from rmsrepro.runs.checkpoint_files import LAST, PREVIOUS
from rmsrepro.runs.identity import check_norm, norm_file, norm_source
from rmsrepro.runs.progress import speaker
from rmsrepro.tasks import Task, build_task, normalisation


@dataclass
class Checkpoint:
    """A checkpoint as read: its path, the run it came from and everything in the file."""

    path: Path
    content: dict[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        """What this package stored."""
        state: dict[str, Any] = self.content[STATE_KEY]
        return state

    @property
    def config(self) -> TrainConfig:
        return from_plain(self.state["config"])

    @property
    def run_id(self) -> str:
        return str(self.state["run_id"])

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def position(self) -> dict[str, Any]:
        """Where the run was in its data: what `ResumableData.load_state_dict` takes."""
        # Older checkpoints have none; their runs began with the first batch.
        batches = self.step * int(self.state["config"]["trainer"]["accumulate"])
        return {"batches": batches, "updates": self.step} | self.state.get("data", {})

    def hand_over(self) -> dict[str, Any]:
        """Return everything in the file and keep only what this package stored: weights take memory."""
        content, self.content = self.content, {STATE_KEY: self.state}
        return content


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint, given the file or its run folder (its newest that is there).

    Raises:
        UserError: no such file, or not a checkpoint of this package.
    """
    file = expanded(path)
    if file.is_dir():
        inside = [place / name for name in (LAST, PREVIOUS) for place in (file, file / "checkpoints")]
        found = [candidate for candidate in inside if candidate.is_file()]
        if not found:
            raise UserError(
                f"ckpt={path}: this folder holds no checkpoints/last.ckpt; name a run folder or a .ckpt file"
            )
        file = found[0]
    if not file.is_file():
        near = [item.name for item in file.parent.iterdir()] if file.parent.is_dir() else []
        raise UserError(
            f"ckpt={path}: there is no such file{nearest(file.name, near)} "
            "(name a run's folder or its .ckpt file; rmsrepro train prints both)"
        )
    try:
        _check_members(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = _why_unreadable(file, error)
        raise UserError(f"ckpt={path}: cannot be read as a checkpoint ({reason})") from error
    if not isinstance(content, dict) or STATE_KEY not in content:
        raise UserError(f"ckpt={path}: not a checkpoint of rmsrepro (it has no {STATE_KEY!r} entry)")
    checkpoint = Checkpoint(file, content)
    _check_content(checkpoint, path)
    _note_norm(checkpoint)
    return checkpoint


def _check_members(file: Path) -> None:
    """Raise BadZipFile for an archive with a byte that is not as it was written.

    `torch.load` does not look at the checksums that `torch.save` writes. Looking takes 0.04 s for 100 MB, and
    a megabyte of memory.
    """
    if not zipfile.is_zipfile(file):
        return  # torch.load refuses it
    with zipfile.ZipFile(file) as archive:
        broken = archive.testzip()
    if broken is not None:
        raise zipfile.BadZipFile(f"damaged: the checksum of its part {broken} is wrong")


_NEEDED = ("run_id", "step", "config", "src_vocab", "tgt_vocab", "tokenizers", "bytes_per_token")


def _check_content(checkpoint: Checkpoint, path: str | Path) -> None:
    """Raise UserError for a file that `torch.load` reads and that is no whole checkpoint all the same."""
    state = checkpoint.content[STATE_KEY]
    lacking = [key for key in _NEEDED if not isinstance(state, dict) or key not in state]
    if lacking:
        raise UserError(f"ckpt={path}: damaged, or no checkpoint of a run (it lacks {', '.join(lacking)})")
    try:
        _ = str(checkpoint.config.norm["name"]), checkpoint.step
    except UserError:
        pass  # a model, task or set that this version does not know: said where it is used
    except Exception as error:
        raise UserError(
            f"ckpt={path}: its config cannot be read ({type(error).__name__}: {first_line(error)})"
        ) from error


def _note_norm(checkpoint: Checkpoint) -> None:
    """Let weights that were saved before they noted their norm note it, before anyone changes the config."""
    metadata = getattr(checkpoint.content.get("state_dict"), "_metadata", None)
    with contextlib.suppress(UserError):  # a model that this version does not know; `config` says so
        if metadata is not None and NOTE not in metadata.get("model", {}):
            metadata.setdefault("model", {})[NOTE] = normalisation(checkpoint.config).note()


def _why_unreadable(file: Path, error: Exception) -> str:
    """Say what is wrong with a file that `torch.load` refused; torch's own message is often a mere number."""
    if isinstance(error, OSError):
        return first_line(error)
    with file.open("rb") as opened:
        start = opened.read(4)
    if not start:
        return "the file is empty"
    if start != b"PK\x03\x04":  # torch.save writes a zip archive
        return "it is not in the format that torch.save writes"
    if not zipfile.is_zipfile(file):
        return "it is cut off: its end is missing"
    if isinstance(error, pickle.UnpicklingError):
        return "it holds Python objects beside tensors and plain values, and such files are not loaded"
    return first_line(error)


def _misfit(error: Exception) -> str:
    """Say which weights do not fit, from what `load_state_dict` raised."""
    if isinstance(error, RuntimeError):
        # The first line names the class; then each kind of misfit has one.
        found = [line.strip() for line in str(error).splitlines() if line.strip()]
        reasons = "; ".join(found[1:3] if len(found) > 1 else found)
        return f"its weights do not fit the model that its config describes ({reasons[:300]})"
    return "it holds no weights (the entry 'state_dict' is missing or no state dict)"


def tell_changed_norm(checkpoint: Checkpoint) -> None:
    """Say on the standard error when the file of the user's norm is not what it was when the model trained.

    The model is used all the same: a comment changes the file and not the norm.
    """
    name = str(checkpoint.config.norm["name"])
    was = checkpoint.state.get("norm_source")  # not in the checkpoints of older versions
    if was is None or was == norm_source(name):
        return
    file = norm_file(name)
    speaker(Console(stderr=True))(
        f"note: norm={name}: {name if file is None else file} has changed since {checkpoint.run_id} was "
        "trained; if the norm computes something else now, this is another model"
    )


def check_tokens(checkpoint: Checkpoint, data: Any, name: str) -> None:
    """Refuse to train a model on with data whose tokens are others than those that it has learned.

    Args:
        data: from `build_data`.
        name: of the data, for the message.

    Raises:
        UserError: tells how many tokens each has.
    """
    stored = checkpoint.state["tokenizers"]
    sides = [("src", "source "), ("tgt", "target ")] if checkpoint.config.task.name != "lm" else [("tgt", "")]
    for side, called in sides:
        was, now = tokenizer_from_json(stored[side]), getattr(data, f"{side}_tokenizer")
        if was.digest == now.digest:
            continue
        sizes = f"{was.vocab_size:,} {called}tokens", f"{now.vocab_size:,}"
        others = " others" if was.vocab_size == now.vocab_size else ""
        raise UserError(
            f"ckpt={checkpoint.path}: its model knows {sizes[0]} ({was.kind}), made from the data of "
            f"{checkpoint.run_id}; data={name} as configured has {sizes[1]}{others} ({now.kind}). Go on with "
            "the data and the data.tokenizer that it was trained with (data.tokenizer=byte has the same "
            "tokens for any text), or train a new model without ckpt"
        )


@dataclass
class Trained:
    """A trained model ready for use, with its tokenizers and without its data."""

    config: TrainConfig
    module: Task
    src_tokenizer: Any
    tgt_tokenizer: Any

    @property
    def tokenizer(self) -> Any:
        """The language model's tokenizer."""
        return self.tgt_tokenizer


class _Vocabularies:
    """What `build_task` asks of data, from a checkpoint."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.src_vocab: int = state["src_vocab"]
        self.tgt_vocab: int = state["tgt_vocab"]
        self._bytes_per_token: dict[str, float] = state["bytes_per_token"]

    def bytes_per_token(self, split: str) -> float:
        return self._bytes_per_token[split]


def restore(checkpoint: Checkpoint) -> Trained:
    """Rebuild the model of a checkpoint on the CPU, in evaluation mode.

    Raises:
        UserError: a norm of the user's, or its plug-in's module, that is not found here, or weights that do
            not fit the config.
    """
    state = checkpoint.state
    config = checkpoint.config
    load_plugins(config.plugins)
    check_norm(config)
    tell_changed_norm(checkpoint)
    module = build_task(config, _Vocabularies(state))
    try:
        module.load_state_dict(checkpoint.content["state_dict"])
    except UserError:
        raise
    except (RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"ckpt={checkpoint.path}: {_misfit(error)}") from error
    module.eval()
    tokenizers = {side: tokenizer_from_json(text) for side, text in state["tokenizers"].items()}
    return Trained(config, module, tokenizers["src"], tokenizers["tgt"])
