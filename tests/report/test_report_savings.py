"""What paired timings say: places, what remains on other backends, the norm's share, pRMSNorm over p."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.report.layers import layer_times
from rmsrepro.report.load import load_records
from rmsrepro.report.parameters import Names, names_of
from rmsrepro.report.records import Records
from rmsrepro.report.savings import OverP, Place, over_p, places_of, remaining, remaining_text, shares
from rmsrepro.report.timing import newest, step_times

Made = Callable[..., Any]


def model_level(made: Made, norm: str, ratio: float, backend: str = "composite", **changes: Any) -> Any:
    facts = {"level": "model", "mode": "fwd_bwd", "task": "translation", "shape": "8x8->8"}
    ends = {"arm": f"{norm}/{backend}", "baseline": f"layernorm/{backend}"}
    return made("comparison", norm, ratio=ratio, **({"model": "gru"} | facts | ends | changes))


def arm(norm: str, backend: str = "composite", **changes: Any) -> dict[str, Any]:
    """A row of `arms`, as a bench writes it."""
    row = {
        "level": "model",
        "model": "gru",
        "task": "translation",
        "shape": "8x8->8",
        "mode": "fwd_bwd",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "arm": f"{norm}/{backend}",
        "role": "norm",
        "norm": norm,
        "norm_params": {},
        "backend": backend,
        "status": "measured",
        "median_s": 0.1,
    }
    return row | changes


def read(out_dir: Path) -> tuple[Records, list[Place], Names]:
    records = load_records(out_dir)
    times = newest(step_times(records.benches))
    return records, places_of(times), names_of((), [time.comparison for time in times])


def titles(places: list[Place]) -> list[str]:
    return [place.title for place in places]


# --------------------------------------------------------------------------------------------- places


def test_places_are_ordered_and_named(tmp_path: Path, made: Made) -> None:
    layer = {"level": "layer", "model": None, "task": None}
    shapes = [made("comparison", **layer, shape=shape, mode=mode) for shape in ("4096x512", "80x1024")
              for mode in ("fwd", "fwd_bwd")]  # fmt: skip
    made("bench", tmp_path, [*shapes, model_level(made, "rmsnorm", 0.9), made("comparison")])
    _, places, _ = read(tmp_path)
    assert titles(places) == [
        "training step: gru / lm",
        "forward and backward: gru / translation",
        "layer, forward and backward: 80x1024",
        "layer, forward and backward: 4096x512",
        "layer, forward: 80x1024",
        "layer, forward: 4096x512",
    ]
    assert [place.cell for place in places] == ["gru/lm", "gru/translation", "", "", "", ""]


def test_a_model_of_two_sizes_is_two_places(tmp_path: Path, made: Made) -> None:
    for name, width in (("narrow", 64), ("wide", 256)):
        config = {"model": {"name": "gru", "d_model": width}}
        made("bench", tmp_path, [model_level(made, "rmsnorm", 0.9)], name, config=config)
    _, places, _ = read(tmp_path)
    assert titles(places) == [
        "forward and backward: gru / translation (d_model=64)",
        "forward and backward: gru / translation (d_model=256)",
    ]


def test_a_percentage_is_formed_between_equal_backends_only(tmp_path: Path, made: Made) -> None:
    crossed = model_level(made, "rmsnorm", 0.5, "torch", baseline="layernorm/composite")
    made("bench", tmp_path, [crossed])
    _, places, _ = read(tmp_path)
    assert places == []


# --------------------------------------------------------------------------------------- what remains


def test_what_remains_on_other_backends(tmp_path: Path, made: Made) -> None:
    rows = [
        model_level(made, "rmsnorm", 0.83),
        model_level(made, "prmsnorm", 0.84),
        model_level(made, "rmsnorm", 1.32, "torch"),
        model_level(made, "none", 0.7),
    ]
    made("bench", tmp_path, rows)
    _, places, names = read(tmp_path)
    left = remaining(places, names)
    assert [(row.norm, list(row.by_backend)) for row in left] == [
        ("rmsnorm", ["composite", "torch"]),
        ("prmsnorm", ["composite"]),
    ]
    (sentence,) = remaining_text(left)
    assert sentence == (
        "forward and backward: gru / translation: RMSNorm takes 17.0 % less time [15.0, 19.0] written from "
        "primitive operations and 32.0 % more time [30.0, 34.0] with torch's own nn.LayerNorm and nn.RMSNorm."
    )


def test_an_interval_around_nothing_is_no_saving(tmp_path: Path, made: Made) -> None:
    rows = [
        model_level(made, "rmsnorm", 0.99),
        model_level(made, "rmsnorm", 1.32, "torch", trusted=False),
    ]
    made("bench", tmp_path, rows)
    _, places, names = read(tmp_path)
    (sentence,) = remaining_text(remaining(places, names))
    assert (
        "takes no time that can be told from LayerNorm's (1.0 % less, [-1.0, 3.0]) written from" in sentence
    )
    assert "32.0 % more time [30.0, 34.0] (not trusted) with torch's own" in sentence


def test_each_backend_is_told_in_its_own_words(tmp_path: Path, made: Made) -> None:
    ratios = {"fused": 0.96, "compiled": 0.9, "composite": 0.83, "other": 0.8}
    made("bench", tmp_path, [model_level(made, "rmsnorm", *one[::-1]) for one in ratios.items()])
    _, places, names = read(tmp_path)
    (row,) = remaining(places, names)
    assert list(row.by_backend) == ["composite", "compiled", "fused", "other"]
    (sentence,) = remaining_text([row])
    assert sentence.endswith(
        "RMSNorm takes 17.0 % less time [15.0, 19.0] written from primitive operations, "
        "10.0 % less time [8.0, 12.0] with both compiled by Inductor, "
        "4.0 % less time [2.0, 6.0] with both on this package's fused kernels "
        "and 20.0 % less time [18.0, 22.0] on other."
    )


def test_one_backend_leaves_no_question(tmp_path: Path, made: Made) -> None:
    made("bench", tmp_path, [model_level(made, "rmsnorm", 0.83)])
    _, places, names = read(tmp_path)
    assert remaining(places, names) == []


# ------------------------------------------------------------------------------------------ the share


def test_the_share_of_a_norm_is_what_taking_it_out_saves(tmp_path: Path, made: Made) -> None:
    rows = [
        model_level(made, "none", 0.705),
        model_level(made, "rmsnorm", 0.845, norm_share_pct=16.6, norm_share_ci=[15.0, 18.0]),
    ]
    made("bench", tmp_path, rows)
    _, places, names = read(tmp_path)
    own, other = shares(places, names)
    assert (own.label, own.share, own.low, own.high) == (
        "LayerNorm",
        *(pytest.approx(value) for value in (29.5, 27.5, 31.5)),
    )
    assert (other.label, other.share, other.low, other.high) == ("RMSNorm", 16.6, 15.0, 18.0)


def test_a_share_needs_both_in_one_bench(tmp_path: Path, made: Made) -> None:
    made("bench", tmp_path, [model_level(made, "none", 0.7)], "a")
    made("bench", tmp_path, [model_level(made, "rmsnorm", 0.8)], "b")
    _, places, names = read(tmp_path)
    assert [share.label for share in shares(places, names)] == ["LayerNorm"]


def test_a_share_that_the_bench_does_not_know_is_none(tmp_path: Path, made: Made) -> None:
    made("bench", tmp_path, [model_level(made, "none", 0.6), model_level(made, "rmsnorm", 0.8)])
    _, places, names = read(tmp_path)
    assert math.isnan(shares(places, names)[1].share)  # two ratios to a third do not make one


# --------------------------------------------------------------------------------------------- over p


def test_prmsnorm_over_p(tmp_path: Path, made: Made) -> None:
    half = {"arm": "prmsnorm(p=0.5)/composite"}
    rows = [
        model_level(made, "prmsnorm", 0.9, **half),
        model_level(made, "prmsnorm", 0.8),
        model_level(made, "rmsnorm", 0.95),
    ]
    arms = [arm("prmsnorm", arm="prmsnorm(p=0.5)/composite", norm_params={"p": 0.5}), arm("prmsnorm")]
    made("bench", tmp_path, rows, arms=arms)
    _, places, _ = read(tmp_path)
    (found,) = over_p(places)
    assert isinstance(found, OverP)
    assert [(p, time.comparison.ratio) for p, time in found.points] == [(0.0625, 0.8), (0.5, 0.9)]
    assert found.whole is not None
    assert found.whole.comparison.ratio == 0.95


def test_only_p_differs_along_a_line(tmp_path: Path, made: Made) -> None:
    other = {"arm": "prmsnorm(p=0.25,eps=0.1)/composite", "norm_params": {"p": 0.25, "eps": 0.1}}
    quarter = {"arm": "prmsnorm(p=0.25)/composite", "norm_params": {"p": 0.25}}
    rows = [
        model_level(made, "prmsnorm", 0.1, **other),
        model_level(made, "prmsnorm", 0.9, **quarter),
        model_level(made, "prmsnorm", 0.8),
        model_level(made, "rmsnorm", 0.2, arm="rmsnorm(eps=0.1)/composite", norm_params={"eps": 0.1}),
    ]
    made("bench", tmp_path, rows)
    _, places, _ = read(tmp_path)
    (found,) = over_p(places)
    assert [(p, time.comparison.ratio) for p, time in found.points] == [(0.0625, 0.8), (0.25, 0.9)]
    assert found.whole is None  # the RMSNorm there is another


def test_parameters_are_taken_from_the_row_or_from_the_name(tmp_path: Path, made: Made) -> None:
    rows = [
        model_level(made, "prmsnorm", 0.9, arm="prmsnorm(p=0.5)/composite"),
        model_level(made, "prmsnorm", 0.8, arm="prmsnorm(p=0.25)/composite", norm_params={"p": 0.25}),
    ]
    arms = [arm("prmsnorm", arm=row["arm"]) for row in rows]  # arms that state none
    made("bench", tmp_path, rows, arms=[{**one, "norm_params": None} for one in arms])
    (bench,) = load_records(tmp_path).benches
    assert [dict(one.params) for one in bench.comparisons] == [{"p": 0.5}, {"p": 0.25}]
    assert [dict(one.params) for one in bench.arms] == [{"p": 0.5}, {"p": 0.25}]


@pytest.mark.parametrize("shape", ["80\u00b2x1024", "\u0663x4", "x" * 50, "9" * 400])
def test_shapes_that_are_none_stop_no_report(tmp_path: Path, made: Made, shape: str) -> None:
    made("bench", tmp_path, [model_level(made, "rmsnorm", 0.9, shape=shape, level="layer")])
    _, places, _ = read(tmp_path)
    assert len(places) == 1


def test_a_reduction_that_is_no_number_follows_from_the_ratio(tmp_path: Path, made: Made) -> None:
    wild = {"time_reduction_pct": math.inf, "time_reduction_ci": [-math.inf, 3.0]}
    made("bench", tmp_path, [model_level(made, "rmsnorm", 0.9, **wild)])
    (row,) = load_records(tmp_path).benches[0].comparisons
    assert (row.reduction, row.reduction_low, row.reduction_high) == tuple(
        map(pytest.approx, (10.0, 8.0, 12.0))
    )


def test_one_p_is_no_line(tmp_path: Path, made: Made) -> None:
    made("bench", tmp_path, [model_level(made, "prmsnorm", 0.9), model_level(made, "rmsnorm", 0.9)])
    _, places, _ = read(tmp_path)
    assert over_p(places) == []


# --------------------------------------------------------------------------------------------- layers


def layer_bench(made: Made, out_dir: Path, name: str = "layers", **result: Any) -> Path:
    facts = {"level": "layer", "model": None, "task": None}
    comparisons, arms = [], []
    for shape, ratio in (("80x1024", 0.8), ("4096x512", 0.6)):
        place = facts | {"shape": shape}
        comparisons.append(model_level(made, "rmsnorm", ratio, **place))
        arms += [
            arm("layernorm", **place, gb_per_s=5.0, copy_share=0.4, peak_bytes=2**20),
            arm("rmsnorm", **place, gb_per_s=7.0, copy_share=0.6, peak_bytes=2**19),
            arm("", **place, arm="copy", role="copy", gb_per_s=12.0),
            arm("dyt", **place, status="failed", median_s=None, reason="it gave nan"),
        ]
    folder: Path = made("bench", out_dir, comparisons, name, arms=arms, **result)
    return folder


def test_layers_stand_by_shape_with_their_savings(tmp_path: Path, made: Made) -> None:
    layer_bench(made, tmp_path)
    records, _, names = read(tmp_path)
    found = layer_times(records.benches, step_times(records.benches))
    assert [(one.title.split(": ")[1], one.label(names)) for one in found] == [
        ("80x1024", "LayerNorm, composite"),
        ("80x1024", "RMSNorm, composite"),
        ("4096x512", "LayerNorm, composite"),
        ("4096x512", "RMSNorm, composite"),
    ]
    assert [one.saving.comparison.ratio if one.saving else None for one in found] == [None, 0.8, None, 0.6]
    assert [one.arm.copy_share for one in found[:2]] == [0.4, 0.6]


def test_an_arm_that_failed_at_one_shape_is_shown_there(tmp_path: Path, made: Made) -> None:
    facts = {"level": "layer", "model": None, "task": None}
    measured = model_level(made, "rmsnorm", 0.8, **facts, shape="80x1024")
    failed = arm("rmsnorm", **facts, shape="4096x512", status="failed", reason="it gave nan")
    made("bench", tmp_path, [measured], arms=[failed])
    (bench,) = load_records(tmp_path).benches
    assert [(one.shape, one.flags) for one in bench.comparisons] == [
        ("80x1024", ()),
        ("4096x512", ("it gave nan",)),
    ]


def test_a_baselines_time_is_that_of_its_own_cell(tmp_path: Path, made: Made) -> None:
    place = {"level": "layer", "model": None, "task": None}
    rows = [model_level(made, "rmsnorm", 0.8, **place, shape=shape) for shape in ("8x8", "16x8")]
    arms = [arm("layernorm", **place, shape=shape, median_s=s) for shape, s in (("8x8", 1.0), ("16x8", 2.0))]
    made("bench", tmp_path, rows, arms=arms)
    (bench,) = load_records(tmp_path).benches
    assert [one.baseline_s for one in bench.comparisons] == [1.0, 2.0]
