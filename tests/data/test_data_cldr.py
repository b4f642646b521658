from __future__ import annotations

from pathlib import Path

import pytest

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import CldrConfig
from rmsrepro.data import cldr
from rmsrepro.data.cldr import MAX_CHARACTERS, cldr_pairs, cldr_versions, write_pairs
from rmsrepro.data.cldr_values import Draw

SMALL = {"num_train": 400, "num_val": 40, "num_test": 50}


def test_parts_are_disjoint_and_as_large_as_asked() -> None:
    pairs = write_pairs(CldrConfig(**SMALL))
    assert {split: len(rows) for split, rows in pairs.items()} == {"train": 400, "val": 40, "test": 50}
    sources = {split: {source for source, _ in rows} for split, rows in pairs.items()}
    assert not sources["train"] & sources["test"]
    assert not sources["train"] & sources["val"]
    assert not sources["val"] & sources["test"]
    assert {split: len(texts) for split, texts in sources.items()} == {"train": 400, "val": 40, "test": 50}


def test_pairs_depend_on_the_seed_and_not_on_the_numbers() -> None:
    pairs = write_pairs(CldrConfig(**SMALL))
    more = write_pairs(CldrConfig(num_train=800, num_val=10, num_test=90))
    assert more["train"][:400] == pairs["train"]
    assert more["val"] == pairs["val"][:10]
    assert more["test"][:50] == pairs["test"]
    other = write_pairs(CldrConfig(corpus_seed=2, **SMALL))
    assert not set(other["train"]) >= set(pairs["train"][:20])


def test_pairs_are_translations() -> None:
    pairs = dict(write_pairs(CldrConfig(num_train=3000, num_val=1, num_test=1))["train"])
    months = {"January": "Januar", "March": "März", "May": "Mai", "October": "Oktober"}  # codespell:ignore
    births = {s: t for s, t in pairs.items() if s.startswith("She was born on")}
    assert len(births) > 50
    for source, target in births.items():
        month, day, year = source.removeprefix("She was born on ").removesuffix(".").replace(",", "").split()
        assert target.startswith(f"Sie wurde am {day}. ")  # codespell:ignore
        assert target.endswith(f" {year} geboren.")
        assert month not in months or months[month] in target
    trains = {s: t for s, t in pairs.items() if s.startswith("The train leaves at")}
    for source, target in trains.items():
        clock, half = source.removeprefix("The train leaves at ").removesuffix(".").split()
        hour, minute = map(int, clock.split(":"))
        assert f" {hour % 12 + 12 * (half == 'PM'):02d}:{minute:02d} Uhr" in target
    lists = [(s, t) for s, t in pairs.items() if s.endswith("in the list.")]
    assert all(t.startswith("In der Liste steht ") for _, t in lists)
    assert "The answer is five." in pairs
    assert pairs["The answer is five."] == "Die Antwort lautet fünf."


def test_all_frames_occur_and_no_sentence_is_long_or_odd() -> None:
    rows = write_pairs(CldrConfig(num_train=3000, num_val=1, num_test=1))["train"]
    assert max(len(text) for row in rows for text in row) <= MAX_CHARACTERS
    for english, german, _ in cldr._FRAMES:
        start_en, start_de = english.split("{")[0], german.split("{")[0]
        assert any(s.startswith(start_en) and t.startswith(start_de) for s, t in rows)
    characters = {c for row in rows for text in row for c in text}
    assert not characters & set("\u202f\xa0\n{}")
    assert not any(side != side.strip() for row in rows for side in row)


def test_other_direction() -> None:
    pairs = write_pairs(CldrConfig(source_lang="de", target_lang="en", **SMALL))
    assert any(s.startswith("Die Karte kostet") and t.startswith("The ticket") for s, t in pairs["train"])
    assert not {s for s, _ in pairs["train"]} & {s for s, _ in pairs["test"]}


def test_any_number_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one frame of 300 sentences more are asked for than there are."""
    monkeypatch.setattr(cldr, "_FRAMES", (("The {0} one.", "Die {0}.", ("ordinal",)),))
    monkeypatch.setattr(cldr, "_PATIENCE", 10)
    pairs = write_pairs(CldrConfig(num_train=600, num_val=5, num_test=30))
    assert {split: len(rows) for split, rows in pairs.items()} == {"train": 600, "val": 5, "test": 30}
    assert not {s for s, _ in pairs["train"]} & {s for split in ("val", "test") for s, _ in pairs[split]}


def test_draws_are_the_same_everywhere() -> None:
    draw = Draw(1, 0)
    values = [draw.below(1000) for _ in range(3)]
    assert values == [716, 761, 677]
    again = Draw(1, 0)
    assert again.pick(range(1000)) == values[0]


def test_kept_by_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CldrConfig(num_train=5, num_val=2, num_test=2)
    first = cldr_pairs(config, tmp_path)
    monkeypatch.setattr(cldr, "write_pairs", None)
    assert cldr_pairs(config, tmp_path) == first
    assert isinstance(first["train"][0], tuple)
    monkeypatch.setattr(cldr, "GENERATOR_VERSION", 0)
    with pytest.raises(TypeError):  # another recipe is not in the cache
        cldr_pairs(config, tmp_path)


def test_versions_are_known() -> None:
    assert set(cldr_versions()) == {"babel", "cldr", "num2words", "generator"}
    assert all(cldr_versions().values())


@pytest.mark.parametrize("key", ["num_train", "num_val", "num_test"])
def test_no_pairs(key: str) -> None:
    with pytest.raises(UserError, match=rf"data\.{key}=0"):
        write_pairs(CldrConfig(**{key: 0}))
