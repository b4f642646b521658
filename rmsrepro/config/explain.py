"""Errors of Hydra and OmegaConf in one line: the key's path, what was given, what is expected."""

from __future__ import annotations

import re

from omegaconf.errors import OmegaConfBaseException

from rmsrepro.config.errors import first_line, nearest

_EXPECTED = (
    ("could not be converted to Float", "expected a number"),
    ("could not be converted to Integer", "expected a whole number"),
    ("is not a valid bool", "expected true or false"),
    ("is not a ListConfig, list or tuple", "expected a list, as in {key}=[a,b]"),
    ("to string:", "expected text"),
    ("is not Optional", "it cannot be null"),
    ("Invalid type assigned: NoneType", "it cannot be null"),
    ("with ListConfig", "a list stands where keys are expected, or keys where a list is"),
    ("is not a subclass of", "expected keys of its own, each with a value"),
)


def explain(error: BaseException) -> str:
    """Return one line about an error that composing a configuration raised."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for item in chain:
        if isinstance(item, OmegaConfBaseException):
            return _omegaconf(item)
    for item in chain:
        if type(item).__module__.startswith("yaml."):
            return f"cannot be read as YAML: {' '.join(str(item).split())}"
        if isinstance(item, UnicodeDecodeError):
            return "cannot be read: it is not UTF-8 text"
    return first_line(error)


def _omegaconf(error: OmegaConfBaseException) -> str:
    key = str(getattr(error, "full_key", None) or "")
    key = "study" if key == "study_name" else key  # as it is written on the command line
    text = first_line(getattr(error, "msg", None) or error)
    choices = re.search(r"valid options are: \[(.*)\]|expected one of \[(.*)\]", text)
    value = re.search(r"[Vv]alue '(.*?)'(?: of type| is not|,)", text)
    if choices and value:
        names = [name.strip() for name in (choices[1] or choices[2]).split(",")]
        return f"{key}={value[1]}: not a valid value{nearest(value[1], names)} (one of: {', '.join(names)})"
    if key in ("experiment", "debug") and "to string:" in text:
        return f"{key}: an overlay starts with the line '# @package _global_', which is missing here"
    if "missing mandatory value" in text:
        return f"{key}: a value is missing"
    unknown = re.search(r"Key '(.*)' not in '(\w+)'", text)
    if unknown:
        fields = getattr(getattr(error, "object_type", None), "__dataclass_fields__", {})
        hint = nearest(unknown[1], fields)
        return f"{key or unknown[1]}: there is no such key{hint} (keys there: {', '.join(fields)})"
    for sign, expected in _EXPECTED:
        if sign in text:
            given = "null" if "null" in expected else value[1] if value else None
            shown = key if given is None else f"{key}={given}"
            return f"{shown}: {expected.format(key=key)}" if key else f"{expected} ({text})"
    return f"{key}: {text}" if key else text
