from __future__ import annotations

import csv
import json
import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from rmsrepro.bench import BenchError, BenchResult, bench_key, find_reusable, run_bench
from rmsrepro.bench import measuring as measuring_module
from rmsrepro.bench import runner as runner_module
from rmsrepro.bench.processes import ProcessFailed
from rmsrepro.bench.runner import NothingToCompare
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.errors import UserError
from rmsrepro.config.resolve import resolve
from rmsrepro.config.schema import LMConfig, PydocConfig, TrainConfig, TrainerConfig, TransformerConfig

NORMS: list[dict[str, Any]] = [
    {"name": "rmsnorm", "params": {}, "backend": "composite"},
    {"name": "none", "params": {}, "backend": "composite"},
    {"name": "prmsnorm", "params": {}, "backend": "torch"},
]
CONFIG = BenchConfig(processes=2, rounds=4, warmup_s=0.02, block_s=0.001, num_batches=2, num_threads=1)


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches of tests that run side by side need not wait for each other: they judge no speed."""
    monkeypatch.setattr(runner_module, "machine_lock_path", lambda: tmp_path / "bench.lock")


def base(out_dir: Path) -> TrainConfig:
    return resolve(
        TrainConfig(
            norm={"name": "layernorm"},
            model=TransformerConfig(d_model=16, num_layers=1, num_heads=2, d_ff=32, dropout=0.0),
            task=LMConfig(),
            data=PydocConfig(max_len=16, batch_tokens=64),
            trainer=TrainerConfig(max_steps=10, accelerator="cpu"),
            out_dir=str(out_dir),
            study_name="smoke",
        )
    )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchResult, list[str]]:
    folder = tmp_path_factory.mktemp("bench")
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "machine_lock_path", lambda: folder / "bench.lock")
        result = run_bench(CONFIG, base=base(folder / "outputs"), norms=NORMS, on_progress=lines.append)
    return result, lines


def read_samples(path: Path) -> list[dict[str, str]]:
    with (path / "samples.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_files_hold_what_is_returned(bench: tuple[BenchResult, list[str]]) -> None:
    found, lines = bench
    assert sorted(path.name for path in found.path.iterdir()) == ["result.json", "samples.csv"]
    assert json.loads((found.path / "result.json").read_text()) == found.result
    assert found.result["bench_id"] == found.path.name
    assert [path.name for path in found.path.parent.iterdir()] == [found.path.name]
    assert lines[-1] == f"written: {found.path}"
    assert "process 2 of 2: round 4 of 4" in lines


def test_every_row_carries_the_facts_of_the_contract(bench: tuple[BenchResult, list[str]]) -> None:
    result = bench[0].result
    for row in [*result["arms"], *result["comparisons"]]:
        assert {
            name: row[name] for name in ("level", "model", "shape", "mode", "dtype", "device", "threads")
        } == {
            "level": "step",
            "model": "transformer",
            "shape": "4x16",
            "mode": "step",
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
        }
        assert (row["task"], row["data"], row["size"]) == ("lm", "pydoc", "tiny")
    assert result["study"] == "smoke"
    assert result["status"] == "completed"
    assert result["plan"]["cells"]["4x16/step/float32"]["rounds"] == 4


def test_arms_are_measured_or_say_why_not(bench: tuple[BenchResult, list[str]]) -> None:
    result = bench[0].result
    arms = {row["arm"]: row for row in result["arms"]}
    assert {name: row["status"] for name, row in arms.items()} == {
        "layernorm/composite": "measured",
        "rmsnorm/composite": "measured",
        "none/composite": "measured",
        "layernorm/torch": "measured",
        "prmsnorm/torch": "unavailable",
    }
    assert arms["prmsnorm/torch"]["reason"]
    assert any(flag.startswith("prmsnorm/torch: ") for flag in result["flags"])
    assert "layernorm/torch was added: it is the baseline" in result["notes"]
    for row in arms.values():
        if row["status"] == "measured":
            assert row["rounds"] == 8
            assert 0 < row["median_s"] < math.inf
            assert row["iqr_s"] >= 0
            assert row["first_call_s"] > 0


def test_samples_are_complete_and_paired(bench: tuple[BenchResult, list[str]]) -> None:
    rows = read_samples(bench[0].path)
    columns = ["process", "round", "position", "arm", "seconds_per_step", "steps_in_block", "cell"]
    assert list(rows[0]) == columns
    assert {row["cell"] for row in rows} == {"4x16/step/float32"}
    by_round = defaultdict(list)
    for row in rows:
        by_round[row["process"], row["round"]].append(row)
    assert sorted(by_round) == [(process, number) for process in "01" for number in "0123"]
    expected = {
        "layernorm/composite#1", "layernorm/composite#2", "rmsnorm/composite", "none/composite",
        "layernorm/torch#1", "layernorm/torch#2",
    }  # fmt: skip
    for own in by_round.values():
        assert {row["arm"] for row in own} == expected
        assert sorted(row["position"] for row in own) == list("012345")
    orders = {tuple(row["arm"] for row in own) for own in by_round.values()}
    assert len(orders) > 1


def recomputed(path: Path, arm: str) -> tuple[float, float, float]:
    """The ratio to layernorm/composite and its interval, from the file alone, worked out once more."""
    seconds: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in read_samples(path):
        seconds[row["process"]][row["round"]][row["arm"]] = float(row["seconds_per_step"])
    medians = [
        math.log(
            statistics.median(
                times[arm] / math.sqrt(times["layernorm/composite#1"] * times["layernorm/composite#2"])
                for times in rounds.values()
            )
        )
        if len(rounds) % 2
        # The median of an even number of ratios is taken between their logarithms.
        else statistics.median(
            math.log(times[arm] / math.sqrt(times["layernorm/composite#1"] * times["layernorm/composite#2"]))
            for times in rounds.values()
        )
        for rounds in seconds.values()
    ]
    low, high = stats.t.interval(
        0.95, len(medians) - 1, loc=statistics.fmean(medians), scale=stats.sem(medians)
    )
    return math.exp(statistics.fmean(medians)), math.exp(low), math.exp(high)


def test_the_ratio_is_that_of_the_samples(bench: tuple[BenchResult, list[str]]) -> None:
    found = bench[0]
    assert [row["arm"] for row in found.result["comparisons"]] == ["rmsnorm/composite", "none/composite"]
    for row in found.result["comparisons"]:
        ratio, low, high = recomputed(found.path, row["arm"])
        assert row["baseline"] == "layernorm/composite"
        assert row["ratio"] == pytest.approx(ratio, rel=1e-9)
        assert row["ratio_ci"] == pytest.approx([low, high], rel=1e-9)
        assert row["time_reduction_pct"] == pytest.approx(100 * (1 - ratio), abs=1e-7)
        assert row["time_reduction_ci"] == pytest.approx([100 * (1 - high), 100 * (1 - low)])
        assert row["time_reduction_ci"][0] <= row["time_reduction_pct"] <= row["time_reduction_ci"][1]
        assert (row["n_rounds"], row["n_processes"]) == (8, 2)
        assert row["aa_ci"][0] <= row["aa_ratio"] <= row["aa_ci"][1]
        assert isinstance(row["trusted"], bool)
    assert [row["arm"] for row in found.result["aa"]] == ["layernorm/composite", "layernorm/torch"]


CELL = "4x16/step/float32"


def test_processes_report_what_is_outside_the_clock(bench: tuple[BenchResult, list[str]]) -> None:
    result = bench[0].result
    assert [process["process"] for process in result["processes"]] == [0, 1]
    for process in [result["pilot"], *result["processes"]]:
        assert process["peak_rss_bytes"] > 1e7
        assert process["clock_resolution_s"] > 0
        assert process["threads"] == 1
        assert 0 < process["start_s"] < process["wall_s"]
        found = process["cells"][CELL]
        assert "samples" not in found
        assert found["warm_up"]["steps"] >= 2
        assert found["warm_up"]["seconds"].keys() == found["first_call_s"].keys()
        losses = found["first_loss"]
        assert losses["layernorm/composite#1"] == losses["layernorm/composite#2"]
        assert losses["layernorm/torch#1"] == pytest.approx(losses["layernorm/composite#1"], rel=1e-4)
        assert losses["none/composite"] != losses["layernorm/composite#1"]
    assert result["settings"]["keep_blocks"] is False


def test_the_memory_of_a_step_is_reported(bench: tuple[BenchResult, list[str]]) -> None:
    arms = {row["arm"]: row for row in bench[0].result["arms"]}
    assert 0 < arms["none/composite"]["peak_bytes"] < arms["layernorm/composite"]["peak_bytes"] < 1e9
    assert arms["prmsnorm/torch"]["peak_bytes"] is None


def test_a_timing_is_reused_only_when_the_same_is_asked_for(bench: tuple[BenchResult, list[str]]) -> None:
    found = bench[0]
    config = base(found.path.parent.parent)
    key = bench_key(CONFIG, config, NORMS)
    assert found.result["key"] == key
    assert find_reusable(config.out_dir, key) == found.path
    again = run_bench(
        BenchConfig(**{**vars(CONFIG), "reuse": True}),
        base=config,
        norms=NORMS,
        on_progress=lambda line: None,
    )
    assert again.reused
    assert again.path == found.path
    assert again.result == found.result


# ------------------------------------------------------- without measuring: stand-in processes


ARMS = {"layernorm/composite#1": 1.0, "layernorm/composite#2": 1.0, "rmsnorm/composite": 0.8}


def outcome(number: int, failed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a process found; the pilot for -1."""
    failed = failed or {}
    pilot = {"steps_in_block": dict.fromkeys(ARMS, 2), "lead_in": 1, "round_s": 1.0, "setup_s": 1.0}
    samples = [
        [number, 0, position, arm, seconds, 1, CELL]
        for position, (arm, seconds) in enumerate(ARMS.items())
        if not any(arm.startswith(label) for label in failed)
    ]
    return {
        "cells": {
            CELL: {
                "samples": [] if number < 0 else samples,
                "pilot": {**pilot, "noise": {}} if number < 0 else None,
                "unavailable": {},
                "failed": dict(failed),
                "flags": {},
                "first_call_s": dict.fromkeys(ARMS, 0.1),
                "other_load": 0.0,
                "peak_bytes": {},
            }
        },
        "start_s": 1.0,
        "wall_s": 3.0,
        "settings": {"governor": "performance", "frequency_mhz": [2000.0, 2000.0]},
        "threads": 1,
        "device": "cpu",
    }


