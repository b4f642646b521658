"""Faults of sweeps, records, checkpoints, trackers, met in practice: B29, B30, B32, B33, B35, B36."""

from __future__ import annotations

import csv
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rmsrepro.config.schema import TrainConfig
from rmsrepro.norms import norm_info
from rmsrepro.runs.interruption import Interrupted
from rmsrepro.runs.records import read_metrics
from rmsrepro.runs.train import train
from tests.cli.running import LM, TRANSLATION, Ran, Trained, command, environment, records, tree
from tests.cli.test_cli_reproduce import STUDY
from tests.cli.test_cli_use import Stdin, printed_checkpoint
from tests.runs.test_runs_train import StopAfter

Run = Callable[..., Ran]
Make = Callable[..., TrainConfig]
QUIET = Console(quiet=True)
SHORT = [*LM, "trainer.max_steps=2"]


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------ failing jobs


def failing_jobs_are_told(ran: Ran, out_dir: str) -> None:
    """Of the widths 16, 15, 0 and 32 two are possible; the others are told when met, and at the end."""
    assert ran.code == 1, ran.out + ran.err
    by_width = {record["config"]["model"]["d_model"]: record for record in records(out_dir).values()}
    assert {width: record["status"] for width, record in by_width.items()} == {
        16: "completed", 32: "completed", 15: "failed", 0: "failed",
    }  # fmt: skip
    for width in (15, 0):
        assert ran.out.count(f"model.d_model={width}\n") == 2
        assert ran.out.count(by_width[width]["error"]) == 1
        assert f"model.d_model={width}: " in by_width[width]["error"]


def test_bad_jobs_stand_in_the_results_table(cli: Run) -> None:
    """B29: a job that failed is missing from the table, as if nobody had asked for it."""
    ran = cli("sweep", "debug=fast", "trainer.max_steps=2", "model.d_model=16,15,0,32")
    failing_jobs_are_told(ran, "outputs")
    assert cli("report").code == 0
    [file] = Path("outputs/reports").rglob("results.csv")
    with file.open(newline="") as opened:
        table = {row["run_id"]: row for row in csv.DictReader(opened)}
    assert table.keys() == records().keys()
    assert {name: row["status"] for name, row in table.items()} == {
        name: record["status"] for name, record in records().items()
    }


@pytest.mark.slow
def test_bad_jobs_among_workers(program: Run) -> None:
    """B29: the same with worker processes, which lose a job's failure more easily."""
    ran = program(
        "sweep",
        "debug=fast",
        "trainer.max_steps=2",
        "model.d_model=16,15,0,32",
        "launcher=joblib",
        "n_jobs=2",
    )
    failing_jobs_are_told(ran, "outputs")


