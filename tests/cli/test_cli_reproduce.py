"""A study from its runs to its page, by one command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rmsrepro.verbs import reporting
from rmsrepro.verbs.timing import PreparedBench
from tests.cli.running import Ran, records

Run = Callable[..., Ran]

STUDY = """\
name: tiny
title: A tiny study
norms: [layernorm, rmsnorm]
models: [gru]
tasks: [lm]
seeds: [1, 2]
verdict: false
overrides: [debug=fast, model.d_model=16, trainer.max_steps=2]
"""
BENCH = """\
bench:
  cells: [gru/lm]
  overrides: [bench.processes=2, bench.budget_s=2, bench.warmup_s=0.05, bench.rounds=5, bench.num_threads=1]
"""


@pytest.fixture
def study() -> None:
    Path("conf/study").mkdir(parents=True)
    Path("conf/study/tiny.yaml").write_text(STUDY)
    Path("conf/study/timed.yaml").write_text(STUDY.replace("name: tiny", "name: timed") + BENCH)


def page_of(ran: Ran) -> Path:
    [line] = [line for line in ran.out.splitlines() if line.startswith("page: ")]
    return Path(line.removeprefix("page: "))


@pytest.mark.usefixtures("study")
def test_a_study_without_timing(cli: Run) -> None:
    ran = cli("reproduce", "study=tiny")
    assert ran.code == 0, ran.err
    assert "== A tiny study: 1 cell, 2 seeds" in ran.out
    found = records()
    assert {(record["norm"], record["seed"]) for record in found.values()} == {
        ("layernorm", 1), ("layernorm", 2), ("rmsnorm", 1), ("rmsnorm", 2),
    }  # fmt: skip
    assert {record["study"] for record in found.values()} == {"tiny"}
    assert {record["backend_used"] for record in found.values()} == {"composite"}
    page = page_of(ran)
    assert page.is_absolute()
    text = page.read_text()
    assert "A tiny study" in text
    assert all(run_id in text for run_id in found)
    assert "rmsnorm" in ran.out
    again = cli("reproduce", "study=tiny")
    assert again.code == 0
    assert "4 runs: 4 done already, 0 to do" in again.out
    assert page_of(again).is_file()


@pytest.mark.usefixtures("study")
def test_a_study_in_another_folder_and_narrowed(cli: Run) -> None:
    ran = cli("reproduce", "study=tiny", "seed=3", "out_dir=my outputs")
    assert ran.code == 0, ran.err
    assert {record["seed"] for record in records("my outputs").values()} == {3}
    assert {record["study"] for record in records("my outputs").values()} == {"tiny_modified"}
    assert Path("my outputs").resolve() in page_of(ran).parents
    assert not Path("outputs").exists()


@pytest.mark.usefixtures("study")
def test_how_to_time_does_not_make_it_another_study(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[PreparedBench] = []
    monkeypatch.setattr(reporting, "run_prepared_bench", timed.append)
    ran = cli("reproduce", "study=timed", "bench.processes=3", "bench.budget_s=7")
    assert ran.code == 0, ran.err
    assert [(one.settings.processes, one.settings.budget_s) for one in timed] == [(3, 7.0)]
    assert [one.base.study_name for one in timed] == ["timed"]
    assert {record["study"] for record in records().values()} == {"timed"}
    assert page_of(ran).parent.name == "timed"
    again = cli("reproduce", "study=timed", "bench.processes=3", "norm=rmsnorm", "seed=1")
    assert "2 runs: 2 done already, 0 to do" in again.out
    assert page_of(again).parent.name == "timed_modified"
    assert timed[-1].base.study_name == "timed_modified"


CLAIMS = """\
benches:
  - {name: layers, level: layer, backends: [composite, torch], overrides: [bench.budget_s=3]}
  - {level: step, cells: [gru/lm], overrides: [bench.budget_s=2]}
claims:
  - {claims: [t3py-rmsnorm-time], by: {cell: gru/lm, level: step}, why: tiny}
"""


def timed_as(reduction: list[float]) -> Callable[[PreparedBench], None]:
    """A bench that measures nothing and writes the record of a step."""

    def write(prepared: PreparedBench) -> None:
        if prepared.settings.name != "step":
            return
        low, high = reduction
        row = {
            "level": "step", "mode": "step", "model": "gru", "task": "lm", "device": "cpu", "trusted": True,
            "arm": "rmsnorm/composite", "baseline": "layernorm/composite", "ratio": 1 - (low + high) / 200,
            "ratio_ci": [1 - high / 100, 1 - low / 100], "time_reduction_pct": (low + high) / 2,
            "time_reduction_ci": [low, high], "flags": [],
        }  # fmt: skip
        folder = Path("outputs/bench/made")
        folder.mkdir(parents=True, exist_ok=True)
        record = {"study": prepared.base.study_name, "arms": [], "comparisons": [row], "machine": {}}
        (folder / "result.json").write_text(json.dumps(record))

    return write


def test_a_study_ends_with_verdicts_on_the_claims_it_addresses(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("conf/study").mkdir(parents=True)
    Path("conf/study/tiny.yaml").write_text(STUDY + CLAIMS)
    monkeypatch.setattr(reporting, "run_prepared_bench", timed_as([5.0, 9.0]))
    ran = cli("reproduce", "study=tiny")
    assert ran.code == 0, ran.err
    assert "timing 1/2: layers" in ran.out
    assert "timing 2/2: step gru/lm" in ran.out
    said = "  t3py-rmsnorm-time           11.0 (sd 2.6)  7.0 [5.0, 9.0]      direction only\n"
    assert said in ran.out
    assert "217 claims of the paper: " in ran.out
    assert said in cli("report", "study=tiny").out
    monkeypatch.setattr(reporting, "run_prepared_bench", timed_as([-9.0, -5.0]))
    said = "  t3py-rmsnorm-time           11.0 (sd 2.6)  -7.0 [-9.0, -5.0]   not reproduced\n"
    assert said in cli("reproduce", "study=tiny").out
    assert "t3py-rmsnorm-time" not in cli("report").out


@pytest.mark.usefixtures("study")
def test_a_failed_run_of_a_study_is_exit_1_and_the_page_is_built(cli: Run) -> None:
    ran = cli("reproduce", "study=tiny", "data.batch_tokens=8")
    assert ran.code == 1
    assert "4 failed" in ran.out
    assert page_of(ran).is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("study")
def test_a_study_with_its_timing(program: Run) -> None:
    ran = program("reproduce", "study=timed")
    assert ran.code == 0, ran.out + ran.err
    assert "timing 1/1: step gru/lm" in ran.out
    assert len(list(Path("outputs/bench").iterdir())) == 1
    again = program("reproduce", "study=timed")
    assert again.code == 0
    assert "4 runs: 4 done already, 0 to do" in again.out
    assert "timing reused" in again.out + again.err
    assert len(list(Path("outputs/bench").iterdir())) == 1
