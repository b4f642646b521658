"""The ledger: every number, property and statement of the paper that could be true or false elsewhere.

`claims.yaml` holds them as the paper's tables do, one line a norm. Here each becomes a `Claim` with an id of
its own. What a claim comes to is judged in `verdicts.py`, from records alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

LAYERNORM = "LayerNorm"
"""The norm that all the paper's percentages are taken against, as the paper writes it."""

OURS: Mapping[str, str] = {
    "Baseline": "none",
    "BatchNorm": "batchnorm",
    "WeightNorm": "weightnorm",
    LAYERNORM: "layernorm",
    "L2-Norm": "l2norm",
    "RMSNorm": "rmsnorm",
    "pRMSNorm": "prmsnorm",
}
"""The paper's name of a norm -> the package's. Cited work and BatchNorm inside an LSTM have none."""


class Metric(Enum):
    """What kind of thing a claim speaks of."""

    time = "time"
    quality = "quality"
    statistic = "statistic"
    property = "property"
    statement = "statement"


@dataclass(frozen=True)
class Claim:
    """One thing that the paper prints. Texts are empty where the paper has nothing to say."""

    id: str
    table: str
    """Where it stands: a table, a figure, a section."""
    task: str
    framework: str
    model: str
    norm: str
    """As the paper writes it."""
    metric: Metric
    name: str
    """Of the metric: `training time`, `Test14`, `dataset re-scaling`, ..."""
    value: float | bool | str | None
    """None: printed as "-". A text for a range and for a statement in words."""
    spread: float | None = None
    """Standard deviation; the paper has one for times only, of 3 runs."""
    unit: str = ""
    better: str = ""
    """`higher` or `lower`."""
    hardware: str = ""
    p: float | None = None
    """pRMSNorm: the part of a vector that it reads."""
    reduction_pct: float | None = None
    """100 (1 - t / t of LayerNorm), as printed."""
    baseline: str = ""
    """What a percentage is taken against."""
    note: str = ""
    verified: bool = True
    """Whether the number was seen in the paper or in its authors' files."""

    @property
    def ours(self) -> str | None:
        """The package's name of the norm; None where it has no such norm."""
        return OURS.get(self.norm)


@dataclass(frozen=True)
class Reduction:
    """A time reduction against LayerNorm, in per cent."""

    pct: float
    sd: float
    """From the spreads of both times, to first order; NaN where the paper gives none."""
    printed: bool
    """Whether the paper prints the percentage itself, and not only the two times."""

    @property
    def band(self) -> tuple[float, float]:
        """The value and two standard deviations to either side; the value alone without a spread."""
        two = 0.0 if math.isnan(self.sd) else 2 * self.sd
        return self.pct - two, self.pct + two

    @property
    def text(self) -> str:
        """`24.7 % (sd 4.1)`."""
        return f"{self.pct:.1f} %" + ("" if math.isnan(self.sd) else f" (sd {self.sd:.1f})")


class Ledger:
    """All claims, by id and in the paper's order."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self._by_id = {claim.id: claim for claim in claims}
        if len(self._by_id) < len(claims):
            raise ValueError("two claims have one id")

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, claim_id: str) -> Claim:
        return self._by_id[claim_id]

    @property
    def ids(self) -> list[str]:
        """All ids, in order."""
        return list(self._by_id)

    def matching(self, pattern: str) -> list[Claim]:
        """The claims whose id fits `pattern`, in which `*` stands for any text."""
        expression = ".*".join(re.escape(part) for part in pattern.split("*"))
        return [claim for claim in self if re.fullmatch(expression, claim.id)]

    def layernorm_of(self, claim: Claim) -> Claim | None:
        """The same figure of LayerNorm: what `claim` is compared with, in its own table if it is there.

        None for LayerNorm's own, and where the paper has no such figure.
        """
        if claim.norm == LAYERNORM:
            return None
        wanted = (claim.framework, claim.model, claim.metric, claim.name)
        found = [
            other
            for other in self
            if other.norm == LAYERNORM and (other.framework, other.model, other.metric, other.name) == wanted
        ]
        return min(found, key=lambda other: other.table != claim.table, default=None)

    def reduction(self, claim: Claim) -> Reduction | None:
        """The time reduction that a claim on a time amounts to; None for any other, and for LayerNorm's."""
        other = self.layernorm_of(claim) if claim.metric is Metric.time else None
        if other is None:
            return None
        ours, theirs = _number(claim.value), _number(other.value)
        ratio = ours / theirs
        spread = math.hypot(_number(claim.spread) / ours, _number(other.spread) / theirs)
        pct = claim.reduction_pct
        return Reduction(100 * (1 - ratio) if pct is None else pct, 100 * ratio * spread, pct is not None)


