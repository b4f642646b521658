"""The ledger of the paper's claims: complete, and consistent with itself."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from rmsrepro.norms import list_norms
from rmsrepro.paper import HEADLINE, Metric, ledger
from rmsrepro.paper.claims import OURS, Ledger

FACTS = Path(__file__).resolve().parents[3] / "shared" / "paper" / "paper_claims.yaml"
SPLIT = {"headline-rmsnorm", "headline-prmsnorm"}
"""The headline for each norm alone: ours, formed from the paper's percentages."""


@pytest.fixture(scope="module")
def facts() -> dict[str, dict[str, Any]]:
    """The paper's numbers as they were gathered beside this repository."""
    if not FACTS.is_file():
        pytest.skip("the gathered facts (../shared/paper/paper_claims.yaml) are not beside this checkout")
    return {entry["id"]: entry for entry in yaml.safe_load(FACTS.read_text(encoding="utf-8"))}


def test_the_ledger_has_every_kind_of_claim() -> None:
    assert Counter(claim.metric for claim in ledger()) == {
        Metric.quality: 105,
        Metric.time: 38,
        Metric.statistic: 30,
        Metric.property: 30,
        Metric.statement: 14,
    }
    assert len(ledger()) == len(set(ledger().ids)) == 217


def test_every_gathered_fact_is_in_the_ledger_with_its_values(facts: dict[str, dict[str, Any]]) -> None:
    assert set(ledger().ids) - set(facts) == SPLIT
    assert set(facts) <= set(ledger().ids)
    names = {
        "table": "table", "task": "task", "framework": "framework", "model": "model", "norm": "norm",
        "metric_name": "name", "value": "value", "std": "spread", "better": "better", "hardware": "hardware",
        "baseline_norm": "baseline", "reduction_percent": "reduction_pct", "verified": "verified",
    }  # fmt: skip
    for claim_id, fact in facts.items():
        claim = ledger()[claim_id]
        assert claim.metric.value == fact["metric"], claim_id
        for theirs, ours in names.items():
            expected, value = blank(fact.get(theirs)), blank(getattr(claim, ours))
            if claim.metric is Metric.statement and theirs in ("task", "value"):
                continue  # in words of our own; the numbers are compared below
            if claim_id == "headline-7-64" and theirs == "reduction_percent":
                expected = ""  # told by the two tables that it names
            assert value == expected, (claim_id, theirs)
        percent = fact.get("p_percent")
        assert claim.p == (None if percent is None else percent / 100), claim_id
        unit = blank(fact["unit"])
        if unit == "% (R@K) or rank (Mean r)":
            unit = "rank" if "Mean r" in claim.name else "%"
        assert claim.unit == unit, claim_id


def test_statements_in_words_keep_the_numbers_of_the_facts(facts: dict[str, dict[str, Any]]) -> None:
    for claim in ledger():
        if claim.metric is Metric.statement:
            assert numbers(claim.value) == numbers(facts[claim.id]["value"]), claim.id


def test_the_headline_is_that_of_the_tables(facts: dict[str, dict[str, Any]]) -> None:
    low, high = re.findall(r"\d+\.\d", facts["headline-7-64"]["reduction_percent"])
    assert ledger()["t4-rmsnorm-time"].reduction_pct == float(low)
    assert ledger()["t8-prmsnorm-time"].reduction_pct == float(high)


def blank(value: Any) -> Any:
    return "" if value in (None, "-") else value


def numbers(text: Any) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?", str(text)))


# ------------------------------------------------------------------- what holds without the facts


PRINTED = [claim.id for claim in ledger() if claim.reduction_pct is not None]


@pytest.mark.parametrize("claim_id", PRINTED)
def test_each_printed_percentage_follows_from_the_printed_times(claim_id: str) -> None:
    claim = ledger()[claim_id]
    other = ledger().layernorm_of(claim)
    assert other is not None
    assert isinstance(claim.value, float)
    assert isinstance(other.value, float)
    assert claim.reduction_pct == pytest.approx(100 * (1 - claim.value / other.value), abs=0.05)
    assert f"{100 * (1 - claim.value / other.value):.1f}" == f"{claim.reduction_pct:.1f}"
    assert claim.baseline == "LayerNorm"


def test_fourteen_percentages_are_printed() -> None:
    assert Counter(ledger()[claim_id].norm for claim_id in PRINTED) == {"RMSNorm": 7, "pRMSNorm": 7}


