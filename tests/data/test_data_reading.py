from __future__ import annotations

import codecs
import gzip
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsrepro.config.errors import UserError
from rmsrepro.data.reading import check_text, decode_text, read_lines, read_text, text_digest

SOME = Path("some.txt")


@pytest.mark.parametrize(
    "text",
    ["a\u2028b", "c\x0bd", "e\x85f", "g\x0ch", "i\x1cj", "k\u2029l", "m\rn"],
)
def test_unusual_line_breaks_do_not_split_a_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(f"{text}\nnext\n".encode())
    assert read_lines(path) == [text, "next"]


@pytest.mark.parametrize(
    ("raw", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\n", ["a", ""]),
        (b"a\r\n\r\nb\r\n", ["a", "", "b"]),
        (codecs.BOM_UTF8 + b"a\nb", ["a", "b"]),
    ],
)
def test_lines(tmp_path: Path, raw: bytes, lines: list[str]) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(raw)
    assert read_lines(path) == lines
    packed = tmp_path / "lines.txt.gz"
    packed.write_bytes(gzip.compress(raw))
    assert read_lines(packed) == lines


def test_gzip_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "no_suffix"
    path.write_bytes(gzip.compress("größe".encode()))
    assert read_text(path) == "größe"


def test_latin1_is_refused_by_file_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("one\nzwei\ngrün\n".encode("latin-1"))
    with pytest.raises(UserError) as caught:
        read_text(path)
    message = str(caught.value)
    assert str(path) in message
    assert "line 3" in message
    assert "byte 0xfc at byte 2 of the line" in message
    assert "byte offset 11 of the file" in message
    with pytest.raises(UserError, match="line 3 has byte 0xfc"):
        check_text(path)


def test_utf16_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "utf16.txt"
    path.write_bytes("hello".encode("utf-16"))
    with pytest.raises(UserError, match="iconv -f UTF-16"):
        read_text(path)


@pytest.mark.parametrize("damage", ["cut", "flipped", "plain"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    raw = bytearray(gzip.compress(bytes(range(256)) * 20))
    if damage == "cut":
        del raw[len(raw) // 2 :]
    elif damage == "flipped":
        raw[len(raw) // 2] ^= 0xFF
    else:
        raw = bytearray(b"this is no gzip file")
    path = tmp_path / "broken.txt.gz"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"broken\.txt\.gz: damaged gzip file"):
        read_text(path)


def test_check_text_accepts_characters_across_pieces(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    raw = b"x" + "é".encode() * (1 << 19) + b"end"  # the first piece ends inside a character
    path.write_bytes(raw)
    assert check_text(path) == len(raw)


def test_digest_ignores_how_a_text_is_stored(tmp_path: Path) -> None:
    text = "first\nsecond ü\n" * 10
    versions = {
        "plain.txt": text.encode(),
        "bom.txt": codecs.BOM_UTF8 + text.encode(),
        "crlf.txt": text.replace("\n", "\r\n").encode(),
        "packed.txt.gz": gzip.compress(text.encode()),
    }
    for name, raw in versions.items():
        (tmp_path / name).write_bytes(raw)
    assert len({text_digest([tmp_path / name]) for name in versions}) == 1
    (tmp_path / "other.txt").write_text(text + "x", encoding="utf-8")
    assert text_digest([tmp_path / "other.txt"]) != text_digest([tmp_path / "plain.txt"])


def test_digest_of_a_line_end_across_pieces(tmp_path: Path) -> None:
    (tmp_path / "crlf.txt").write_bytes(b"x" * ((1 << 20) - 1) + b"\r\nend")
    (tmp_path / "lf.txt").write_bytes(b"x" * ((1 << 20) - 1) + b"\nend")
    assert text_digest([tmp_path / "crlf.txt"]) == text_digest([tmp_path / "lf.txt"])


def test_digest_tells_one_file_from_its_halves(tmp_path: Path) -> None:
    for name, text in (("ab", "ab"), ("a", "a"), ("b", "b")):
        (tmp_path / name).write_text(text)
    assert text_digest([tmp_path / "ab"]) != text_digest([tmp_path / "a", tmp_path / "b"])


@given(st.lists(st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]))))
def test_any_lines_come_back(lines: list[str]) -> None:
    written = "".join(line + "\n" for line in lines)
    expected = written.removeprefix("\ufeff")  # a leading one is a byte-order mark
    assert decode_text(written.encode(), SOME) == expected
    assert decode_text(codecs.BOM_UTF8 + written.encode(), SOME) == written
    assert decode_text(written.replace("\n", "\r\n").encode(), SOME) == expected


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"one\ntw\0o\n", "line 2 holds a NUL character"),
        ("one\ntwo\n".encode("utf-16-le"), "iconv -f UTF-16LE"),
        (gzip.compress(gzip.compress(b"one\n")), "It is compressed twice"),
        ("one gr\u00f6\u00df".encode()[:-1], "It ends in the middle of a character, so it was cut off"),
    ],
    ids=["NUL", "UTF-16", "packed twice", "cut off"],
)
def test_what_no_text_holds_is_told(tmp_path: Path, raw: bytes, told: str) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=re.escape(told)) as caught:
        read_text(path)
    assert str(path) in str(caught.value)
