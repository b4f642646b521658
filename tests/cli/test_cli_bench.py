from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rmsrepro.cli import main
from rmsrepro.verbs import bench_text, timing


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("incomplete", 1)])
def test_a_bench_without_a_sound_baseline_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    arms = [{"arm": "layernorm/composite", "status": "failed", "reason": "the loss is nan"}]
    result = {"status": status, "comparisons": [], "arms": arms}
    prepared = SimpleNamespace(settings=SimpleNamespace(name="step"), norms=[])
    monkeypatch.setattr(timing, "prepare_bench", lambda overrides: prepared)
    monkeypatch.setattr(
        timing, "run_prepared_bench", lambda prepared: SimpleNamespace(path=Path("there"), result=result)
    )
    assert timing.bench([]) == code
    said = capsys.readouterr()
    assert "layernorm/composite: failed: the loss is nan" in said.out
    assert "records: there" in said.out
    assert ("incomplete: no baseline" in said.err) is (code == 1)


def test_a_bench_that_can_compare_nothing_says_so_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "norm=batchnorm", "model=gru"]) == 2
    said = capsys.readouterr()
    assert "nothing to compare" in said.err
    assert "batchnorm/composite: norm=batchnorm: its statistics would see the tokens to come" in said.err


def test_the_table_fits_80_columns_and_its_doubts_stand_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doubts = ["A/A: two equal arms differ by +9.9 %", "within the noise", "other load: unknown, it says"]
    row = {
        "ratio": 1.123,
        "time_reduction_pct": -12.3,
        "time_reduction_ci": [-110.4, 110.2],
        "trusted": False,
        "flags": doubts,
        "n_processes": 2,
        "n_rounds": 8,
    }
    names = ["examples.huber_like:HuberLikeNormOfMine/composite", "hubernorm/composite"]
    arm = {"level": "step", "device": "cpu", "threads": 1, "median_s": 0.0123}
    result = {
        "status": "completed",
        "comparisons": [row | {"arm": name} for name in names],
        "arms": [arm | {"arm": name} for name in names],
    }
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(
        timing,
        "prepare_bench",
        lambda overrides: SimpleNamespace(settings=SimpleNamespace(name="step"), norms=[]),
    )
    monkeypatch.setattr(
        timing, "run_prepared_bench", lambda prepared: SimpleNamespace(path=Path("there"), result=result)
    )
    assert timing.bench([]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "step: cpu, 1 thread, 2 processes, 8 rounds"
    assert lines[1].split() == ["arm", "time", "ratio", "time", "saved", "(95", "%)"]
    numbers = "12.3 ms  1.123  -12.3 % [-110.4, 110.2] ?"
    assert lines[2].split() == ["examples.huber_like:", *numbers.split()]
    assert lines[3] == "HuberLikeNormOfMine/composite"
    assert lines[4].split() == ["hubernorm/composite", *numbers.split()]
    assert lines[5:] == [
        "? 2 of 2 comparisons are not trusted: A/A (2)",
        "unknown, the system does not tell: other load",
        "records: there",
    ]
    assert max(map(len, lines)) <= 80


# ------------------------------------------------------------------------------------ bench=layer

QUICK = (
    "bench=layer", "bench.shapes=[8x16]", "bench.modes=[fwd,fwd_bwd]", "bench.processes=2", "bench.rounds=2",
    "bench.warmup_s=0", "bench.block_s=1e-4", "bench.num_threads=1", "trainer=cpu",
)  # fmt: skip


def test_a_layer_bench_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rmsrepro.bench.runner.machine_lock_path", lambda: tmp_path / "lock")
    monkeypatch.setenv("COLUMNS", "80")
    code = main(
        ["bench", "norm=layernorm,rmsnorm,prmsnorm", "backend=composite,torch", "model=gru", *QUICK,
         f"out_dir={tmp_path}"]
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "bench=layer times norms by themselves; not looked at: model" in said.err
    lines = said.out.splitlines()
    heads = [line for line in lines if line.startswith("layer ")]
    assert heads == [
        f"layer 8x16 {mode} float32: cpu, 1 thread, 2 processes, 4 rounds" for mode in ("fwd", "fwd_bwd")
    ]
    tables = lines[: next(place for place, line in enumerate(lines) if line.startswith("prmsnorm/torch: "))]
    assert max(len(line.rstrip()) for line in tables) <= 80
    assert sum(line.startswith("copy/memory ") for line in tables) == 2
    # An arm that two cells lack is told once.
    assert [line for line in lines if line.startswith("prmsnorm/torch: unavailable: ")] == [
        line for line in lines if "torch has no function for it" in line
    ]
    (record,) = (tmp_path / "bench").glob("*/result.json")
    assert {row["level"] for row in json.loads(record.read_text())["comparisons"]} == {"layer"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bench.shapes=[80]", "bench.shapes: '80' is no shape"),
        ("bench.shapes=80x1024", "bench.shapes: expected a list"),
        ("bench.modes=[forward]", "bench.modes: 'forward'"),
        ("bench.dtypes=[float]", "bench.dtypes: 'float'"),
        ("bench.shape=[8x8]", "did you mean bench.shapes"),
    ],
)
def test_cells_that_cannot_be_timed_exit_with_2(
    override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "bench=layer", override, f"out_dir={tmp_path}"]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_trusted_and_not_known_is_said_once() -> None:
    row = {
        "trusted": False,
        "flags": ["A/A: too wide", "A/A: off", "other load: 1 core", "governor: unknown, x"],
    }
    fine = {"trusted": True, "flags": ["governor: unknown, x"]}
    assert bench_text.remarks({"comparisons": [row, row, fine], "arms": [], "notes": ["a note"]}) == [
        "? 2 of 3 comparisons are not trusted: A/A (2), other load (2)",
        "unknown, the system does not tell: governor",
        "a note",
    ]


def test_an_arm_that_one_cell_lacks_is_told_with_the_cell() -> None:
    arms = [
        {"arm": "x/torch", "cell": cell, "status": status, "reason": "off by 9 eps"}
        for cell, status in (("a", "measured"), ("b", "failed"), ("c", "measured"))
    ]
    assert bench_text.remarks({"comparisons": [], "arms": arms}) == ["x/torch: failed: off by 9 eps (b)"]


@pytest.mark.parametrize(
    ("given", "kernels", "told"),
    [
        (["norm=layernorm,rmsnorm"], "no_fused_kernels", "torch's own functions"),
        (["norm=layernorm,rmsnorm"], "fused_kernels", "this package's fused kernels"),
        (["norm=layernorm,prmsnorm"], "fused_kernels", "backend=composite,fused times both"),
        # Training takes composite for these as well.
        (["norm=layernorm,prmsnorm"], "no_fused_kernels", None),
        (["norm=layernorm,rmsnorm,dyt"], "fused_kernels", None),
        (["norm=layernorm,rmsnorm", "backend=composite"], "fused_kernels", None),
    ],
)
def test_a_backend_that_nobody_named_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    given: list[str],
    kernels: str,
    told: str | None,
) -> None:
    request.getfixturevalue(kernels)
    result = {"status": "completed", "comparisons": [], "arms": []}
    monkeypatch.setattr(
        timing, "run_prepared_bench", lambda prepared: SimpleNamespace(path=Path("there"), result=result)
    )
    assert main(["bench", "bench=layer", *given]) == 0
    said = capsys.readouterr().err
    assert ("backend=composite, since none was named" in said) is (told is not None)
    assert told is None or told in said
