"""Wild command lines: what they are made of, a place to run them in, and what must hold of each."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from rmsrepro.cli import HELP, main
from rmsrepro.config import schema
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.overrides import split_override, unquote
from rmsrepro.config.tuning import TuningConfig
from rmsrepro.verbs.cards import CheckNormVerb
from rmsrepro.verbs.converting import ConvertVerb
from rmsrepro.verbs.doctor import DoctorVerb
from rmsrepro.verbs.inspecting import InspectVerb
from rmsrepro.verbs.kernels import BuildKernelsVerb
from rmsrepro.verbs.reporting import ReportVerb
from rmsrepro.verbs.training import SweepVerb
from rmsrepro.verbs.using import EvalVerb, SampleVerb, TranslateVerb
from rmsrepro.verbs.watching import StatusVerb

EXAMPLES = int(os.environ.get("RMSREPRO_FUZZ", "0"))
"""How many examples each of these tests takes; 0: the few of an ordinary run."""
MEMORY = 4 << 30
"""So much more address space than at the beginning may a wild width take."""


def _fields(prefix: str, *kinds: type) -> list[str]:
    return [f"{prefix}{item.name}" for kind in kinds for item in dataclasses.fields(kind)]


_PARTS = {
    "model.": (schema.TransformerConfig, schema.GRUConfig),
    "task.": (schema.TaskConfig, schema.TranslationConfig),
    "data.": (
        schema.PydocConfig, schema.CldrConfig, schema.TextFilesConfig, schema.ParallelFilesConfig,
        schema.Multi30kConfig, schema.Wmt14Config, schema.TinyShakespeareConfig,
    ),
    "optim.": (schema.OptimConfig,),
    "trainer.": (schema.TrainerConfig,),
    "tracker.": (schema.TrackerConfig,),
    "bench.": (BenchConfig,),
}  # fmt: skip
_OWN = (
    SweepVerb, StatusVerb, ReportVerb, EvalVerb, TranslateVerb, SampleVerb, ConvertVerb, CheckNormVerb,
    InspectVerb, DoctorVerb, BuildKernelsVerb,
)  # fmt: skip
NORM_KEYS = [
    f"norm.{name}" for name in ("eps", "eps_position", "p", "k_rule", "gain", "bias", "variant", "casting")
]
TYPED = sorted({
    *(key for prefix, kinds in _PARTS.items() for key in _fields(prefix, *kinds)),
    *_fields("", schema.TrainConfig, *_OWN), *NORM_KEYS,
})  # fmt: skip
"""Every key that the configuration or a verb has."""
STRANGE = [
    "", "x", "norm.x", "norm.eps.x", "model.", ".model", "mo del", "hydra.run.dir", "hydra/launcher",
    "norm@model", "hydra.sweep.dir", "--out_dir", "-x", "é", "日本", "=", "==", "~norm", "+x", "++optim.lr",
    "+norm", "@", ",", "[]", "{}", "${seed}", "data/train", "schema", "_self_", "defaults", "plugins[0]",
    "optim.betas[0]", "optim.betas.0", "study_name", "_target_", "a" * 400, "norm.name", "model.name", "show",
    "study", "debug", "bench",
]  # fmt: skip
VALUES = [
    "", "null", "None", "none", "true", "false", "yes", "0", "-0", "-1", "1", "2", "16", "1e3", "1e-6", ".5",
    "6.25", "inf", "-inf", "nan", "1e400", "-1e-400", "99999999999999999999", "9223372036854775808",
    "9223372036854775807", "-9223372036854775808", "1_000", "0x10", "0b1", "1,2", "1.5", "rmsnorm",
    "layernorm", "prmsnorm", "batchnorm", "weightnorm", "rmsnorm,layernorm", "gru", "transformer", "lm",
    "translation", "cldr", "pydoc", "text_files", "parallel_files", "multi30k", "fast", "post", "pre",
    "sandwich", "torch", "composite", "fused", "compiled", "auto", "tiny", "small", "paper", "smoke", "quick",
    "joblib", "basic", "stop", "char", "bpe", "cosine", "swiglu", "rotary", "bf16-mixed", "16", "gpu", "cuda",
    "[gates_x]", "[]", "[[]]", "[1,2]", "[a,[b]]", "{a:1}", "{}", "{a:{b:c}}", "a,b", "a b", "'a b'", '"a"',
    "'", '"', "(", ")", "[", "]", "{", "${seed}", "${x}", "${oc.env:HOME}", "${oc.env:NO_SUCH}", "${", "$",
    "\\${x}", "\\\\${x}", "${now:%s}", "${oc.decode:x}", "${model}", "${.}", "${..lr}", "???", "'???'",
    "pkg.mod:Class", "os:path", "torch.nn:LayerNorm", "torch.nn:ReLU", ":", "a:", ":b", "a:b:c", "a=b", "~",
    "~/x", "~nobody/x", "+", "@", "%", "#", ";", "&&", "|", "é", "日本", "🙂", "\u2028", "\u202e", "\x00",
    "a\x00b", "\x1b[31m", "\udcff", "range(1,3)", "range(1,1)", "range(3)", "range(0,1,0)", "choice(a,b)",
    "choice()", "shuffle(1,2)", "sort(2,1)", "interval(0,1)", "glob(*)", "tag(a,b)", "int(x)", "float(1)",
    "json_str('x')", "../x", "./a/../b", "out", "a file", "a file/x", "model.ckpt", "text.txt", "LM", "MT",
    ".", "..", "*", "\n", "\t", "\r", " ", "a\nb", "\\", "\\'", "\\,", "x" * 300, "x/" * 200, "x" * 5000,
    "[" * 200, "9" * 5000, "-" * 50, "1" + "0" * 400,
]  # fmt: skip

keys = st.one_of(
    st.sampled_from(TYPED), st.sampled_from(TYPED), st.sampled_from(TYPED), st.sampled_from(STRANGE),
    st.sampled_from(["norm", "model", "task", "data"]), st.text(max_size=12),
)  # fmt: skip
values = st.one_of(
    st.sampled_from(VALUES),
    st.sampled_from(VALUES),
    st.text(max_size=20),
    st.text(alphabet="[]{}()'\"\\,:=${}.~+@ ab1-", max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.lists(st.sampled_from(VALUES), max_size=3).map(lambda items: f"[{','.join(items)}]"),
    st.lists(st.sampled_from(VALUES), max_size=3).map(",".join),
)
overrides = st.builds(
    lambda key, equals, value: f"{key}{equals}{value}",
    keys,
    st.sampled_from(["=", "=", "=", "=", "=", "=", " = ", ""]),
    values,
)

verbs = st.sampled_from(sorted(HELP))


def _of(*kinds: type) -> list[str]:
    return _fields("", *kinds)


_RUN = [key for key in TYPED if not key.startswith("bench.")]
_DATA = [key for key in TYPED if key.startswith(("data.", "task."))]
_TUNING = _fields("tuning.", TuningConfig)
_NORM = ["norm", "backend", "plugins", "out_dir", *NORM_KEYS]
BASES: dict[str, tuple[list[str], list[str]]] = {
    "train": (["debug=fast", "model.d_model=16"], _RUN),
    "eval": (["ckpt=LM"], [*_of(EvalVerb), *_DATA, "out_dir", "norm", "norm.eps"]),
    "translate": (["ckpt=MT"], [*_of(TranslateVerb), "norm", "out_dir"]),
    "sample": (["ckpt=LM", "num_tokens=3"], [*_of(SampleVerb), "norm", "sites"]),
    "convert": (["ckpt=LM"], [*_of(ConvertVerb), "norm"]),
    "sweep": (["debug=fast", "model.d_model=16", "seed=1,2"], [*_of(SweepVerb), *_RUN, "study", *_TUNING]),
    "sweep tuned": (
        ["debug=fast", "model.d_model=16", "norm=layernorm,rmsnorm", "tune=true", "tuning.points=2"],
        [*_TUNING, *_TUNING, *_of(SweepVerb), *_fields("optim.", schema.OptimConfig), "seed", "study"],
    ),
    "status": ([], _of(StatusVerb)),
    "bench": (
        ["debug=fast", "model.d_model=16"],
        [key for key in TYPED if key not in ("dry_run", "launcher")],
    ),
    "reproduce": (["study=smoke"], [*TYPED, "study"]),
    "report": ([], _of(ReportVerb)),
    "norms": ([], ["norm", "plugins", *NORM_KEYS]),
    "check-norm": (["norm=rmsnorm"], [*_of(CheckNormVerb), *_NORM]),
    "inspect": (["target=torch.nn:Identity"], [*_of(InspectVerb), *_NORM]),
    "doctor": ([], _of(DoctorVerb)),
    "build-kernels": ([], _of(BuildKernelsVerb)),
}
"""Of each verb, the first word, a command that is right, and the keys that it takes."""


@st.composite
def commands(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A right command with a few wild values of keys that it takes, sometimes among others."""
    name = draw(st.sampled_from(sorted(BASES)))
    base, known = BASES[name]
    wild = st.builds(lambda key, value: f"{key}={value}", st.sampled_from(known), values)
    added = draw(
        st.lists(
            st.one_of(wild, wild, wild, overrides), min_size=1, max_size=draw(st.sampled_from([1, 1, 2, 3]))
        )
    )
    return name.partition(" ")[0], [*base, *added]


