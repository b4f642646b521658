"""Strict reading of text: UTF-8 only, lines end at a newline and nowhere else.

`str.splitlines` and text-mode files also break lines at characters such as U+2028, U+0085 or a vertical
tab, which puts source and target of a parallel corpus out of step; so files are read as bytes here. A
byte-order mark is removed and CR LF becomes LF, so that the same text saved on any system gives the same
corpus and the same digest.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from rmsrepro.config.errors import UserError

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK = 1 << 20


def _open(path: Path) -> IO[bytes]:
    """Open a file, through gzip when its first bytes (or its name) say so."""
    with path.open("rb") as handle:
        magic = handle.read(2)
    if magic == _GZIP_MAGIC or path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


def iter_bytes(path: Path) -> Iterator[bytes]:
    """Yield the (decompressed) bytes of a file in pieces.

    Raises:
        UserError: the file cannot be read, or its gzip stream is damaged.
    """
    try:
        with _open(path) as handle:
            while chunk := handle.read(_CHUNK):
                yield chunk
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: damaged gzip file ({error}); copy or compress it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def decode_text(raw: bytes, path: Path) -> str:
    """Decode UTF-8 strictly, remove a byte-order mark, turn CR LF into LF.

    Raises:
        UserError: not UTF-8, or a NUL; names the file, the line (from 1), the byte and its offset (from 0).
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {_place(raw, error.start)}. {_advice(raw, error)}") from None
    nul = text.find("\0")
    if nul >= 0:
        raise UserError(
            f"{path}: line {text.count(chr(10), 0, nul) + 1} holds a NUL character, which no text does: the "
            "file is damaged, or in UTF-16 (then: iconv -f UTF-16LE -t UTF-8)"
        )
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _place(raw: bytes, start: int) -> str:
    line = raw.count(b"\n", 0, start) + 1
    in_line = start - (raw.rfind(b"\n", 0, start) + 1)
    byte = f"byte 0x{raw[start]:02x} at byte {in_line} of the line"
    return f"line {line} has {byte} (byte offset {start} of the file)"


def _advice(raw: bytes, error: UnicodeDecodeError) -> str:
    if raw.startswith(_GZIP_MAGIC):
        return "It is compressed twice: decompress it once"
    if error.reason == "unexpected end of data":
        return "It ends in the middle of a character, so it was cut off: copy it again"
    utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "UTF-16" if utf16 else "ISO-8859-1"
    return f"Convert the file first, for example: iconv -f {encoding} -t UTF-8"


def read_text(path: Path) -> str:
    """Return the whole text of a plain or gzipped file; see `decode_text`."""
    return decode_text(b"".join(iter_bytes(path)), path)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file, split at newlines only, without the newlines.

    A newline at the very end ends the last line; it does not begin another one.
    """
    text = read_text(path)
    if not text:
        return []
    return text.removesuffix("\n").split("\n")


def check_text(path: Path) -> int:
    """Check that a file is UTF-8 without keeping it in memory; return its number of bytes.

    Raises:
        UserError: as `decode_text`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        for chunk in iter_bytes(path):
            decoder.decode(chunk)
            size += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        read_text(path)  # reads it again, whole, to name line and byte
        raise
    return size


def text_digest(paths: Iterable[Path]) -> str:
    """SHA-256 of the files' text: the same for plain, gzipped, CR LF and BOM versions of one text."""
    digest = hashlib.sha256()
    for path in paths:
        first, carry, size = True, b"", 0
        for chunk in iter_bytes(path):
            piece = carry + chunk
            if first:
                piece, first = piece.removeprefix(codecs.BOM_UTF8), False
            # A chunk may end between CR and LF: hold the CR back.
            carry = b"\r" if piece.endswith(b"\r") else b""
            piece = piece[: len(piece) - len(carry)].replace(b"\r\n", b"\n")
            digest.update(piece)
            size += len(piece)
        digest.update(carry + f"\0{size + len(carry)}\0".encode())
    return digest.hexdigest()


def bytes_digest(paths: Iterable[Path]) -> str:
    """SHA-256 of files as they are (parquet)."""
    digest = hashlib.sha256()
    for path in paths:
        size = 0
        for chunk in iter_bytes(path):
            digest.update(chunk)
            size += len(chunk)
        digest.update(f"\0{size}\0".encode())
    return digest.hexdigest()
