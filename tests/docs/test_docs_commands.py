"""Every block of the README and of docs/ is run, in order, one page in one directory.

`bash` blocks: each `rmsrepro` command runs in this process, with these changes and no others:

* train: `debug=fast` and two updates; the generated corpora are short. The other processes of `trainer=ddp`
  know nothing of that: such a run is given a short text as a file.
* sweep: `dry_run=true`, so all jobs are composed and none is trained.
* bench, reproduce: everything but the training and the timing themselves. Both are done for real, on a tiny
  corpus, by the tests marked slow at the end.
* doctor: a trial of a fifth of a second.
* status, report: without `watch=true`, which never ends.
* RUN in `outputs/runs/RUN` is the newest run that fits the command, NAME in `outputs/converted/NAME` is the
  newest conversion.

`scripts/reproduce` is run as the `rmsrepro reproduce` that it stands for. `scripts/test` and `wandb` are
looked up. `python` blocks are executed, or written where their first line says. `yaml` blocks are written.
`text` blocks are shown only.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.cli import main
from rmsrepro.norms import registry

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WORDS = {
    "a red dog": "ein roter Hund",
    "the old house": "das alte Haus",
    "two green trees": "zwei grüne Bäume",
    "sees": "sieht",
    "and": "und",
    "near": "bei",
    "today": "heute",
}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, item.start()) + 2, item[1], item[2]) for item in found]


def commands_of(block: Block) -> list[list[str]]:
    """The commands of a shell block as words: comments gone, continued lines joined."""
    text = block.text.replace("\\\n", " ")
    return [words for line in text.split("\n") if (words := shlex.split(line, comments=True))]


# --------------------------------------------------------------------------------- what readers have


def write_corpora(folder: Path) -> None:
    """The files that the pages speak of: a parallel corpus, text, and local copies of public sets."""
    draw = random.Random(1)

    def pairs(count: int) -> list[tuple[str, str]]:
        chosen = [[draw.choice(list(WORDS)) for _ in range(draw.randint(1, 5))] for _ in range(count)]
        return [(" ".join(words), " ".join(WORDS[word] for word in words)) for words in chosen]

    corpus, captions, plays = (folder / name for name in ("corpus", "multi30k", "shakespeare"))
    for path in (corpus, captions, plays):
        path.mkdir()
    for split, name, count in (("train", "train", 120), ("dev", "validation", 12), ("test", "test", 12)):
        rows = pairs(count)
        for side, language in enumerate(("en", "de")):
            (corpus / f"{split}.{language}").write_text(
                "".join(f"{row[side]}\n" for row in rows), encoding="utf-8"
            )
        with gzip.open(captions / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"en": en, "de": de}) + "\n" for en, de in rows)
        (plays / f"{name}.txt").write_text(
            "".join(f"{en}\n" for en, _ in pairs(10 * count)), encoding="utf-8"
        )
    (folder / "book.txt").write_text("".join(f"{en}\n" for en, _ in pairs(400)), encoding="utf-8")
    (folder / "sentences.en").write_text("a red dog\n\nthe old house today\n", encoding="utf-8")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the readers' files, and this process as it was before once they are done."""
    import rmsrepro.data.fingerprint
    import rmsrepro.data.pydoc
    import rmsrepro.data.text

    write_corpora(tmp_path)
    monkeypatch.chdir(tmp_path)
    short = rmsrepro.data.pydoc.pydoc_text()[:12000]
    for module in (rmsrepro.data.pydoc, rmsrepro.data.text, rmsrepro.data.fingerprint):
        monkeypatch.setattr(module, "pydoc_text", lambda: short)
    known, modules, path = dict(registry._registered), set(sys.modules), list(sys.path)
    python_path = os.environ.get("PYTHONPATH")
    yield tmp_path
    registry._registered.clear()
    registry._registered.update(known)
    registry._import_strings.clear()
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.path[:] = path
    if python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = python_path


# -------------------------------------------------------------------------------- the commands, small


