"""Files that are not UTF-8 text, by their content: what each is, and how to make text of it."""

from __future__ import annotations

import codecs
import re
import shlex
from pathlib import Path

from lm.errors import ConfigError
from lm.fileio import find_pointer

DECOMPRESSORS = {".gz": "gzip -dc", ".zst": "zstd -dc"}
"""commands for the compressed files that are read, by suffix"""
ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark is the start of this one
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""encodings by their byte-order marks, none of which is UTF-8"""


_CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f]")
"""characters that no text has; escape sequences of terminals have \\x1b"""


def check_start(path: Path, start: bytes) -> None:
    """Raise ConfigError if content that starts with `start` is a pointer, or not UTF-8."""
    check_pointer(path, start)
    for mark, encoding in ENCODINGS.items():
        if start.startswith(mark):
            problem = f"is {encoding}, by its byte-order mark, not UTF-8"
            raise ConfigError(f"{path}: {problem}; convert the file, {_iconv(path, encoding)}")


def check_pointer(path: Path, start: bytes | None = None) -> None:
    """Raise ConfigError if `path` is a pointer of Git LFS or git-annex.

    Args:
        start: of the content; None = read it.
    """
    if start is None:
        with path.open("rb") as file:
            start = file.read(64)
    pointer = find_pointer(start)
    if pointer is not None:
        its_format, remedy = pointer
        raise ConfigError(f"{path}: {its_format}, not text; {remedy}")


def check_nul(path: Path, block: bytes, offset: int) -> None:
    """Raise ConfigError if a block at byte `offset` of `path` contains NUL."""
    at = block.find(0)
    if at >= 0:
        problem = f"file with NUL bytes, not text; the first is byte {offset + at}"
        remedy = "choose files of text by a glob, e.g. 'DIRECTORY/**/*.txt'"
        converted = f"or if it is UTF-16, convert it, {_iconv(path, 'UTF-16LE')}"
        raise ConfigError(f"{path}: {problem}: {remedy}, {converted}")


def advise_encoding(path: Path, content: bytes) -> str:
    """Return what to do with a file whose `content` is not UTF-8."""
    if _CONTROL.search(content):
        return "it is binary, not text; choose files of text"
    return f"convert the file from its encoding, e.g. {_iconv(path, 'WINDOWS-1252')}"


def _iconv(path: Path, encoding: str) -> str:
    """Return what writes the text of a file, in UTF-8, to another one."""
    quoted = shlex.quote(str(path))
    command = f"iconv -f {encoding} -t UTF-8"
    decompressor = DECOMPRESSORS.get(path.suffix.lower())
    if decompressor is None:
        return f"{command} < {quoted} > NEW"
    return f"{decompressor} {quoted} | {command} > NEW"
