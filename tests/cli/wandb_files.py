"""Reads what wandb writes offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def written(run_id: str, folder: str = "outputs") -> Path:
    [file] = Path(folder, "wandb").rglob(f"run-{run_id}.wandb")
    return file


def items(file: Path) -> list[Any]:
    """What an offline wandb file holds."""
    from wandb.proto import wandb_internal_pb2

    data, found, parts = file.read_bytes(), [], b""
    place = 7  # the header of the file
    while place + 7 <= len(data):
        # LevelDB's log: blocks of 32 KiB; checksum, length and kind (1 whole, 2 first, 3 middle, 4 last).
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def history(content: list[Any]) -> list[dict[str, Any]]:
    """The rows that were logged."""
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in content
        if record.WhichOneof("record_type") == "history"
    ]