Outcomes = list[dict[str, Any] | BaseException]


def bench_with(
    monkeypatch: pytest.MonkeyPatch,
    out_dir: Path,
    processes: Outcomes,
    pilots: Outcomes | None = None,
    norms: Sequence[str] = ("rmsnorm",),
) -> tuple[BenchResult, list[dict[str, Any]]]:
    specs: list[dict[str, Any]] = []
    pilots = [outcome(-1)] if pilots is None else list(pilots)

    def stand_in(spec: dict[str, Any], folder: Path, **others: Any) -> dict[str, Any]:
        specs.append(spec)
        found = pilots.pop(0) if spec["process"] < 0 else processes[spec["process"]]
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(measuring_module, "run_worker", stand_in)
    config = BenchConfig(processes=len(processes), num_batches=1, budget_s=1)
    arms = [{"name": name, "params": {}, "backend": "composite"} for name in norms]
    return run_bench(config, base=base(out_dir), norms=arms), specs


def test_the_pilot_decides_for_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, specs = bench_with(monkeypatch, tmp_path, [outcome(0), outcome(1), outcome(2)])
    assert [spec["process"] for spec in specs] == [-1, 0, 1, 2]
    assert specs[0]["plans"] is None
    plan = {CELL: {"rounds": 7, "steps_in_block": dict.fromkeys(ARMS, 2), "lead_in": 1}}
    assert [spec["plans"] for spec in specs[1:]] == [plan] * 3
    assert [spec["threads"] for spec in specs] == [None, 1, 1, 1]
    assert found.result["plan"]["processes"] == 3
    assert found.result["plan"]["cells"] == plan
    assert found.result["plan_reason"] == found.result["plan"]["reason"]