def test_every_kind_of_failure_in_one_sweep(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """B29: jobs that are refused before they start beside one that breaks while it runs: all are told."""
    from rmsrepro.runs import callbacks

    original = callbacks.RunCallback._record_training

    def planted(this: Any, *rest: Any, **more: Any) -> None:
        if "-s2-" in this._folder.name:
            raise RuntimeError("planted")
        original(this, *rest, **more)

    monkeypatch.setattr(callbacks.RunCallback, "_record_training", planted)
    ran = cli("sweep", *SHORT, "norm=rmsnorm", "seed=1,2", "model.num_heads=2,3")
    assert ran.code == 1
    found = sorted((record["status"], record["error"] or "") for record in records().values())
    assert [status for status, _ in found] == ["completed", "failed", "failed", "failed"]
    assert sum("planted" in error for _, error in found) == 1
    closing = ran.out.split("1 completed, 3 failed")[1]
    for _, error in found[1:]:
        assert error in closing
    status = cli("status").out
    assert status.startswith("1 completed, 0 running, 3 failed, 0 left")


# -------------------------------------------------------------------------------- names of folders


def test_long_names_of_norms_do_not_meet(cli: Run) -> None:
    """B30: names cut to a length, and two that differ behind the cut share a folder."""
    stem = "A" * 120
    text = "import torch\nfrom torch import nn\n"
    for end in ("One", "Two"):
        text += (
            f"class {stem}{end}(nn.Module):\n"
            "    def __init__(self, dim: int):\n"
            "        super().__init__()\n"
            "        self.weight = nn.Parameter(torch.ones(dim))\n"
            "    def forward(self, x):\n"
            f"        return x * self.weight * {len(end)}.0\n"
        )
    Path("practice_long_names.py").write_text(text)
    norms = ",".join(f"practice_long_names:{stem}{end}" for end in ("One", "Two"))
    ran = cli("sweep", *SHORT, f"norm={norms}")
    assert ran.code == 0, ran.out + ran.err
    found = records()
    assert {record["norm"] for record in found.values()} == set(norms.split(","))
    assert len(found) == 2
    assert {item.name for item in Path("outputs/runs").iterdir()} == found.keys()
    assert all(len(run_id.encode()) <= 255 for run_id in found)


@pytest.mark.parametrize(
    "out_dir", ["~no such user/a=b, [x] {y}", pytest.param("größe/'quoted'", marks=pytest.mark.slow)]
)
def test_a_folder_of_any_name_serves_every_verb(cli: Run, out_dir: str) -> None:
    """B30, B35: what a path may hold, an override's grammar reads otherwise; each verb takes it as it is."""
    ran = cli("train", *SHORT, "norm=layernorm", f"out_dir={out_dir}")
    assert ran.code == 0, ran.err
    checkpoint = printed_checkpoint(ran)
    [run_id] = records(out_dir)
    assert Path(checkpoint) == Path(out_dir) / "runs" / run_id / "checkpoints" / "last.ckpt"
    assert Path(checkpoint).is_file()
    assert cli("eval", f"ckpt={checkpoint}", "split=val").code == 0
    assert cli("sample", f"ckpt={checkpoint}", "num_tokens=3").code == 0
    assert cli("convert", f"ckpt={checkpoint}", f"out_dir={out_dir}").code == 0
    more = cli(
        "sweep", *LM, "norm=layernorm", f"ckpt={checkpoint}", "trainer.max_steps=3,4", f"out_dir={out_dir}"
    )
    assert more.code == 0, more.out + more.err
    assert len(records(out_dir)) == 3
    assert "3 completed" in cli("status", f"out_dir={out_dir}").out
    assert cli("report", f"out_dir={out_dir}").code == 0
    assert {item.name for item in Path(out_dir).iterdir()} >= {"runs", "converted", "reports", "sweeps"}


# ------------------------------------------------------------------------------- rows of the records


@pytest.mark.parametrize(("model", "task"), [("gru", "lm"), ("transformer", "translation")])
def test_ten_steps_and_five_more_in_one_folder(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, model: str, task: str
) -> None:
    """B32: a late metric breaks the columns; what goes on in the folder deletes or repeats rows."""
    config = make_config(
        model, task, "trainer.max_steps=15", "trainer.val_every=5", "trainer.log_every=1",
        "trainer.checkpoint_every=4",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        StopAfter(patch, 10)
        with pytest.raises(Interrupted) as stopped:
            train(config, console=QUIET)
    assert stopped.value.exit_code == 143
    [run] = Path("outputs/runs").iterdir()
    early = rows_of(run)
    assert [int(row["step"]) for row in early] == list(range(1, 11))
    result = train(config, console=QUIET)
    assert result.path.resolve() == run.resolve()
    lines = (run / "metrics.csv").read_text().splitlines()
    assert sum("step" in line for line in lines) == 1
    late = rows_of(run)
    assert [int(row["step"]) for row in late] == list(range(1, 16))
    assert all(None not in row and None not in row.values() for row in late)
    for before, after in zip(early, late, strict=False):
        assert {key: after[key] for key in before} == before
    assert [int(row["step"]) for row in late if row["val_loss"]] == [5, 10, 15]
    assert all(row["train_loss"] for row in late)
    # The CSV file is the other file, in another form.
    for row, same in zip(read_metrics(run / "metrics.jsonl"), late, strict=True):
        assert {key: str(value) for key, value in row.items()} == {k: v for k, v in same.items() if v}


# --------------------------------------------------------------------------- checkpoints, going on


@pytest.mark.parametrize("norm", ["prmsnorm", "batchnorm", "weightnorm"])
def test_checkpoints_load_with_safe_defaults(make_config: Make, norm: str) -> None:
    """B33: objects of a config in the file, which torch no longer unpickles; whatever the norm keeps."""
    task = "translation" if norm_info(norm).takes_mask else "lm"
    result = train(make_config("gru", task, f"norm={norm}", "trainer.max_steps=1"), console=QUIET)
    files = list((result.path / "checkpoints").iterdir())
    assert files
    for file in files:
        content = torch.load(file)
        assert content["global_step"] == 1
        assert not any(mark in file.name for mark in "= /,[]")


@pytest.mark.parametrize(
    ("model", "task"),
    [("gru", "translation"), pytest.param("transformer", "translation", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("first", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_longer_equals_straight(make_config: Make, model: str, task: str, first: int) -> None:
    """B33: some steps and then the rest are what training at once is, over the ends of epochs too."""
    options = ("model.dropout=0.1", "data.num_train=40") if task == "translation" else ("model.dropout=0.1",)
    short = train(make_config(model, task, *options, f"trainer.max_steps={first}"), console=QUIET)
    longer = train(make_config(model, task, *options, f"ckpt={short.path}"), console=QUIET)
    straight = train(make_config(model, task, *options), console=QUIET)
    assert longer.run_id != straight.run_id
    found, expected = (
        torch.load(one.path / "checkpoints" / "last.ckpt")["state_dict"] for one in (longer, straight)
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert [row["step"] for row in read_metrics(longer.path / "metrics.jsonl")] == list(range(first + 1, 7))


def test_a_sweep_with_nothing_left_says_so(cli: Run, language_model: Trained) -> None:
    """B33: jobs whose checkpoint is as far as they ask for count as done without a word, or wait for ever."""
    before = {path: path.read_bytes() for path in language_model.path.rglob("*") if path.is_file()}
    ran = cli("sweep", *LM, "norm=rmsnorm", f"ckpt={language_model.path}", "trainer.max_steps=4,6,7")
    assert ran.code == 0, ran.out
    notes = [line for line in ran.out.splitlines() if line.startswith("note: ckpt=")]
    assert len(notes) == 2
    for steps, note in zip((4, 6), notes, strict=True):
        assert f"is at step 6 already: trainer.max_steps={steps} asks for no further update" in note
        assert "Nothing was done" in note
    assert "3 runs: 2 done already, 1 to do" in ran.out
    assert [record["steps"] for record in records().values()] == [7]
    assert cli("status").out.startswith("1 completed, 0 running, 0 failed, 0 left")
    assert {path: path.read_bytes() for path in language_model.path.rglob("*") if path.is_file()} == before
    again = cli("sweep", *LM, "norm=rmsnorm", f"ckpt={language_model.path}", "trainer.max_steps=4,6")
    assert again.code == 0
    assert again.out.count("Nothing was done") == 2
    assert len(records()) == 1


def test_a_translators_checkpoint_is_pasted(
    cli: Run, translator: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B35: the path as printed, cut into words as a shell does it, for every verb of a translator."""
    trained = shlex.join([*TRANSLATION, "model=gru", "norm=layernorm"])
    monkeypatch.setattr("sys.stdin", Stdin(b"January 5\n"))
    for rest, verb in (
        ("split=val", "eval"),
        ("beam_size=1", "translate"),
        (f"{trained} trainer.max_steps=7", "train"),
        (f"{trained} trainer.max_steps=7,8", "sweep"),
    ):
        ran = cli(*shlex.split(f"{verb} ckpt={translator.checkpoint} {rest}"))
        assert ran.code == 0, ran.out + ran.err
    assert sorted(record["steps"] for record in records().values()) == [7, 8]


# ---------------------------------------------------------------------------------------- trackers


def test_without_a_home_nothing_is_printed_or_left() -> None:
    """B36: no home, standard input closed: wandb's own process then printed its log between our lines."""
    bare = {
        "HOME": "", "XDG_CACHE_HOME": None, "WANDB_MODE": None, "WANDB_CACHE_DIR": None,
        "WANDB_CONFIG_DIR": None, "WANDB_DATA_DIR": None, "WANDB_SILENT": None,
    }  # fmt: skip
    line = f"exec {shlex.join(command('train', *SHORT, 'norm=rmsnorm', 'tracker=wandb'))} <&-"
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, env=environment(bare), check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 5, lines
    assert {item.name for item in Path().iterdir()} == {"outputs"}
    [(run_id, record)] = records().items()
    assert record["status"] == "completed"
    assert len(rows_of(Path("outputs/runs", run_id))) == 2
    assert len(list(Path("outputs/wandb").glob("offline-run-*"))) == 1


@pytest.mark.parametrize("mode", ["online", "no such mode"])
def test_a_tracker_that_cannot_start_asks_for_nothing(
    cli: Run, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """B36: asked to log in, a run waits for a key; it goes on without the tracker instead, and says so."""
    import wandb

    def refuse(**settings: Any) -> None:
        assert settings["mode"] == mode
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.setattr("sys.stdin", None)
    ran = cli("train", *SHORT, "tracker=wandb")
    assert ran.code == 0
    assert "note: wandb could not start (No API key configured.); the records go on without it" in ran.out
    [(run_id, record)] = records().items()
    assert record["status"] == "completed"
    assert len(rows_of(Path("outputs/runs", run_id))) == 2


@pytest.mark.parametrize("verb", ["sweep", pytest.param("reproduce", marks=pytest.mark.slow)])
def test_many_runs_need_no_account(cli: Run, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """B36: the verbs that train many models, disabled: no folder of wandb, all records."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr("sys.stdin", None)
    Path("conf/study").mkdir(parents=True)
    Path("conf/study/tiny.yaml").write_text(STUDY.replace("debug=fast", "debug=fast, tracker=wandb"))
    arguments = ["study=tiny"] if verb == "reproduce" else [*SHORT, "norm=layernorm,rmsnorm", "tracker=wandb"]
    ran = cli(verb, *arguments)
    assert ran.code == 0, ran.out + ran.err
    found = records()
    assert found
    for run_id, record in found.items():
        assert record["status"] == "completed"
        assert record["config"]["tracker"]["name"] == "wandb"
        assert rows_of(Path("outputs/runs", run_id))
    assert not any("wandb" in path for path in tree())