def with_values(words: list[str], **values: object) -> list[str]:
    """`words` with these keys set to these values (a dot in a key is written `__`)."""
    new = {key.replace("__", "."): value for key, value in values.items()}
    kept = [word for word in words if word.partition("=")[0] not in new]
    return [*kept, *(f"{key}={value}" for key, value in new.items())]


def filled_in(words: list[str]) -> list[str]:
    """Replace RUN by the newest run that fits the command, and NAME by the newest conversion."""
    converted = sorted(Path("outputs/converted").glob("*"), key=lambda folder: folder.stat().st_mtime)
    words = [
        word.replace("outputs/converted/NAME", str(converted[-1])) if "converted/NAME" in word else word
        for word in words
    ]
    given = [(word.partition("=")[0], word.partition("=")[2]) for word in words]
    wanted: dict[str, str] = {
        "sample": {"task": "lm"},
        "translate": {"task": "translation"},
        "convert": {"norm": "layernorm", "model": "transformer"},
        "train": {"task": "lm"} | {key: value for key, value in given if key in ("norm", "model", "task")},
    }.get(words[0], {})
    if not any("outputs/runs/RUN" in word for word in words):
        return words
    runs = sorted(Path("outputs/runs").glob("*/result.json"), key=lambda file: file.stat().st_mtime)
    fitting = [file.parent.name for file in runs if wanted.items() <= json.loads(file.read_text()).items()]
    return [word.replace("outputs/runs/RUN", f"outputs/runs/{fitting[-1]}") for word in words]


def shrunk(words: list[str]) -> list[str]:
    """The command of a page as it is run here; see the top of this module."""
    verb, values = words[0], [word for word in words[1:] if word != "watch=true"]
    words = filled_in([verb, *values])
    if verb == "train" and "show=true" not in words:
        steps = 4 if any(word.startswith("ckpt=") for word in words) else 2
        words = with_values(
            words, debug="fast", trainer__max_steps=steps, trainer__val_every=2, data__batch_tokens=1024
        )
        if "trainer=ddp" in words:
            words = with_values(words, data="text_files", data__train="book.txt")
        if "data=cldr" in words:
            words = with_values(words, data__num_train=100, data__num_val=10, data__num_test=10)
    if verb == "sweep":
        words = with_values(words, dry_run="true")
    if verb == "doctor":
        words = with_values(words, trial_s=0.2)
    if verb == "sample":
        words = with_values(words, num_tokens=20)
    return words


