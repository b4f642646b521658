"""The trial of `scripts/sweep_test.py`, small: planted failures, interruptions, the same command again."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cli.running import LM, Ran, Trained, records
from tests.conftest import ROOT
from tests.scripts import load_script

Run = Callable[..., Ran]
FAULTS = ("memory", "package", "error")


@pytest.fixture
def script() -> ModuleType:
    return load_script("sweep_test.py")


@pytest.fixture
def planted(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Path("planted.py").write_text(script.PLUGIN)
    Path("short.txt").write_text("the cat sat on the mat and the dog ran\n" * 300)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    yield
    sys.modules.pop("planted", None)


SHORT = [*LM, "data=text_files", "data.train=short.txt"]
SWEEP = [
    "sweep", *SHORT, "trainer.max_steps=2", "backend=composite", "norm.eps=1e-5,1e-6",
    "norm=rmsnorm,l2norm,planted:Faulty", f"norm.fault={','.join(FAULTS)}",
]  # fmt: skip


@pytest.mark.usefixtures("planted")
def test_a_sweep_with_failures_and_interruptions_ends_whole(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rmsrepro.runs import sweep

    train, ended = sweep.train, Counter[str]()
    stops = iter((2, 4))
    stop = next(stops)

    def counted(config: Any, **rest: Any) -> Any:
        if len(ended) == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        result = train(config, **rest)
        ended[result.run_id] += 0 if result.skipped else 1
        return result

    monkeypatch.setattr(sweep, "train", counted)
    assert cli(*SWEEP).code == 143
    assert len(ended) == 2
    stop = next(stops)
    assert cli(*SWEEP).code == 143
    stop = -1
    waiting = cli("status")
    assert "of abandoned sweeps" in waiting.out
    assert "goes on with: rmsrepro sweep debug=fast" in waiting.out
    ran = cli(*SWEEP)
    assert ran.code == 1
    assert "4 completed, 3 failed (" in ran.out
    found = records()
    assert Counter(record["status"] for record in found.values()) == {"completed": 4, "failed": 3}
    done = {run_id for run_id, record in found.items() if record["status"] == "completed"}
    assert {run_id: ended[run_id] for run_id in done} == dict.fromkeys(done, 1)
    closing = ran.out.partition("4 completed, 3 failed (")[2]
    for fault in FAULTS:
        assert f"norm.fault={fault}\n" in closing
    for reason in ("out of memory: ", "a package is missing: ", "RuntimeError: planted: error"):
        assert closing.count(reason) == 1
    assert closing.count("  traceback: outputs/runs/") == 3
    assert cli(*SWEEP).code == 1
    assert {run_id: ended[run_id] for run_id in done} == dict.fromkeys(done, 1)
    assert "abandoned" not in cli("status").out
    assert "runs: 4 completed, 3 failed\n" in cli("report").out
    page = Path("outputs/reports/all/index.html").read_text()
    assert "7 runs: 4 completed, 3 failed" in re.sub("<[^>]*>", "", page)


@pytest.mark.usefixtures("planted")
def test_what_all_jobs_fail_by_is_said_once(cli: Run) -> None:
    words = ["sweep", *SHORT, "backend=composite", "norm=planted:Faulty", "seed=1,2,3"]
    ran = cli(*words)
    assert ran.code == 1
    first, _, closing = ran.out.partition("3 failed (")
    assert first.count("RuntimeError: planted: error") == 1
    assert first.count("for the same reason as lm-text_files-transformer-planted_Faulty-s1-") == 2
    assert closing.count("RuntimeError: planted: error") == 1
    assert closing.count("\nfailed: ") == 3
    assert "(all 3 of them)" in closing


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_a_job_that_kills_the_sweep_again_and_again(program: Run) -> None:
    """Without workers nobody outlives it: the sweep that comes next counts, and tells."""
    words = ["sweep", *SHORT, "trainer.max_steps=2", "backend=composite", "norm=planted:Faulty,rmsnorm"]
    words.append("norm.fault=killed")
    env = {"PLANTED_WORKERS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path.cwd())])}
    assert [program(*words, env=env).code for _ in range(3)] == [-signal.SIGKILL] * 3
    # One that struck comes last: the other was done by the second command.
    assert [record["status"] for record in records().values()] == ["completed"]
    told = program(*words, env=env)
    assert told.code == 1
    assert "1 completed, 1 failed (1 of them before)" in told.out
    assert (
        "killed 3 times in a row without reaching a further checkpoint (the last time at step 0)" in told.out
    )
    assert Counter(record["status"] for record in records().values()) == {"completed": 1, "failed": 1}
    assert program("status", env=env).out.startswith("1 completed, 0 running, 1 failed, 0 left")
    env["PLANTED_WORKERS"] = ""  # it fails in the usual way
    again = program(*words, env=env)
    assert (again.code, "RuntimeError: planted: killed" in again.out) == (1, True)
    assert list(Path("outputs/runs").glob("*/deaths.json")) == []


@pytest.mark.slow
def test_the_script_small(script: ModuleType) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "sweep_test.py", "--eps", "1", "--kills", "KILL"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("5 completed, 5 failed, none twice (1 kills)\n")
    assert "report: runs: 5 completed, 5 failed" in done.stdout
    assert "its worker process was killed (SIGKILL)" in done.stdout


# ---------------------------------------------------------------------------------- damaged records

DAMAGED = (
    "result.json",
    "metrics.jsonl",
    "env.json",
    "data.json",
    "config.yaml",
    "lock.json",
    "running.json",
)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\x00", b"[]", b"null", b'{"status": 1}', b"\x00" * 50])
def test_damaged_records_cost_nothing_but_themselves(cli: Run, language_model: Trained, raw: bytes) -> None:
    runs = Path("outputs/runs")
    shutil.copytree(language_model.path, runs / language_model.path.name)
    for name in DAMAGED:
        folder = runs / f"damaged-{name.partition('.')[0]}"
        shutil.copytree(language_model.path, folder)
        (folder / name).write_bytes(raw)
    Path("outputs/sweeps").mkdir()
    Path("outputs/sweeps/0.json").write_bytes(raw)
    status = cli("status")
    assert status.code == 0
    assert status.out.startswith(f"{len(DAMAGED)} completed, 0 running")
    report = cli("report")
    assert report.code == 0
    assert f"runs: {len(DAMAGED)} completed" in report.out
    for name in DAMAGED[1:]:
        assert cli("sample", f"ckpt={runs}/damaged-{name.partition('.')[0]}", "num_tokens=2").code == 0
    assert cli("status", "forget=0").code == 0
    assert not Path("outputs/sweeps/0.json").exists()


def test_a_damaged_checkpoint_is_named(cli: Run, language_model: Trained) -> None:
    import torch

    raw = language_model.checkpoint.read_bytes()
    content = torch.load(language_model.checkpoint, weights_only=True)
    largest = max(content["state_dict"].values(), key=torch.numel).numpy().tobytes()
    middle = raw.index(largest) + len(largest) // 2
    flipped = raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]
    file = Path("last.ckpt")
    for damaged in (
        raw[: len(raw) // 2],
        raw[:1000] + bytes(1000) + raw[2000:],
        b"",
        b"PK\x03\x04" + raw[400:],
        flipped,
    ):
        file.write_bytes(damaged)
        ran = cli("eval", "ckpt=last.ckpt")
        assert ran.code == 2
        assert ran.error.startswith("ckpt=last.ckpt: ")
    for state in (None, 1, {}, {**content["rmsrepro"], "config": {}}, {**content["rmsrepro"], "step": "x"}):
        torch.save({**content, "rmsrepro": state}, file)
        assert "ckpt=last.ckpt: " in cli("sample", "ckpt=last.ckpt").error


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (MemoryError(), "out of memory: MemoryError; lower data.batch_tokens"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you"),
            "out of memory: DefaultCPUAllocator",
        ),
        (ModuleNotFoundError("No module named 'sacrebleu'", name="sacrebleu"), "pip install sacrebleu"),
    ],
)
def test_other_verbs_explain_such_errors_too(
    cli: Run, language_model: Trained, monkeypatch: pytest.MonkeyPatch, raised: Exception, told: str
) -> None:
    def broken(*rest: Any, **keywords: Any) -> Any:
        raise raised

    monkeypatch.setattr("rmsrepro.tasks.evaluate", broken)
    ran = cli("eval", f"ckpt={language_model.path}")
    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert told in ran.err


def test_giving_up_a_sweep(cli: Run) -> None:
    Path("outputs/sweeps").mkdir(parents=True)
    Path("outputs/runs").mkdir()
    for name in ("aaaa", "bbbb"):
        Path(f"outputs/sweeps/{name}.json").write_text(json.dumps({"jobs": [{"run_id": name}]}))
    assert "there is no such sweep; did you mean aaaa?" in cli("status", "forget=aaab").error
    assert cli("status", "forget=aaaa").out == "forgot the sweep aaaa; what its runs recorded stays\n"
    assert cli("status", "forget=abandoned").out == "forgot the sweep bbbb; what its runs recorded stays\n"
    assert cli("status", "forget=abandoned").out == "no sweep is abandoned\n"


ODD = """\
from torch import nn


