"""What a study declares about the paper's claims, and what it may not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rmsrepro.config.errors import UserError
from rmsrepro.config.study import ClaimTest, Relation
from rmsrepro.paper import bench_jobs, check_study, ledger, study_jobs
from rmsrepro.paper.declared import declared, still_declared
from rmsrepro.paper.study_files import BY_COST, built_in
from tests.paper.made import STUDY, TIMES, entry

GRU = "gru/translation"


def test_a_declaration_is_filled_from_study_and_claim() -> None:
    found = declared(STUDY)
    assert found["t3py-rmsnorm-time"].by == ClaimTest("gru/translation", "rmsnorm", "model", "composite")
    assert found["words-ln-slower-67"].by.norm == "none"
    assert found["words-prms-not-faster"].by == ClaimTest("", "", "model", "composite")
    with_l2 = replace(
        STUDY, norms=[*STUDY.norms, "l2norm"], claims=[entry("t2-*-time", cell="gru/translation")]
    )
    assert set(declared(with_l2)) == {  # LayerNorm's own time cannot be judged and is passed over
        "t2-baseline-time", "t2-l2-norm-time", "t2-rmsnorm-time", "t2-prmsnorm-time",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("claim", "by", "message"),
    [
        ("t2-rmsnrom-time", {"cell": GRU}, "no claim 't2-rmsnrom-time'; did you mean t2-rmsnorm-time"),
        ("t2-rmsnorm-time", {}, "by.cell is missing; it names the cell that tests t2-rmsnorm-time"),
        ("t2-rmsnorm-time", {"cell": "gru/translations"}, "by.cell is 'gru/translations', which the study"),
        ("t2-rmsnorm-time", {"cell": "gru/translations"}, "did you mean gru/translation"),
        ("t2-rmsnorm-time", {"cell": GRU, "norm": "rmsnrom"}, "names the norm 'rmsnrom', which the study"),
        ("t2-rmsnorm-time", {"cell": GRU, "norm": "rmsnrom"}, "did you mean rmsnorm"),
        ("t2-l2-norm-time", {"cell": GRU}, "is about L2-Norm, which the study does"),
        ("t2-rmsnorm-time", {"cell": GRU, "level": "step"}, "no timing of the study measures t2-"),
        ("t2-rmsnorm-time", {"cell": GRU, "level": "step"}, "by.level=step, by.cell=gru/translation, by"),
        ("t2-rmsnorm-time", {"cell": GRU, "backend": "torch"}, "by.backend=torch); add it to benches"),
        ("t2-rmsnorm-time", {"cell": GRU, "why": " "}, "why is empty; say in a sentence what"),
        ("t8-rmsnorm-time", {"cell": GRU}, "it cannot be tested: there is no image-caption"),
        ("t2-layernorm-time", {"cell": GRU}, "it cannot be tested: it is what the other"),
        ("t1-rmsnorm-*", {}, "cannot be declared; the norm's card judges it"),
        ("words-grad-w", {}, "cannot be declared; the norm's card judges it"),
        ("headline-rmsnorm", {}, "cannot be declared; it follows from the claims that it sums up"),
    ],
)  # fmt: skip
def test_a_declaration_that_the_study_cannot_keep_is_refused(
    claim: str, by: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_study(replace(STUDY, claims=[entry(claim, **by)]))
    assert str(caught.value).startswith("study 'mine': claims[0]: ")
    assert message in str(caught.value)


def test_a_claim_is_addressed_once_and_an_entry_names_one() -> None:
    again = entry("t2-rmsnorm-time", cell=GRU)
    with pytest.raises(UserError, match=r"claims\[1\]: t2-rmsnorm-time is addressed already"):
        check_study(replace(STUDY, claims=[TIMES, again]))
    with pytest.raises(UserError, match=r"claims\[0\]: claims is empty"):
        check_study(replace(STUDY, claims=[entry()]))


def test_a_quality_needs_a_margin_and_a_verdict() -> None:
    claims = [entry("t2-rmsnorm-test14", cell="gru/translation")]
    with pytest.raises(UserError, match="judged by val_loss, for which the study gives no verdict"):
        check_study(replace(STUDY, claims=claims, verdict=False))
    with pytest.raises(UserError, match="does not run in gru/translation"):
        check_study(replace(STUDY, claims=claims, norm_cells={"rmsnorm": ["transformer/translation"]}))


def test_what_a_command_line_leaves_of_the_claims() -> None:
    faithful = replace(STUDY, claims=[replace(TIMES, relation=Relation.faithful)])
    smaller = replace(STUDY, norms=["layernorm", "rmsnorm"], norm_variants={}, norm_overrides={}, claims=[])
    kept = still_declared(smaller, faithful, other_values=False)
    assert [one.claims for one in kept] == [["t2-rmsnorm-time"], ["t3th-rmsnorm-time"], ["t3py-rmsnorm-time"]]
    assert {one.relation for one in kept} == {Relation.faithful}
    changed = still_declared(smaller, faithful, other_values=True)
    assert {(one.relation, one.why) for one in changed} == {(Relation.proxy, "changed on the command line")}


# ------------------------------------------------------------------------------------ the built-in studies


@pytest.mark.parametrize("name", BY_COST)
def test_built_in_studies_keep_what_they_declare(name: str) -> None:
    study = built_in(name)
    assert declared(study).keys() <= set(ledger().ids)
    assert study_jobs(study)
    assert {job.level for job in bench_jobs(study)} <= {"layer", "model", "step"}


def test_no_built_in_study_but_paper_claims_to_be_faithful() -> None:
    for name in ("quick", "small"):
        assert {one.relation for one in declared(built_in(name)).values()} <= {Relation.proxy}
    paper = declared(built_in("paper"))
    assert {claim for claim, one in paper.items() if one.relation is Relation.faithful} >= {
        "t3py-rmsnorm-time",
        "t4-rmsnorm-test14",
    }
    # newstest2017 is not in the WMT14 set
    assert not any(claim.endswith("test17") for claim in paper)


@pytest.mark.parametrize(("name", "timed"), [("quick", False), ("small", True), ("paper", True)])
def test_fused_kernels_are_timed_beside_the_others_and_decide_no_claim(name: str, timed: bool) -> None:
    study = built_in(name)
    beside = [bench for bench in study.benches if len(bench.backends) > 1]
    assert beside
    assert [("fused" in bench.backends) for bench in beside] == [timed] * len(beside)
    assert all({"composite", "torch"} <= set(bench.backends) for bench in beside)
    assert {one.by.backend for one in declared(study).values() if one.by.backend} == {"composite"}
