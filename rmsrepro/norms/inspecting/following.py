"""Follow tensors through a forward: where one is divided by a statistic of itself, a norm is written out."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rmsrepro.norms.probing.finding import dimension_words


@dataclass(frozen=True)
class Written:
    """A norm made of primitive operations."""

    subtracts_mean: bool
    divided_by: str | None
    """mean |a| or sum |a|; None for a root of squares, whose scaling is not followed."""
    eps: float | None
    eps_position: str | None
    over: str | None
    """The dimensions that share the statistic; None for the last one."""


class _Kind(Enum):
    total = auto()
    """The sum of some tensor's rows."""
    mean = auto()
    squared_mean = auto()
    centred = auto()
    square = auto()
    magnitude = auto()
    statistic = auto()
    """One number a row that grows with the tensor: to the power that the mark says."""
    quotient = auto()
    """A tensor by its statistic: a norm."""
    mean_quotient = auto()
    """The mean of the tensor by the same statistic."""


@dataclass(frozen=True)
class _Mark:
    """What a tensor is, seen from another tensor that it was made of."""

    kind: _Kind
    of: frozenset[int]
    """Origins of that tensor."""
    dimensions: tuple[int, ...] = ()
    ndim: int = 0
    count: int = 0
    """How many numbers a statistic has, or entries a total."""
    power: float = 0.0
    divided_by: str | None = None
    eps: float | None = None
    position: str | None = None
    place: int = 0
    """Of a quotient: which of the norms found."""

    def scaled(self, factor: float) -> _Mark | None:
        """Return the mark of what is this times a number; None where nothing is known of it then."""
        if self.kind is _Kind.total:
            return self.as_mean() if math.isclose(factor * self.count, 1.0, rel_tol=1e-6) else None
        if self.kind in (_Kind.mean, _Kind.squared_mean):
            return self if factor == 1.0 else None
        if self.kind is _Kind.statistic and self.eps is not None and factor > 0:
            # In the denominator at last: a square's eps inside the root goes with the square.
            grows = 2 / self.power if self.position == "inside" else 1 / self.power
            return dataclasses.replace(self, eps=self.eps * factor**grows)
        return self

    def as_mean(self) -> _Mark:
        return dataclasses.replace(self, kind=_Kind.mean)


_VIEWS = (
    "_to_copy", "clone", "alias", "detach", "view", "_unsafe_view", "unsqueeze", "squeeze", "expand",
    "transpose", "permute", "t", "_reshape_alias", "lift_fresh",
)  # fmt: skip
"""What leaves a tensor's entries as they are, but for their order, shape and dtype."""
_PARTS = ("slice", "select")
_REDUCTIONS = ("mean", "sum", "linalg_vector_norm", "norm", "var", "std", "var_mean", "std_mean")


