"""Many runs by one command: planned, run, skipped, failed, listed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rmsrepro.cli import main
from tests.cli.running import LM, Ran, command, environment, records, tree

Run = Callable[..., Ran]
SHORT = [*LM, "trainer.max_steps=2"]


def planned(ran: Ran) -> dict[str, str]:
    """Run id -> state, as dry_run lists them."""
    rows = [line for line in ran.out.splitlines() if line.startswith("  ") and not line.startswith("   ")]
    return {line[18:].split()[0]: line[:18].strip() for line in rows}


def notes(ran: Ran) -> list[str]:
    return [line.removeprefix("note: ") for line in ran.out.splitlines() if line.startswith("note: ")]


def test_a_dry_run_lists_the_jobs_and_touches_nothing(cli: Run) -> None:
    ran = cli("sweep", *SHORT, "norm=layernorm,rmsnorm", "model=gru,transformer", "seed=1,2", "dry_run=true")
    assert ran.code == 0
    jobs = planned(ran)
    assert [name.rsplit("-", 1)[0] for name in jobs] == [
        f"lm-pydoc-{model}-{norm}-s{seed}"
        for norm in ("layernorm", "rmsnorm")
        for model in ("gru", "transformer")
        for seed in (1, 2)
    ]
    assert set(jobs.values()) == {"run"}
    assert "8 runs: 0 done already, 8 to do" in ran.out
    assert "estimated time: unknown until a run of the same kind has finished" in ran.out
    assert tree() == set()


@pytest.mark.usefixtures("no_fused_kernels")
def test_a_sweep_runs_is_skipped_and_grows(cli: Run) -> None:
    first = cli("sweep", *SHORT, "norm=layernorm,rmsnorm", "seed=1")
    assert first.code == 0
    assert "2 completed (0 of them before)" in first.out
    assert {(record["norm"], record["backend"]) for record in records().values()} == {
        ("layernorm", "torch"), ("rmsnorm", "torch"),
    }  # fmt: skip
    assert notes(first) == [
        "backend=auto: all jobs use torch, the fastest that all their norms have "
        "(not the fused kernels: no kernels in this test)"
    ]
    before = {path: Path(path).read_bytes() for path in tree() if Path(path).is_file()}
    again = cli("sweep", *SHORT, "norm=layernorm,rmsnorm", "seed=1")
    assert again.code == 0
    assert "2 runs: 2 done already, 0 to do" in again.out
    assert "2 completed (2 of them before)" in again.out
    after = {path: Path(path).read_bytes() for path in tree() if Path(path).is_file()}
    assert {path for path in after if after[path] != before.get(path)} <= {
        path for path in after if path.startswith("outputs/sweeps")
    }
    more = cli("sweep", *SHORT, "norm=layernorm,rmsnorm", "seed=1,2", "dry_run=true")
    assert sorted(planned(more).values()) == ["run", "run", "skip (completed)", "skip (completed)"]
    assert "about " in more.out
    assert "s of training, by the finished runs of the same kind" in more.out
    # A single run of the sweep is the run of `train`.
    assert "nothing to do" in cli("train", *SHORT, "norm=rmsnorm", "seed=1", "backend=torch").out


@pytest.mark.usefixtures("fused_kernels")
def test_auto_is_fused_where_the_kernels_can_be_had(cli: Run) -> None:
    ran = cli("sweep", *SHORT, "norm=layernorm,rmsnorm,prmsnorm", "dry_run=true")
    assert notes(ran) == ["backend=auto: all jobs use fused, the fastest that all their norms have"]
    ran = cli("sweep", *SHORT, "norm=layernorm,dyt", "dry_run=true")
    assert notes(ran) == ["backend=auto: all jobs use composite, the fastest that all their norms have"]


@pytest.mark.usefixtures("no_fused_kernels")
def test_a_norm_parameter_applies_to_the_norms_that_have_it(cli: Run) -> None:
    ran = cli("sweep", *SHORT, "norm=layernorm,prmsnorm,none", "norm.p=0.5", "norm.gain=false")
    assert ran.code == 0, ran.out
    found = {record["norm"]: record for record in records().values()}
    assert found["prmsnorm"]["norm_params"]["p"] == 0.5
    assert found["prmsnorm"]["norm_params"]["gain"] is False
    assert found["layernorm"]["norm_params"] == {
        "eps": 1e-5, "eps_position": "inside", "gain": False, "bias": True,
    }  # fmt: skip
    assert found["none"]["norm_params"] == {}
    assert {record["backend"] for record in found.values()} == {"composite"}
    assert "composite" in notes(ran)[0]


def test_equal_jobs_are_merged(cli: Run) -> None:
    ran = cli("sweep", *SHORT, "norm=layernorm,prmsnorm", "norm.p=0.25,0.5", "dry_run=true")
    assert len(planned(ran)) == 3
    # What the id tells by a hash only stands beside it.
    rows = [line.split() for line in ran.out.splitlines() if line.startswith("  run ")]
    assert [row[2:] for row in rows] == [[], ["norm.p=0.25"], ["norm.p=0.5"]]
    assert "1 of 4 jobs are the same as others and were merged" in notes(ran)
    ran = cli(
        "sweep",
        *SHORT,
        "norm=none",
        "placement=pre,post,sandwich",
        "sites=[gates_x],[cand_x]",
        "dry_run=true",
    )
    assert len(planned(ran)) == 1
    assert "5 of 6 jobs are the same as others and were merged" in notes(ran)
    ran = cli("sweep", *SHORT, "norm.eps=1e-5,0.00001,1e-6", "seed=1,1", "dry_run=true")
    assert len(planned(ran)) == 2


def test_a_placement_is_dropped_for_a_gru(cli: Run) -> None:
    ran = cli(
        "sweep",
        *SHORT,
        "model=gru,transformer",
        "placement=post,sandwich",
        "norm=rmsnorm,none",
        "dry_run=true",
    )
    assert ran.code == 0
    jobs = planned(ran)
    assert sorted(name.rsplit("-", 1)[0] for name in jobs) == [
        "lm-pydoc-gru-none-s1", "lm-pydoc-gru-rmsnorm-s1", "lm-pydoc-transformer-none-s1",
        "lm-pydoc-transformer-rmsnorm-s1", "lm-pydoc-transformer-rmsnorm-s1",
    ]  # fmt: skip
    assert "placement=post does not apply to model=gru and was dropped there" in notes(ran)
    plain = cli("sweep", *SHORT, "model=gru", "norm=rmsnorm,none", "dry_run=true")
    assert set(planned(plain)) < set(jobs)


def test_a_gru_with_a_dropped_placement_trains(cli: Run) -> None:
    ran = cli("sweep", *SHORT, "model=gru,transformer", "placement=post", "norm=rmsnorm")
    assert ran.code == 0, ran.out
    assert {record["model"]: record["placement"] for record in records().values()} == {
        "gru": "pre", "transformer": "post",
    }  # fmt: skip


# ---------------------------------------------------------------------------------- failures (B29)


def test_every_bad_job_is_named_and_the_good_ones_run(cli: Run) -> None:
    ran = cli("sweep", *SHORT[:1], "trainer.max_steps=2", "model.d_model=16,15,0,32")
    assert ran.code == 1
    assert "4 runs: 0 done already, 2 to do, 2 invalid" in ran.out
    found = records()
    by_width = {record["config"]["model"]["d_model"]: record for record in found.values()}
    assert {width: record["status"] for width, record in by_width.items()} == {
        16: "completed", 32: "completed", 15: "failed", 0: "failed",
    }  # fmt: skip
    reasons = {
        15: "model.d_model=15: not divisible by model.num_heads=4; the nearest width that is: 16",
        0: "model.d_model=0: expected a whole number above zero",
    }
    lines = ran.out.splitlines()
    closing = next(number for number, line in enumerate(lines) if line.startswith("2 completed, 2 failed"))
    for width, reason in reasons.items():
        assert by_width[width]["error"] == reason
        heading = f"failed: debug=fast trainer.max_steps=2 model.d_model={width}"
        at = [number for number, line in enumerate(lines) if line == heading]
        assert len(at) == 2
        assert at[0] < closing < at[1]  # when it happens, and in the closing summary
        assert [number for number, line in enumerate(lines) if line == f"  {reason}"] == [at[1] + 1]
        assert "-invalid-" in by_width[width]["run_id"]
    status = cli("status")
    assert status.code == 0
    assert status.out.startswith("2 completed, 0 running, 2 failed, 0 left")
    for width in (15, 0):
        [row] = [line for line in status.out.splitlines() if by_width[width]["run_id"] in line]
        assert row.startswith("failed")
        assert reasons[width] in row
    # Asked again, the good are skipped, the bad named again, and no second record appears.
    again = cli("sweep", *SHORT[:1], "trainer.max_steps=2", "model.d_model=16,15,0,32")
    assert again.code == 1
    assert "2 completed, 2 failed (2 of them before)" in again.out
    assert set(records()) == set(found)


@pytest.mark.usefixtures("no_fused_kernels")
def test_a_norm_that_does_not_suit_the_task_fails_alone(cli: Run) -> None:
    ran = cli("sweep", *SHORT, "norm=batchnorm,layernorm")
    assert ran.code == 1
    found = {record["norm"]: record for record in records().values()}
    assert {norm: record["status"] for norm, record in found.items()} == {
        "layernorm": "completed", "batchnorm": "failed",
    }  # fmt: skip
    reason = found["batchnorm"]["error"]
    assert reason.startswith("norm=batchnorm: its statistics would see the tokens to come")
    assert "-invalid-" in found["batchnorm"]["run_id"]
    assert ran.out.count(reason) == 1
    assert "backend=auto: 1 of 2 jobs use torch, the fastest that all their norms have" in ran.out


def test_a_job_that_breaks_while_it_runs(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from rmsrepro.runs import callbacks

    original = callbacks.RunCallback._record_training

    def planted(this: callbacks.RunCallback, *rest: object, **more: object) -> None:
        if this._folder.name.startswith("lm-pydoc-gru"):
            raise RuntimeError("planted")
        original(this, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(callbacks.RunCallback, "_record_training", planted)
    ran = cli("sweep", *SHORT, "model=gru,transformer", "norm=rmsnorm")
    assert ran.code == 1
    assert {record["model"]: record["status"] for record in records().values()} == {
        "gru": "failed", "transformer": "completed",
    }  # fmt: skip
    [run_id] = [name for name, record in records().items() if record["status"] == "failed"]
    assert f"failed {run_id}" in ran.out
    assert ran.out.count("RuntimeError: planted") == 2
    assert "1 completed, 1 failed" in ran.out
    monkeypatch.undo()
    # A broken run is taken up again by the same command.
    assert main(["sweep", *SHORT, "model=gru,transformer", "norm=rmsnorm"]) == 0


def test_stopping_at_the_first_failure(cli: Run) -> None:
    ran = cli("sweep", *SHORT[:1], "trainer.max_steps=2", "model.d_model=15,16", "on_error=stop")
    assert ran.code == 1
    assert [record["status"] for record in records().values()] == ["failed"]
    assert "not run: debug=fast trainer.max_steps=2 model.d_model=16" in ran.out


def test_a_wrong_job_stops_everything_before_it_starts(cli: Run) -> None:
    assert "backend=foo: not a valid value" in cli("sweep", *SHORT, "seed=1,2", "backend=torch,foo").error
    assert tree() == set()


# ----------------------------------------------------------------------------- odd names (B30)


def test_values_of_all_sorts_make_flat_folders(cli: Run) -> None:
    folder = Path("deep/my data [v1], (x) ~y/it's")
    folder.mkdir(parents=True)
    text = folder / "a,b & c.txt"
    text.write_text("the cat sat on the mat and the dog ran " * 100)
    many = [
        f"data.train={text}", "data=text_files", *LM, "trainer.max_steps=2", "trainer.val_every=2",
        "trainer.checkpoint_every=2", "trainer.log_every=1", "trainer.accumulate=1", "trainer.num_threads=1",
        "trainer.accelerator=cpu", "trainer.devices=1", "trainer.divergence_factor=5.0",
        "optim.lr=1e-3", "optim.betas=[0.9,0.99]", "optim.eps=1e-8", "optim.weight_decay=0.1",
        "optim.schedule=cosine", "optim.warmup_steps=1", "optim.final_lr_fraction=0.5", "optim.clip_norm=2.0",
        "model=transformer", "model.num_layers=1", "model.num_heads=2", "model.d_ff=32", "model.dropout=0.1",
        "model.tie_embeddings=false", "model.positions=rotary", "model.ffn=swiglu", "model.bias=false",
        "data.tokenizer=char", "data.max_len=16", "data.batch_tokens=64", "data.vocab_size=100",
        "placement=sandwich", "backend=composite", "precision=32", "norm=rmsnorm", "norm.eps=1e-6",
        f"tracker.project='{'a long name, [1] ' * 20}'", "study_name='my study/with (all) sorts'",
        "tracker.entity=null",
    ]  # fmt: skip
    assert len(many) >= 40
    ran = cli("sweep", *many, "seed=1,2")
    assert ran.code == 0, ran.out
    names = [item.name for item in Path("outputs/runs").iterdir()]
    assert len(names) == 2
    assert all(len(name.encode()) <= 255 and name.replace("-", "_").isidentifier() for name in names)
    found = records()
    assert set(found) == set(names)
    for record in found.values():
        assert record["status"] == "completed"
        assert record["config"]["data"]["train"] == str(text)
        assert record["config"]["tracker"]["project"] == "a long name, [1] " * 20
        assert record["study"] == "my study/with (all) sorts"
    [manifest] = Path("outputs/sweeps").iterdir()
    jobs = json.loads(manifest.read_text())["jobs"]
    assert {job["run_id"] for job in jobs} == set(names)
    assert all(len(job["overrides"]) == len(many) + 1 for job in jobs)
    assert "2 completed" in cli("status").out
    page = cli("report")
    assert page.code == 0, page.err
    [results] = Path("outputs/reports").rglob("results.csv")
    assert all(name in results.read_text() for name in names)


# ------------------------------------------------------------------------------------------ status


def test_status_without_any_run(cli: Run) -> None:
    ran = cli("status")
    assert (ran.code, ran.out) == (0, "no runs in outputs yet; start with: rmsrepro sweep study=smoke\n")


def test_status_counts_every_state(cli: Run) -> None:
    import os
    import socket
    import time

    from rmsrepro.runs.owners import process_start

    runs = Path("outputs/runs")

    def write(name: str, **files: dict[str, object]) -> None:
        (runs / name).mkdir(parents=True)
        for key, content in files.items():
            (runs / name / f"{key}.json").write_text(json.dumps(content))

    owner = {"pid": os.getpid(), "host": socket.gethostname(), "start": process_start(os.getpid())}
    write("a-done", result={"status": "completed", "clocks": {"total_s": 10.0}})
    write("b-done", result={"status": "completed", "clocks": {"total_s": 20.0}})
    write("c-failed", result={"status": "failed", "error": "first line\nsecond", "steps": 3})
    write("d-diverged", result={"status": "diverged", "error": "the loss is nan", "steps": 7})
    write("e-stopped", result={"status": "interrupted", "steps": 4})
    write("f-running", lock=owner, running={"step": 5, "max_steps": 20, "updated": time.time()})
    write("g-crashed", lock={**owner, "start": "1"}, running={"step": 2, "max_steps": 20})
    write("h-damaged")
    (runs / "h-damaged" / "result.json").write_text("{")
    (runs / "a file").write_text("")
    Path("outputs/sweeps").mkdir()
    Path("outputs/sweeps/x.json").write_text(
        json.dumps({"owner": owner, "jobs": [{"run_id": "a-done"}, {"run_id": "i-waiting"}]})
    )
    Path("outputs/sweeps/y.json").write_text("damaged")
    ran = cli("status")
    assert ran.code == 0
    lines = ran.out.splitlines()
    # Interrupted ones (stopped, crashed, damaged) are also left to do: 3 and the waiting one.
    assert lines[0].startswith("2 completed, 1 running, 1 failed, 1 diverged, 3 interrupted, 4 left, about ")
    rows = {
        line.split()[1]: line.split() for line in lines[1:] if line.split() and line.split()[0] != "state"
    }
    assert rows["c-failed"][:3] == ["failed", "c-failed", "3"]
    assert "first line" in ran.out
    assert "second" not in ran.out
    assert rows["d-diverged"][0] == "diverged"
    assert rows["f-running"] == ["running", "f-running", "5/20"]
    assert rows["g-crashed"][0] == "interrupted"
    assert rows["i-waiting"] == ["waiting", "i-waiting"]
    assert "a-done" not in rows


def test_watching_ends_when_nothing_is_left(cli: Run) -> None:
    Path("outputs/runs/a").mkdir(parents=True)
    Path("outputs/runs/a/result.json").write_text(
        json.dumps({"status": "completed", "clocks": {"total_s": 1.0}})
    )
    ran = cli("status", "watch=true", "every_s=0.01")
    assert ran.code == 0
    assert "1 completed, 0 running, 0 failed, 0 left" in ran.out


def test_watching_follows(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("outputs/runs/a")
    folder.mkdir(parents=True)
    from rmsrepro.verbs import watching

    def finish(seconds: float) -> None:
        (folder / "result.json").write_text(json.dumps({"status": "completed", "clocks": {"total_s": 1.0}}))

    monkeypatch.setattr(watching.time, "sleep", finish)
    ran = cli("status", "watch=true")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "0 completed, 0 running, 0 failed, 1 interrupted, 1 left", "1 completed, 0 running, 0 failed, 0 left",
    ]  # fmt: skip
    assert "every_s=0.0: expected seconds above zero" in cli("status", "every_s=0").error


# -------------------------------------------------------------------------------- worker processes


@pytest.mark.slow
def test_two_workers_do_as_one(program: Run) -> None:
    jobs = [*SHORT, "norm=rmsnorm,prmsnorm", "seed=1,2"]
    many = program("sweep", *jobs, "launcher=joblib", "n_jobs=2", "out_dir=many")
    assert many.code == 0, many.out + many.err
    one = program("sweep", *jobs, "out_dir=one")
    assert one.code == 0
    expected, found = records("one"), records("many")
    assert expected.keys() == found.keys()
    for run_id, record in expected.items():
        assert found[run_id]["metrics"] == record["metrics"]
        assert found[run_id]["status"] == "completed"
    lines = [line for line in many.out.splitlines() if line.startswith("[")]
    assert sorted(line.split()[0] for line in lines) == [f"[{number}/4]" for number in (1, 2, 3, 4)]


def test_command_and_environment_are_those_of_this_test() -> None:
    assert command("x")[-1] == "x"
    assert "HOME" not in environment({"HOME": None})


# ----------------------------------------------------------------------- backends of single runs


@pytest.mark.usefixtures("no_fused_kernels")
def test_a_run_says_and_records_why_it_is_not_fused(cli: Run) -> None:
    ran = cli("train", *SHORT, "norm=rmsnorm")
    note = "not the fused kernels: no kernels in this test"
    assert f"composite backend ({note})" in ran.out
    (record,) = records().values()
    assert (record["backend"], record["backend_used"], record["backend_note"]) == ("auto", "composite", note)


@pytest.mark.usefixtures("no_fused_kernels")
def test_the_runs_of_a_sweep_record_why_they_are_not_fused(cli: Run) -> None:
    note = "not the fused kernels: no kernels in this test"
    assert cli("sweep", *SHORT, "norm=rmsnorm,prmsnorm").code == 0
    assert {record["backend_note"] for record in records().values()} == {note}
    # Named backends were not settled, and need no reason.
    assert cli("sweep", *SHORT, "norm=rmsnorm", "seed=2,3", "backend=composite", "out_dir=named").code == 0
    assert {record["backend_note"] for record in records("named").values()} == {None}


def test_workers_record_why_they_are_not_fused(program: Callable[..., Ran], tmp_path: Path) -> None:
    without = {"CXX": "no-such-compiler", "RMSREPRO_CACHE": str(tmp_path / "cache")}
    ran = program("sweep", *SHORT, "norm=rmsnorm", "seed=1,2", "launcher=joblib", "n_jobs=2", env=without)
    assert ran.code == 0, ran.out + ran.err
    found = [record["backend_note"] for record in records().values()]
    assert len(found) == 2
    assert all(note.startswith("not the fused kernels: CXX=no-such-compiler: ") for note in found)


@pytest.mark.usefixtures("no_fused_kernels")
def test_a_backend_that_cannot_run_here_ends_the_command(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmsrepro.norms.backends.why_no_compiler", lambda: "no compiler in this test")
    for backend, lacking in (("fused", "no kernels in this test"), ("compiled", "no compiler in this test")):
        for verb in ("train", "sweep", "check-norm"):
            keys = [] if verb == "check-norm" else SHORT
            ran = cli(verb, *keys, "norm=rmsnorm", f"backend={backend}")
            assert ran.code == 2
            message = f"backend={backend} cannot run here: {lacking}; or use backend=composite"
            assert message in ran.err
            assert "Traceback" not in ran.err
    assert tree() == set()


@pytest.mark.slow
def test_a_run_on_the_compiled_backend(cli: Run) -> None:
    for norm in ("layernorm", "batchnorm"):
        task = ["task=translation", "data=cldr"] if norm == "batchnorm" else []
        assert cli("train", *SHORT, *task, f"norm={norm}", "backend=compiled").code == 0
    for record in records().values():
        assert record["backend_used"] == "compiled"
        assert record["warmup_s"] > 0
