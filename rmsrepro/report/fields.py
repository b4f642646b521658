"""Reads single files and values of records, whatever is in them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rmsrepro.config.errors import first_line
from rmsrepro.report.records import Problem


def folders(parent: Path) -> list[Path]:
    """The visible folders in `parent`, sorted; none if it cannot be read."""
    try:
        return sorted(
            entry for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError:
        return []


def read_mapping(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """Read a JSON (or YAML, by suffix) file that holds a mapping; None when missing or damaged."""
    try:
        content = path.read_text(encoding="utf-8-sig")
        value = _yaml(content) if path.suffix == ".yaml" else json.loads(content)
    except FileNotFoundError:
        return None
    except Exception as error:  # parsers raise almost anything for damaged bytes, asserts included
        problems.append(Problem(path, f"damaged: {first_line(error)}"))
        return None
    if not isinstance(value, dict):
        problems.append(Problem(path, f"holds a {type(value).__name__}, not a mapping"))
        return None
    return value


def _yaml(content: str) -> Any:
    """Parse YAML as the configuration does: `1e-05` is a number here, a text to plain PyYAML."""
    return OmegaConf.to_container(OmegaConf.create(content), resolve=False)


def modified(path: Path) -> float:
    """When a file was last written, in seconds since 1970; 0 if it cannot be told."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def mapping(node: Any, key: str) -> dict[str, Any]:
    """`node[key]` if it is a mapping, else an empty one."""
    value = node.get(key) if isinstance(node, Mapping) else None
    return {str(name): item for name, item in value.items()} if isinstance(value, Mapping) else {}


def text(node: Any, key: str) -> str:
    """`node[key]` as a text; empty for what is missing, null or a container."""
    value = node.get(key) if isinstance(node, Mapping) else None
    return "" if value is None or isinstance(value, Mapping | list) else str(value)


def texts(value: Any) -> tuple[str, ...]:
    """A list's items as texts; none for anything else."""
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def named(config: Mapping[str, Any], key: str) -> str:
    """The name of a config group: `model: {name: gru}` or plain `model: gru`."""
    value = config.get(key)
    return text(value, "name") if isinstance(value, Mapping) else str(value or "")


def norm_params(node: Any) -> dict[str, Any]:
    """The parameters in a config's norm node, without its name."""
    return {str(k): v for k, v in node.items() if k != "name"} if isinstance(node, Mapping) else {}


def is_numeric(value: Any) -> bool:
    """Whether a record's value stands for a number: numbers, null, and how JSON writers spell inf."""
    if isinstance(value, str):
        return value.lower() in ("nan", "inf", "-inf", "infinity", "-infinity")
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def number(value: Any) -> float:
    """A record's number; NaN for null and for what is no number."""
    if value is None or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def integer(value: Any) -> int | None:
    """A record's whole number; None for what is none."""
    found = number(value)
    return int(found) if math.isfinite(found) else None


def pair(value: Any) -> tuple[float, float]:
    """A list of two numbers; NaNs for anything else."""
    if isinstance(value, list | tuple) and len(value) == 2:
        return number(value[0]), number(value[1])
    return math.nan, math.nan


def sorted_pair(value: Any) -> tuple[float, float]:
    """An interval, smaller end first (a reduction's interval may be written in its ratio's order)."""
    low, high = pair(value)
    return (high, low) if low > high else (low, high)


def shape_text(value: Any) -> str:
    """A shape as a text: `16 x 64` of a list, `rows 16, length 64` of a mapping."""
    if isinstance(value, list | tuple):
        return " x ".join(str(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "" if value is None else str(value)
