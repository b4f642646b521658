"""A study that addresses claims, for tests."""

from __future__ import annotations

from rmsrepro.config.study import ClaimTest, Relation, StudyBench, StudyClaims, StudyConfig


def entry(
    *claims: str, relation: Relation = Relation.proxy, why: str = "tiny models", **by: str
) -> StudyClaims:
    return StudyClaims(list(claims), relation, ClaimTest(**by), why)


TIMES = entry("t2-rmsnorm-time", "t2-prmsnorm-time", "t3*-rmsnorm-time", "words-ln-slower-67",
              cell="gru/translation")  # fmt: skip
STUDY = StudyConfig(
    name="mine",
    norms=["none", "layernorm", "rmsnorm", "prmsnorm", "prmsnorm_p50"],
    norm_variants={"prmsnorm_p50": {"name": "prmsnorm", "p": 0.5}},
    models=["gru", "transformer"],
    tasks=["translation"],
    seeds=[1, 2, 3],
    margin={"val_loss": 0.05},
    norm_overrides={"prmsnorm": ["norm.p=0.25"]},
    benches=[
        StudyBench(level="model", cells=["gru/translation", "transformer/translation"]),
        StudyBench(level="layer", norms=["layernorm", "rmsnorm"], backends=["composite", "torch"]),
    ],
    claims=[
        TIMES,
        entry("t4-rmsnorm-time", "t4-prmsnorm-time", cell="transformer/translation"),
        entry("words-prms-not-faster"),
        entry("t2-rmsnorm-test*", cell="gru/translation"),
        entry("t2-baseline-test14", cell="gru/translation"),
        entry("words-transformer-needs-norm", "t4-baseline-test14", cell="transformer/translation"),
        entry("f3-p-insensitive", cell="gru/translation"),
    ],
)  # fmt: skip
