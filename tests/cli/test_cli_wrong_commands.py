"""Wrong commands: one clear message, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rmsrepro.norms import list_norms
from tests.cli.running import Ran, Trained, command, environment, tree

Run = Callable[..., Ran]


@pytest.fixture
def files() -> None:
    """Files that a user might name by mistake."""
    Path("one.txt").write_text("one line\n")
    Path("two.txt").write_text("one line\nanother\n")
    Path("latin.txt").write_bytes(b"line\ncaf\xe9 noir\n")
    Path("short.txt").write_text("ab\n")
    Path("brief.txt").write_text("a text of three lines\n" * 3)
    Path("text.ckpt").write_text("hello\n")
    torch.save({"weights": torch.zeros(2)}, "other.ckpt")
    Path("folder").mkdir()


PARALLEL = "train task=translation data=parallel_files"
WRONG = [
    # verbs and the form of overrides
    ("trian norm=rmsnorm", "there is no verb 'trian'; did you mean train?"),
    ("--norm rmsnorm", "there is no verb '--norm'"),
    ("train norm", "'norm' is not an override: write it as key=value"),
    ("train --show", "'--show' is not an override"),
    ("train =3", "'' is not a key"),
    ("train +foo=1", "'+foo=1': the configuration is typed, so keys cannot be added or deleted; write foo"),
    ("train ++optim.lr=1", "write optim.lr=VALUE for a key that exists"),
    ("train ~optim", "'~optim': the configuration is typed"),
    ("train optim.lr=(", "optim.lr=(: cannot read the value"),
    ("train seed=1,2", "seed=1,2: train makes one run; for several values use rmsrepro sweep"),
    ("train study=a,b", "study=a,b: train makes one run"),
    # keys
    ("train nrom=rmsnorm", "nrom=rmsnorm: there is no key nrom; did you mean norm?"),
    ("train optim.lrr=1", "there is no key optim.lrr; did you mean optim.lr"),
    ("train model=gru model.num_heads=4", "there is no key model.num_heads with model=gru"),
    ("train data.path=folder", "there is no key data.path with data=pydoc"),
    ("train dry_run=true", "dry_run=true: dry_run belongs to rmsrepro sweep (rmsrepro train show=true shows"),
    ("train n_jobs=2", "n_jobs=2: n_jobs belongs to rmsrepro sweep"),
    ("train bench.processes=3", "there is no key bench.processes: how to time is a matter of rmsrepro bench"),
    ("status wach=true", "wach=true: status has no option wach; did you mean watch? (it has: watch, out_dir"),
    ("report stdy=smoke", "report has no option stdy; did you mean study?"),
    ("sample promt=x", "sample has no option promt; did you mean prompt?"),
    ("norms foo=1", "norms takes plugins=[module,...] and norm=NAME only"),
    # choices and values
    ("train norm=rmsnrom", "norm=rmsnrom: there is no such norm; did you mean rmsnorm, prmsnorm"),
    ("train norm=", "norm=: there is no such norm (norm is one of: "),
    ("train norm=null", "norm=null: there is no such norm; did you mean none?"),
    ("train tracker=null", "tracker=null: there is no such tracker; did you mean none?"),
    ("train model=gur", "model=gur: there is no such model; did you mean gru?"),
    ("train data=pydocs", "data=pydocs: there is no such data; did you mean pydoc?"),
    ("train task=translate", "task=translate: there is no such task; did you mean translation?"),
    ("train experiment=shakespear", "did you mean shakespeare_char?"),
    ("train placement=pos", "placement=pos: not a valid value; did you mean post?"),
    ("train model=gru sites=[gates_y]", "sites[0]=gates_y: not a valid value; did you mean gates_x"),
    ("train backend=trch", "backend=trch: not a valid value; did you mean torch?"),
    ("train precision=16", "precision=16: not supported (one of: 32, bf16-mixed)"),
    ("train optim.lr=abc", "optim.lr=abc: expected a number"),
    ("train optim.lr=", "optim.lr=: expected a number"),
    ("train optim.lr=${nokey}", "optim.lr: Interpolation key 'nokey' not found"),
    ("train trainer.max_steps=2.5", "trainer.max_steps=2.5: expected a whole number"),
    ("train trainer.max_steps=0", "trainer.max_steps=0: expected a whole number above zero"),
    ("train seed=-1", "seed=-1: expected a whole number from 0 to 2^63 - 1"),
    ("train rerun=maybe", "rerun=maybe: expected true or false"),
    ("train show=maybe", "show=maybe: expected true or false"),
    ("train out_dir=", "out_dir='': expected a folder"),
    ("train norm.name=rmsnorm", "write norm=rmsnorm"),
    # norms
    ("train norm=batchnorm", "norm=batchnorm: its statistics would see the tokens to come, which task=lm is"),
    ("train model=gru model.qk_norm=true", "there is no key model.qk_norm with model=gru"),
    ("train norm=prmsnorm norm.p=6.25", "norm.p is a fraction in (0, 1], got 6.25; did you mean 0.0625?"),
    ("train norm=prmsnorm norm.p=6.25 show=true", "norm.p is a fraction in (0, 1], got 6.25"),
    ("train norm=layernorm norm.p=.5", "norm.p=0.5: layernorm has no parameter p (it has: bias, eps, "),
    ("train norm=none norm.eps=1", "norm.eps=1.0: none has no parameter eps (it has: none)"),
    ("train norm.eps=-1", "norm.eps must be 0 or more, got -1"),
    ("train norm=prmsnorm backend=torch", "backend=torch cannot run prmsnorm: torch has no function for it"),
    ("train norm=nomodule:Norm", "norm=nomodule:Norm: the norm 'nomodule:Norm' cannot be imported"),
    ("train norm=torch.nn:Norm", "torch.nn has no 'Norm'"),
    ("train norm=os:sep", "must be a class derived from torch.nn.Module"),
    ("train plugins=[nomodule]", "plugins=[nomodule]: no module named 'nomodule'"),
    ("train plugins=nomodule", "plugins=nomodule: expected a list of modules, as in plugins=[mynorms]"),
    # rules between fields
    ("train model.d_model=15", "model.d_model=15: not divisible by model.num_heads=4; the nearest"),
    ("train model=gru placement=post", "placement=post: a GRU has no placement"),
    ("train data=cldr", "data=cldr does not fit task=lm"),
    ("train data.batch_tokens=8", "data.batch_tokens=8: too few for one row of data.max_len=64"),
    ("train model.d_model=4000000000000", "cannot be built at width 4000000000000"),
    # data
    (PARALLEL, "a value is missing: data.train_src, data.train_tgt; give it as data.train_src=VALUE"),
    (f"{PARALLEL} data.train_tgt=two.txt", "a value is missing: data.train_src; give it as"),
    (f"{PARALLEL} data.train_src=one.txt data.train_tgt=two.txt", "one.txt has 1 lines, two.txt has 2"),
    (f"{PARALLEL} data.train_src=one.tx data.train_tgt=two.txt", "no such file or folder; did you mean one"),
    (f"{PARALLEL} data.train_src=one.txt data.train_tgt=one.txt data.val_src=one.txt", "data.val_tgt"),
    (f"{PARALLEL} data.train_src=two.txt data.train_tgt=latin.txt", "latin.txt: not UTF-8: line 2"),
    ("train data=text_files data.train=latin.txt", "latin.txt: not UTF-8: line 2 has byte 0xe9"),
    ("train data=text_files data.train=nofile", "data.train=nofile: no such file or folder"),
    ("train data=text_files data.train=short.txt", "short.txt"),
    ("train data=text_files data.train=brief.txt", "tokens, but at least 65 are needed for one window"),
    ("train data=text_files data.train=folder", "folder"),
    ("train experiment=shakespeare_char data.path=nofolder", "data.path=nofolder: no such file or folder"),
    ("train experiment=shakespeare_char data.path=folder", "folder"),
    # checkpoints
    ("train ckpt=nofile", "ckpt=nofile: there is no such file"),
    ("train ckpt=text.ckt", "did you mean text.ckpt"),
    ("train ckpt=text.ckpt", "ckpt=text.ckpt: cannot be read as a checkpoint (it is not in the format"),
    ("train ckpt=other.ckpt", "ckpt=other.ckpt: not a checkpoint of rmsrepro"),
    ("train ckpt=folder", "ckpt=folder: this folder holds no checkpoints/last.ckpt"),
    ("eval", "eval needs ckpt=RUN, a run's folder or a .ckpt file"),
    ("eval ckpt=text.ckpt", "ckpt=text.ckpt: cannot be read as a checkpoint"),
    ("eval ckpt=other.ckpt split=foo", "split=foo: expected val, test or both"),
    ("eval ckpt=other.ckpt num_threads=0", "num_threads=0: expected a whole number above zero"),
    ("translate ckpt=other.ckpt", "ckpt=other.ckpt: not a checkpoint of rmsrepro"),
    ("translate ckpt=other.ckpt beam_size=big", "beam_size=big: expected a whole number"),
    ("translate ckpt=other.ckpt length_penalty=nan", "length_penalty=nan: expected a finite number"),
    ("sample", "sample needs ckpt=RUN"),
    ("sample ckpt=other.ckpt num_tokens=many", "num_tokens=many: expected a whole number"),
    ("sample ckpt=other.ckpt temperature=hot", "temperature=hot: expected a number"),
    ("sample ckpt=other.ckpt seed=-1", "seed=-1: expected a whole number from 0"),
    # sweeps and studies
    ("sweep study=foo", "study=foo: there is no such study (study is one of: "),
    ("sweep study=quik", "did you mean quick?"),
    ("sweep n_jobs=0", "n_jobs=0: expected a whole number above zero"),
    ("sweep launcher=job_lib", "launcher=job_lib: there is no such launcher; did you mean joblib?"),
    ("sweep on_error=halt", "on_error=halt: expected continue or stop"),
    ("sweep dry_run=perhaps", "dry_run=perhaps: expected true or false"),
    ("sweep norm=layernorm,rmsnrom", "norm=rmsnrom: there is no such norm; did you mean rmsnorm"),
    ("sweep norm=layernorm,rmsnorm norm.p=.5", "norm.p=0.5: layernorm and rmsnorm have no parameter p"),
    ("sweep norm=dyt,none,l2norm norm.p=.5", "dyt, none and l2norm have no parameter p"),
    ("sweep norm=layernorm,prmsnorm backend=torch", "backend=torch cannot run prmsnorm"),
    ("sweep model=gru,transformer model.num_heads=4", "there is no key model.num_heads with model=gru"),
    ("sweep seed=1,x", "seed=x: expected a whole number"),
    ("sweep seed=range(3,3)", "seed=range(3,3)"),
    ("sweep norm=layernorm data=text_files data.train=nofile", "data.train=nofile: no such file or folder"),
    ("sweep study=smoke optim.lr=1,2", "optim.lr=1,2: a study takes one value of it"),
    ("reproduce", "reproduce needs a study: rmsrepro reproduce study=smoke"),
    ("reproduce study=smoke dry_run=true", "(rmsrepro sweep study=smoke dry_run=true lists its runs)"),
    ("reproduce study=smoke norm=rmsnrom", "norm=rmsnrom: there is no such norm"),
    ("reproduce study=smoke bench.processes=1", "bench.processes=1: the interval is taken over processes"),
    ("reproduce study=smoke bench.procesess=4", "did you mean bench.processes"),
    # timing and pages
    ("bench norm=foo", "norm=foo: there is no such norm"),
    ("bench backend=foo", "backend=foo: not a valid value (one of: auto, composite, torch, compiled, fused)"),
    ("bench bench=foo", "bench=foo: there is no such bench (bench is one of: "),
    ("bench bench.processes=1", "bench.processes=1: the interval is taken over processes, so it needs"),
    ("bench bench.precision=5", "bench.precision=5.0: a fraction between 0 and 1 is needed"),
    ("bench norm=prmsnorm norm.p=6.25", "got 6.25; did you mean 0.0625?"),
    ("bench bench.norms=[rmsnorm]", "bench.norms=[rmsnorm]: the arms are named by norm, as in norm=layer"),
    ("bench bench.backends=[torch]", "bench.backends=[torch]: the arms are named by backend too, as in"),
    ("bench bench.cells=3", "bench.cells=3: it follows from the study"),
    ("reproduce study=smoke bench.norms=[rmsnorm]", "bench.norms=[rmsnorm]: the arms are named by norm"),
    ("bench dry_run=true", "dry_run=true: dry_run belongs to rmsrepro sweep"),
    ("bench seed=1,2", "bench times one setting at a time; only norm and backend take several values"),
    ("bench model.d_model=15", "model.d_model=15: not divisible by model.num_heads=4"),
    ("report out_dir=nofolder", "out_dir=nofolder: there is no such folder"),
    ("report study=foo", "study=foo: there is no such study"),
    ("report out_dir=folder every_s=0 watch=true", "every_s=0.0: expected seconds above zero"),
    ("norms norm=foo", "there is no norm 'foo'"),
]  # fmt: skip


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_command(cli: Run, line: str, message: str) -> None:
    before = tree()
    ran = cli(*line.split(" "))
    assert message in ran.error
    assert len(ran.error) < 1000
    assert tree() == before


def test_several_broken_rules_are_all_told(cli: Run) -> None:
    ran = cli("train", "model.d_model=15", "optim.lr=-1", "seed=-1")
    assert ran.code == 2
    assert [line.removeprefix("error: ").split("=")[0] for line in ran.err.splitlines()] == [
        "model.d_model", "optim.lr", "seed",
    ]  # fmt: skip


def test_values_with_spaces_are_told_as_typed(cli: Run) -> None:
    assert "'norm = rmsnorm': 'norm ' is not a key" in cli("train", "norm = rmsnorm").error
    assert "tracker.project=a=b: cannot read the value" in cli("train", "tracker.project=a=b").error


def test_keys_of_eval(cli: Run, language_model: Trained) -> None:
    ckpt = f"ckpt={language_model.path}"
    for text, message in (
        ("norm=layernorm", "was trained with norm=rmsnorm, and eval uses a model as it was trained"),
        ("data.max_len=8", "data.max_len=8: eval takes ckpt, split and keys of data and task"),
        ("data=cldr", "data=cldr: eval takes ckpt"),
        ("data.nokey=3", "data.nokey=3: there is no key data.nokey"),
        ("data.batch_token=3", "there is no key data.batch_token; did you mean batch_tokens"),
        ("data.batch_tokens=abc", "data.batch_tokens=abc: expected a whole number"),
        ("data.batch_tokens=0", "data.batch_tokens=0: expected a whole number above zero"),
        ("data.batch_tokens=64,128", "data.batch_tokens=64,128: eval takes one value"),
        ("task.beam_size=3", "there is no key task.beam_size"),
    ):
        assert message in cli("eval", ckpt, text).error


def test_models_of_the_other_task(cli: Run, language_model: Trained, translator: Trained) -> None:
    assert (
        "a model of task=lm does not translate; use rmsrepro sample"
        in cli("translate", f"ckpt={language_model.path}").error
    )
    assert (
        "a model of task=translation writes no free text; use rmsrepro translate"
        in cli("sample", f"ckpt={translator.checkpoint}").error
    )


def test_values_of_sample(cli: Run, language_model: Trained) -> None:
    ckpt = f"ckpt={language_model.path}"
    for text, message in (
        ("temperature=-1", "temperature=-1.0: expected 0"),
        ("temperature=nan", "temperature=nan: expected 0"),
        ("num_tokens=-1", "num_tokens=-1: expected 0 or more"),
        ("top_k=0", "top_k=0: expected 1 or more"),
        ("seed=99999999999999999999", "seed=99999999999999999999: expected a whole number"),
        ("prompt=你", "prompt='你': the model's vocabulary has nothing of it"),
    ):
        assert message in cli("sample", ckpt, text).error


def test_a_run_of_other_parts_is_not_continued(cli: Run, language_model: Trained) -> None:
    before = tree()
    message = cli(
        "train", f"ckpt={language_model.path}", "debug=fast", "norm=layernorm", "trainer.max_steps=9"
    ).error
    assert "it was trained with" in message
    assert tree() == before


def test_wrong_commands_as_a_program(program: Run) -> None:
    ran = program("train", "norm=rmsnrom")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: norm=rmsnrom: there is no such norm; did you mean rmsnorm, prmsnorm")
    assert f"(norm is one of: {', '.join(sorted(list_norms()))})" in ran.err
    assert ran.err.count("\n") == 1
    assert program("tran").code == 2
    assert tree() == set()


def on_a_terminal(width: int, *arguments: str, **variables: str | None) -> str:
    """What a wrong command says to a terminal of this width; its standard output goes elsewhere."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    done = subprocess.run(
        command(*arguments), stdout=subprocess.PIPE, stderr=writer, env=environment(variables), check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    os.close(writer)
    said = b""
    try:
        while more := os.read(reader, 4096):
            said += more
    except OSError:  # how Linux says that nobody writes any more
        pass
    os.close(reader)
    return said.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("width", "columns", "most"), [(60, None, 60), (200, "50", 50), (0, None, 80), (60, "wide", 80)]
)
def test_an_error_is_wrapped_on_a_terminal_alone(
    program: Run, width: int, columns: str | None, most: int
) -> None:
    whole = program("train", "norm=rmsnrom", env={"COLUMNS": columns}).err
    assert whole.count("\n") == 1
    wrapped = on_a_terminal(width, "train", "norm=rmsnrom", COLUMNS=columns)
    lines = wrapped.splitlines()
    assert most - 20 < max(map(len, lines)) <= most
    assert all(line.startswith("  ") for line in lines[1:])
    assert wrapped.split() == whole.split()


def test_a_path_is_not_broken_by_a_terminal() -> None:
    path = f"/{'/'.join(['folder'] * 20)}"
    assert f"out_dir={path}:" in on_a_terminal(60, "report", f"out_dir={path}", COLUMNS=None)
