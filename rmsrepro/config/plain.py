"""Config dataclasses as plain values, as records and checkpoints hold them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any, get_type_hints

import yaml

from rmsrepro.config import schema
from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import unknown_choice

NODES: dict[str, dict[str, type]] = {
    "model": {"transformer": schema.TransformerConfig, "gru": schema.GRUConfig},
    "task": {"lm": schema.LMConfig, "translation": schema.TranslationConfig},
    "data": {
        "pydoc": schema.PydocConfig,
        "tinyshakespeare": schema.TinyShakespeareConfig,
        "wikitext": schema.WikitextConfig,
        "text_files": schema.TextFilesConfig,
        "cldr": schema.CldrConfig,
        "multi30k": schema.Multi30kConfig,
        "wmt14": schema.Wmt14Config,
        "parallel_files": schema.ParallelFilesConfig,
    },
}
"""The classes of each typed group, by the name of the choice."""
NOTHING = "none"
"""Name of the task and the data of a model that brings its own inputs."""


def _node(group: str, name: str) -> type | None:
    """Return the class of a choice, or of what stands beside the choices for a user's own model."""
    if group == "model" and ":" in name:
        return schema.ImportedModelConfig
    if name == NOTHING:
        return {"task": schema.TaskConfig, "data": schema.DataConfig}.get(group)
    return NODES[group].get(name)


def plain(value: Any) -> Any:
    """Return a config dataclass as nested dicts of JSON's types (enums by their value)."""
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def yaml_text(value: Any) -> str:
    """Return plain values as YAML. (OmegaConf's writer would take a "${" in a path for more than text.)"""
    return yaml.safe_dump(plain(value), sort_keys=False, allow_unicode=True)


def from_plain(data: Mapping[str, Any]) -> schema.TrainConfig:
    """Rebuild a `TrainConfig` from what `plain` gave (a record's or checkpoint's config).

    Keys that this version does not know are ignored, absent ones take their defaults, so that records of
    an older version stay readable.

    Raises:
        UserError: the data names a model, task or data source that does not exist.
    """
    config: schema.TrainConfig = _build(schema.TrainConfig, {**data, "norm": dict(data.get("norm", {}))})
    return config


def _build(kind: type, data: Mapping[str, Any]) -> Any:
    hints = get_type_hints(kind)
    values = {}
    for item in fields(kind):
        if item.name not in data:
            if item.default is MISSING and item.default_factory is MISSING:
                raise UserError(f"{kind.__name__}: {item.name} is missing")
            continue
        values[item.name] = _convert(item.name, hints[item.name], data[item.name])
    return kind(**values)


def _convert(name: str, hint: Any, value: Any) -> Any:
    if name in NODES and isinstance(value, Mapping):
        node = _node(name, str(value.get("name")))
        if node is None:
            raise UserError(unknown_choice(name, str(value.get("name")), sorted(NODES[name])))
        return _build(node, value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if hasattr(hint, "__dataclass_fields__") and isinstance(value, Mapping):
        return _build(hint, value)
    if getattr(hint, "__origin__", None) is list and isinstance(value, list):
        return [_convert("", hint.__args__[0], element) for element in value]
    return value
