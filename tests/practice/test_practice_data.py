"""Faults of reading text, met in practice: B41, B42, B43."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import (
    DataConfig,
    Multi30kConfig,
    ParallelFilesConfig,
    TextFilesConfig,
    Tokenizer,
    Wmt14Config,
)
from rmsrepro.data import build_data
from rmsrepro.data.parallel import load_parallel
from tests.cli.running import LM, Ran, Trained, records
from tests.cli.test_cli_use import Stdin

Run = Callable[..., Ran]
SPLITS = ("train", "val", "test")
ODD = [
    ("a\u2028b", "1"),
    ("c\x0bd", "2"),
    ("e\x85f", "3"),
    ("g\x0ch", "4"),
    ("i\u2029j", "5"),
    ("k\x1cl", "6"),
]
KINDS = ("plain", "gzip", "jsonl", "jsonl.gz", "parquet", "nested")


def write(folder: Path, kind: str, rows: list[tuple[str, str]]) -> DataConfig:
    """Write the pairs as all three splits of a set of this kind of files; return its config."""
    if kind in ("plain", "gzip"):
        paths = {}
        for number, side in enumerate(("src", "tgt")):
            raw = "".join(row[number] + "\n" for row in rows).encode()
            path = folder / f"text.{side}"
            path.write_bytes(gzip.compress(raw) if kind == "gzip" else raw)
            paths |= {f"{split}_{side}": str(path) for split in SPLITS}
        return ParallelFilesConfig(**paths)
    table: list[dict[str, Any]] = [{"en": source, "de": target} for source, target in rows]
    if kind == "nested":
        table = [{"translation": row} for row in table]
    for split in SPLITS:
        if kind == "parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(table), folder / f"{split}.parquet")
            continue
        raw = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table).encode()
        packed = kind == "jsonl.gz"
        (folder / f"{split}.jsonl{'.gz' * packed}").write_bytes(gzip.compress(raw) if packed else raw)
    return (Wmt14Config if kind == "nested" else Multi30kConfig)(path=str(folder))


# -------------------------------------------------------------------------------- lines that belong


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_stay_pairs_in_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    """B41: a reader that splits at every Unicode line break makes more lines of one side."""
    corpus = load_parallel(write(tmp_path, kind, ODD), tmp_path / "cache")
    assert {split: corpus.splits[split] for split in SPLITS} == dict.fromkeys(SPLITS, ODD)
    assert corpus.num_blank == dict.fromkeys(SPLITS, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_blank_side_takes_its_partner_along(tmp_path: Path, kind: str) -> None:
    """B41: blank lines that are removed from one side only let all that follows slide."""
    rows = [("one", "eins"), ("", "zwei"), ("three", " \t"), ("\u3000\u2028", "vier"), ("five", "fünf")]
    corpus = load_parallel(write(tmp_path, kind, rows), tmp_path / "cache")
    assert corpus.splits["train"] == corpus.splits["test"] == [rows[0], rows[4]]
    assert corpus.num_blank == dict.fromkeys(SPLITS, 3)
    assert corpus.num_read == dict.fromkeys(SPLITS, 5)


@pytest.mark.parametrize("split", SPLITS)
def test_unequal_files_of_any_split(tmp_path: Path, split: str) -> None:
    """B41: ten lines against nine are refused with both numbers and both names, in each split."""
    config = write(tmp_path, "plain", [("a", "b")] * 10)
    for side, count in (("src", 10), ("tgt", 9)):
        (tmp_path / f"other.{side}").write_text("line\n" * count)
        setattr(config, f"{split}_{side}", str(tmp_path / f"other.{side}"))
    with pytest.raises(UserError, match=r"other\.src has 10 lines, .*other\.tgt has 9"):
        load_parallel(config, tmp_path)


def test_translations_are_lines_as_well(
    cli: Run, translator: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B41: what is written must not have more lines than what was read, whatever a model writes."""
    monkeypatch.setattr("rmsrepro.tasks.translate_texts", lambda *_, **__: ["a\nb", "c\rd", "e\r\nf"])
    monkeypatch.setattr("sys.stdin", Stdin(b"one\ntwo\nthree\n"))
    ran = cli("translate", f"ckpt={translator.path}")
    assert ran.out == "a b\nc d\ne  f\n"


# ---------------------------------------------------------------------------------------- encodings

