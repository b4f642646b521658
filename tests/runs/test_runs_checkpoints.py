"""What is said of a file that is no checkpoint."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch

from rmsrepro.config.errors import UserError
from rmsrepro.runs.checkpoints import load_checkpoint


def write(kind: str, file: Path) -> None:
    if kind == "text":
        file.write_text("hello\n")
    elif kind == "empty":
        file.touch()
    elif kind == "objects":
        torch.save({"rmsrepro": datetime.UTC}, file)
    else:
        torch.save({"rmsrepro": torch.zeros(1000)}, file)
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("text", "it is not in the format that torch.save writes"),
        ("empty", "the file is empty"),
        ("half", "it is cut off: its end is missing"),
        ("objects", "it holds Python objects beside tensors and plain values"),
    ],
)
def test_the_reason_is_told(kind: str, reason: str) -> None:
    write(kind, Path("model.ckpt"))
    with pytest.raises(UserError) as caught:
        load_checkpoint("model.ckpt")
    assert str(caught.value).startswith(f"ckpt=model.ckpt: cannot be read as a checkpoint ({reason}")


def test_a_file_without_our_entry() -> None:
    torch.save({"weights": torch.zeros(2)}, "other.ckpt")
    with pytest.raises(UserError, match="not a checkpoint of rmsrepro"):
        load_checkpoint("other.ckpt")