class Follower:
    """Follow the operations of a forward.

    A tensor keeps its origin through views, casts and multiplication by a number. A norm is found where a
    tensor, or that tensor minus its mean, is divided by a root of squares (or a sum of magnitudes) of the
    same origin.
    """

    def __init__(self) -> None:
        self._marks: Any = WeakIdKeyDictionary()
        self._origins: Any = WeakIdKeyDictionary()
        self._wholes: dict[int, frozenset[int]] = {}
        """Of a part: the origins of what it was cut from."""
        self._numbers = itertools.count()
        self.found: list[Written] = []

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Look at one call of an operation of torch and its result."""
        tensors = [one for one in args if isinstance(one, Tensor)]
        if not tensors or tensors[0] is not args[0] or not all(map(_plain, tensors)):
            return
        name = func._schema.name.removeprefix("aten::")
        named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | dict(kwargs)
        name, in_place = name.rstrip("_"), name.endswith("_")
        if name in _REDUCTIONS:
            results = result if isinstance(result, tuple | list) else (result,)
            for one, reduced in zip(results, self._reduced(name, args[0], named), strict=False):
                self._marks[one] = reduced
            return
        if not isinstance(result, Tensor):
            return
        mark = self._next(name, args[0], named, result)
        origin = self._kept(name, args[0], named, result)
        if in_place:
            self._marks.pop(result, None)
        if in_place or origin is not None:
            self._origins[result] = next(self._numbers) if origin is None else origin
        if mark is not None:
            self._marks[result] = mark

    # ------------------------------------------------------------------------------------- origins

    def _origin(self, tensor: Tensor) -> int:
        if tensor not in self._origins:
            self._origins[tensor] = next(self._numbers)
        return int(self._origins[tensor])

    def _kept(self, name: str, first: Tensor, named: Mapping[str, Any], result: Tensor) -> int | None:
        """Return the origin that the result has of its first argument; None where it is something new."""
        if name in _PARTS and result.shape != first.shape:
            whole = self._origin(first)
            part = next(self._numbers)
            self._wholes[part] = self._wholes.get(whole, frozenset()) | {whole}
            return part
        scales = name in ("mul", "div") and isinstance(named.get("other"), int | float)
        return self._origin(first) if name in (*_VIEWS, *_PARTS) or scales else None

    def _sources(self, tensor: Tensor) -> frozenset[int]:
        """Of which origins a statistic of `tensor` is one: its own, its whole's, the one that was centred."""
        origin, mark = self._origin(tensor), self._mark(tensor)
        before = mark.of if mark is not None and mark.kind is _Kind.centred else frozenset()
        return before | self._wholes.get(origin, frozenset()) | {origin}

    def _mark(self, value: Any) -> _Mark | None:
        return self._marks.get(value) if isinstance(value, Tensor) else None

    def _is(self, value: Any, kind: _Kind) -> _Mark | None:
        mark = self._mark(value)
        return mark if mark is not None and mark.kind is kind else None

    # --------------------------------------------------------------------------------------- marks

    def _reduced(self, name: str, first: Tensor, named: Mapping[str, Any]) -> list[_Mark]:
        given = named.get("dim")
        listed = [given] if isinstance(given, int) else list(given or ())
        dimensions = tuple(sorted(one % first.ndim for one in listed)) if first.ndim else ()
        over = math.prod(first.shape[one] for one in dimensions)
        if not 0 < len(dimensions) < first.ndim or over < 2:
            return []
        mark = self._mark(first)
        plain = _Mark(
            _Kind.mean, self._sources(first), dimensions, first.ndim, count=first.numel() // max(over, 1)
        )
        statistic = dataclasses.replace(plain, kind=_Kind.statistic)
        if name in ("var", "var_mean", "std", "std_mean"):
            return [dataclasses.replace(statistic, power=2.0 if name.startswith("var") else 1.0), plain]
        if name in ("linalg_vector_norm", "norm"):
            order = named.get("ord", named.get("p", 2))
            if order in (1, 2, None):
                divided_by = "sum |a|" if order == 1 else None
                return [dataclasses.replace(statistic, power=1.0, divided_by=divided_by)]
            return []
        if mark is not None and mark.kind is _Kind.square:
            return [dataclasses.replace(statistic, of=mark.of, power=2.0)]
        if mark is not None and mark.kind is _Kind.magnitude:
            return [dataclasses.replace(statistic, of=mark.of, power=1.0, divided_by=f"{name} |a|")]
        return [plain if name == "mean" else dataclasses.replace(plain, kind=_Kind.total, count=over)]

    def _next(self, name: str, first: Tensor, named: Mapping[str, Any], result: Tensor) -> _Mark | None:
        """Return what the result of an operation is; note a norm where it is one."""
        second = named.get("other", named.get("mat2"))
        mark = self._mark(first)
        if name in ("mul", "div") and isinstance(second, Tensor):
            quotient = self._quotient(name, first, second)
            if quotient is not None:
                return quotient
        if name == "sub" and isinstance(second, Tensor):
            return self._difference(first, second)
        if (name == "pow" and named.get("exponent") == 2) or (
            name == "mul" and _same_entries(self, first, second)
        ):
            if mark is not None and mark.kind is _Kind.mean:
                return dataclasses.replace(mark, kind=_Kind.squared_mean)
            if mark is None or mark.kind is not _Kind.statistic:
                return _Mark(_Kind.square, self._sources(first))
        if name == "abs":
            return _Mark(_Kind.magnitude, self._sources(first))
        if name == "bmm" and isinstance(second, Tensor) and first.shape[1] == 1 == second.shape[2]:
            same = self._origin(first) == self._origin(second) and first.shape[2] > 1
            of = self._sources(first)
            return _Mark(_Kind.statistic, of, count=result.numel(), power=2.0) if same else None
        if mark is None:
            return None
        if name in _VIEWS or (name in _PARTS and result.shape == first.shape):
            return mark
        number = _number(second)
        if name in ("mul", "div") and number is not None:
            if number == 0 or (isinstance(second, Tensor) and mark.kind is not _Kind.statistic):
                return None
            return mark.scaled(number if name == "mul" else 1 / number)
        return _statistic(name, mark, named) if mark.kind is _Kind.statistic else None

    def _quotient(self, name: str, first: Tensor, second: Tensor) -> _Mark | None:
        """Note a tensor that is divided by a statistic of itself."""
        power = 1.0 if name == "div" else -1.0
        for tensor, by in ((first, second), (second, first))[: 1 if name == "div" else 2]:
            statistic, mark = self._is(by, _Kind.statistic), self._mark(tensor)
            if statistic is None or statistic.power != power:
                continue
            if mark is not None and mark.kind is _Kind.mean and mark.of & statistic.of:
                return dataclasses.replace(mark, kind=_Kind.mean_quotient)
            centred = mark is not None and mark.kind is _Kind.centred
            origins = {self._origin(tensor)} | (mark.of if mark is not None and centred else frozenset())
            if tensor.numel() > statistic.count and origins & statistic.of:
                last = statistic.dimensions in ((), (statistic.ndim - 1,))
                over = None if last else dimension_words(statistic.dimensions, statistic.ndim)
                found = Written(centred, statistic.divided_by, statistic.eps, statistic.position, over)
                self.found.append(found)
                return _Mark(_Kind.quotient, statistic.of, place=len(self.found) - 1)
        return None

    def _difference(self, first: Tensor, second: Tensor) -> _Mark | None:
        mean, square, part = (
            self._is(second, kind) for kind in (_Kind.mean, _Kind.squared_mean, _Kind.mean_quotient)
        )
        if mean is not None and self._origin(first) in mean.of and first.numel() > second.numel():
            return _Mark(_Kind.centred, mean.of)
        statistic, quotient = self._is(first, _Kind.statistic), self._is(first, _Kind.quotient)
        if statistic is not None and square is not None and statistic.of & square.of:
            return statistic  # E[a^2] - E[a]^2
        if quotient is not None and part is not None and quotient.of & part.of:
            # a / std - mean / std
            self.found[quotient.place] = dataclasses.replace(self.found[quotient.place], subtracts_mean=True)
        return None