class Odd(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        if self.training and self.calls > 20:
            raise RuntimeError("no \\ud800 more")
        return x
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the file system takes names of any bytes")
def test_text_that_is_no_utf8(cli: Run, program: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the name of the folder, in an error, and in a record: shown and written as escapes."""
    folder = Path(os.fsdecode(b"\xff x"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("the file system takes no such names")
    monkeypatch.chdir(folder)
    Path("odd.py").write_text(ODD)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    job = [*LM, "model=gru", "trainer.max_steps=8", "tracker=none"]
    failed = cli("train", *job, "norm=odd:Odd")
    assert failed.code == 1, failed.err
    assert r"RuntimeError: no \ud800 more" in failed.out
    [(run_id, record)] = records().items()
    assert (record["status"], record["error"]) == ("failed", r"RuntimeError: no \ud800 more")
    assert r"no \ud800 more" in Path(f"outputs/runs/{run_id}/error.txt").read_text()
    swept = cli("sweep", *job, "norm=rmsnorm,odd:Odd")
    assert swept.code == 1, swept.err
    assert swept.out.count(r"RuntimeError: no \ud800 more") == 2  # when it fails, and at the end
    assert sorted(one["status"] for one in records().values()) == ["completed", "failed"]
    status = program("status")  # whose output is strict until it says otherwise
    assert status.code == 0
    assert status.out.startswith("1 completed, 0 running, 1 failed, 0 left\n")
    assert r"RuntimeError: no \ud800 more" in status.out
    report = cli("report")
    assert report.code == 0, report.err
    assert r"\udcff x/outputs/reports/all/index.html" in report.out
    assert r"no \ud800 more" in Path("outputs/reports/all/index.html").read_text()
    assert r"no \ud800 more" in Path("outputs/reports/all/results.csv").read_text()
    sys.modules.pop("odd", None)


def test_no_text_in_any_field_of_a_record(cli: Run, language_model: Trained) -> None:
    """Nor in the name of a norm, from which its colour is drawn, nor of a sweep that is given up."""
    folder = Path("outputs/runs") / language_model.path.name
    shutil.copytree(language_model.path, folder)
    record = language_model.record
    for key, value in record.items():
        if isinstance(value, str):
            (folder / "result.json").write_text(json.dumps({**record, key: "\ud800x"}))
            for verb in ("status", "report"):
                ran = cli(verb)
                assert ran.code == 0, (key, ran.err)
    Path("outputs/sweeps").mkdir()
    Path("outputs/sweeps/a.json").write_text(json.dumps({"jobs": [{"run_id": "x"}], "study": "\ud800"}))
    assert r"study \ud800: 1 left" in cli("status").out
    assert cli("status", "forget=a").code == 0


def test_damaged_tunings_are_named_and_removed(cli: Run) -> None:
    """Also one that was copied, whose id is that of a file elsewhere: nothing is written there."""
    Path("outputs/tunings").mkdir(parents=True)
    Path("outputs/runs").mkdir()
    copied = json.dumps({"schema_version": 1, "tuning_id": "../x"})
    for name, content in (("x", copied), ("empty", "{}")):
        Path(f"outputs/tunings/{name}.json").write_text(content)
    told = cli("status")
    assert told.code == 0
    for name, reason in (
        ("x", "tuning_id '../x' is not the file's name"),
        ("empty", "schema_version None; 1 is read here"),
    ):
        [row] = [line for line in told.out.splitlines() if f"tunings/{name}.json" in line]
        assert row.startswith("unreadable ")
        assert f"a tuning's file, damaged ({reason}); rmsrepro status forget={name} removes it" in row
    assert "there is no such sweep" in cli("status", "forget=../x").error
    for name in ("x", "empty"):
        forgot = cli("status", f"forget={name}")
        assert forgot.out == f"forgot the tuning {name}; what its runs recorded stays\n"
    assert sorted(path.name for path in Path("outputs").rglob("*")) == ["runs", "tunings"]
    assert cli("status").out == "0 completed, 0 running, 0 failed, 0 left\n"


def test_commands_that_are_told_can_be_pasted(cli: Run, language_model: Trained) -> None:
    """In a folder whose name means something to a shell, and with data of such a name."""
    folder, text = Path("it's my $runs"), Path("a = b.txt")
    text.write_text("the cat sat on the mat and the dog ran\n" * 300)
    job = [*LM, "data=text_files", f"data.train={text}", "norm=rmsnorm", "trainer.max_steps=2"]
    failing = cli("sweep", *job, "placement=post,none", "model=gru", "optim.lr=-1", f"out_dir={folder}")
    assert "data.train=a = b.txt" in shlex.split(failing.out.partition("failed: ")[2].splitlines()[0])
    (folder / "sweeps").mkdir(exist_ok=True)
    (folder / "sweeps" / "aaaa.json").write_text(json.dumps({"jobs": [{"run_id": "x"}]}))
    told = cli("status", f"out_dir={folder}").out
    words = shlex.split(told.partition("given up by: ")[2].splitlines()[0])
    assert words == ["rmsrepro", "status", "forget=aaaa", f"out_dir={folder}"]
    assert cli(*words[1:]).out.startswith("forgot the sweep aaaa")
    shutil.copytree(language_model.path, folder / "runs" / language_model.path.name)
    layernorm = [*LM, "norm=layernorm", "model=transformer", "placement=pre", f"out_dir={folder}"]
    ran = cli("train", *layernorm)
    run = ran.out.partition("records: ")[2].splitlines()[0]
    refused = cli("eval", f"ckpt={run}", "norm=rmsnorm").error
    words = shlex.split(refused.partition("; ")[2].partition(" makes an equal")[0])
    assert words == ["rmsrepro", "convert", f"ckpt={run}", "to=rmsnorm"]
    converted = cli(*words[1:], f"out_dir={folder}")
    words = shlex.split(converted.out.partition("fresh optimiser: ")[2].splitlines()[0])
    assert words[-1] == "trainer.max_steps=N"
    assert cli(*words[1:-1], "trainer.max_steps=3", "debug=fast").code == 0


def test_a_run_belongs_to_every_study_whose_sweep_wanted_it(cli: Run, language_model: Trained) -> None:
    run_id = language_model.path.name
    shutil.copytree(language_model.path, Path("outputs/runs") / run_id)
    assert "runs: none\n" in cli("report", "study=smoke").out
    Path("outputs/sweeps").mkdir()
    for study in ("smoke", "other"):
        Path(f"outputs/sweeps/{study}.json").write_text(
            json.dumps({"study": study, "jobs": [{"run_id": run_id}]})
        )
    assert "runs: 1 completed\n" in cli("report", "study=smoke").out
    assert "runs: none\n" in cli("report", "study=quick").out