LINES = "".join(f"Zeile {number} sagt über {word}\n" for number in range(60) for word in ("Äpfel", "Öl"))


def encoded(text: str) -> dict[str, bytes]:
    return {
        "plain": text.encode(),
        "bom": text.encode("utf-8-sig"),
        "crlf": text.replace("\n", "\r\n").encode(),
        "both": text.replace("\n", "\r\n").encode("utf-8-sig"),
        "gzip": gzip.compress(text.encode("utf-8-sig")),
    }


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_a_corpus_trains_alike_however_it_is_stored(cli: Run, task: str) -> None:
    """B42: a mark or a carriage return in the vocabulary shows as another loss; Latin-1 as a bare error."""
    source = "".join(f"line {number} says of {word}\n" for number in range(60) for word in ("apples", "oil"))
    found = []
    for name, raw in encoded(LINES).items():
        Path(name).mkdir()
        Path(name, "a.de").write_bytes(raw)
        Path(name, "a.en").write_bytes(encoded(source)[name])
        ran = cli(*arguments(task, name), f"out_dir={name}/outputs")
        assert ran.code == 0, ran.out + ran.err
        [(run_id, record)] = records(f"{name}/outputs").items()
        data = json.loads(Path(name, "outputs/runs", run_id, "data.json").read_text())
        found.append((run_id, record["metrics"], data["tokenizer"], data["fingerprint"], data["splits"]))
    assert all(one == found[0] for one in found[1:])
    Path("latin").mkdir()
    Path("latin/a.de").write_bytes(LINES.encode("latin-1"))
    Path("latin/a.en").write_text(source)
    error = cli(*arguments(task, "latin"), "out_dir=latin/outputs").error
    assert "latin/a.de: not UTF-8: line 1 has byte 0xfc at byte 13" in error
    assert not Path("latin/outputs").exists()


def arguments(task: str, folder: str) -> list[str]:
    if task == "lm":
        return ["train", *LM, "data=text_files", f"data.train={folder}/a.de", "norm=rmsnorm"]
    return [
        "train", "debug=fast", "model.d_model=16", "norm=rmsnorm", "task=translation", "data=parallel_files",
        f"data.train_src={folder}/a.en", f"data.train_tgt={folder}/a.de", "data.vocab_size=300",
        "task.max_decode_len=6",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "form", ["both", *(pytest.param(one, marks=pytest.mark.slow) for one in ("crlf", "bom"))]
)
def test_files_of_the_users_own_in_any_form(cli: Run, form: str) -> None:
    """B42: configuration, study and plug-in, as an editor of another system writes them."""
    files = {
        "conf/norm/soft.yaml": "name: rmsnorm\neps: 1e-4\n",
        "conf/study/small.yaml": (
            "name: small_one\ntitle: A study\nnorms: [layernorm, rmsnorm]\nmodels: [gru]\ntasks: [lm]\n"
            "seeds: [1]\nverdict: false\noverrides: [debug=fast, model.d_model=16]\n"
        ),
        f"practice_forms_{form}.py": (
            "import torch\nfrom torch import nn\n\n\nclass Scaled(nn.Module):\n"
            "    def __init__(self, dim: int) -> None:\n        super().__init__()\n"
            "        self.weight = nn.Parameter(torch.ones(dim))\n\n"
            "    def forward(self, x):\n        return x * self.weight\n"
        ),
    }
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(encoded(text)[form])
    shown = cli("train", "show=true", "norm=soft")
    assert shown.code == 0, shown.err
    assert "  eps: 0.0001\n" in shown.out
    assert "2 runs: 0 done already, 2 to do" in cli("sweep", "study=small", "dry_run=true").out
    assert cli("train", *LM, "trainer.max_steps=1", f"norm=practice_forms_{form}:Scaled").code == 0


def test_a_mark_belongs_to_the_first_line_only(tmp_path: Path) -> None:
    """B42: U+FEFF within a text is a character of it, not a mark."""
    config = write(tmp_path, "plain", [("\ufeffone", "eins"), ("\ufefftwo", "zwei")])
    assert (tmp_path / "text.src").read_bytes().startswith(codecs.BOM_UTF8)
    assert load_parallel(config, tmp_path).splits["train"] == [("one", "eins"), ("\ufefftwo", "zwei")]


# ------------------------------------------------------------------------------------ long sentences


