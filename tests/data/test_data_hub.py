"""The Hub, without a Hub: what is asked of `datasets`, and what is said when nothing answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import datasets
import pytest

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import (
    DataConfig,
    Multi30kConfig,
    TinyShakespeareConfig,
    WikitextConfig,
    Wmt14Config,
)
from rmsrepro.data import tables
from rmsrepro.data.parallel import load_parallel
from rmsrepro.data.text import load_text


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Answer every request with a set of the right columns, and remember the requests."""
    asked: list[tuple[Any, ...]] = []
    columns: dict[str, dict[str, list[Any]]] = {
        "bentrevett/multi30k": {"en": ["one"], "de": ["eins"]},
        "wmt/wmt14": {"translation": [{"de": "eins", "en": "one"}]},
        "Salesforce/wikitext": {"text": ["", " = A = \n", ""]},
        "karpathy/tiny_shakespeare": {"text": ["to be"]},
    }

    def load(repository: str, subset: str | None, revision: str | None = None) -> Any:
        asked.append((repository, subset, revision, datasets.config.HF_HUB_OFFLINE))
        table = datasets.Dataset.from_dict(columns[repository])
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), table))

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def load(config: DataConfig, cache: Path) -> dict[str, Any]:
    if isinstance(config, (Multi30kConfig, Wmt14Config)):
        return dict(load_parallel(config, cache).splits)
    return dict(load_text(config, cache).splits)


@pytest.mark.parametrize(
    ("config", "request_", "train"),
    [
        (Multi30kConfig(), ("bentrevett/multi30k", None, None), [("one", "eins")]),
        (Wmt14Config(), ("wmt/wmt14", "de-en", None), [("one", "eins")]),
        (WikitextConfig(), ("Salesforce/wikitext", "wikitext-103-raw-v1", None), "\n = A = \n\n"),
        (
            TinyShakespeareConfig(),
            ("karpathy/tiny_shakespeare", None, "refs/convert/parquet"),
            "to be\n",
        ),
    ],
)
def test_what_is_asked_for(
    hub: list[tuple[Any, ...]], tmp_path: Path, config: DataConfig, request_: tuple[Any, ...], train: Any
) -> None:
    splits = load(config, tmp_path)
    assert hub == [(*request_, True)]  # the tests run in offline mode
    assert splits == dict.fromkeys(("train", "val", "test"), train)


def test_settings_of_datasets_are_put_back(hub: list[tuple[Any, ...]], tmp_path: Path) -> None:
    datasets.enable_progress_bars()
    before = (datasets.config.HF_HUB_OFFLINE, datasets.logging.get_verbosity())
    load(Multi30kConfig(), tmp_path)
    assert not datasets.are_progress_bars_disabled()
    assert (datasets.config.HF_HUB_OFFLINE, datasets.logging.get_verbosity()) == before


@pytest.mark.parametrize(
    ("config", "name", "columns"),
    [
        (Multi30kConfig(), "bentrevett/multi30k", "en, de"),
        (Wmt14Config(), r"wmt/wmt14 \(de-en\)", "translation"),
        (WikitextConfig(), r"Salesforce/wikitext \(wikitext-103-raw-v1\)", "text"),
        (TinyShakespeareConfig(), "karpathy/tiny_shakespeare", "text"),
    ],
)
@pytest.mark.parametrize("offline", [True, False])
def test_unreachable_hub_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: DataConfig,
    name: str,
    columns: str,
    offline: bool,
) -> None:
    if not offline:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens on the discard port
    why = "offline mode is on" if offline else "the Hugging Face Hub cannot be reached"
    started = time.monotonic()
    with pytest.raises(
        UserError, match=f"{name} could not be loaded: {why} and the set is not in its"
    ) as caught:
        load(config, tmp_path)
    message = str(caught.value)
    assert "data.path=FOLDER" in message
    assert f"with the columns {columns} (" in message
    assert "\n" not in message
    assert time.monotonic() - started < 60  # the client's own retries are not waited for


def test_a_silent_name_server_does_not_hold_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_REACH_TIMEOUT_S", -1.9)
    monkeypatch.setattr(tables, "_answers", lambda endpoint: time.sleep(5))
    assert not tables._hub_reachable()


def test_set_without_a_split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"en": ["one"], "de": ["eins"]})
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: datasets.DatasetDict({"train": table, "dev": table})
    )
    with pytest.raises(UserError, match="bentrevett/multi30k has no test split"):
        load(Multi30kConfig(), tmp_path)