def test_the_pilot_is_tried_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, _ = bench_with(
        monkeypatch, tmp_path, [outcome(0), outcome(1)], [ProcessFailed("a hiccup"), outcome(-1)]
    )
    assert found.result["status"] == "completed"
    with pytest.raises(BenchError, match=r"the pilot, .*, gave no result\. a; b$"):
        bench_with(monkeypatch, tmp_path, [outcome(0)] * 2, [ProcessFailed("a"), ProcessFailed("b")])


def test_nothing_is_measured_where_no_arm_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pilot = outcome(-1, {"layernorm/composite": "wrong"})
    pilot["cells"][CELL]["pilot"] = None
    found, specs = bench_with(monkeypatch, tmp_path, [outcome(0), outcome(1)], [pilot], ["layernorm"])
    assert [spec["process"] for spec in specs] == [-1]
    assert found.result["status"] == "incomplete"
    assert [(row["status"], row["reason"]) for row in found.result["arms"]] == [("failed", "pilot: wrong")]


def test_an_arm_that_fails_in_the_pilot_is_not_ranked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pilot = outcome(-1, {"rmsnorm/composite": "off by 90 eps"})
    norms = ["rmsnorm", "prmsnorm"]
    found, _ = bench_with(monkeypatch, tmp_path, [outcome(0), outcome(1)], [pilot], norms)
    assert found.result["comparisons"] == []
    assert found.result["arms"][1]["reason"] == "pilot: off by 90 eps"
    assert "rmsnorm/composite: pilot: off by 90 eps" in found.result["flags"]


