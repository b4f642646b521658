"""`sweep tune=true`: equal trials, the best again with fresh seeds, resumed, grown, refused."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.runs.interruption import Interrupted
from tests.cli.running import LM, Ran, records, tree

Run = Callable[..., Ran]
RUN = [
    *LM,
    "model=gru",
    "data=text_files",
    "data.train=short.txt",
    "trainer.max_steps=4",
    "backend=composite",
]
SHORT = ["sweep", "tune=true", *RUN]
TUNE = [*SHORT, "norm=layernorm,rmsnorm", "tuning.points=3", "tuning.final_seeds=[1,2]"]
BLOWS = """\
import torch
from torch import nn


class Blows(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return x * float("nan") if self.training and self.calls > 200 else x


class Fails(Blows):
    def forward(self, x):
        if self.training and self.calls > 50:
            raise RuntimeError("no more")
        return super().forward(x)
"""


@pytest.fixture(autouse=True)
def text() -> None:
    """A text that is read at once."""
    Path("short.txt").write_text("the cat sat on the mat and the dog ran\n" * 300)


def kept() -> dict[str, Any]:
    """The one record of a tuning."""
    (file,) = Path("outputs/tunings").glob("*.json")
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def points_of(found: dict[str, dict[str, Any]], norm: str, seed: int = 0) -> set[tuple[float, ...]]:
    optims = [
        record["config"]["optim"]
        for record in found.values()
        if (record["norm"], record["seed"]) == (norm, seed)
    ]
    return {(optim["lr"], optim["warmup_steps"], optim["weight_decay"]) for optim in optims}


def test_every_norm_has_the_same_trials_and_its_best_runs_again(cli: Run) -> None:
    ran = cli(*TUNE)
    assert ran.code == 0, ran.err
    assert "6 trials: 0 done already, 6 to do" in ran.out
    assert "then at most 4 final runs: each norm's best point with the seeds 1, 2" in ran.out
    assert "4 final runs: 0 done already, 4 to do" in ran.out
    found, record = records(), kept()
    assert len(found) == 10
    assert points_of(found, "layernorm") == points_of(found, "rmsnorm")
    assert len(points_of(found, "rmsnorm")) == 3
    for one in record["norms"]:
        losses = [found[run_id]["metrics"]["val_loss"] for run_id in one["trials"]]
        assert one["best"] == losses.index(min(losses))
        best = found[one["trials"][one["best"]]]["config"]["optim"]
        assert [found[run_id]["seed"] for run_id in one["finals"]] == [1, 2]
        assert all(found[run_id]["config"]["optim"] == best for run_id in one["finals"])
        assert all(found[run_id]["norm"] == one["norm"] for run_id in (*one["trials"], *one["finals"]))
        mean = sum(found[run_id]["metrics"]["val_loss"] for run_id in one["finals"]) / 2
        assert f"{min(losses):.4f}   {mean:.4f} (2)" in ran.out
    assert all(len(line.rstrip()) <= 80 for line in ran.out[ran.out.index("Tuning:") :].splitlines())
    status = cli("status").out
    assert "10 completed, 0 running, 0 failed, 0 left" in status
    # A trial is the run that `train` makes with the same values.
    point = record["points"][0]
    values = [f"optim.{key}={value}" for key, value in point.items()]
    same = cli("train", *RUN, *values, "seed=0", "norm=rmsnorm")
    assert "nothing to do" in same.out

    again = cli(*TUNE)
    assert again.code == 0
    assert "6 trials: 6 done already, 0 to do" in again.out
    assert "4 final runs: 4 done already, 0 to do" in again.out
    assert again.out[again.out.index("Tuning:") :] == ran.out[ran.out.index("Tuning:") :]
    assert records() == found

    more = cli(*TUNE, "tuning.points=5")
    assert more.code == 0
    assert "10 trials: 6 done already, 4 to do" in more.out
    grown = kept()
    assert grown["points"][:3] == record["points"]
    assert grown["tuning_id"] == record["tuning_id"]
    listed = cli(*TUNE, "tuning.points=6", "dry_run=true")
    assert listed.out.count("skip (completed)") == 10
    assert "then at most 4 final runs" in listed.out
    assert kept() == grown


def test_a_dry_run_lists_the_trials_and_touches_nothing(cli: Run) -> None:
    ran = cli("sweep", "tune=true", *LM, "norm=layernorm,rmsnorm", "model=gru,transformer", "dry_run=true")
    assert ran.code == 0
    assert "32 trials: 0 done already, 32 to do" in ran.out
    assert len(re.findall(r"^  run .* optim\.lr=\S+ optim\.warmup_steps=\d+ ", ran.out, re.M)) == 32
    assert "then at most 12 final runs" in ran.out
    assert tree() == {"short.txt"}


def test_a_fixed_value_is_not_tuned(cli: Run) -> None:
    ran = cli(*TUNE, "optim.lr=2e-3,4e-3", "optim.warmup_steps=2", "dry_run=true")
    assert ran.code == 0
    rows = [line for line in ran.out.splitlines() if line.startswith("  run ")]
    assert len(rows) == 12  # two cells
    assert all(re.search(r"optim\.lr=0\.00[24]\b", row) for row in rows)
    assert not any("warmup" in row for row in rows)
    assert len({re.findall(r"weight_decay=(\S+)", row)[0] for row in rows}) == 3


def test_parameters_of_a_norm_are_arms_of_one_cell(cli: Run) -> None:
    ran = cli(*SHORT, "norm=layernorm,prmsnorm", "norm.p=0.25,0.5", "tuning.points=2", "dry_run=true")
    assert ran.code == 0
    assert "6 trials: 0 done already" in ran.out
    assert "then at most 9 final runs" in ran.out


def test_an_interrupted_tuning_goes_on(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from rmsrepro.runs import sweep

    train, calls = sweep.train, []

    def interrupted(config: Any, **rest: Any) -> Any:
        calls.append(config)
        if len(calls) == 3:
            raise Interrupted(15)
        return train(config, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "train", interrupted)
        ran = cli(*TUNE)
    assert ran.code == 143
    assert ran.out.endswith("interrupted: 2 of 6 finished; the same command goes on\n")
    status = " ".join(cli("status").out.split())
    assert "2 completed" in status
    assert "4 of abandoned sweeps" in status
    assert "rmsrepro sweep tune=true" in status
    assert "2 completed" in cli("report").out
    ran = cli(*TUNE)
    assert ran.code == 0
    assert "6 trials: 2 done already, 4 to do" in ran.out
    assert "abandoned" not in cli("status").out


def test_an_interruption_between_the_stages_loses_nothing(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import rmsrepro.runs.sweep

    run_sweep, calls = rmsrepro.runs.sweep.run_sweep, []

    def interrupted(plan: Any, *rest: Any, **keywords: Any) -> Any:
        calls.append(plan)
        if len(calls) == 2:
            raise Interrupted(15)
        return run_sweep(plan, *rest, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(rmsrepro.runs.sweep, "run_sweep", interrupted)
        assert cli(*TUNE).code == 143
    assert len(records()) == 6
    page = cli("report").out
    assert "Tuning: gru / lm on text_files" in page
    # Every run that a sweep wanted has ended, and yet there is something left.
    told = cli("status").out
    name = kept()["tuning_id"]
    assert f"tuning {name}: not all its final runs are begun" in told
    assert f"given up by: rmsrepro status forget={name}" in told
    assert "did you mean" in cli("status", f"forget={name}x").error
    again = shlex.split(told.partition("goes on with: ")[2].partition(";")[0])
    ran = cli(*again[1:])
    assert ran.code == 0
    assert "6 trials: 6 done already, 0 to do" in ran.out
    assert "4 final runs: 0 done already, 4 to do" in ran.out
    assert "tuning" not in cli("status").out
    assert cli("report").code == 0
    with Path("outputs/reports/all/results.csv").open() as file:
        roles = [(row["role"], row["seed"]) for row in csv.DictReader(file)]
    trial, final = ("trial of a tuning", "0"), "final run of a tuning"
    assert sorted(roles) == sorted([*[trial] * 6, *[(final, "1"), (final, "2")] * 2])


@pytest.mark.parametrize("given", ["", "abandoned"])
def test_a_tuning_without_a_choice_is_named_and_given_up(
    cli: Run, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    with monkeypatch.context() as patch:

        def interrupted(*rest: Any) -> None:
            raise Interrupted(15)

        patch.setattr("rmsrepro.verbs.tuning._choose", interrupted)
        assert cli(*TUNE).code == 143
    name = kept()["tuning_id"]
    assert f"tuning {name}: its best points are not chosen" in cli("status").out
    forgot = cli("status", f"forget={given or name}").out
    assert forgot == f"forgot the tuning {name}; what its runs recorded stays\n"
    assert "tuning" not in cli("status").out
    assert cli("status", "forget=abandoned").out == "no sweep is abandoned\n"
    assert kept()["given_up"] is True
    assert cli("report").code == 0
    assert "given up" in Path("outputs/reports/all/index.html").read_text()
    assert cli(*TUNE).code == 0  # and taken up again after all
    assert len(records()) == 10
    assert kept()["given_up"] is False


def test_a_lost_trial_is_worst_and_a_lost_norm_is_named(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("blows.py").write_text(BLOWS)
    monkeypatch.syspath_prepend(os.getcwd())
    sys.modules.pop("blows", None)
    ran = cli(*SHORT, "trainer.max_steps=12", "norm=layernorm,blows:Blows", "tuning.points=2",
              "tuning.final_seeds=[1,2]")  # fmt: skip
    assert ran.code == 1
    assert "2 diverged" in ran.out
    assert "what diverged is finished: rerun=true trains it anew" in ran.out
    assert "runs these again" not in ran.out
    assert "norm=blows:Blows: no final runs: all 2 trials diverged or failed" in ran.out
    assert "Blows: 2 diverged of 2 trials" in ran.out
    assert sorted(record["seed"] for record in records().values()) == [0, 0, 0, 0, 1, 2]
    layernorm = next(one for one in kept()["norms"] if one["norm"] == "layernorm")
    # The best of LayerNorm diverges after all: the other point takes its place.
    file = Path("outputs/runs") / layernorm["trials"][layernorm["best"]] / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"status": "diverged"}))
    ran = cli(*SHORT, "trainer.max_steps=12", "norm=layernorm,blows:Blows", "tuning.points=2",
              "tuning.final_seeds=[1,2]")  # fmt: skip
    assert ran.code == 1
    assert "LayerNorm: 1 diverged of 2 trials" in ran.out
    chosen = next(one for one in kept()["norms"] if one["norm"] == "layernorm")
    assert chosen["best"] == 1 - layernorm["best"]
    assert {run["run_id"] for run in kept()["superseded"]} == set(layernorm["finals"])


def test_a_failed_trial_is_not_replaced_and_may_stop_it(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("blows.py").write_text(BLOWS)
    monkeypatch.syspath_prepend(os.getcwd())
    sys.modules.pop("blows", None)
    command = [*SHORT, "trainer.max_steps=12", "norm=blows:Fails,layernorm", "tuning.points=2",
               "tuning.final_seeds=[1]"]  # fmt: skip
    ran = cli(*command, "on_error=stop")
    assert ran.code == 1
    assert "on_error=stop: there are no final runs" in ran.out
    assert {record["seed"] for record in records().values()} == {0}
    ran = cli(*command)
    assert ran.code == 1
    assert "no more" in ran.out
    assert "norm=blows:Fails: no final runs: all 2 trials diverged or failed" in ran.out
    assert "Fails: 2 failed of 2 trials" in ran.out
    assert [record["norm"] for record in records().values() if record["seed"] == 1] == ["layernorm"]


def test_a_best_at_the_edge_is_said(cli: Run) -> None:
    # Of these two points the larger rate learns more in four steps, and it lies at the upper end.
    ran = cli(*SHORT, "norm=layernorm", "tuning.points=3", "tuning.final_seeds=[1]",
              "tuning.lr=[1e-9,1e-2]", "optim.warmup_steps=0", "optim.weight_decay=0.01")  # fmt: skip
    assert ran.code == 0
    (best,) = [one["best"] for one in kept()["norms"]]
    rate = kept()["points"][best]["lr"]
    assert rate == max(point["lr"] for point in kept()["points"])
    assert f"LayerNorm: the best learning rate {rate:g} lies at the edge" in " ".join(ran.out.split())


@pytest.mark.slow
def test_workers_give_the_same_runs(cli: Run) -> None:
    ran = cli(*TUNE, "n_jobs=2", "tuning.points=2", "tuning.final_seeds=[1]")
    assert ran.code == 0, ran.out
    assert len(records()) == 6
    again = cli(*TUNE, "tuning.points=2", "tuning.final_seeds=[1]")
    assert "4 trials: 4 done already, 0 to do" in again.out
    assert "2 final runs: 2 done already, 0 to do" in again.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tune=true seed=1", "seed=1: with tune=true, a tuning has tuning.seed"),
        ("tune=true study=quick", "study=quick: with tune=true, a study fixes what would be tuned"),
        ("tune=true ckpt=x", "with tune=true, every trial is trained from its beginning"),
        ("tune=true tuning.lr=[1e-2,1e-3]", "tuning.lr=[0.01,0.001]: the second number must be the larger"),
        ("tune=true tuning.warmup=[1,301]", "longer than the run (trainer.max_steps=300)"),
        ("tune=true tuning.warmup=[1,9] debug=fast", "longer than the run (trainer.max_steps=6)"),
        ("tune=true optim.lr=1e-3 tuning.lr=[1e-3,1e-2]",
         "optim.lr=1e-3 and tuning.lr=[1e-3,1e-2]: the first fixes the value, the second tunes it"),
        ("tune=true optim.lr=1e-3 optim.warmup_steps=3 optim.weight_decay=0", "nothing is left to tune"),
        ("tune=maybe", "tune=maybe: expected true or false"),
        ("tuning.points=4", "tuning.points=4: it takes effect with tune=true only"),
        ("tune=true norm=rmsnrm", "norm=rmsnrm: there is no such norm"),
        ("tune=true optim.lrr=3", "optim.lrr"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_starts(cli: Run, arguments: str, message: str) -> None:
    assert message in cli("sweep", *arguments.split()).error
    assert tree() == {"short.txt"}


@pytest.mark.parametrize("verb", ["train", "reproduce"])
def test_other_verbs_do_not_tune(cli: Run, verb: str) -> None:
    study = ["study=smoke"] if verb == "reproduce" else []
    assert "belongs to rmsrepro sweep" in cli(verb, "tune=true", *study).error
    assert "belongs to rmsrepro sweep" in cli(verb, "tuning.points=3", *study).error
