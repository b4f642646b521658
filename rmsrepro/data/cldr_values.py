"""Values written in English and German, by Babel (Unicode CLDR) and, for spelled numbers, num2words.

Each writer takes a `Draw` and returns ``(english, german)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from babel import Locale
from babel.dates import format_date, format_datetime, format_skeleton, format_time, format_timedelta
from babel.numbers import format_currency, format_decimal, format_percent
from babel.units import format_unit

_num2words: Callable[..., str] = import_module("num2words").num2words  # it has no type information

T = TypeVar("T")
Both = tuple[str, str]

_ENGLISH, _GERMAN = Locale("en"), Locale("de")

_CURRENCIES = ("EUR", "USD", "GBP", "CHF", "JPY", "SEK", "PLN", "INR")
_DISTANCES = ("length-kilometer", "length-meter", "length-mile", "length-centimeter")
_MASSES = ("mass-kilogram", "mass-gram", "mass-tonne", "mass-pound", "mass-milligram")
_DURATIONS = ("duration-second", "duration-minute", "duration-hour", "duration-day", "duration-week")
_MEASURES = (
    "volume-liter",
    "temperature-celsius",
    "speed-kilometer-per-hour",
    "area-square-meter",
    "area-hectare",
    "digital-gigabyte",
    "energy-kilowatt-hour",
    "power-watt",
)
_SPANS = {"minute": 60, "hour": 3600, "day": 86400, "week": 604800, "month": 2592000, "year": 31536000}


class Draw:
    """Choices for one pair, cut from a 512-bit hash: the same on every machine and Python version."""

    def __init__(self, seed: int, index: int) -> None:
        digest = hashlib.blake2b(f"cldr:{seed}:{index}".encode(), digest_size=64).digest()
        self._rest = int.from_bytes(digest, "big")

    def below(self, count: int) -> int:
        """Return an integer in [0, count)."""
        self._rest, value = divmod(self._rest, count)
        return value

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of the choices."""
        return choices[self.below(len(choices))]


def _both(write: Callable[[Locale], str]) -> Both:
    """Write one value in both languages; CLDR's no-break spaces become plain ones."""
    english, german = write(_ENGLISH), write(_GERMAN)
    return (
        english.replace("\u202f", " ").replace("\xa0", " "),
        german.replace("\u202f", " ").replace("\xa0", " "),
    )


def _day(draw: Draw) -> date:
    return date(1990, 1, 1) + timedelta(days=draw.below(14610))  # 40 years


def day_full(draw: Draw) -> Both:
    """``Monday, March 3, 2025``"""
    day = _day(draw)
    return _both(lambda locale: format_date(day, "full", locale=locale))


def day_long(draw: Draw) -> Both:
    """``March 3, 2025``"""
    day = _day(draw)
    return _both(lambda locale: format_date(day, "long", locale=locale))


def day_medium(draw: Draw) -> Both:
    """``Mar 3, 2025``"""
    day = _day(draw)
    return _both(lambda locale: format_date(day, "medium", locale=locale))


def month(draw: Draw) -> Both:
    """``March 2025``"""
    day = _day(draw)
    return _both(lambda locale: format_skeleton("yMMMM", day, locale=locale))


def day_and_time(draw: Draw) -> Both:
    """``3/3/25, 3:05 PM``"""
    moment = datetime.combine(_day(draw), time(draw.below(24), draw.below(60)))
    return _both(lambda locale: format_datetime(moment, "short", locale=locale))


def clock(draw: Draw) -> Both:
    """``3:05 PM``"""
    moment = time(draw.below(24), draw.below(60))
    return _both(lambda locale: format_time(moment, "short", locale=locale))


def ago(draw: Draw) -> Both:
    """``3 days ago``"""
    return _relative(draw, -1)


def ahead(draw: Draw) -> Both:
    """``in 3 days``"""
    return _relative(draw, 1)


def _relative(draw: Draw, sign: int) -> Both:
    unit = draw.pick(tuple(_SPANS))
    span = timedelta(seconds=sign * (1 + draw.below(50)) * _SPANS[unit])
    return _both(
        lambda locale: format_timedelta(
            span,
            granularity=unit,  # type: ignore[arg-type]  # one of the names it takes, as a str
            threshold=1000,
            add_direction=True,
            locale=locale,
        )
    )


def amount(draw: Draw) -> Both:
    """``€1,234.50``"""
    cents, currency = 5 * draw.below(40000), draw.pick(_CURRENCIES)
    return _both(lambda locale: format_currency(cents / 100, currency, locale=locale))


def money(draw: Draw) -> Both:
    """``5 Swiss francs``"""
    count, currency = 1 + draw.below(500), draw.pick(_CURRENCIES)
    return _both(
        lambda locale: format_currency(
            count, currency, format="#,##0", currency_digits=False, format_type="name", locale=locale
        )
    )


def _measure(units: Sequence[str]) -> Callable[[Draw], Both]:
    def write(draw: Draw) -> Both:
        tenths, unit = 1 + draw.below(2000), draw.pick(units)
        value = tenths // 10 if tenths >= 1000 or tenths % 10 == 0 else tenths / 10
        return _both(lambda locale: format_unit(value, unit, locale=locale))

    return write


distance = _measure(_DISTANCES)
mass = _measure(_MASSES)
duration = _measure(_DURATIONS)
measure = _measure(_MEASURES)


def percent(draw: Draw) -> Both:
    """``3.5%``"""
    tenths = 1 + draw.below(1000)
    return _both(lambda locale: format_percent(tenths / 1000, locale=locale, decimal_quantization=False))


def count(draw: Draw) -> Both:
    """``12,345``, of two to six digits"""
    value = 10 + draw.below(10 ** (2 + draw.below(5)))
    return _both(lambda locale: format_decimal(value, locale=locale))


def ordinal(draw: Draw) -> Both:
    """``twenty-first``"""
    number = 1 + draw.below(300)
    return _num2words(number, to="ordinal", lang="en"), _num2words(number, to="ordinal", lang="de")


def spelled(draw: Draw) -> Both:
    """``forty-two``, up to ten thousand"""
    number = draw.below(10 ** (1 + draw.below(4)))
    return _num2words(number, lang="en"), _num2words(number, lang="de")


@lru_cache(maxsize=2)
def _names(kind: str) -> tuple[Both, ...]:
    """Names with two-letter codes that are plain words and not long, in both languages."""
    english: dict[str, Any] = dict(getattr(_ENGLISH, kind))
    german: dict[str, Any] = dict(getattr(_GERMAN, kind))
    codes = sorted(code for code in english if len(code) == 2 and code.isalpha() and code in german)
    pairs = [(str(english[code]), str(german[code])) for code in codes]
    return tuple(p for p in pairs if all(name.replace(" ", "").isalpha() and len(name) <= 18 for name in p))


def language(draw: Draw) -> Both:
    """``French``"""
    return draw.pick(_names("languages"))


def territory(draw: Draw) -> Both:
    """``Germany``"""
    return draw.pick(_names("territories"))
