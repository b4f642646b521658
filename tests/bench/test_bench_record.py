from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.bench.cells import Arm
from rmsrepro.bench.load import OtherLoad, load_flags, peak_rss_bytes
from rmsrepro.bench.record import ResultTables, samples_csv
from rmsrepro.bench.statistics import BlockSample
from rmsrepro.config.bench import BenchConfig

LAYERNORM = Arm("layernorm/composite", "layernorm", {}, "composite", is_baseline=True)
RMSNORM = Arm("rmsnorm/composite", "rmsnorm", {}, "composite")
FACTS = {"level": "step", "model": "gru", "mode": "step"}


def process(number: int, **given: Any) -> dict[str, Any]:
    return {
        "process": number,
        "failed": {},
        "flags": {},
        "first_call_s": {"layernorm/composite#1": 0.3, "rmsnorm/composite": 0.1 * (number + 1)},
        "other_load": 0.0,
        **given,
    }


def samples(times: dict[str, list[float]]) -> list[BlockSample]:
    """One round a process: arm -> seconds by process."""
    return [
        BlockSample(number, 0, position, arm, seconds, 2)
        for position, (arm, by_process) in enumerate(times.items())
        for number, seconds in enumerate(by_process)
    ]


QUIET = {"layernorm/composite#1": [1.0, 2.0, 4.0], "layernorm/composite#2": [1.0, 2.0, 4.0]}


def tables(
    times: dict[str, list[float]], *arms: Arm, processes: list[dict[str, Any]] | None = None, **settings: Any
) -> ResultTables:
    config = BenchConfig(processes=3, **settings)
    found = [process(number) for number in range(3)] if processes is None else processes
    return ResultTables([LAYERNORM, *arms], samples(times), found, config, FACTS)


def test_arms_that_are_no_norms_stand_against_those_that_they_name() -> None:
    outer = Arm("a+outer/composite", "a", {}, "composite", role="framework", against=[LAYERNORM.label])
    inner = Arm(
        "a+inner/composite", "a", {}, "composite", role="framework", against=[LAYERNORM.label, outer.label]
    )
    times = {**QUIET, outer.label: [1.5, 2.5, 4.5], inner.label: [1.75, 2.75, 4.75]}
    found = tables(times, outer, inner)
    assert found.comparisons() == []
    assert [(row["arm"], row["baseline"], row["difference_s"]) for row in found.extras()] == [
        (outer.label, LAYERNORM.label, pytest.approx(0.5)),
        (inner.label, LAYERNORM.label, pytest.approx(0.75)),
        (inner.label, outer.label, pytest.approx(0.25)),
    ]
    assert all(row["difference_ci"] == pytest.approx([row["difference_s"]] * 2) for row in found.extras())
    failed = [process(0, failed={outer.label: "it stopped"}), process(1), process(2)]
    assert [row["baseline"] for row in tables(times, outer, inner, processes=failed).extras()] == [
        LAYERNORM.label
    ]


def test_norms_of_different_backends_are_set_against_each_other_without_a_percentage() -> None:
    def twins(backend: str, scale: float) -> dict[str, list[float]]:
        return {f"layernorm/{backend}#{twin}": [scale, 2 * scale, 4 * scale] for twin in (1, 2)}

    arms = [
        Arm("layernorm/torch", "layernorm", {}, "torch", is_baseline=True),
        Arm("layernorm/fused", "layernorm", {}, "fused", is_baseline=True),
        Arm("rmsnorm/fused", "rmsnorm", {}, "fused"),
        Arm("rmsnorm/torch", "rmsnorm", {}, "torch"),
        Arm("none/fused", "none", {}, "fused"),
    ]
    times = twins("torch", 1.0) | twins("fused", 0.5)
    times |= {"rmsnorm/fused": [0.25, 0.5, 1.0], "rmsnorm/torch": [2.0, 4.0, 8.0]}
    found = ResultTables(
        arms,
        samples(times),
        [process(0, failed={"none/fused": "it stopped"}), process(1), process(2)],
        BenchConfig(processes=3),
        FACTS,
    ).across()
    assert [(row["arm"], row["baseline"], row["ratio"]) for row in found] == [
        ("layernorm/fused", "layernorm/torch", pytest.approx(0.5)),
        ("rmsnorm/fused", "layernorm/torch", pytest.approx(0.25)),
        ("rmsnorm/fused", "rmsnorm/torch", pytest.approx(0.125)),
    ]
    for row in found:
        assert row["ratio_ci"] == pytest.approx([row["ratio"]] * 2)
        assert row["trusted"]
        assert not any("pct" in key or "reduction" in key for key in row)