def _same_entries(follower: Follower, first: Tensor, second: Any) -> bool:
    """Whether two tensors hold the same entries in the same order, as x and x.float() do."""
    if second is first:
        return True
    return (
        isinstance(second, Tensor)
        and second.shape == first.shape
        and second.stride() == first.stride()
        and follower._origin(first) == follower._origin(second)
    )


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is made of rows that can be compared: no nested, sparse or complex one."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_complex()


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        return float(value.detach())
    return float(value) if isinstance(value, int | float) else None


def _statistic(name: str, mark: _Mark, named: Mapping[str, Any]) -> _Mark | None:
    """Return what becomes of a statistic."""
    exponents = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
    exponent = exponents.get(name, named.get("exponent") if name == "pow" else None)
    if isinstance(exponent, int | float):
        return dataclasses.replace(mark, power=mark.power * exponent)
    if name == "add":
        eps, position = _number(named.get("other")), {2.0: "inside", 1.0: "outside"}.get(mark.power)
    else:
        least = named.get("other") if name == "maximum" else named.get("min")
        eps, position = _number(least), "floor"
        if named.get("max") is not None or name not in ("clamp", "clamp_min", "maximum"):
            return None
        if eps is not None and mark.power == 2.0:
            eps = math.sqrt(max(eps, 0.0))
    if eps is None or position is None or mark.power not in (1.0, 2.0):
        return None
    return dataclasses.replace(mark, eps=eps, position=position)
