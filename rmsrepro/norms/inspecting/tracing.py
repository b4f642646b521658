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
from torch.utils.weak import WeakIdKeyDictionary

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
        return Seen(*place, name, self.family, self.divided_by, mean, bias is not None, value, self.position)


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
        if known is None:
            return func(*args, **(kwargs or {}))
        self.seen.append(known[1].read(known[0], self.place(), args, kwargs or {}))
        outer, self.inside = self.inside, True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.inside = outer


@dataclass(frozen=True)
class _Mark:
    """What a tensor on the way through a norm that is written out is."""

    kind: str
    """mean, centred, square, or statistic."""
    centred: bool = False
    rooted: bool = False
    eps: float | None = None
    position: str | None = None


class OperationWatch(TorchDispatchMode):
    """See operations below torch's functions, and norms that a forward writes out.

    A norm is written out where a tensor is multiplied or divided by one number a row that comes from the
    squares of a last dimension. What runs inside a function that `functions` sees is left out.
    """

    def __init__(self, place: Place, functions: FunctionWatch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = place
        self.functions = functions
        self.seen: list[Seen] = []
        self._marks: Any = WeakIdKeyDictionary()

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
        elif args and isinstance(args[0], Tensor) and isinstance(result, Tensor):
            self._follow(name.removeprefix("aten.").rstrip("_"), args, kwargs or {}, result)
        return result

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        first, second = args[0], args[1] if len(args) > 1 else None
        mark, other = self._mark(first), self._mark(second)
        if name in ("mul", "div") and (self._scales(first, other) or self._scales(second, mark)):
            scaled, statistic = (first, other) if self._scales(first, other) else (second, mark)
            assert statistic is not None
            own = self._mark(scaled)
            centred = own is not None and own.kind == "centred"
            eps, position = statistic.eps, statistic.position
            self.seen.append(
                Seen(*self.place(), "written out", "written out", None, centred, False, eps, position)
            )
            return
        new = self._next(name, args, kwargs, result, mark, other)
        if new is not None:
            self._marks[result] = new

    def _next(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Tensor,
        mark: _Mark | None,
        other: _Mark | None,
    ) -> _Mark | None:
        """Return what the result is."""
        second = args[1] if len(args) > 1 else None
        centred = mark is not None and mark.kind == "centred"
        if name in ("mean", "sum", "linalg_vector_norm", "var", "std") and _by_row(args[0], result):
            if name in ("var", "std", "linalg_vector_norm"):
                return _Mark("statistic", rooted=name != "var")
            if mark is not None and mark.kind == "square":
                return _Mark("statistic")
            return _Mark("mean") if name == "mean" else None
        if name == "sub" and other is not None and other.kind == "mean":
            return _Mark("centred")
        if (name == "pow" and second == 2) or (name == "mul" and second is args[0]):
            return _Mark("square", centred=centred)
        if mark is None:
            return None
        if mark.kind == "statistic" and name in ("sqrt", "rsqrt", "pow"):
            return _Mark("statistic", rooted=True, eps=mark.eps, position=mark.position)
        if (
            mark.kind == "statistic"
            and name in ("add", "clamp_min", "clamp")
            and isinstance(second, int | float)
        ):
            position = "floor" if name.startswith("clamp") else "outside" if mark.rooted else "inside"
            return _Mark("statistic", rooted=mark.rooted, eps=float(second), position=position)
        passes = ("_to_copy", "reciprocal", "expand", "clone", "unsqueeze", "view", "div", "mul")
        return mark if name in passes and not isinstance(second, Tensor) else None

    def _mark(self, value: Any) -> _Mark | None:
        return self._marks.get(value) if isinstance(value, Tensor) else None

    @staticmethod
    def _scales(value: Any, mark: _Mark | None) -> bool:
        """Whether `value` is a tensor of rows and the mark one number a row that scales it."""
        return (
            isinstance(value, Tensor)
            and value.ndim > 0
            and value.shape[-1] > 1
            and (mark is not None and mark.kind == "statistic" and mark.rooted)
        )


def _by_row(given: Tensor, result: Tensor) -> bool:
    """Whether a reduction left one number for each row of the last dimension."""
    return (
        given.ndim > 1 and given.shape[-1] > 1 and result.shape in (given.shape[:-1], (*given.shape[:-1], 1))
    )
