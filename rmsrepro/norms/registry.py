"""Names of norms: the built-in ones, those that users register, and import strings.

A norm that is not built in is an `nn.Module` class whose `__init__` takes the size of the last dimension
first and its parameters, with annotations and defaults, by keyword:

    @register_norm("mynorm")
    class MyNorm(nn.Module):
        def __init__(self, dim: int, *, eps: float = 1e-5) -> None: ...
        def forward(self, x): ...   # (..., dim) -> (..., dim)

It is found under its name once its module was imported, through an entry point of the group `rmsrepro.norms`
(name = the norm's name, value = the class), or by the import string "pkg.module:MyNorm". This module imports
no torch; looking up a user's norm imports what the user's module imports.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from rmsrepro.config.errors import nearest
from rmsrepro.norms.backends import BACKENDS, refusal
from rmsrepro.norms.making import make_params
from rmsrepro.norms.params import BUILTIN_PARAMS
from rmsrepro.norms.roles import norm_takes_mask
from rmsrepro.norms.signatures import check_defaults, import_path, params_from_signature, size_keyword

ENTRY_POINT_GROUP = "rmsrepro.norms"
SCOPES = ("activation", "weight")
"""activation: a module on (..., dim), built for dim. weight: a module on a linear map's weights (rows, in),
built for the number of rows; models reach it through `normed_linear`."""

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class NormInfo:
    """What is known about a norm without building it."""

    name: str
    params_class: type[Any]
    """Frozen dataclass whose fields are the norm's parameters."""
    scope: str
    backends: tuple[str, ...]
    """Those that take the norm with at least its default parameters."""
    summary: str
    source: str
    """Where the norm is from: a paper, or the user's class."""
    takes_mask: bool = False
    """Whether its statistics are over positions: its forward is (x, mask), and language models refuse it."""
    factory: type[Any] | None = field(default=None, compare=False)
    """The user's class; None for a built-in norm."""
    size_keyword: str | None = field(default=None, compare=False)
    """The keyword under which the class takes the size of the last dimension; None: it comes first."""


_SUMMARIES = {
    "none": ("no normalisation", "the paper's baseline"),
    "layernorm": ("(a - mean) / sqrt(var + eps) * gain + bias", "Ba et al. 2016, eq. 4"),
    "layernorm_nobias": ("LayerNorm without bias", "control for RMSNorm's missing bias"),
    "rmsnorm": ("a / sqrt(mean(a^2) + eps) * gain", "Zhang & Sennrich 2019, eq. 4"),
    "prmsnorm": ("RMSNorm with the RMS of the first p * dim entries", "Zhang & Sennrich 2019, section 3.2"),
    "l2norm": ("a / sqrt(sum(a^2) + eps) * gain", "Zhang & Sennrich 2019, section 5.1"),
    "batchnorm": (
        "(a - mean) / sqrt(var + eps) * gain + bias, over positions",
        "Ioffe & Szegedy 2015, algorithm 1",
    ),
    "weightnorm": ("linear maps with rows g v / |v|", "Salimans & Kingma 2016, eq. 2"),
    "scalenorm": ("a / |a| * one gain, sqrt(dim) at first", "Nguyen & Salazar 2019, section 3.2"),
    "crmsnorm": ("RMSNorm of a and -sum(a), which is not stored", "Jiang et al. 2023, section 4"),
    "dyt": ("tanh(alpha a) * gain + bias, no statistic", "Zhu et al. 2025, eq. 1"),
    "llama_rmsnorm": ("RMSNorm rounded before the gain", "Touvron et al. 2023"),
    "mistral_rmsnorm": ("llama_rmsnorm with Mistral's eps", "Jiang et al. 2023, Mistral 7B"),
    "qwen_rmsnorm": ("llama_rmsnorm with Qwen's eps", "Qwen 2 and 3"),
    "t5_rmsnorm": ("llama_rmsnorm without bias", "Raffel et al. 2020, section 2.1"),
    "gemma_rmsnorm": ("RMSNorm with the gain 1 + weight", "Gemma Team 2024"),
}

_BUILTIN = {
    name: NormInfo(
        name=name,
        params_class=params,
        scope="weight" if name == "weightnorm" else "activation",
        takes_mask=name == "batchnorm",
        backends=tuple(backend for backend in BACKENDS if refusal(params(), backend) is None),
        summary=_SUMMARIES[name][0],
        source=_SUMMARIES[name][1],
    )
    for name, params in BUILTIN_PARAMS.items()
}

_registered: dict[str, NormInfo] = {}
_import_strings: dict[str, NormInfo] = {}


# ------------------------------------------------------------------------------------ registering


