"""Any key and any value: the config is shown, or one message tells why not. Never a traceback."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rmsrepro.cli import main

KEYS = [
    "norm", "norm.eps", "norm.p", "norm.gain", "norm.variant", "norm.name", "model", "model.size",
    "model.d_model", "model.num_heads", "model.dropout", "model.name", "task", "task.beam_size",
    "data", "data.max_len", "data.path", "data.train", "data.batch_tokens", "optim", "optim.lr",
    "optim.betas", "optim.schedule", "trainer", "trainer.max_steps", "trainer.val_every", "tracker",
    "tracker.mode", "tracker.project", "placement", "sites", "backend", "precision", "seed",
    "out_dir", "plugins", "study", "study_name", "experiment", "debug", "ckpt", "rerun", "show",
    "hydra.run.dir", "hydra/launcher", "norm@model", "x", "norm.x.y",
]  # fmt: skip
VALUES = [
    "", "null", "none", "true", "0", "-1", "1", "16", "1e3", "1e-6", ".5", "6.25", "inf", "nan",
    "99999999999999999999", "rmsnorm", "layernorm", "prmsnorm", "gru", "transformer", "lm",
    "translation", "cldr", "pydoc", "fast", "post", "pre", "torch", "composite", "tiny",
    "[gates_x]", "[]", "[1,2]", "{a:1}", "a,b", "a b", "'a b'", '"a"', "'", "(", "[", "${seed}",
    "${x}", "${oc.env:HOME}", "${", "\\${x}", "???", "pkg.mod:Class", "os:path", "a=b", "~", "é",
    "日本", "range(1,3)", "choice(a,b)", "../x", "/", "*", "\n", "\t", "\\", "\'", "🙂", "x" * 300,
]  # fmt: skip

keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=12))
values = st.one_of(
    st.sampled_from(VALUES),
    st.text(max_size=20),
    st.integers().map(str),
    st.floats().map(str),
    st.lists(st.sampled_from(VALUES), max_size=3).map(lambda items: f"[{','.join(items)}]"),
)
overrides = st.builds(
    lambda key, equals, value: f"{key}{equals}{value}",
    keys,
    st.sampled_from(["=", "=", "=", "=", "=", " = ", ""]),
    values,
)


def outcome(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def check(*arguments: str) -> None:
    if any(item in ("-h", "--help") for item in arguments):
        return
    code, out, err = outcome(*arguments)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in out + err
    if code == 0:
        assert out.startswith("# ")
        assert errors == []
    else:
        assert code == 2
        assert len(errors) == 1
        assert errors[0] != "error: "
        assert out == ""
    assert list(Path().iterdir()) == []


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=30, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(overrides)
@example("norm=prmsnorm")
@example("optim.lr=${x}")
@example("out_dir=${")
@example("plugins=a,b")
@example("norm=torch.nn:LayerNorm")
@example("norm=os.path:join")
@example("model.d_model=99999999999999999999")
@example("plugins=['']")
@example("seed=\n")
@example("sites=[[]]")
def test_one_override(text: str) -> None:
    check("train", text, "show=true")


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=QUIET)
@given(st.lists(overrides, max_size=4))
def test_several_overrides(texts: list[str]) -> None:
    check("train", *texts, "show=true")


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
@given(
    st.sampled_from(
        ["sweep", "eval", "translate", "sample", "report", "status", "norms", "reproduce", "bench"]
    ),
    st.lists(overrides, min_size=1, max_size=3),
)
def test_the_other_verbs(verb: str, texts: list[str]) -> None:
    # One option that is always wrong, so that nothing ever starts.
    code, out, err = outcome(verb, *texts, "dry_run=true" if verb == "sweep" else "no_such_key=1")
    assert "Traceback" not in out + err
    assert code in ((0, 2) if verb == "sweep" else (2,))
    assert list(Path().iterdir()) == []