def outcome(*arguments: str) -> tuple[int, str, str]:
    """Run a command on streams that encode as those of a terminal do; return code and both texts."""
    out, err = io.BytesIO(), io.BytesIO()
    kept = sys.stdout, sys.stderr, sys.stdin
    own = (
        io.TextIOWrapper(out, encoding="utf-8"),
        io.TextIOWrapper(err, encoding="utf-8", errors="backslashreplace"),
        io.TextIOWrapper(io.BytesIO(b"one\ntwo\n"), encoding="utf-8"),
    )
    sys.stdout, sys.stderr, sys.stdin = own
    try:
        code = main(arguments)
        own[0].flush()
        own[1].flush()
    finally:
        sys.stdout, sys.stderr, sys.stdin = kept
    return code, out.getvalue().decode(), err.getvalue().decode()


_WRITING = ("train", "sweep", "reproduce", "report", "inspect", "check-norm", "convert", "eval")


class Place:
    """A folder to run wild commands in, two levels below the folder that is watched."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.started: list[str] = []
        self._named: dict[str, str] = {}
        self.cwd = top / "a" / "work"
        self.cwd.mkdir(parents=True)
        (self.cwd / "a file").write_text("text\n")
        (self.cwd / "text.txt").write_text("the cat sat on the mat and the dog ran\n" * 300)
        (self.cwd / "model.ckpt").write_bytes(b"PK\x03\x04 no checkpoint")
        self.before = self.look()

    def look(self) -> dict[str, int]:
        return {str(item.relative_to(self.top)): item.lstat().st_mtime_ns for item in self.top.rglob("*")}

    def restore(self) -> None:
        """Remove what a command has written."""
        for name in sorted(set(self.look()) - set(self.before), reverse=True):
            path = self.top / name
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        self.started.clear()

    def trained(self, name: str, folder: Path) -> None:
        """Let `ckpt=NAME` stand for a trained model."""
        self._named[f"ckpt={name}"] = f"ckpt={folder}"

    def check(self, verb: str, texts: list[str]) -> int:
        """Run a command; assert what must hold of any. Return its exit code."""
        texts = [self._named.get(text) or self._inside(text) for text in texts]
        path, home = list(sys.path), os.getcwd()
        os.chdir(self.cwd)
        try:
            with limited_memory():
                code, out, err = outcome(verb, *texts)
        finally:
            os.chdir(home)
            sys.path[:] = path
        try:
            self._judge(verb, texts, code, out, err)
        finally:
            self.restore()
        return code

    def _inside(self, text: str) -> str:
        """Keep folders of the machine out of it: an absolute path begins in this place."""
        key, equals, value = text.partition("=")
        bare = value.lstrip(" \"'[")
        return f"{key}{equals}{self.top}{bare}" if bare.startswith("/") else text

    def _judge(self, verb: str, texts: list[str], code: int, out: str, err: str) -> None:
        assert "Traceback" not in out + err
        assert code in (0, 1, 2, 130, 143), code
        after = self.look()
        new = sorted(set(after) - set(self.before))
        changed = [name for name, mark in self.before.items() if after.get(name) != mark and "." in name]
        assert changed == [], changed
        messages = [line for line in err.splitlines() if line.startswith("error: ")]
        if code == 2:
            assert len(messages) == 1, err
            assert messages[0].removeprefix("error: ").strip(), err
            assert self.started == []
            assert new == [], new
            assert out == "" or verb in ("sweep", "reproduce", "norms"), out
        elif new:
            assert verb in (
                "train",
                "sweep",
                "reproduce",
                "report",
                "inspect",
                "check-norm",
                "convert",
                "eval",
            ), new
            assert self._within_out_dir(texts, new), (texts, new)
        assert not [name for name in new if name.endswith((".tmp", "lock.json"))]

    def _within_out_dir(self, texts: list[str], new: list[str]) -> bool:
        """Whether all new files and folders are in the folder for them, or lead to it."""
        given = [text for text in texts if text.startswith("out_dir=")]
        value = unquote(split_override(given[-1]).value) if given else "outputs"
        out_dir = (self.cwd / os.path.expanduser(value)).resolve()
        paths = [(self.top / name).resolve() for name in new]
        return all(path.is_relative_to(out_dir) or out_dir.is_relative_to(path) for path in paths)


def stand_ins(patch: pytest.MonkeyPatch, place: Place) -> None:
    """Put something cheap in place of the work: what runs, measures, compiles or sleeps."""
    import rmsrepro.bench
    import rmsrepro.bench.doctor
    import rmsrepro.norms.backends.fused.building
    import rmsrepro.norms.card
    import rmsrepro.runs.sweep
    import rmsrepro.runs.train
    import rmsrepro.tasks.sampling
    import rmsrepro.tasks.translation
    from rmsrepro.bench.runner import BenchResult
    from rmsrepro.runs.files import write_atomic
    from rmsrepro.runs.result import RunResult

    def execute(run: Any) -> RunResult:
        place.started.append(run.identity.run_id)
        write_atomic(run.folder / "result.json", "{}")
        return RunResult(run.identity.run_id, run.folder, "completed")

    def run_sweep(plan: Any, *rest: Any, **keywords: Any) -> Any:
        place.started += [job.run_id for job in plan.jobs]
        return [dataclasses.replace(job, status="completed") for job in plan.jobs]

    def run_bench(config: Any, *, base: Any, norms: Any, **keywords: Any) -> BenchResult:
        from rmsrepro.bench.arms import arrange_arms
        from rmsrepro.config.bench import check_bench_config

        check_bench_config(config)
        arrange_arms(norms)
        place.started.append("bench")
        return BenchResult(Path("outputs/bench"), {"arms": [], "comparisons": []})

    def make_card(subject: Any, *rest: Any) -> Any:
        place.started.append("card")
        raise KeyboardInterrupt

    def stop(*rest: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    class Reader(rmsrepro.tasks.sampling._Reader):
        def feed(self, token: Any) -> Any:
            self.fed = getattr(self, "fed", 0) + 1
            return super().feed(token) if self.fed < 20 else stop()

    patch.setattr(rmsrepro.tasks.sampling, "_Reader", Reader)
    patch.setattr(rmsrepro.tasks.translation, "beam_search", stop)
    patch.setattr(rmsrepro.tasks, "evaluate", stop)
    patch.setattr(rmsrepro.runs.train.Run, "execute", execute)
    patch.setattr(rmsrepro.runs.sweep, "run_sweep", run_sweep)
    patch.setattr(rmsrepro.bench, "run_bench", run_bench)
    patch.setattr(rmsrepro.norms.card, "make_card", make_card)
    patch.setattr(rmsrepro.bench.doctor, "trial", stop)
    patch.setattr(rmsrepro.norms.backends.fused.building, "build", stop)
    patch.setattr("rmsrepro.verbs.watching.time.sleep", stop)
    patch.setattr("rmsrepro.data.tables._hub_reachable", lambda: False)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let what asks for absurd amounts of memory be refused at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


Check = Callable[[str, list[str]], int]