@pytest.fixture
def without_work(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Let sweeps and benches do all but their work; return what they were asked to do."""
    import rmsrepro.bench
    import rmsrepro.runs.sweep
    from rmsrepro.bench.arms import arrange_arms
    from rmsrepro.bench.runner import BenchResult
    from rmsrepro.config.bench import check_bench_config

    asked: list[tuple[str, Any]] = []

    def run_sweep(plan: Any, *rest: Any, **keywords: Any) -> Any:
        assert [job.error for job in plan.jobs if job.error] == []
        asked.append(("sweep", plan))
        return [replace(job, status="completed") for job in plan.jobs]

    def run_bench(config: Any, *, base: Any, norms: Any, **keywords: Any) -> BenchResult:
        check_bench_config(config)
        arms, _ = arrange_arms(norms)
        asked.append(("bench", (config, base, arms)))
        return BenchResult(Path("outputs/bench"), {"arms": [], "comparisons": []})

    monkeypatch.setattr(rmsrepro.runs.sweep, "run_sweep", run_sweep)
    monkeypatch.setattr(rmsrepro.bench, "run_bench", run_bench)
    return asked


def run_command(words: list[str]) -> None:
    """Run one command of a page; redirections of input and output are followed."""
    files = {sign: words[words.index(sign) + 1] for sign in ("<", ">") if sign in words}
    for sign, file in files.items():
        place = words.index(sign)
        assert words[place + 1] == file
        words = words[:place] + words[place + 2 :]
    program = words[0]
    if program == "scripts/reproduce":
        assert os.access(ROOT / program, os.X_OK)
        given = [] if any(word.startswith("study=") for word in words) else ["study=quick"]
        program, words = "rmsrepro", ["rmsrepro", "reproduce", *given, *words[1:]]
    if program == "scripts/test":
        assert os.access(ROOT / program, os.X_OK)
        return
    if program == "wandb":
        from wandb.cli import cli

        assert words[1] in cli.cli.commands
        assert all(word.startswith("outputs/wandb") for word in words[2:])
        return
    assert program == "rmsrepro", f"{program} cannot be run here: mark the block as text"
    given_input = io.TextIOWrapper(io.BytesIO(Path(files["<"]).read_bytes() if "<" in files else b""))
    output = io.StringIO()
    before, sys.stdin = sys.stdin, given_input
    try:
        with contextlib.redirect_stdout(output):
            code = main(shrunk(words[1:]))
    finally:
        sys.stdin = before
    assert code == 0, output.getvalue()
    if ">" in files:
        Path(files[">"]).write_text(output.getvalue(), encoding="utf-8")
        assert output.getvalue().count("\n") == Path(files["<"]).read_text(encoding="utf-8").count("\n")


def write_named(block: Block) -> bool:
    """Write a block whose first line is the name of a file; return whether it is one."""
    named = re.match(r"(?:# @package _global_\n)?# (\S+\.(?:py|yaml))\n", block.text)
    if named is None:
        return False
    file = Path(named[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(block.text, encoding="utf-8")
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page: Path, workplace: Path, without_work: list[Any]) -> None:
    for block in blocks_of(page):
        where = f"{page.name}:{block.line}"
        try:
            match block.language:
                case "bash":
                    for words in commands_of(block):
                        where = f"{page.name}:{block.line}: {shlex.join(words)}"
                        run_command(words)
                case "python":
                    if not write_named(block):
                        with contextlib.redirect_stdout(io.StringIO()):
                            exec(compile(block.text, where, "exec"), {"__name__": "__page__"})
                case "yaml":
                    assert write_named(block), "a yaml block begins with the name of its file"
                case _:
                    assert block.language == "text", "mark the block as bash, python, yaml or text"
        except BaseException as error:
            error.add_note(where)
            raise


def test_records_page_lists_the_keys_of_a_run(workplace: Path) -> None:
    text = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    section = text.split("### result.json of a run\n")[1].split("\n## ")[0]
    run_command(["rmsrepro", "train", "task=translation", "data=multi30k", "data.path=multi30k", "model=gru"])
    (folder,) = Path("outputs/runs").iterdir()
    record = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    told = {
        key
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }
    assert told == set(record)
    files = re.findall(r"^\| (`.*?) \|", text.split("## A run\n")[1].split("\n### ")[0], re.MULTILINE)
    named = {name for row in files for name in re.findall(r"`([^`]+)`", row)}
    there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert there <= named
    # So short a run has one checkpoint, and none that was put aside.
    ends = {"error.txt", "running.json", "lock.json", "deaths.json"}
    others = {f"checkpoints/{name}.ckpt" for name in ("previous", "damaged-*", "unused-*")}
    assert named - there == ends | others
    clocks = re.search(r"\| `clocks` \| `([^`]+)`", section)
    assert clocks is not None
    assert clocks[1].split() == list(record["clocks"])
    metrics = text.split("### metrics.jsonl\n")[1].split("\n### ")[0]
    told = {
        name
        for row in re.findall(r"^\| (`.*?) \|", metrics, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    bits = {"val_bits_per_byte", "test_bits_per_byte"}
    assert set(record["metrics"]) == (told - bits) | {"train_loss", "lr", "grad_norm"}
    data = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").split("## data.json\n")[1]
    mentioned = set(re.findall(r"`(\w+)`", page))
    assert set(data) <= mentioned
    assert set(data["splits"]["train"]) <= mentioned


def test_a_study_runs_on_the_readers_corpus(workplace: Path, without_work: list[tuple[str, Any]]) -> None:
    files = [f"data.train_{side}=corpus/train.{end}" for side, end in (("src", "en"), ("tgt", "de"))]
    assert main(["reproduce", "study=quick", "data=parallel_files", *files, "bench.budget_s=5"]) == 0
    (_, plan), *timings = without_work
    assert len(plan.jobs) == 2 * 4 * 3  # models, norms, seeds: translation alone
    assert {(job.config.task.name, job.config.data.name) for job in plan.jobs} == {
        ("translation", "parallel_files")
    }
    assert {job.config.data.vocab_size for job in plan.jobs} == {512}
    assert {job.config.study_name for job in plan.jobs} == {"quick_modified"}
    benches = [(config.name, base.model.name) for _, (config, base, _) in timings if config.name != "layer"]
    assert benches == [
        *(("model", "gru"), ("model", "transformer")),
        *(("step", "gru"), ("step", "transformer")),
    ]
    assert {config.budget_s for _, (config, _, _) in timings} == {5.0}


def test_a_study_on_other_data_loses_its_thresholds() -> None:
    from rmsrepro.config.errors import UserError
    from rmsrepro.config.overrides import split_override
    from rmsrepro.verbs.studies import load_study, restricted

    quick = load_study("quick")
    other, _ = restricted(quick, [split_override("data=wmt14")])
    assert (other.tasks, other.learned, other.target) == (["translation"], {}, {})
    assert (quick.verdict, other.verdict) == (True, False)
    assert other.margin == quick.margin
    assert other.task_overrides["translation"] == [
        text for text in quick.task_overrides["translation"] if not text.startswith(("data.num_",))
    ]
    same, _ = restricted(quick, [split_override("data=pydoc")])
    assert same.verdict
    assert same.learned == {cell: value for cell, value in quick.learned.items() if cell.endswith("/lm")}
    with pytest.raises(UserError, match=r"data=cldr: it fits none of the tasks of study=smoke \(lm\)"):
        restricted(load_study("smoke"), [split_override("data=cldr")])


# ------------------------------------------------------------------------------------ done for real


@pytest.mark.slow
def test_reproduce_on_the_readers_corpus_for_real(workplace: Path) -> None:
    files = [
        f"data.{split}_{side}=corpus/{name}.{language}"
        for split, name in (("train", "train"), ("val", "dev"))
        for side, language in (("src", "en"), ("tgt", "de"))
    ]
    small = [
        "norm=rmsnorm",
        "model=gru",
        "seed=1,2",
        "trainer.max_steps=3",
        "data.vocab_size=300",
        "tracker=none",
    ]
    timing = ["bench.processes=2", "bench.budget_s=2", "bench.rounds=2", "bench.warmup_s=0.1"]
    assert main(["reproduce", "study=quick", "data=parallel_files", *files, *small, *timing]) == 0
    page = Path("outputs/reports/quick_modified/index.html").read_text(encoding="utf-8")
    assert "RMSNorm" in page
    benches = {
        record["level"]: (record, file.parent)
        for file in Path("outputs/bench").glob("*/result.json")
        for record in [json.loads(file.read_text(encoding="utf-8"))]
    }
    assert set(benches) == {"layer", "model", "step"}
    text = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")

    def keys(head: str) -> set[str]:
        table = text.split(f"{head}\n", 1)[1].split("\n\n", 1)[0]
        rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        return {key for row in rows for key in re.findall(r"`(\w+)`", row)}

    facts = {
        "level",
        "cell",
        "mode",
        "model",
        "size",
        "task",
        "data",
        "placement",
        "shape",
        "dtype",
        "device",
        "threads",
    }
    for record, folder in benches.values():
        assert keys("### result.json of a timing") == set(record)
        for key in (*record["arms"][0], *record["comparisons"][0]):
            assert f"`{key}`" in text, key
        header = (folder / "samples.csv").read_text(encoding="utf-8").split("\n")[0].split(",")
        assert all(f"`{column}`" in text for column in header)
    step = benches["step"][0]
    assert keys("| Key of an arm | Meaning |") | facts == set(step["arms"][0])
    assert keys("| Key of a comparison | Meaning |") | facts == set(step["comparisons"][0])


@pytest.mark.slow
def test_wandb_writes_where_the_readme_says(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main([*shrunk(["train", "model=gru", "norm=rmsnorm"]), "tracker.name=wandb"]) == 0
    (run,) = Path("outputs/runs").iterdir()
    (mirror,) = Path().glob("outputs/wandb/offline-run-*")
    assert mirror.name.endswith(run.name)
