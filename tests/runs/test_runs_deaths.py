"""A run that takes its process down again and again, where the sweep is that process (launcher=basic)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs.deaths import DEATHS, died_before, give_up
from rmsrepro.runs.files import read_json
from rmsrepro.runs.owners import owner_record

MakeConfig = Callable[..., TrainConfig]


@dataclass
class Job:
    config: TrainConfig
    run_id: str = "struck"
    group: str = "struck"
    status: str = "planned"
    error: str | None = None
    seconds: float = 0.0


@pytest.fixture
def job(make_config: MakeConfig) -> Job:
    return Job(make_config("gru", "lm", "norm=rmsnorm"))


RUNS = Path("outputs/runs")
PLACE = RUNS / "struck"


def strike(moment: float, step: int) -> None:
    """Leave what a killed process leaves."""
    PLACE.mkdir(parents=True, exist_ok=True)
    owner = {**owner_record(), "pid": 2**30, "start": "1", "updated": moment}
    (PLACE / "lock.json").write_text(json.dumps(owner))
    (PLACE / "running.json").write_text(json.dumps({**owner, "step": step}))


def checkpoint(moment: int) -> None:
    """Have a checkpoint that was written then."""
    file = PLACE / "checkpoints" / "last.ckpt"
    file.parent.mkdir(exist_ok=True)
    file.touch()
    os.utime(file, (moment, moment))


def test_the_third_death_at_one_place_is_a_failure(job: Job) -> None:
    for moment, step in enumerate((40, 38)):
        strike(moment, step)
        assert list(give_up(RUNS, [job])) == []
        assert (job.status, job.error) == ("planned", None)
    strike(3, 41)
    assert list(give_up(RUNS, [job])) == [job]
    assert job.status == "failed"
    assert str(job.error).startswith(
        "the process that trained it was killed 3 times in a row without reaching a further checkpoint (the "
        "last time at step 41), most likely for want of memory; lower data.batch_tokens"
    )
    record = read_json(PLACE / "result.json") or {}
    assert (record["status"], record["error"], record["steps"]) == ("failed", job.error, 41)
    assert not (PLACE / "lock.json").exists()
    assert not (PLACE / "running.json").exists()
    # The next command tries it once more, after the others, and one more death is enough.
    assert died_before(PLACE)
    again = Job(job.config)
    assert list(give_up(RUNS, [again])) == []
    strike(4, 40)
    assert list(give_up(RUNS, [again])) == [again]
    assert "killed 4 times" in str(again.error)


def test_one_death_that_is_seen_by_many_commands_counts_once(job: Job) -> None:
    strike(1, 40)
    for _ in range(5):
        assert list(give_up(RUNS, [job])) == []
    assert (read_json(PLACE / DEATHS) or {})["times"] == 1


def test_a_further_checkpoint_begins_the_count_anew(job: Job) -> None:
    given_up = []
    for moment, written in enumerate((1, 1, 2, 2, 2)):
        strike(moment, 10 * moment)
        checkpoint(written)
        given_up.append(bool(list(give_up(RUNS, [job]))))
    assert given_up == [False, False, False, False, True]
    assert "killed 3 times" in str(job.error)


def test_a_living_owner_is_no_death(job: Job) -> None:
    PLACE.mkdir(parents=True)
    (PLACE / "lock.json").write_text(json.dumps(owner_record()))
    assert list(give_up(RUNS, [job])) == []
    assert not died_before(PLACE)