def register_norm(
    name: str,
    *,
    params: type[Any] | None = None,
    scope: str = "activation",
    summary: str | None = None,
    source: str | None = None,
) -> Callable[[Class], Class]:
    """Register the decorated `nn.Module` class as the norm `name`.

    Args:
        name: lower-case letters, digits and underscores.
        params: dataclass of the parameters; derived from the signature of `__init__` when None.
        scope: activation, or weight: then the class is built for the number of a linear map's rows, and its
            forward maps the weights (rows, in) to the normalised ones.
        summary: one line; the first line of the class's docstring when None.
        source: where the norm is from; the class's import path when None.

    Raises:
        ValueError: the name is taken or not well formed, or the scope unknown.
        TypeError: not a module class, or a parameter whose type cannot be configured.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"a norm's name has lower-case letters, digits and underscores; got {name!r}")
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {', '.join(SCOPES)}; got {scope!r}{nearest(scope, SCOPES)}")

    def decorate(cls: Class) -> Class:
        known = _BUILTIN.get(name) or _registered.get(name)
        if known is not None and known.factory is not cls:
            owner = known.source if known.factory is None else import_path(known.factory)
            raise ValueError(
                f"the norm {name!r} is registered already ({owner}); choose another name"
                + ("" if known.factory is None else f", or call unregister_norm({name!r}) first")
            )
        _registered[name] = _user_norm(name, cls, params, scope, summary, source)
        return cls

    return decorate


def unregister_norm(name: str) -> None:
    """Forget a registered norm (in a notebook, before defining it anew).

    Raises:
        ValueError: no such norm was registered.
    """
    if _registered.pop(name, None) is None:
        raise ValueError(f"the norm {name!r} was not registered{nearest(name, _registered)}")


def _user_norm(
    name: str,
    cls: object,
    params: type[Any] | None,
    scope: str = "activation",
    summary: str | None = None,
    source: str | None = None,
) -> NormInfo:
    from torch import nn

    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"the norm {name!r} must be a class derived from torch.nn.Module, got {cls!r}")
    if params is None:
        params = params_from_signature(name, cls)
    elif not is_dataclass(params):
        raise TypeError(f"params of the norm {name!r} must be a dataclass, got {params!r}")
    else:
        check_defaults(name, params)
    doc = (cls.__doc__ or "").strip().partition("\n")[0]
    return NormInfo(
        name=name,
        params_class=params,
        scope=scope,
        backends=("composite",),
        summary=doc if summary is None else summary,
        source=import_path(cls) if source is None else source,
        takes_mask=scope == "activation" and norm_takes_mask(cls),
        factory=cls,
        size_keyword=size_keyword(cls),
    )


# -------------------------------------------------------------------------------------- looking up


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """Entry points by name. Two of one name, or one with a built-in's name, are an error."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        other = found.get(point.name)
        if point.name in _BUILTIN or (other is not None and other.value != point.value):
            owner = "this package" if other is None else other.value
            raise ValueError(
                f"the norm {point.name!r} is offered twice, by {owner} and by the plug-in {point.value}; "
                "uninstall one of them"
            )
        found[point.name] = point
    return found


def list_norms() -> list[str]:
    """Return the names of all norms: built-in, registered, and those of installed plug-ins."""
    return [*_BUILTIN, *sorted({*_registered, *_entry_points()})]


def norm_info(name: str) -> NormInfo:
    """Return what is known about the norm `name`, which may be an import string "pkg.module:Class".

    Raises:
        ValueError: no such norm; the message names the nearest.
        TypeError: `name` is no string, or the class it points at is no norm.
    """
    if not isinstance(name, str):
        raise TypeError(f"a norm is named by a string, got {name!r}")
    info = _BUILTIN.get(name) or _registered.get(name)
    if info is not None:
        return info
    if ":" in name:
        return _from_import_string(name)
    point = _entry_points().get(name)
    if point is None:
        raise ValueError(
            f"there is no norm {name!r}{nearest(name, list_norms())}; norms are {', '.join(list_norms())}, "
            "or an import string such as mypackage.norms:MyNorm "
            "(a norm that your module registers: import it, or give plugins=[module])"
        )
    cls = point.load()
    # Loading it may have run a @register_norm of the same name.
    if name not in _registered:
        register_norm(name)(cls)
    return _registered[name]


def _from_import_string(name: str) -> NormInfo:
    if name in _import_strings:
        return _import_strings[name]
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
        raise ValueError(f"{name!r} is no import string; it has the form package.module:Class")
    module_name, _, attribute = name.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the norm {name!r} cannot be imported: there is no module {error.name!r} on the Python path"
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            choices = [key for key, value in vars(target).items() if isinstance(value, type)]
            raise ValueError(
                f"the norm {name!r} cannot be found: {module_name} has no {attribute!r}"
                + nearest(part, choices)
            )
        target = getattr(target, part)
    # The module may have registered the class under a name: it is the same norm then.
    same = [info for info in _registered.values() if info.factory is target]
    _import_strings[name] = same[0] if same else _user_norm(name, target, None)
    return _import_strings[name]


def resolve_params(name: str, **given: Any) -> Any:
    """Return the parameters of norm `name`: its defaults, then the preset of `variant`, then `given`.

    Returns:
        The norm's frozen parameter dataclass, types and ranges checked.

    Raises:
        ValueError: an unknown norm (the nearest is named), or a value out of range.
        TypeError: an unknown parameter (the nearest is named), or a value of the wrong type.
    """
    return make_params(norm_info(name).params_class, name, given)