@pytest.mark.parametrize(
    ("claim_id", "pct", "sd"),
    [
        ("t2-rmsnorm-time", 24.7, 4.1),
        ("t3th-rmsnorm-time", 34.0, 2.4),
        ("t3py-rmsnorm-time", 11.0, 2.6),
        ("t4-rmsnorm-time", 6.9, 0.5),
        ("t6-rmsnorm-time", 15.1, 1.8),
        ("t8-rmsnorm-time", 40.8, 2.0),
        ("t10-rmsnorm-time", 20.5, 1.5),
    ],
)
def test_spreads_are_propagated_to_first_order(claim_id: str, pct: float, sd: float) -> None:
    reduction = ledger().reduction(ledger()[claim_id])
    assert reduction is not None
    assert reduction.printed
    assert reduction.pct == pct
    assert round(reduction.sd, 1) == sd
    assert reduction.band == pytest.approx((pct - 2 * reduction.sd, pct + 2 * reduction.sd))


def test_where_prmsnorm_differs_from_rmsnorm() -> None:
    """In the Transformer and the order-embedding by more than two standard deviations, and nowhere else."""
    apart = {}
    for table in ("t2", "t3th", "t3py", "t4", "t6", "t8", "t10"):
        rms, partial = (ledger()[f"{table}-{norm}-time"] for norm in ("rmsnorm", "prmsnorm"))
        assert isinstance(rms.value, float)
        assert isinstance(partial.value, float)
        apart[table] = (rms.value - partial.value) / math.hypot(rms.spread or 0, partial.spread or 0)
    assert {table for table, sds in apart.items() if sds > 2} == {"t4", "t8"}
    assert (round(apart["t4"], 1), round(apart["t8"], 1)) == (3.7, 10.4)


def test_a_reduction_that_is_not_printed_is_formed_from_the_times() -> None:
    reduction = ledger().reduction(ledger()["t2-l2-norm-time"])
    assert reduction is not None
    assert not reduction.printed
    assert round(reduction.pct, 1) == 27.5
    slope = ledger().reduction(ledger()["f1-baseline-time"])
    assert slope is not None
    assert math.isnan(slope.sd)
    assert slope.band == (slope.pct, slope.pct)
    assert ledger().reduction(ledger()["t2-layernorm-time"]) is None
    assert ledger().reduction(ledger()["t2-rmsnorm-test14"]) is None


def test_the_headline_is_split_by_norm() -> None:
    for norm, (low, high) in HEADLINE.by_norm.items():
        assert ledger()[f"headline-{norm}"].value == f"{low:g}~{high:g}"
    assert ledger()["headline-rmsnorm"].value == "6.9~40.8"
    assert ledger()["headline-prmsnorm"].value == "9.3~63.9"


def test_figures_are_compared_with_layernorms_of_the_same_table() -> None:
    pairs = {
        "t3py-rmsnorm-test17": "t3py-layernorm-test17",
        "t3th-prmsnorm-time": "t3th-layernorm-time",
        "a1-weightnorm-test14": "t3th-layernorm-test14",  # told in the text, of the models of Table 3
        "t1-rmsnorm-dataset-re-scaling": "t1-layernorm-dataset-re-scaling",
    }
    assert {claim_id: (ledger().layernorm_of(ledger()[claim_id]) or claim_id) for claim_id in pairs} == {
        claim_id: ledger()[other] for claim_id, other in pairs.items()
    }
    assert ledger().layernorm_of(ledger()["t2-layernorm-time"]) is None
    assert ledger().layernorm_of(ledger()["t7-prior-sym[32]-cap-r1"]) is None


def test_ids_are_matched_by_stars_alone() -> None:
    assert [claim.id for claim in ledger().matching("t3*-rmsnorm-test17")] == [
        "t3th-rmsnorm-test17",
        "t3py-rmsnorm-test17",
    ]
    assert [claim.id for claim in ledger().matching("t7-prior-sym[32]-cap-r1")] == ["t7-prior-sym[32]-cap-r1"]
    assert ledger().matching("t2-rmsnorm") == []


def test_the_norms_of_the_paper_are_norms_of_the_package() -> None:
    assert set(OURS.values()) <= set(list_norms())
    assert ledger()["t6-batchnorm-lstm-time"].ours is None


def test_two_claims_of_one_id_are_refused() -> None:
    claim = ledger()["t2-rmsnorm-time"]
    with pytest.raises(ValueError, match="two claims have one id"):
        Ledger([claim, claim])
