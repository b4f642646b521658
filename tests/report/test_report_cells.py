"""Which runs may be compared with which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.report.cells import Cell, build_cells
from rmsrepro.report.labels import differences
from rmsrepro.report.load import load_records

Made = Callable[..., Any]


def _cells(out_dir: Path, study: Any = None) -> list[Cell]:
    return build_cells(load_records(out_dir).runs, study)[0]


def test_norm_and_seed_alone_may_differ(tmp_path: Path, made: Made) -> None:
    made("arm", tmp_path, "layernorm", [1.0, 1.0])
    made("arm", tmp_path, "rmsnorm", [1.0, 1.0])
    (cell,) = _cells(tmp_path)
    assert [arm.label for arm in cell.arms] == ["LayerNorm", "RMSNorm"]
    assert cell.seeds == (1, 2)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"optim": {"lr": 0.1}}, "optim.lr=0.1"),
        ({"trainer": {"max_steps": 20}}, "trainer.max_steps=20"),
        ({"placement": "post"}, "placement=post"),
        ({"precision": "bf16-mixed"}, None),
    ],
)
def test_other_settings_make_another_cell(
    tmp_path: Path, made: Made, change: dict[str, Any], shown: str | None
) -> None:
    for norm in ("layernorm", "rmsnorm"):
        made("run", tmp_path, norm)
        result = {"placement": change.get("placement", "pre"), "precision": change.get("precision", "32")}
        made("run", tmp_path, norm, run_id=f"other-{norm}", config=change, **result)
    cells = _cells(tmp_path)
    assert [len(cell.arms) for cell in cells] == [2, 2]
    if shown:
        assert any(shown in cell.label for cell in cells)
    assert len({cell.label for cell in cells}) == 2


@pytest.mark.parametrize(
    "change",
    [{"out_dir": "/elsewhere"}, {"study_name": "x"}, {"tracker": {"name": "none"}}, {"experiment": "e"}],
)
def test_what_does_not_touch_the_result_makes_no_other_cell(
    tmp_path: Path, made: Made, change: dict[str, Any]
) -> None:
    made("run", tmp_path, "layernorm")
    made("run", tmp_path, "rmsnorm", config=change)
    assert len(_cells(tmp_path)) == 1


def test_a_setting_that_is_newer_than_a_record_does_not_part_it_from_others(
    tmp_path: Path, made: Made
) -> None:
    made("run", tmp_path, "layernorm")
    for qk_norm in (False, True):
        model = {"name": "gru", "size": "tiny", "d_model": 64, "qk_norm": qk_norm}
        made("run", tmp_path, "rmsnorm", config={"model": model}, run_id=f"newer-{qk_norm}")
    assert sorted(len(cell.arms) for cell in _cells(tmp_path)) == [1, 2]


def test_data_is_known_by_its_content_not_its_place(tmp_path: Path, made: Made) -> None:
    here = {"data": {"name": "multi30k", "path": "/here"}}
    there = {"data": {"name": "multi30k", "path": "/there"}}
    made("run", tmp_path, "layernorm", config=here)
    made("run", tmp_path, "rmsnorm", config=there)
    assert len(_cells(tmp_path)) == 1
    made("run", tmp_path, "prmsnorm", config=there, data_hash="another content")
    assert len(_cells(tmp_path)) == 2


@pytest.mark.parametrize("guests", [["none"], ["weightnorm"], ["none", "weightnorm"]])
def test_what_no_placement_concerns_joins_any(tmp_path: Path, made: Made, guests: list[str]) -> None:
    for guest in guests:
        made("run", tmp_path, guest, model="transformer", config={"placement": "pre"}, placement="pre")
    assert len(_cells(tmp_path)) == 1
    for placement in ("pre", "post"):
        for norm in ("layernorm", "rmsnorm"):
            settings = {"placement": placement}
            run_id = f"{placement}-{norm}"
            made(
                "run",
                tmp_path,
                norm,
                model="transformer",
                config=settings,
                placement=placement,
                run_id=run_id,
            )
    cells = _cells(tmp_path)
    shown = ["layernorm", "rmsnorm", *sorted(guests, reverse=True)]
    assert [[arm.norm for arm in cell.arms] for cell in cells] == [shown] * 2


def test_parameters_tell_arms_of_one_norm_apart(tmp_path: Path, made: Made) -> None:
    made("run", tmp_path, "layernorm")
    for p in (0.0625, 0.25):
        made("run", tmp_path, "prmsnorm", run_id=f"p{p}", config={"norm": {"name": "prmsnorm", "p": p}})
    (cell,) = _cells(tmp_path)
    assert [arm.label for arm in cell.arms] == ["LayerNorm", "pRMSNorm (p=0.0625)", "pRMSNorm (p=0.25)"]


def test_the_baseline_of_an_arm_has_its_parameters(tmp_path: Path, made: Made) -> None:
    for eps in (1e-5, 1e-6):
        for norm in ("layernorm", "rmsnorm"):
            made("run", tmp_path, norm, run_id=f"{norm}{eps}", config={"norm": {"name": norm, "eps": eps}})
    (cell,) = _cells(tmp_path)
    arms = [arm for arm in cell.arms if arm.norm == "rmsnorm"]
    assert [cell.baseline_of(arm).params["eps"] for arm in arms] == [arm.params["eps"] for arm in arms]  # type: ignore[union-attr]


def test_of_two_runs_of_a_seed_an_ended_one_counts(tmp_path: Path, made: Made) -> None:
    made("run", tmp_path, "layernorm", run_id="a", val_loss=1.0)
    made("run", tmp_path, "layernorm", run_id="b", status="failed")
    (cell,) = _cells(tmp_path)
    assert cell.arms[0].runs[1].run_id == "a"


def test_a_study_plans_its_cells_before_anything_ran(tmp_path: Path, made: Made) -> None:
    study = made("study", models=["gru", "transformer"], tasks=["lm", "translation"], learned={}, target={})
    cells = _cells(tmp_path, study)
    assert [cell.name for cell in cells] == [
        "gru/lm",
        "gru/translation",
        "transformer/lm",
        "transformer/translation",
    ]
    assert [arm.norm for arm in cells[0].arms] == ["layernorm", "rmsnorm", "prmsnorm"]
    assert all(arm.runs == {} for cell in cells for arm in cell.arms)


def test_a_study_takes_the_fuller_group_and_leaves_the_rest_outside(tmp_path: Path, made: Made) -> None:
    made("arm", tmp_path, "layernorm", [1.0, 1.0, 1.0])
    made("run", tmp_path, "layernorm", run_id="trial", steps=20, val_loss=9.0)
    made("run", tmp_path, "layernorm", seed=9)
    cells, outside = build_cells(load_records(tmp_path).runs, made("study"))
    assert sorted(cells[0].arms[0].runs) == [1, 2, 3]
    assert sorted(run.run_id for run in outside) == ["gru-lm-layernorm-s9", "trial"]


def test_settings_that_a_study_gives_one_norm_do_not_part_it_from_the_others(
    tmp_path: Path, made: Made
) -> None:
    made("run", tmp_path, "layernorm")
    made("run", tmp_path, "rmsnorm", config={"optim": {"lr": 0.01}})
    study = made("study", norm_overrides={"rmsnorm": ["optim.lr=0.01"]}, seeds=[1])
    (cell,) = _cells(tmp_path, study)
    assert [sorted(arm.runs) for arm in cell.arms] == [[1], [1], []]


def test_two_settings_of_one_norm_in_a_study_are_two_arms(tmp_path: Path, made: Made) -> None:
    made("arm", tmp_path, "layernorm", [2.0])
    for scale in (0.25, 1.0, 0.5):
        given = {"norm": {"name": "mine:Scaled"} | ({"scale": scale} if scale != 1 else {})}
        named = {"run_id": f"scaled-{scale}", "norm_params": {"scale": scale}}
        made("arm", tmp_path, "mine:Scaled", [1.0 + scale], config=given, **named)
    study = made(
        "study",
        norms=["layernorm", "mine:Scaled", "half", "quarter"],
        norm_files={"half": {"name": "mine:Scaled", "scale": 0.5}, "quarter": {"name": "mine:Scaled"}},
        norm_overrides={"quarter": ["norm.scale=.25"]},
        seeds=[1],
    )
    (cell,) = _cells(tmp_path, study)
    assert [(arm.norm, arm.label, arm.params.get("scale")) for arm in cell.arms] == [
        ("layernorm", "LayerNorm", None),
        ("mine:Scaled", "mine:Scaled", 1.0),
        ("mine:Scaled", "half", 0.5),
        ("mine:Scaled", "quarter", 0.25),
    ]
    assert [arm.runs[1].metrics["val_loss"] for arm in cell.arms[1:]] == [2.0, 1.5, 1.25]


def test_two_names_for_one_run_share_it(tmp_path: Path, made: Made) -> None:
    made("arm", tmp_path, "layernorm", [2.0])
    made("arm", tmp_path, "rmsnorm", [1.5])
    files = {"soft": {"name": "rmsnorm"}}
    study = made("study", norms=["layernorm", "rmsnorm", "soft"], norm_files=files, seeds=[1])
    (cell,) = _cells(tmp_path, study)
    assert [arm.runs[1].norm for arm in cell.arms] == ["layernorm", "rmsnorm", "rmsnorm"]


def _twice(made: Made) -> Any:
    return made(
        "study",
        norms=["layernorm", "prmsnorm", "prmsnorm_p50", "prmsnorm_p100"],
        norm_variants={
            "prmsnorm_p50": {"name": "prmsnorm", "p": 0.5},
            "prmsnorm_p100": {"name": "prmsnorm", "p": 1.0},
        },
        norm_cells={"prmsnorm_p100": []},
    )


@pytest.mark.parametrize("there", [(None, 0.5), (None,), (0.5,), ()])
def test_a_norm_that_is_there_twice_has_its_own_runs_or_none(
    tmp_path: Path, made: Made, there: tuple[float | None, ...]
) -> None:
    made("arm", tmp_path, "layernorm", [2.0, 2.1, 2.2])
    for p in there:
        norm = {"name": "prmsnorm"} | ({} if p is None else {"p": p})
        for seed in (1, 2, 3):
            made("run", tmp_path, "prmsnorm", seed=seed, run_id=f"p{p}-s{seed}", config={"norm": norm})
    (cell,) = _cells(tmp_path, _twice(made))
    assert [arm.label for arm in cell.arms] == ["LayerNorm", "pRMSNorm", "pRMSNorm (p=0.5)"]
    expected = {p: [f"p{p}-s{seed}" for seed in (1, 2, 3)] if p in there else [] for p in (None, 0.5)}
    assert [[run.run_id for run in arm.runs.values()] for arm in cell.arms[1:]] == list(expected.values())


def test_a_default_that_is_typed_out_makes_no_other_arm(tmp_path: Path, made: Made) -> None:
    for seed, given in enumerate(({}, {"eps": 1e-5}, {"eps": 1e-3}), start=1):
        made("run", tmp_path, "layernorm", seed=seed, config={"norm": {"name": "layernorm"} | given})
    (cell,) = _cells(tmp_path)
    assert [(arm.label, sorted(arm.runs)) for arm in cell.arms] == [
        ("LayerNorm (eps=0.001)", [3]),
        ("LayerNorm (eps=1e-05)", [1, 2]),
    ]


def test_settings_in_different_cells_are_told_apart(tmp_path: Path, made: Made) -> None:
    for model, center in (("gru", True), ("transformer", False)):
        given = {"name": "mine:Huber"} | ({} if center else {"center": False})
        recorded = {"center": center, "delta": 1.0}
        made("run", tmp_path, "mine:Huber", model=model, config={"norm": given}, norm_params=recorded)
        made("run", tmp_path, "layernorm", model=model)
    labels = [arm.label for cell in _cells(tmp_path) for arm in cell.arms]
    assert labels == ["LayerNorm", "mine:Huber (center=true)", "LayerNorm", "mine:Huber (center=false)"]


def test_cells_are_named_by_what_tells_them_apart(tmp_path: Path, made: Made) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"model": {"name": "gru", "size": "tiny", "d_model": 64, "qk_norm": True}},
        {"precision": "bf16-mixed"},
    ]
    for number, change in enumerate(changes):
        precision = change.get("precision", "32")
        content = f"0123456789abcdef{number}" * 2
        made(
            "run",
            tmp_path,
            run_id=f"r{number}",
            config=change,
            precision=precision,
            data_hash=f"{number}{content}",
            parent="p" if number else None,
        )
    names = {cell.label for cell in _cells(tmp_path)}
    assert names == {
        "gru / lm (model.qk_norm=not set, precision=32, continued=not set, data content=00123456)",
        "gru / lm (model.qk_norm=true, precision=32, continued=true, data content=10123456)",
        "gru / lm (model.qk_norm=not set, precision=bf16-mixed, continued=true, data content=20123456)",
    }


def test_a_name_never_hides_what_alone_tells_two_cells_apart() -> None:
    shared = {f"model.a{number}": number for number in range(9)}
    first, other = shared | {"x": 1}, dict.fromkeys(shared, -1) | {"x": 1}
    last = shared | {"x": 2, "same": 0}
    rivals = [first | {"same": 0}, other | {"same": 0}, last]
    words = [differences(one, rivals) for one in rivals]
    assert words[0] == "model.a0=0, model.a1=1, model.a2=2, model.a3=3, x=1 and 5 more"
    assert len(set(words)) == 3
    long = [{"sites": ["a" * 30, tail]} for tail in ("one", "two")]
    assert [differences(one, long)[-3:] for one in long] == ["one", "two"]
    assert differences(rivals[0], rivals[:1]) == ""
