"""A small translation task that needs no download: dates, amounts, units and names, English and German.

A few dozen sentence frames, with the word order of each language, hold the values of
`rmsrepro.data.cldr_values`. The corpus is an endless sequence: candidate i is a pure function of
(corpus_seed, i). A pair belongs to the training, validation or test part by a hash of its source sentence,
so that no source of one part is ever in another, however many pairs are asked for; and the first n pairs of
a part are the same whatever the other numbers are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import CldrConfig
from rmsrepro.data.cache import read_cached, write_cached

if TYPE_CHECKING:
    from rmsrepro.data.cldr_values import Both, Draw

GENERATOR_VERSION = 1
"""Part of the data hash: raise it when a pair changes."""

LANGUAGES = ("en", "de")

MAX_CHARACTERS = 60
"""Longer pairs are left out: 62 character tokens with the marks hold any sentence."""

_HELD_OUT_PERCENT = {"test": 5, "val": 5}

_PATIENCE = 500
"""After so many repeated sources in a row one is accepted, so that any number of pairs is delivered."""

Pair = tuple[str, str]

_FRAMES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("The meeting is on {0}.", "Das Treffen findet am {0} statt.", ("day_full",)),
    ("She was born on {0}.", "Sie wurde am {0} geboren.", ("day_long",)),
    ("Everything was different on {0}.", "Am {0} war alles anders.", ("day_medium",)),
    ("We have been living here since {0}.", "Wir wohnen seit {0} hier.", ("month",)),
    ("Your appointment: {0}", "Ihr Termin: {0}", ("day_and_time",)),
    ("The train leaves at {0}.", "Der Zug fährt um {0} Uhr ab.", ("clock",)),
    ("He has to get up at {0} tomorrow.", "Er muss morgen um {0} Uhr aufstehen.", ("clock",)),
    ("They moved out {0}.", "Sie sind {0} ausgezogen.", ("ago",)),
    ("The shop opens again {0}.", "Das Geschäft macht {0} wieder auf.", ("ahead",)),
    ("The ticket costs {0}.", "Die Karte kostet {0}.", ("amount",)),
    ("He has already paid {0}.", "Er hat schon {0} bezahlt.", ("amount",)),
    ("I still owe her {0}.", "Ich schulde ihr noch {0}.", ("money",)),
    ("It is still {0} to the station.", "Bis zum Bahnhof sind es noch {0}.", ("distance",)),
    ("The package weighs {0}.", "Das Paket wiegt {0}.", ("mass",)),
    ("The film lasts {0}.", "Der Film dauert {0}.", ("duration",)),
    ("The device shows {0}.", "Das Gerät zeigt {0} an.", ("measure",)),
    ("Prices rose by {0} last year.", "Letztes Jahr stiegen die Preise um {0}.", ("percent",)),
    ("There are {0} books in the library.", "In der Bibliothek stehen {0} Bücher.", ("count",)),
    ("This is the {0} attempt.", "Das ist der {0} Versuch.", ("ordinal",)),
    ("The answer is {0}.", "Die Antwort lautet {0}.", ("spelled",)),
    ("My neighbor speaks {0} and {1}.", "Mein Nachbar spricht {0} und {1}.", ("language", "language")),
    ("Can you speak {0}, too?", "Kannst du auch {0} sprechen?", ("language",)),
    ("{0} comes before {1} in the list.", "In der Liste steht {0} vor {1}.", ("territory", "territory")),
    ("How many people in {0} speak {1}?", "Wie viele Leute in {0} sprechen {1}?", ("territory", "language")),
)


def cldr_versions() -> dict[str, str]:
    """Versions of what writes the pairs."""
    from babel.core import get_cldr_version

    return {
        "babel": metadata.version("babel"),
        "cldr": str(get_cldr_version()),
        "num2words": metadata.version("num2words"),
        "generator": str(GENERATOR_VERSION),
    }


def _writers() -> list[tuple[str, str, tuple[Callable[[Draw], Both], ...]]]:
    from rmsrepro.data import cldr_values

    return [
        (english, german, tuple(getattr(cldr_values, kind) for kind in kinds))
        for english, german, kinds in _FRAMES
    ]


def _part(seed: int, source: str) -> str:
    digest = hashlib.blake2b(f"{seed}:{source}".encode(), digest_size=8).digest()
    percent = int.from_bytes(digest, "big") % 100
    for part, share in _HELD_OUT_PERCENT.items():
        if percent < share:
            return part
        percent -= share
    return "train"


def write_pairs(config: CldrConfig) -> dict[str, list[Pair]]:
    """Write the pairs that `config` asks for, per split, each (source, target).

    Within a split a source that was written before is left out, unless new ones have become so rare
    that the number asked for would not be reached.
    """
    from rmsrepro.data.cldr_values import Draw

    wanted = {"train": config.num_train, "val": config.num_val, "test": config.num_test}
    for split, number in wanted.items():
        if number < 1:
            raise UserError(f"data.num_{split}={number}: at least one pair is needed")
    writers = _writers()
    forward = config.source_lang == "en"
    pairs: dict[str, list[Pair]] = {split: [] for split in wanted}
    seen: set[str] = set()
    repeats = dict.fromkeys(wanted, 0)
    missing = sum(wanted.values())
    index = 0
    while missing:
        draw = Draw(config.corpus_seed, index)
        index += 1
        english, german, kinds = draw.pick(writers)
        slots = [kind(draw) for kind in kinds]
        first = english.format(*[slot[0] for slot in slots])
        second = german.format(*[slot[1] for slot in slots])
        if max(len(first), len(second)) > MAX_CHARACTERS:
            continue
        source, target = (first, second) if forward else (second, first)
        split = _part(config.corpus_seed, source)
        if len(pairs[split]) >= wanted[split]:
            continue
        if source in seen:
            repeats[split] += 1
            if repeats[split] < _PATIENCE:
                continue
        repeats[split] = 0
        seen.add(source)
        pairs[split].append((source, target))
        missing -= 1
    return pairs


def cldr_pairs(config: CldrConfig, cache_dir: Path | None) -> dict[str, list[Pair]]:
    """Return `write_pairs(config)`, kept in `cache_dir` by everything that it depends on."""
    recipe = {
        "versions": cldr_versions(),
        "seed": config.corpus_seed,
        "languages": [config.source_lang, config.target_lang],
        "pairs": [config.num_train, config.num_val, config.num_test],
    }
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    name = f"cldr-{digest[:24]}.json"
    cached = read_cached(cache_dir, name)
    if cached is not None:
        return {split: [(s, t) for s, t in rows] for split, rows in json.loads(cached).items()}
    pairs = write_pairs(config)
    write_cached(cache_dir, name, json.dumps(pairs, ensure_ascii=False))
    return pairs
