"""How claims that are not a figure of one norm are tested, and which claims nothing here can test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rmsrepro.paper.claims import LAYERNORM, Claim, Metric, ledger
from rmsrepro.paper.rules import Expected


@dataclass(frozen=True)
class SumsUp:
    """It holds as far as other claims hold."""

    parts: tuple[str, ...]


@dataclass(frozen=True)
class SameAs:
    """It says in words what another claim says in numbers."""

    claim: str


@dataclass(frozen=True)
class QualityOf:
    """It is what a norm's quality is expected to be."""

    norm: str
    expected: Expected


@dataclass(frozen=True)
class GradientsOf:
    """It is measured on a norm's card."""

    norm: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class NoGain:
    """pRMSNorm against RMSNorm, in every cell that was timed."""


@dataclass(frozen=True)
class EveryP:
    """Every pRMSNorm of the study, whatever its p, is as good as LayerNorm."""


@dataclass(frozen=True)
class Untestable:
    """Nothing in this package tests it."""

    reason: str


Test = SumsUp | SameAs | QualityOf | GradientsOf | NoGain | EveryP | Untestable

_RNN = ("t2", "t3th", "t3py")
_TASKS = (*_RNN, "t4", "t6", "t8", "t10")


def _times(tables: tuple[str, ...], *norms: str) -> tuple[str, ...]:
    return tuple(f"{table}-{norm}-time" for table in tables for norm in norms)


TESTS: Mapping[str, Test] = {
    "headline-7-64": SumsUp(_times(_TASKS, "rmsnorm", "prmsnorm")),
    "headline-rmsnorm": SumsUp(_times(_TASKS, "rmsnorm")),
    "headline-prmsnorm": SumsUp(_times(_TASKS, "prmsnorm")),
    "words-transformer-7-9": SumsUp(_times(("t4",), "rmsnorm", "prmsnorm")),
    "words-rnn-11-34": SumsUp(_times(("t3th", "t3py"), "rmsnorm", "prmsnorm")),
    "words-oe-40-64": SumsUp(_times(("t8",), "rmsnorm", "prmsnorm")),
    "words-ln-slower-67": SameAs("t2-baseline-time"),
    "words-l2": QualityOf("l2norm", Expected.worse),
    "words-transformer-needs-norm": QualityOf("none", Expected.fails),
    "words-prms-not-faster": NoGain(),
    "f3-p-insensitive": EveryP(),
    "words-grad-w": GradientsOf(
        "rmsnorm", ("weight_unchanged_by_input_scale", "weight_inverse_to_weight_scale")
    ),
    "words-grad-gb": GradientsOf(
        "rmsnorm",
        (
            "gain_unchanged_by_input_scale",
            "gain_unchanged_by_weight_scale",
            "bias_unchanged_by_input_scale",
            "bias_unchanged_by_weight_scale",
        ),
    ),
    "words-steps-halved": Untestable(
        "runs take a fixed number of steps, and none is said to have converged; the page shows the steps to "
        "a target loss"
    ),
    "words-prms-unstable": Untestable(
        "no record holds the spread of the estimate; runs whose pRMSNorm reads fewer than 16 entries are "
        "flagged"
    ),
    "words-cifar-ln-worse": Untestable("there is no image classification here"),
    "words-cifar-rms-better": Untestable("there is no image classification here"),
    "words-ar": Untestable("there is no attentive reader here"),
}
"""By id, for claims that no norm's time, quality or property is."""

_MODELS: Mapping[str, str] = {
    "t6": "there is no attentive reader here",
    "t7": "there is no image-caption retrieval here",
    "t8": "there is no image-caption retrieval here",
    "t10": "there is no image classification here",
    "t5": "no record holds statistics of a decoder's hidden-to-hidden products",
    "f4": "initial weights cannot be moved off centre here",
    "f1": "the paper does not say which framework it shows, and its ratio fits none of the tables",
}


def why_untestable(claim: Claim) -> str:
    """Say why nothing in this package tests a claim; empty if something does."""
    test = TESTS.get(claim.id)
    if isinstance(test, SumsUp):
        reasons = [why_untestable(ledger()[part]) for part in test.parts]
        return reasons[0] if all(reasons) else ""
    if test is not None:
        return test.reason if isinstance(test, Untestable) else ""
    known = _MODELS.get(claim.id.split("-")[0])
    if known:
        return known
    if claim.metric in (Metric.time, Metric.quality) and claim.norm == LAYERNORM:
        return "it is what the other norms are compared with; by itself it depends on hardware and data"
    return "" if claim.ours is not None else f"there is no {claim.norm} here"


def declarable(claim: Claim) -> str:
    """Say why a study cannot declare that it addresses a claim; empty if it can."""
    if untestable := why_untestable(claim):
        return f"it cannot be tested: {untestable}"
    if claim.metric is Metric.property or isinstance(TESTS.get(claim.id), GradientsOf):
        return "the norm's card judges it, from rmsrepro check-norm"
    if isinstance(TESTS.get(claim.id), SumsUp):
        return "it follows from the claims that it sums up"
    return ""


def counterpart(claim: Claim) -> Claim:
    """The claim whose figures stand for this one: itself, or the one that it says in words."""
    test = TESTS.get(claim.id)
    return ledger()[test.claim] if isinstance(test, SameAs) else claim