def test_the_rest_is_written_when_a_process_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, specs = bench_with(monkeypatch, tmp_path, [ProcessFailed("it fell over"), outcome(1), outcome(2)])
    (row,) = found.result["comparisons"]
    assert row["ratio"] == pytest.approx(0.8)
    assert row["n_processes"] == 2
    assert "process 1 failed: it fell over" in found.result["flags"]
    assert found.result["processes"][-1] == {"process": 0, "error": "it fell over"}
    assert len(specs) == 4


def test_fewer_than_two_results_are_an_error_that_names_the_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(BenchError, match=r"only 1 of 2 measuring processes .* process 2: it fell over"):
        bench_with(monkeypatch, tmp_path, [outcome(0), ProcessFailed("it fell over")])
    assert not (tmp_path / "bench").exists()


def test_a_bench_ends_after_the_pilot_when_only_baselines_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pilot = outcome(-1, {"rmsnorm/composite": "its first step failed: RuntimeError: no"})
    pilot["cells"][CELL]["pilot"] = None
    processes: Outcomes = [AssertionError("there was another process")] * 2
    with pytest.raises(
        BenchError, match=r"nothing is left .* pilot\. rmsnorm/composite: its first step failed"
    ):
        bench_with(monkeypatch, tmp_path, processes, [pilot])
    assert not (tmp_path / "bench").exists()


@pytest.mark.parametrize(
    ("norms", "reason"),
    [
        ([("batchnorm", "composite")], "tokens to come"),
        ([("batchnorm", "composite"), ("prmsnorm", "torch")], "torch has no function"),
    ],
)
def test_nothing_is_measured_where_only_baselines_could_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, norms: list[tuple[str, str]], reason: str
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("it measured")

    monkeypatch.setattr(runner_module, "measure", never)
    given = [{"name": name, "params": {}, "backend": backend} for name, backend in norms]
    with pytest.raises(NothingToCompare, match=reason):
        run_bench(CONFIG, base=base(tmp_path), norms=given)


def test_two_failures_at_the_start_end_the_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken: list[dict[str, Any] | BaseException] = [ProcessFailed(f"broken {number}") for number in range(8)]
    with pytest.raises(BenchError, match=r"only 0 of 8 .* process 1: broken 0; process 2: broken 1$"):
        bench_with(monkeypatch, tmp_path, broken)


def test_an_interrupt_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench_with(monkeypatch, tmp_path / "outputs", [outcome(0), KeyboardInterrupt()])
    assert not (tmp_path / "outputs" / "bench").exists()
    assert not (tmp_path / "bench.lock").exists()


def test_an_interrupt_while_writing_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(samples: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner_module, "samples_csv", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench_with(monkeypatch, tmp_path / "outputs", [outcome(0), outcome(1)])
    assert list((tmp_path / "outputs" / "bench").iterdir()) == []


def test_a_broken_baseline_is_shown_and_nothing_is_ranked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = {"layernorm/composite": "the loss of its first step is nan"}
    found, _ = bench_with(monkeypatch, tmp_path, [outcome(0, failed), outcome(1, failed)])
    assert found.result["status"] == "incomplete"
    assert found.result["comparisons"] == []
    assert found.result["arms"][0]["status"] == "failed"
    assert found.result["arms"][1]["median_s"] == pytest.approx(0.8)


def test_two_benches_of_the_same_second_do_not_share_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner_module.time, "time", lambda: 1.7e9)
    first, _ = bench_with(monkeypatch, tmp_path, [outcome(0), outcome(1)])
    second, _ = bench_with(monkeypatch, tmp_path, [outcome(0), outcome(1)])
    assert first.path.parent == second.path.parent
    assert first.path != second.path


def test_wrong_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"bench\.processes=1: "):
        run_bench(BenchConfig(processes=1), base=base(tmp_path), norms=NORMS)
    assert list(tmp_path.iterdir()) == []


def test_a_norm_whose_first_call_sleeps_is_measured_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleepy.py").write_text(
        textwrap.dedent(
            """
            import time
            import torch

            asleep = True

            class Sleepy(torch.nn.Module):
                def __init__(self, dim: int) -> None:
                    super().__init__()
                    self.weight = torch.nn.Parameter(torch.ones(dim))

                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    global asleep
                    if asleep:
                        asleep = False
                        time.sleep(1)
                    return x * self.weight
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    norms = [{"name": "sleepy:Sleepy", "params": {}, "backend": "composite"}]
    found = run_bench(CONFIG, base=base(tmp_path / "outputs"), norms=norms)
    (row,) = found.result["comparisons"]
    arm = found.result["arms"][1]
    assert arm["arm"] == "sleepy:Sleepy/composite"
    assert arm["first_call_s"] >= 1
    assert row["n_rounds"] == 8