def test_a_comparison_has_the_keys_and_values_of_the_contract() -> None:
    (row,) = tables({**QUIET, "rmsnorm/composite": [0.9, 1.8, 3.6]}, RMSNORM).comparisons()
    assert row["arm"] == "rmsnorm/composite"
    assert row["baseline"] == "layernorm/composite"
    assert row["ratio"] == pytest.approx(0.9)
    assert row["ratio_ci"] == pytest.approx([0.9, 0.9])
    assert row["time_reduction_pct"] == pytest.approx(10)
    assert row["time_reduction_ci"] == pytest.approx([10, 10])
    assert (row["aa_ratio"], row["aa_ci"]) == (1.0, [1.0, 1.0])
    assert (row["n_rounds"], row["n_processes"]) == (3, 3)
    assert row["trusted"] is True
    assert row["flags"] == []
    assert {name: row[name] for name in FACTS} == FACTS


def test_the_twins_are_one_arm_with_the_time_of_their_geometric_mean() -> None:
    times = {"layernorm/composite#1": [1.0, 1.0, 1.0], "layernorm/composite#2": [4.0, 1.0, 16.0]}
    (row,) = tables(times).arms()
    assert row["arm"] == "layernorm/composite"
    assert row["median_s"] == pytest.approx(2.0)
    assert row["iqr_s"] == pytest.approx(3.0 - 1.5)
    assert row["rounds"] == 3
    assert row["first_call_s"] == pytest.approx(0.3)
    assert row["status"] == "measured"


def test_an_unavailable_arm_is_listed_and_never_compared() -> None:
    absent = Arm("prmsnorm/torch", "prmsnorm", {}, "torch", unavailable="torch has no prmsnorm")
    found = tables(QUIET, absent)
    row = found.arms()[1]
    assert (row["status"], row["reason"], row["median_s"], row["rounds"]) == (
        "unavailable", "torch has no prmsnorm", None, 0,
    )  # fmt: skip
    assert found.comparisons() == []


def test_an_arm_that_failed_in_one_process_is_shown_and_not_ranked() -> None:
    processes = [process(0), process(1, failed={"rmsnorm/composite": "the loss is nan"}), process(2)]
    found = tables({**QUIET, "rmsnorm/composite": [0.9, 1.8, 3.6]}, RMSNORM, processes=processes)
    row = found.arms()[1]
    assert (row["status"], row["reason"]) == ("failed", "process 2: the loss is nan")
    assert row["median_s"] == pytest.approx(1.8)
    assert found.comparisons() == []


def test_without_a_sound_baseline_nothing_is_compared() -> None:
    processes = [process(0, failed={"layernorm/composite": "broken"}), process(1), process(2)]
    found = tables({**QUIET, "rmsnorm/composite": [0.9, 1.8, 3.6]}, RMSNORM, processes=processes)
    assert found.comparisons() == []
    assert found.aa() == []


def test_twins_that_differ_take_the_trust_and_say_why() -> None:
    times = {
        "layernorm/composite#1": [1.0, 1.0, 1.0],
        "layernorm/composite#2": [1.1, 1.1, 1.1],
        "rmsnorm/composite": [1.0, 1.0, 1.0],
    }
    (row,) = tables(times, RMSNORM).comparisons()
    assert row["aa_ratio"] == pytest.approx(1.1)
    assert row["ratio"] == pytest.approx(1 / math.sqrt(1.1))
    assert row["trusted"] is False
    assert [flag.split(":")[0] for flag in row["flags"]] == ["A/A", "A/A"]


def test_other_load_takes_the_trust_and_unknown_load_is_flagged() -> None:
    processes = [process(0, other_load=0.8), process(1, other_load=0.02), process(2)]
    (row,) = tables(
        {**QUIET, "rmsnorm/composite": [0.9, 1.8, 3.6]}, RMSNORM, processes=processes
    ).comparisons()
    assert row["trusted"] is False
    (flag,) = row["flags"]
    assert flag.startswith("other load: in 1 of 3 processes other programs kept up to 0.80 cores busy")
    assert load_flags([process(0, other_load=None)], 0.15) == (
        True, ["other load: unknown, the system does not tell"],
    )  # fmt: skip


def test_with_unknown_load_the_trust_rests_on_the_twins() -> None:
    unknown = "other load: unknown, the system does not tell"
    processes = [process(number, other_load=None) for number in range(3)]
    times = {**QUIET, "rmsnorm/composite": [0.9, 1.8, 3.6]}
    found = tables(times, RMSNORM, processes=processes)
    assert [(row["trusted"], row["flags"]) for row in found.comparisons()] == [(True, [unknown])]
    assert [(row["trusted"], row["flags"]) for row in found.aa()] == [(True, [unknown])]

    wide = {**times, "layernorm/composite#2": [1.1, 2.0, 4.0 / 1.1]}
    found = tables(wide, RMSNORM, processes=processes)
    for row in (*found.comparisons(), *found.aa()):
        assert row["trusted"] is False
        assert row["flags"][0].startswith("A/A: the control is too wide to tell: [0.7892, 1.267]")
        assert row["flags"][1] == unknown


