"""What paired timings say of the norms: place by place, backend by backend, over p, and as a part of a step.

A *place* is what timings must share to stand side by side: machine, level, model or shape, mode, number type.
Percentages are formed inside a place and a backend only.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rmsrepro.config.study import cell_name
from rmsrepro.norms.settings import whole
from rmsrepro.report import fields
from rmsrepro.report.formatting import NORM_TITLES, interval, join, number
from rmsrepro.report.labels import telling
from rmsrepro.report.parameters import Names, key_of
from rmsrepro.report.timing import StepTime, place_key, shaping

LEVELS = ("step", "model", "layer")
BACKENDS = ("composite", "torch", "compiled", "fused")
MODES: Mapping[tuple[str, str], str] = {
    ("step", "step"): "training step",
    ("step", ""): "training step",
    ("model", "fwd_bwd"): "forward and backward",
    ("model", "fwd"): "forward",
    ("layer", "fwd_bwd"): "layer, forward and backward",
    ("layer", "fwd"): "layer, forward",
}
NORMS = (*(norm for norm in NORM_TITLES if norm != "none"), "none")
BUILT_IN = ("rmsnorm",)
"""The norms of which torch ships a module: who swaps nn.LayerNorm for nn.RMSNorm gets this one."""


@dataclass(frozen=True)
class Place:
    """Timings that may stand side by side."""

    level: str
    cell: str
    """`model/task`; empty for a layer and for a model of one's own."""
    title: str
    times: tuple[StepTime, ...]
    """Measured comparisons with the baseline of the same backend: by backend, then by norm. Of places
    `across` backends first by what they are set against."""

    @property
    def backends(self) -> list[str]:
        """The backends that were timed here."""
        return list(dict.fromkeys(time.comparison.backend for time in self.times))

    def of(self, norm: str, backend: str) -> list[StepTime]:
        """The timings of one norm on one backend, one a setting."""
        return [
            time
            for time in self.times
            if (time.comparison.plain_norm, time.comparison.backend) == (norm, backend)
        ]


def places_of(times: Sequence[StepTime], *, across: bool = False) -> list[Place]:
    """Sort timings into places: whole steps first, then models, then layers, each in the order of the titles.

    Args:
        times: one of each kind (see `newest`).
        across: whether to take those between two backends, not those within one.
    """
    groups: dict[tuple[object, ...], list[StepTime]] = defaultdict(list)
    for time in times:
        if time.measured and time.comparison.like_for_like is not across:
            groups[place_key(time)].append(time)
    members = [sorted(group, key=_order) for group in groups.values()]
    titles = _titles([group[0] for group in members])
    places = [
        Place(
            level=group[0].comparison.level,
            cell=cell_name(group[0].comparison.model, group[0].comparison.task)
            if group[0].comparison.task
            else "",
            title=title,
            times=tuple(group),
        )
        for group, title in zip(members, titles, strict=True)
    ]
    return sorted(places, key=lambda place: (_place_in(LEVELS, place.level), _natural(place.title)))


def _natural(text: str) -> tuple[str, tuple[int, ...]]:
    """Sorts 80x1024 before 4096x512: by its numbers, not by their digits."""
    return re.sub("[0-9]", "", text), tuple(map(int, re.findall("[0-9]{1,18}", text)))


def _order(time: StepTime) -> tuple[object, ...]:
    c = time.comparison
    own = arm_order(c.plain_norm, c.params, c.backend)
    if c.like_for_like:
        return own
    return (*arm_order(c.plain_baseline, c.baseline_params, c.baseline_backend), *own)


def arm_order(norm: str, params: Mapping[str, Any], backend: str) -> tuple[object, ...]:
    """Sorts arms by backend, then by norm as everywhere else, then by p."""
    p = part_read(norm, params)
    return _place_in(BACKENDS, backend), _place_in(NORMS, norm), norm, math.inf if p is None else p


