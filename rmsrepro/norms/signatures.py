"""What a user's norm says of its parameters: read from its class. Imports no torch."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any

from rmsrepro.norms.checks import check_eps, coerce
from rmsrepro.norms.params import NormParams

_FACTORY_ARGUMENTS = ("device", "dtype")
"""What torch's own layers take beside their parameters; the model decides about it, not its norm."""
_RESERVED = ("name", "dim", "backend", "norm", "flags")
"""Names that mean something else in `build_norm`, `norm.name` or `NormParams`."""


def params_from_signature(name: str, cls: type[Any]) -> type[NormParams]:
    """Make the parameter dataclass of a user's norm from the signature of its `__init__`.

    The first parameter is the size of the last dimension; each other one becomes a field with its annotation
    (or its default's type) and default. A float named eps must not be negative.

    Raises:
        TypeError: no first parameter, a type that cannot be configured, or parameters without names (**kw).
    """
    where = f"the norm {name!r} ({import_path(cls)})"
    # cls.__init__ is read on purpose: the parameters are those of the class as it is now.
    init: Callable[..., None] = cls.__init__
    _, *parameters = inspect.signature(init).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or not (parameters[0].kind in positional or size_keyword(cls)):
        raise TypeError(f"{where} must take the size of the last dimension as its first parameter")
    try:
        hints = typing.get_type_hints(init)
    except (NameError, TypeError) as error:
        raise TypeError(f"{where}: an annotation of __init__ cannot be read: {error}") from error
    members: list[tuple[str, Any, Any]] = []
    for parameter in parameters[1:]:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            raise TypeError(
                f"{where}: __init__ takes **{parameter.name}, which does not say what parameters there are; "
                "name each one, or give register_norm a dataclass of them (params=)"
            )
        if parameter.name in _FACTORY_ARGUMENTS and parameter.default is None:
            continue
        if parameter.name in _RESERVED:
            raise TypeError(f"{where}: a parameter cannot be called {parameter.name!r} here; rename it")
        has_default = parameter.default is not inspect.Parameter.empty
        told_by_default = has_default and parameter.default is not None
        kind = hints.get(parameter.name, type(parameter.default) if told_by_default else None)
        if kind is None:
            raise TypeError(
                f"{where}: the parameter {parameter.name!r} needs an annotation or a default"
                + (" other than None" if has_default else "")
            )
        metadata = {"check": check_eps} if parameter.name == "eps" and kind in (float, float | None) else {}
        if has_default:
            # A default of a wrong type is the author's mistake: it shows here and not in the user's run.
            coerce(f"{name}.{parameter.name}", parameter.default, kind)
        default = parameter.default if has_default else MISSING
        members.append((parameter.name, kind, field(default=default, metadata=metadata)))
    return make_dataclass(
        f"{cls.__name__}Params",
        members,
        bases=(NormParams,),
        frozen=True,
        kw_only=True,
        namespace={"norm": name, "__module__": cls.__module__},
    )


def size_keyword(cls: type[Any]) -> str | None:
    """Return the keyword of a class that takes the size of the last dimension by keyword only; else None.

    That is its first parameter, one without a default: `def __init__(self, *, normalized_shape, eps=1e-5)`.
    """
    init: Callable[..., None] = cls.__init__
    _, *parameters = inspect.signature(init).parameters.values()
    first = parameters[0] if parameters else None
    if first is None or first.kind is not inspect.Parameter.KEYWORD_ONLY:
        return None
    return first.name if first.default is inspect.Parameter.empty else None


def check_defaults(name: str, params: type[Any]) -> None:
    """Check the defaults of a parameter dataclass of the user's own.

    Raises:
        TypeError, ValueError: a type that cannot be configured, or a default of another type.
    """
    hints = typing.get_type_hints(params)
    for one in fields(params):
        if one.default is not MISSING:
            coerce(f"{name}.{one.name}", one.default, hints[one.name])


def import_path(cls: type[Any]) -> str:
    """Return "module:Class"."""
    return f"{cls.__module__}:{cls.__qualname__}"