@pytest.mark.parametrize("tokenizer", [Tokenizer.char, Tokenizer.byte])
@pytest.mark.parametrize("kind", ["plain", "jsonl", "nested"])
def test_lengths_are_ruled_alike_in_every_set(tmp_path: Path, kind: str, tokenizer: Tokenizer) -> None:
    """B43: 16 tokens with their marks are kept; longer pairs are dropped, or cut, and counted."""
    fits, longer = ("s" * 15, "t" * 14), [("s" * 17, "t"), ("s", "t" * 17), ("s" * 5000, "t" * 5000)]
    config = write(tmp_path, kind, [fits, *longer])
    config.tokenizer, config.max_len, config.batch_tokens = tokenizer, 16, 64
    data: Any = build_data(config, "translation", seed=1, accumulate=1, cache_dir=tmp_path / "cache")
    splits = data.summary()["splits"]
    assert splits["train"]["pairs"] == 1
    assert splits["train"]["dropped"] == {"blank": 0, "too_long": 3}
    for split in ("val", "test"):
        assert (splits[split]["pairs"], splits[split]["cut"]) == (4, 3)
        assert splits[split]["dropped"] == {"blank": 0, "too_long": 0}
    assert data.test_texts == [fits, *longer]
    assert max(batch.src.shape[1] for batch in data.test_dataloader()) == 16


def test_a_text_has_no_sentences_to_drop(tmp_path: Path) -> None:
    """B43: language modelling reads windows: one line of 5000 tokens is all there, in every split."""
    (tmp_path / "text.txt").write_text("ab" * 2500)
    config = TextFilesConfig(train=str(tmp_path / "text.txt"), max_len=16, batch_tokens=64)
    data: Any = build_data(config, "lm", seed=1, accumulate=1, cache_dir=tmp_path / "cache")
    assert [len(data.tokens[split]) for split in SPLITS] == [4500, 250, 250]
    assert sum(batch.num_tokens for batch in data.test_dataloader()) == 249


@pytest.mark.parametrize("kind", ["gru", "transformer"])
def test_a_run_with_sentences_of_any_length(cli: Run, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """B43: from training to translating, nothing crashes at a long sentence, none is lost from the score."""
    fits = [("one two", "eins zwei"), ("three", "drei")] * 6
    rows = [*fits, ("ab " * 6, "cd " * 6), ("one " * 1250, "eins " * 1250)]
    for split in SPLITS:
        for number, side in enumerate(("src", "tgt")):
            Path(f"{split}.{side}").write_text("".join(row[number] + "\n" for row in rows))
    files = [f"data.{split}_{side}={split}.{side}" for split in SPLITS for side in ("src", "tgt")]
    ran = cli(
        "train", "debug=fast", f"model={kind}", "model.d_model=16", "norm=rmsnorm", "task=translation",
        "data=parallel_files", *files, "data.tokenizer=char", "data.max_len=16", "data.batch_tokens=64",
    )  # fmt: skip
    assert ran.code == 0, ran.out
    [(run_id, record)] = records().items()
    folder = Path("outputs/runs", run_id)
    splits = json.loads((folder / "data.json").read_text())["splits"]
    assert splits["train"]["dropped"]["too_long"] == 2
    assert (splits["test"]["pairs"], splits["test"]["cut"]) == (14, 2)
    assert (folder / "hypotheses_test.txt").read_text().count("\n") == 14
    assert "test_sentences" not in record["metric_notes"], "all were scored"
    assert cli("eval", f"ckpt={folder}").code == 0
    monkeypatch.setattr("sys.stdin", Stdin(("three\n" + "s" * 15 + "\n" + "one " * 1250 + "\n").encode()))
    ran = cli("translate", f"ckpt={folder}")
    assert ran.code == 0
    assert ran.out.count("\n") == 3
    told = " ".join(ran.err.split())
    assert "note: 1 of 3 lines cut to the model's data.max_len=16 tokens (the first is line 3)" in told


def test_a_prompt_longer_than_the_positions(cli: Run, language_model: Trained) -> None:
    """B43: a Transformer's table of positions is no limit to what is written with it."""
    prompt = "a b c " * 100
    ran = cli("sample", f"ckpt={language_model.path}", f"prompt={prompt}", "num_tokens=70")
    assert ran.code == 0
    assert ran.out.startswith(prompt.strip())
