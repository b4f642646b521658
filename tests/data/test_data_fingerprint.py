from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import (
    CldrConfig,
    DataConfig,
    Multi30kConfig,
    PydocConfig,
    TextFilesConfig,
    Tokenizer,
    WikitextConfig,
    Wmt14Config,
)
from rmsrepro.data import build_data, cldr, data_fingerprint


def test_what_changes_batches_changes_it(multi30k: Path) -> None:
    config = Multi30kConfig(path=str(multi30k))
    changed = [
        replace(config, tokenizer=Tokenizer.char),
        replace(config, vocab_size=300),
        replace(config, max_len=32),
        replace(config, batch_tokens=512),
        replace(config, batch_sentences=4),
        replace(config, shared_vocab=True),
        replace(config, max_train_pairs=3),
        replace(config, source_lang="de", target_lang="en"),
    ]
    prints = [data_fingerprint(c, "translation") for c in (config, *changed)]
    assert len(set(prints)) == len(prints)
    assert all(len(p) == 32 and int(p, 16) >= 0 for p in prints)


def test_where_files_lie_and_how_they_are_packed_does_not(multi30k: Path, tmp_path: Path) -> None:
    first = data_fingerprint(Multi30kConfig(path=str(multi30k)), "translation")
    moved = tmp_path / "elsewhere"
    shutil.copytree(multi30k, moved)
    packed = moved / "train.jsonl.gz"
    (moved / "train.jsonl").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    again = data_fingerprint(Multi30kConfig(path=str(moved), cache_dir="other"), "translation")
    assert again == first
    with (moved / "train.jsonl").open("a") as file:
        file.write('{"en": "more", "de": "mehr"}\n')
    assert data_fingerprint(Multi30kConfig(path=str(moved)), "translation") != first


def test_which_splits_are_given_matters(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text " * 100)
    alone = data_fingerprint(TextFilesConfig(train=str(path)), "lm")
    with_val = data_fingerprint(TextFilesConfig(train=str(path), val=str(path)), "lm")
    with_test = data_fingerprint(TextFilesConfig(train=str(path), test=str(path)), "lm")
    assert len({alone, with_val, with_test}) == 3


def test_generated_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    first = data_fingerprint(CldrConfig(), "translation")
    assert data_fingerprint(CldrConfig(), "translation") == first
    assert data_fingerprint(CldrConfig(corpus_seed=2), "translation") != first
    assert data_fingerprint(CldrConfig(num_train=9), "translation") != first
    monkeypatch.setattr(cldr, "GENERATOR_VERSION", 2)
    assert data_fingerprint(CldrConfig(), "translation") != first
    assert data_fingerprint(PydocConfig(), "lm") == data_fingerprint(PydocConfig(cache_dir="x"), "lm")


def test_sets_on_the_hub_are_known_by_name() -> None:
    configs: list[tuple[DataConfig, str]] = [
        (WikitextConfig(), "lm"),
        (WikitextConfig(subset="wikitext-2-raw-v1"), "lm"),
        (Wmt14Config(), "translation"),
        (Multi30kConfig(), "translation"),
    ]
    assert len({data_fingerprint(config, task) for config, task in configs}) == 4


def test_data_modules_carry_it(multi30k: Path, tmp_path: Path) -> None:
    config = Multi30kConfig(path=str(multi30k), tokenizer=Tokenizer.char)
    data = build_data(config, "translation", seed=1, accumulate=1, cache_dir=tmp_path)
    assert data.fingerprint == data.summary()["fingerprint"] == data_fingerprint(config, "translation")


@pytest.mark.parametrize(
    ("config", "task", "message"),
    [
        (CldrConfig(), "lm", "data=cldr does not fit task=lm; use data=pydoc, tinyshakespeare"),
        (PydocConfig(), "translation", "data=pydoc does not fit task=translation; use data=cldr, multi30k"),
        (PydocConfig(), "cloze", "task=cloze: expected lm or translation"),
        (Multi30kConfig(path="nowhere"), "translation", "data.path=nowhere: no such file or folder"),
        (CldrConfig(target_lang="fr"), "translation", "data.target_lang=fr: data=cldr has en, de"),
        (WikitextConfig(subset="x"), "lm", "data.subset=x: expected one of wikitext-103-raw-v1"),
    ],
)
def test_wrong_data_are_found_before_anything_starts(
    config: DataConfig, task: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        data_fingerprint(config, task)
    with pytest.raises(UserError, match=message):
        build_data(config, task, seed=1, accumulate=1, cache_dir=tmp_path)


def test_accumulate_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.accumulate=0"):
        build_data(PydocConfig(), "lm", seed=1, accumulate=0, cache_dir=tmp_path)


def test_it_needs_neither_torch_nor_datasets() -> None:
    program = (
        "import sys\n"
        "from rmsrepro.config.schema import CldrConfig, PydocConfig\n"
        "from rmsrepro.data import data_fingerprint\n"
        "data_fingerprint(PydocConfig(), 'lm'), data_fingerprint(CldrConfig(), 'translation')\n"
        "print(sorted({'torch', 'lightning', 'datasets', 'tokenizers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
