"""The card of one norm: every check, the paper's table, gradients, cost and eps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rmsrepro import __version__
from rmsrepro.norms.card import behaviour, extremes, numerics, rows
from rmsrepro.norms.card.counting import count
from rmsrepro.norms.card.epsilon import measure_eps
from rmsrepro.norms.card.gradients import follow_from_invariances, measure_gradients
from rmsrepro.norms.card.invariance import INVARIANCES, against_paper, choose_setting, details, judge, measure
from rmsrepro.norms.card.result import Check, Status, first_line, guarded
from rmsrepro.norms.card.subject import Subject
from rmsrepro.norms.making import plain

SCHEMA_VERSION = 1

CHECKS: Mapping[str, Callable[[Subject], Check]] = {
    "agreement_fp32": partial(numerics.agreement, dtype=torch.float32),
    "agreement_bf16": partial(numerics.agreement, dtype=torch.bfloat16),
    "agreement_fp16": partial(numerics.agreement, dtype=torch.float16),
    "float64_precision": numerics.float64_precision,
    "gradcheck": numerics.first_derivatives,
    "gradgradcheck": numerics.second_derivatives,
    "dtype_rule": extremes.dtype_rule,
    "half_precision_sums": extremes.half_precision_sums,
    "zero_rows": extremes.zero_rows,
    "value_range": extremes.value_range,
    "empty_batch": behaviour.empty_batch,
    "non_contiguous": behaviour.non_contiguous,
    "last_dimension": rows.last_dimension,
    "leading_dimensions": rows.leading_dimensions,
    "rows_independent": rows.rows_independent,
    "evaluation": rows.evaluation,
    "in_place": behaviour.in_place,
    "torch_compile": behaviour.compiles,
    "torch_export": behaviour.exports,
    "state_dict": behaviour.state_dict_round_trip,
    "copies": behaviour.copies,
}
"""In the order of the card; `table_1` and `gradients` follow, from what is measured for their tables."""


@dataclass
class Card:
    """A norm's measured properties.

    Attributes:
        checks: by name, each with its status.
        invariances: the six of the paper's table 1.
        invariance_details: how they were measured, and the deviations.
        gradients: the statements on gradients, each `holds` and `deviation`; None without a gain or bias.
        counts: parameters, operations and bytes, and the exponents with which they grow.
        eps: the sizes of rows below which settings of eps part.
        flags: what a reader should know of these parameters at this width.
    """

    subject: Subject
    checks: dict[str, Check] = field(default_factory=dict)
    invariances: dict[str, bool] = field(default_factory=dict)
    invariance_details: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    eps: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [name for name, check in self.checks.items() if check.status is Status.failed]

    def to_json(self) -> dict[str, Any]:
        """Return the card as the content of its file."""
        subject = self.subject
        return {
            "schema_version": SCHEMA_VERSION,
            "name": subject.name,
            "source": subject.info.source,
            "scope": subject.info.scope,
            "backend": subject.backend,
            "dim": subject.dim,
            "params": plain(subject.resolved),
            "torch_version": torch.__version__,
            "package_version": __version__,
            "status": "fail" if self.failed else "pass",
            "failed": self.failed,
            "checks": {name: check.to_json() for name, check in self.checks.items()},
            "invariances": self.invariances,
            "invariance_details": self.invariance_details,
            "gradients": self.gradients,
            "counts": self.counts,
            "eps": self.eps,
            "flags": self.flags,
        }


def make_card(subject: Subject, on_progress: Callable[[str], None] | None = None) -> Card:
    """Measure a norm.

    Args:
        subject: the norm; that it can be built is for the caller to know.
        on_progress: called with what is measured next.

    A check that raises has failed; nothing that the norm does after it was built stops the card.
    """
    tell = on_progress or (lambda _: None)
    card = Card(subject, flags=subject.spec.flags(subject.dim))
    # A norm may draw random numbers, and warn where it is asked for what it was not made for.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, check in CHECKS.items():
            tell(name.replace("_", " "))
            card.checks[name] = guarded(partial(check, subject))
        tell("table 1")
        card.checks["table_1"] = guarded(partial(_table, card))
        tell("gradients")
        card.checks["gradients"] = guarded(partial(_gradients, card))
        tell("cost")
        card.counts = _or_reason(partial(count, subject))
        tell("eps")
        card.eps = _or_reason(partial(measure_eps, subject))
    return card


def _table(card: Card) -> Check:
    card.invariances = dict.fromkeys(INVARIANCES, False)
    setting = choose_setting(card.subject)
    deviations = measure(setting)
    card.invariances = judge(setting, deviations)
    card.invariance_details = details(setting, deviations)
    return against_paper(card.subject.name, card.invariances)


def _gradients(card: Card) -> Check:
    card.gradients = measure_gradients(choose_setting(card.subject))
    return follow_from_invariances(card.gradients, card.invariances)


def _or_reason(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a part of the card without a verdict, or why it could not be measured."""
    try:
        return part()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return {"text": f"not measured: it raised {first_line(error)}"}


def card_path(out_dir: Path, name: str) -> Path:
    """Return the file of a norm's card: out_dir/cards/NAME.json, an import string's colon as a dot."""
    return out_dir / "cards" / f"{name.replace(':', '.')}.json"
