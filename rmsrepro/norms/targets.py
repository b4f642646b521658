"""Models of users, named on the command line as package.module:name, and the norm they are built with."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rmsrepro.config.errors import UserError, first_line, nearest
from rmsrepro.norms.factory import NormSpec

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class GivenNorm(NormSpec):
    """The norm that a factory is called with: `norm.build(dim)`, or `norm(dim)`, makes a layer of it."""

    def __call__(self, dim: int) -> nn.Module:
        return self.build(dim)


def load_model(target: str, spec: NormSpec | None) -> tuple[nn.Module, Any]:
    """Import what `target` names and make a module of it; return it with its inputs, None where it has none.

    Raises:
        UserError: it cannot be imported, cannot be called, or gives no module.
    """
    from torch import nn

    made = _imported(target)
    if not isinstance(made, nn.Module) and callable(made):
        made = _made(target, made, spec)
    if isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made[0], made[1]
    if not isinstance(made, nn.Module):
        kind = type(made).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        raise UserError(
            f"{target}: expected a torch.nn.Module, a pair (module, inputs), or a function that returns "
            f"one of them; got {'None' if made is None else f'{article} {kind}'}"
        )
    return made, None


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module's call: a mapping are keywords, a tuple or list positions.

    A pair of positions and keywords is both, anything else one argument.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if not isinstance(inputs, tuple | list):
        return (inputs,), {}
    if len(inputs) == 2 and isinstance(inputs[0], tuple | list) and isinstance(inputs[1], Mapping):
        return tuple(inputs[0]), dict(inputs[1])
    return tuple(inputs), {}


def source_hash(target: str) -> str | None:
    """Return a hash of the file in which `target` names something; None where it is in no file.

    Raises:
        UserError: it cannot be imported.
    """
    module, _ = _module(target)
    file = getattr(module, "__file__", None)
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def _module(target: str) -> tuple[ModuleType, str]:
    """Import the module of `target`; return it with what stands behind the colon."""
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", target):
        raise UserError(
            f"{target!r} is no import string; it has the form package.module:name, where name is a module, a "
            "class or a function"
        )
    module_name, _, attribute = target.partition(":")
    try:
        return importlib.import_module(module_name), attribute
    except ModuleNotFoundError as error:
        ours = f"{module_name}.".startswith(f"{error.name}.")
        what = (
            f"there is no module {error.name!r}; modules of the current directory ({Path.cwd().name}/) and "
            "installed ones can be named, without .py"
            if ours
            else f"importing it failed: {error}"
        )
        raise UserError(f"{target}: {what}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise UserError(f"{target}: importing it failed: {_said(error)}") from error


def _imported(target: str) -> Any:
    found: Any
    found, attribute = _module(target)
    module_name = target.partition(":")[0]
    for part in attribute.split("."):
        if not hasattr(found, part):
            choices = [name for name in dir(found) if not name.startswith("_")]
            raise UserError(f"{target}: {module_name} has no {part!r}{nearest(part, choices)}")
        found = getattr(found, part)
    return found


def _made(target: str, factory: Any, spec: NormSpec | None) -> Any:
    """Call a factory: without arguments, or with the norm."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        one for one in parameters if one.default is inspect.Parameter.empty and one.kind not in variadic
    ]
    if len(required) > 1:
        names = ", ".join(one.name for one in required)
        raise UserError(
            f"{target}: it needs {names}; name a function without required arguments, or with one, the norm"
        )
    if required and spec is None:
        raise UserError(
            f"{target}: it takes one argument ({required[0].name}); say which norm it is built with, as in "
            "norm=rmsnorm, or name a function without required arguments"
        )
    given: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if required and required[0].kind is inspect.Parameter.KEYWORD_ONLY:
        keywords[required[0].name] = spec
    elif required:
        given = (spec,)
    elif spec is not None and any(one.name == "norm" for one in parameters):
        keywords["norm"] = spec
    try:
        return factory(*given, **keywords)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        called = "called with the norm, " if given or keywords else ""
        raise UserError(f"{target}: {called}it raised {_said(error)}") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