@lru_cache
def ledger() -> Ledger:
    """Read the ledger.

    The last two claims are not the paper's words: they are its headline, split by norm.
    """
    text = resources.files(__package__).joinpath("claims.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    claims = [claim for block in content["blocks"] for claim in _block(block, content)]
    claims += [
        Claim(**{"framework": "", "model": "", **entry, "metric": Metric(entry["metric"])})
        for entry in content["others"]
    ]
    claims += [
        Claim(claim_id, where, "", "", "", "", Metric.statement, "statement", says)
        for claim_id, (where, says) in content["statements"].items()
    ]
    return Ledger([*claims, *_split_headline(claims)])


def _block(block: Mapping[str, Any], content: Mapping[str, Any]) -> Iterator[Claim]:
    """The claims of one block: a table, or the part of it that one framework has."""
    shared = {key: block[key] for key in ("table", "task", "framework", "model")}
    shared["note"] = block.get("note", "")
    for norm, line in block["norms"].items():
        head = f"{block['id']}-{norm.lower()}"
        p = {"p": block.get("p")} if norm == "pRMSNorm" else {}
        for key, value in line.items():
            given = {**shared, "norm": norm, **p}
            if key == "time":
                saves = line.get("saves")
                yield Claim(
                    id=f"{head}-time",
                    metric=Metric.time,
                    name=block.get("time name", "training time"),
                    value=float(value[0]),
                    spread=value[1],
                    unit=block["per"],
                    better="lower",
                    hardware=block.get("hardware", ""),
                    reduction_pct=saves,
                    baseline="" if saves is None else LAYERNORM,
                    **given,
                )
            elif key == "holds":
                for name, holds in zip(content["properties"], value, strict=True):
                    slug = name.replace(" ", "-")
                    yield Claim(id=f"{head}-{slug}", metric=Metric.property, name=name, value=holds, **given)
            elif key in ("mean", "std"):
                for position, number in zip(content["positions"], value, strict=True):
                    yield Claim(
                        id=f"{head}-{key}-{position.lower()}",
                        metric=Metric.statistic,
                        name=f"{key} at token position {position}",
                        value=number,
                        **given,
                    )
            elif key != "saves":
                name, unit, better = content["columns"][key]
                yield Claim(
                    id=f"{head}-{key}",
                    metric=Metric.quality,
                    name=name,
                    value=value,
                    unit=unit,
                    better=better,
                    **given,
                )


def _split_headline(claims: Sequence[Claim]) -> Iterator[Claim]:
    """The range of the headline for each of its two norms alone, from the percentages of the tables."""
    for norm in ("RMSNorm", "pRMSNorm"):
        found = [
            claim.reduction_pct for claim in claims if claim.norm == norm and claim.reduction_pct is not None
        ]
        yield Claim(
            id=f"headline-{norm.lower()}",
            table="Tables 2 to 10",
            task="all",
            framework="all",
            model="all",
            norm=norm,
            metric=Metric.time,
            name="range of training-time reduction",
            value=f"{min(found):g}~{max(found):g}",
            unit="%",
            better="higher",
            baseline=LAYERNORM,
            note="the headline's range, one norm at a time",
        )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
