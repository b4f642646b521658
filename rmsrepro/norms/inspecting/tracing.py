"""See normalisations as they are called: torch's functions, torch's operations, and norms written out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rmsrepro.norms.inspecting.following import Follower
from rmsrepro.norms.probing.finding import dimension_words

Place = Callable[[], tuple[str, str]]
"""Returns path and class name of the submodule that is running."""


@dataclass(frozen=True)
class Seen:
    """One normalisation."""

    path: str
    class_name: str
    function: str
    family: str
    """layer_norm, rms_norm, ...: the same for a function and the operation it ends in."""
    divided_by: str | None
    subtracts_mean: bool
    has_bias: bool
    eps: float | None
    eps_position: str | None
    over: str | None = None
    """The dimensions that share a statistic; None for the last one."""


@dataclass(frozen=True)
class _Known:
    """How to read a function's arguments: places of bias and eps, None where it has none."""

    family: str
    divided_by: str
    bias: int | None
    eps: int
    default_eps: float | None = 1e-5
    position: str = "inside"

    def read(self, name: str, place: tuple[str, str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Seen:
        bias = None if self.bias is None else kwargs.get("bias", _at(args, self.bias))
        eps = kwargs.get("eps", _at(args, self.eps, self.default_eps))
        value = float(eps) if isinstance(eps, int | float) else None
        mean = self.divided_by.startswith("std")
        return Seen(
            *place,
            name,
            self.family,
            self.divided_by,
            mean,
            bias is not None,
            value,
            self.position,
            self._over(args, kwargs),
        )

    def _over(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        given = kwargs.get("input", _at(args, 0))
        if not isinstance(given, Tensor):
            return None
        if self.family == "normalize":
            listed = kwargs.get("dim", _at(args, 2, 1))
        elif self.family in ("layer_norm", "rms_norm"):
            listed = tuple(range(-len(kwargs.get("normalized_shape", _at(args, 1, (1,)))), 0))
        else:
            return None
        dimensions = sorted(one % given.ndim for one in ([listed] if isinstance(listed, int) else listed))
        return None if dimensions == [given.ndim - 1] else dimension_words(dimensions, given.ndim)


def _at(args: Sequence[Any], place: int, default: Any = None) -> Any:
    return args[place] if len(args) > place else default


_LAYER = _Known("layer_norm", "std", 3, 4)
_RMS = _Known("rms_norm", "rms", None, 3, None)
_BATCH = _Known("batch_norm", "std over positions", 4, 7)
_GROUP = _Known("group_norm", "std, groups and positions", 3, 4)
_INSTANCE = _Known("instance_norm", "std over positions", 4, 7)
_NORMALIZE = _Known("normalize", "l2", None, 3, 1e-12, "floor")

FUNCTIONS: dict[Any, tuple[str, _Known]] = {
    F.layer_norm: ("F.layer_norm", _LAYER),
    torch.layer_norm: ("torch.layer_norm", _LAYER),
    F.rms_norm: ("F.rms_norm", _RMS),
    torch.rms_norm: ("torch.rms_norm", _RMS),
    F.batch_norm: ("F.batch_norm", _BATCH),
    torch.batch_norm: ("torch.batch_norm", _Known("batch_norm", "std over positions", 2, 7)),
    F.group_norm: ("F.group_norm", _GROUP),
    torch.group_norm: ("torch.group_norm", _GROUP),
    F.instance_norm: ("F.instance_norm", _INSTANCE),
    torch.instance_norm: ("torch.instance_norm", _Known("instance_norm", "std over positions", 2, 7)),
    F.normalize: ("F.normalize", _NORMALIZE),
}

OPERATIONS: dict[str, _Known] = {
    "aten.native_layer_norm": _LAYER,
    "aten._fused_rms_norm": _RMS,
    "aten.native_batch_norm": _Known("batch_norm", "std over positions", 2, 7),
    "aten._native_batch_norm_legit": _Known("batch_norm", "std over positions", 2, 7),
    "aten.cudnn_batch_norm": _Known("batch_norm", "std over positions", 2, 7),
    "aten.native_group_norm": _Known("group_norm", "std, groups and positions", 2, 7),
    "aten._transformer_encoder_layer_fwd": _Known("encoder layer", "std", 11, 9),
}


UNSEEN = (F.cosine_similarity, F.cosine_embedding_loss, F.pairwise_distance)
"""Functions that divide by lengths and normalise nothing that goes on."""


class FunctionWatch(TorchFunctionMode):
    """See calls of torch's normalising functions."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.seen: list[Seen] = []
        self.inside = False
        """Whether such a function is running."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = FUNCTIONS.get(func)
        if known is None and func not in UNSEEN:
            return func(*args, **(kwargs or {}))
        if known is not None:
            self.seen.append(known[1].read(known[0], self.place(), args, kwargs or {}))
        outer, self.inside = self.inside, True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.inside = outer


class OperationWatch(TorchDispatchMode):
    """See operations below torch's functions, and norms that a forward writes out.

    Norms written out are found as in `Follower`. What runs inside a function that `functions` sees is left
    out.
    """

    def __init__(self, place: Place, functions: FunctionWatch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = place
        self.functions = functions
        self.seen: list[Seen] = []
        self._follower = Follower()
        self._places: list[tuple[str, str]] = []

    @property
    def written(self) -> list[Seen]:
        """The norms that are written out."""
        name = "written out"
        return [
            Seen(
                *place,
                function=name,
                family=name,
                divided_by=one.divided_by,
                subtracts_mean=one.subtracts_mean,
                has_bias=False,
                eps=one.eps,
                eps_position=one.eps_position,
                over=one.over,
            )
            for place, one in zip(self._places, self._follower.found, strict=True)
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).rsplit(".", 1)[0]
        known = OPERATIONS.get(name)
        if self.functions is not None and self.functions.inside:
            return result
        if known is not None:
            self.seen.append(known.read(name, self.place(), args, kwargs or {}))
        else:
            self._follower.follow(func, args, kwargs or {}, result)
            self._places += [self.place()] * (len(self._follower.found) - len(self._places))
        return result