def test_one_loud_process_takes_the_trust_where_another_is_unknown() -> None:
    quiet, flags = load_flags([process(0, other_load=None), process(1, other_load=0.5)], 0.15)
    assert not quiet
    assert [flag.split(",")[0] for flag in flags] == [
        "other load: in 1 of 2 processes other programs kept up to 0.50 cores busy "
        "(bench.max_other_load=0.15)",
        "other load: unknown",
    ]


def test_differences_inside_the_noise_are_marked() -> None:
    (row,) = tables({**QUIET, "rmsnorm/composite": [0.95, 2.1, 4.0]}, RMSNORM).comparisons()
    assert "within the noise: the interval of the ratio contains 1" in row["flags"]
    assert any(flag.startswith("imprecise: the interval reaches") for flag in row["flags"])
    times = {
        "layernorm/composite#1": [1.0, 1.0, 1.0],
        "layernorm/composite#2": [1.01, 0.99, 1.015],
        "rmsnorm/composite": [0.995 * math.sqrt(second) for second in (1.01, 0.99, 1.015)],
    }
    (row,) = tables(times, RMSNORM).comparisons()
    assert row["flags"] == ["within the noise: two equal arms differ as much"]


def test_remarks_of_processes_are_gathered() -> None:
    processes = [
        process(number, flags={"rmsnorm/composite": ["odd"]} if number else {}) for number in range(3)
    ]
    found = tables({**QUIET, "rmsnorm/composite": [0.9, 1.8, 3.6]}, RMSNORM, processes=processes)
    assert found.comparisons()[0]["flags"] == ["odd (process 2, 3)"]


def test_samples_csv_is_in_long_form() -> None:
    text = samples_csv([BlockSample(1, 2, 0, "rmsnorm(p=1,q=2)/composite", 0.0123, 4, "80x1024/fwd/float32")])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows == [
        {
            "process": "1",
            "round": "2",
            "position": "0",
            "arm": "rmsnorm(p=1,q=2)/composite",
            "seconds_per_step": "0.0123",
            "steps_in_block": "4",
            "cell": "80x1024/fwd/float32",
        }
    ]


def test_load_of_others_is_what_we_did_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmsrepro.bench.load._own_busy_seconds", iter([1.0, 2.0]).__next__)
    monkeypatch.setattr("rmsrepro.bench.load.time.perf_counter", iter([0.0, 10.0]).__next__)
    monkeypatch.setattr("rmsrepro.bench.load.os.sysconf", lambda name: 100)
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 9999 9999 0 0 0 0 0\ncpu0 1 1\n")
    meter = OtherLoad(stat)
    # 6 s of work on the machine in 10 s, 1 s of it our own: half a core of others. Idle time is no work.
    stat.write_text("cpu  500 50 200 99999 99999 10 20 20 0 0\ncpu0 1 1\n")
    assert meter.stop() == pytest.approx(0.5)


@pytest.mark.parametrize("text", ["", "cpu", "cpu x y\n", "cpu 0 0 0 0 0 0 0 0\n"])
def test_load_that_cannot_be_read_is_unknown(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmsrepro.bench.load._own_busy_seconds", iter([1.0, 2.0]).__next__)
    stat = tmp_path / "stat"
    stat.write_text(text)
    assert OtherLoad(stat).stop() is None


def test_load_without_proc_is_unknown(tmp_path: Path) -> None:
    assert OtherLoad(tmp_path / "absent").stop() is None


def test_peak_memory_is_that_of_a_python_process() -> None:
    peak = peak_rss_bytes()
    assert peak is not None
    assert 1e7 < peak < 1e12


def test_the_share_of_a_norm_is_paired_with_none_in_its_own_rounds() -> None:
    """Stated anew: the mean over processes of log(t_none / t_norm), with Student's interval of three."""
    bare = Arm("none/composite", "none", {}, "composite")
    other = Arm("none/torch", "none", {}, "torch")
    none, rms = [0.5, 1.1, 1.9], [0.8, 1.5, 3.6]
    times = {**QUIET, RMSNORM.label: rms, bare.label: none, other.label: [0.1] * 3}
    rows = {row["arm"]: row for row in tables(times, RMSNORM, bare, other).comparisons()}
    logs = [math.log(a / b) for a, b in zip(none, rms, strict=True)]
    middle = sum(logs) / 3
    half = 4.302652729911275 * math.sqrt(sum((one - middle) ** 2 for one in logs) / 2) / math.sqrt(3)
    row = rows[RMSNORM.label]
    assert row["norm_share_pct"] == pytest.approx(100 * (1 - math.exp(middle)))
    assert row["norm_share_ci"] == pytest.approx(
        [100 * (1 - math.exp(middle + half)), 100 * (1 - math.exp(middle - half))]
    )
    assert rows[bare.label]["norm_share_pct"] is None
    (alone,) = tables({**QUIET, RMSNORM.label: rms}, RMSNORM).comparisons()
    assert (alone["norm_share_pct"], alone["norm_share_ci"]) == (None, None)