def _place_in(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


def _titles(firsts: Sequence[StepTime]) -> list[str]:
    """What is timed, and where; with what tells places of one name apart."""
    plain = []
    for time in firsts:
        c = time.comparison
        what = MODES.get((c.level, c.mode), f"{c.level} {c.mode}".strip())
        where = (
            c.shape.replace(" ", "") if c.level == "layer" else " / ".join(filter(None, (c.model, c.task)))
        )
        plain.append(f"{what}: {where}")
    facts = [_facts(time) for time in firsts]
    titles = []
    for title, own in zip(plain, facts, strict=True):
        words = telling(own, [other for same, other in zip(plain, facts, strict=True) if same == title])
        titles.append(f"{title} ({words})" if words else title)
    return titles


def _facts(time: StepTime) -> dict[str, Any]:
    c = time.comparison
    facts = {"dtype": c.dtype, "device": c.device, "threads": c.threads, "machine": time.machine}
    return facts | (shaping(time.settings) | {"shape": c.shape} if c.level != "layer" else {})


def part_read(norm: str, params: Mapping[str, Any]) -> float | None:
    """The part of a vector that a norm's statistic reads: p of pRMSNorm, None without one."""
    return p if math.isfinite(p := fields.number(whole(norm, params).get("p"))) else None


# ------------------------------------------------------------------------------------------ what remains


@dataclass(frozen=True)
class Remaining:
    """What one norm saves in one place, on each backend that has it."""

    place: Place
    norm: str
    label: str
    by_backend: Mapping[str, StepTime]


def remaining(places: Sequence[Place], names: Names) -> list[Remaining]:
    """Return a row for each step or model that was timed on several backends, and each norm there but `none`.

    Single layers have a table of their own.
    """
    rows = []
    for place in places:
        if place.level == "layer" or len(place.backends) < 2:
            continue
        found: dict[str, tuple[str, dict[str, StepTime]]] = {}
        for time in place.times:
            c = time.comparison
            if c.plain_norm != "none":
                label = names.given(c.plain_norm, c.params)
                found.setdefault(label, (c.plain_norm, {}))[1][c.backend] = time
        rows += [Remaining(place, norm, label, by_backend) for label, (norm, by_backend) in found.items()]
    return rows


def remaining_text(rows: Sequence[Remaining]) -> list[str]:
    """A sentence a place: what RMSNorm saves as the paper wrote it, and what is left on other backends."""
    sentences = []
    for row in rows:
        composite = row.by_backend.get("composite")
        others = {name: time for name, time in row.by_backend.items() if name != "composite"}
        if row.norm not in BUILT_IN or composite is None or not others:
            continue
        parts = [f"{saved(composite)} written from primitive operations"]
        for backend, time in others.items():
            parts.append(f"{saved(time)} {_HOW.get(backend, f'on {backend}')}")
        sentences.append(f"{row.place.title}: {row.label} takes {join(parts)}.")
    return sentences


_HOW = {
    "torch": "with torch's own nn.LayerNorm and nn.RMSNorm",
    "compiled": "with both compiled by Inductor",
    "fused": "with both on this package's fused kernels",
}
"""How a backend has norm and LayerNorm."""


def saved(time: StepTime) -> str:
    """`17.1 % less time [14.9, 19.2]`; where the interval contains 0, that nothing can be told."""
    c = time.comparison
    doubt = "" if c.trusted else " (not trusted)"
    ends = interval(c.reduction_low, c.reduction_high, 1)
    if c.reduction_low <= 0 <= c.reduction_high:
        return f"no time that can be told from LayerNorm's ({number(c.reduction, 1)} % less, {ends}){doubt}"
    flipped = interval(-c.reduction_high, -c.reduction_low, 1) if c.reduction < 0 else ends
    return f"{time.words} time {flipped}{doubt}"


# ------------------------------------------------------------------------------------ the share of a step


@dataclass(frozen=True)
class Share:
    """The part of a step that a norm takes: what taking it out would save, in per cent of the step."""

    place: Place
    norm: str
    label: str
    backend: str
    share: float
    low: float
    high: float
    """Ends of the 95 % interval over processes; NaN where the bench does not say."""
    trusted: bool


def shares(places: Sequence[Place], names: Names) -> list[Share]:
    """Return the share of each norm in each place in which a model without a norm was timed beside it.

    Of LayerNorm it is the reduction that no norm at all brings; of another norm, 1 - t_none / t_norm, as the
    bench took it from the rounds that have both.
    """
    found = []
    for place in places:
        for backend in place.backends:
            without = next(iter(place.of("none", backend)), None)
            if without is None:
                continue
            bare = without.comparison
            label = names.given(bare.plain_baseline, bare.baseline_params)
            found.append(
                Share(
                    *(place, bare.plain_baseline, label, backend),
                    *(bare.reduction, bare.reduction_low, bare.reduction_high, bare.trusted),
                )
            )
            for time in place.times:
                c = time.comparison
                if c.backend != backend or c.plain_norm == "none" or time.bench_id != without.bench_id:
                    continue
                label = names.given(c.plain_norm, c.params)
                trusted = c.trusted and bare.trusted
                found.append(
                    Share(
                        *(place, c.plain_norm, label, backend),
                        *(c.share, c.share_low, c.share_high, trusted),
                    )
                )
    return found


# --------------------------------------------------------------------------------------------- over p


@dataclass(frozen=True)
class OverP:
    """pRMSNorm's saving over p in one place, on one backend, and RMSNorm's beside it."""

    place: Place
    backend: str
    points: tuple[tuple[float, StepTime], ...]
    """(p, timing), p rising."""
    whole: StepTime | None
    """RMSNorm, which reads all."""


def over_p(places: Sequence[Place]) -> list[OverP]:
    """Return the places in which pRMSNorm was timed with at least two p and nothing else that differs."""
    found = []
    for place in places:
        for backend in place.backends:
            lines: dict[str, dict[float, StepTime]] = defaultdict(dict)
            for time in place.of("prmsnorm", backend):
                p = part_read("prmsnorm", time.comparison.params)
                if p is not None:
                    lines[_besides_p(time)].setdefault(p, time)
            for rest, points in lines.items():
                if len(points) > 1:
                    same = (time for time in place.of("rmsnorm", backend) if _besides_p(time) == rest)
                    ordered = tuple(sorted(points.items(), key=lambda one: one[0]))
                    found.append(OverP(place, backend, ordered, next(same, None)))
    return found


def _besides_p(time: StepTime) -> str:
    """The parameters that RMSNorm has as well."""
    c = time.comparison
    every = whole(c.plain_norm, c.params)
    return key_of({key: value for key, value in every.items() if key not in ("p", "k_rule")})
