"""Files that are not UTF-8 text, by their content: what each is, and how to make text of it."""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from lm.errors import ConfigError
from lm.fileio import find_pointer

DECOMPRESSORS = {".gz": "gzip -dc", ".zst": "zstd -dc"}
"""commands for the compressed files that are read, by suffix"""
_CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f]")
"""characters that no text has; escape sequences of terminals have \\x1b"""
_BINARY = "it is binary, not text; choose files of text"


_MAX_WESTERN_SHARE = 0.3
"""of bytes beyond ASCII in text of Western languages in an encoding of one byte a character"""


def to_json_lines(table: str) -> str:
    """Return the code that writes a table, which `table` of pandas reads, as JSON Lines."""
    return f"pandas.{table}.to_json(NEW, orient='records', lines=True)"


def find_delimiter(header: str) -> str | None:
    """Return what separates the columns of the header of a table that has no comma, if it does."""
    delimiters = [sign for sign in ";\t|" if sign in header]
    if "," in header or not delimiters:
        return None
    return delimiters[0]


def advise_delimiter(columns: Collection[str]) -> str | None:
    """Return how to write a table as CSV if its only column seems to be several; else None."""
    delimiter = find_delimiter("".join(columns))
    if len(columns) != 1 or delimiter is None:
        return None
    code = f"pandas.read_csv(OLD, sep={delimiter!r}).to_csv(NEW, index=False)"
    return f"{delimiter!r} seems to separate columns: write commas, in Python: {code}"


class _Signature(NamedTuple):
    """Bytes that all files of a format have at an offset."""

    offset: int
    content: bytes | tuple[bytes, ...]
    """several: one of them"""
    format: str
    remedy: str
    """{} = the path"""


_IMAGE = "recognize its text, e.g. tesseract {} NEW"
_EXPORT = "write its texts to a .txt or .jsonl file"
_TABLE = (
    "read a column of text by its suffix, with dataset: hf or python -m lm.prepare; for chats"
    " (dataset: jsonl), convert it, in Python: "
)
_SIGNATURES = (
    _Signature(0, b"\x89PNG\r\n", "PNG image", _IMAGE),
    _Signature(0, b"\xff\xd8\xff", "JPEG image", _IMAGE),
    _Signature(0, b"GIF8", "GIF image", _IMAGE),
    _Signature(0, b"%PDF-", "PDF", "convert it to text, pdftotext {} NEW"),
    _Signature(
        0,
        b"PK\x03\x04",
        "ZIP archive, as .docx, .xlsx and .epub are",
        "convert it to text, e.g. with pandoc, or extract it, unzip {}",
    ),
    _Signature(0, b"{\\rtf", "RTF document", "convert it to text, e.g. with pandoc"),
    _Signature(0, b"%!PS-", "PostScript document", "convert it to text, ps2ascii {} NEW"),
    _Signature(
        0,
        b"\xd0\xcf\x11\xe0",
        "document of an old version of Word or Excel",
        "convert it to text, e.g. soffice --convert-to txt {}",
    ),
    _Signature(257, b"ustar", "tar archive", "extract it, tar -xf {}"),
    _Signature(
        4, (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"), "bzip2 file", "decompress it, bunzip2 {}"
    ),
    _Signature(0, b"\xfd7zXZ\0", "xz file", "decompress it, xz -d {}"),
    _Signature(0, b"LZIP\1", "lzip file", "decompress it, lzip -d {}"),
    _Signature(0, b"!<arch>\n", "ar archive, as .deb and .a are", "extract it, ar x {}"),
    _Signature(0, b"7z\xbc\xaf\x27\x1c", "7z archive", "extract it, 7z x {}"),
    _Signature(0, b"Rar!\x1a\x07", "RAR archive", "extract it, unrar x {}"),
    _Signature(0, b"\x04\x22\x4d\x18", "LZ4 file", "decompress it, lz4 -d {}"),
    _Signature(0, b"\x1f\x8b", "gzip file", "decompress it, gzip -dc {} > NEW"),
    _Signature(0, b"\x28\xb5\x2f\xfd", "Zstandard file", "decompress it, zstd -dc {} > NEW"),
    _Signature(0, b"PAR1", "Parquet table", f"{_TABLE}{to_json_lines('read_parquet(OLD)')}"),
    _Signature(
        0,
        (b"ARROW1\0\0", b"\xff\xff\xff\xff"),
        "Arrow table",
        f"{_TABLE}datasets.load_dataset('arrow', data_files=OLD)['train'].to_json(NEW)",
    ),
    _Signature(0, b"\x89HDF\r\n", "HDF5 file", "tokenize its ids with python -m lm.prepare"),
    _Signature(0, b"SQLite format 3\0", "SQLite database", _EXPORT),
    _Signature(0, b"\x93NUMPY", "NumPy array", _EXPORT),
    _Signature(0, (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"), "pickle", _EXPORT),
    _Signature(0, (b"(lp0\n", b"(dp0\n", b"ccopy_reg\n"), "pickle of ASCII", _EXPORT),
    _Signature(7, b'\0{"', "safetensors file", "it holds weights; choose files of text"),
)
ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark is the start of this one
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""encodings by their byte-order marks, none of which is UTF-8"""


class NotTextError(ConfigError):
    """A file is of a format that is not text."""

    def __init__(self, path: Path, its_format: str, remedy: str) -> None:
        super().__init__(f"{path}: {its_format}, not text; {remedy}")
        self.format = its_format
        self.remedy = remedy


def check_start(path: Path, start: bytes) -> None:
    """Raise ConfigError if content that starts with `start` is of a format that is not text."""
    check_pointer(path, start)
    for offset, content, its_format, remedy in _SIGNATURES:
        if start.startswith(content, offset):
            raise NotTextError(path, its_format, remedy.format(shlex.quote(str(path))))
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
        raise NotTextError(path, its_format, remedy)


def check_nul(path: Path, block: bytes, offset: int) -> None:
    """Raise ConfigError if a block at byte `offset` of `path` contains NUL."""
    at = block.find(0)
    if at < 0:
        return
    problem = f"byte {offset + at} is NUL"
    even, odd = block[0:1000:2], block[1:1000:2]
    if offset == 0 and all(even) and not any(odd):
        encoding = "UTF-16LE"
    elif offset == 0 and all(odd) and not any(even):
        encoding = "UTF-16BE"
    else:
        remedy = _BINARY
        if not _CONTROL.search(block):
            command = _pass_through(r"tr -d '\0'", path)
            remedy = f"choose files of text, or delete it, {command}"
        raise ConfigError(f"{path}: {problem}, which text does not contain; {remedy}")
    problem += f", as is every other: the text is {encoding}"
    raise ConfigError(f"{path}: {problem}; convert the file, {_iconv(path, encoding)}")


def advise_encoding(path: Path, content: bytes) -> str:
    """Return what to do with a file whose `content` is not UTF-8."""
    if _CONTROL.search(content):
        return _BINARY
    encoding = "WINDOWS-1252"
    n_beyond_ascii = len(content.translate(None, bytes(range(128))))
    if n_beyond_ascii > _MAX_WESTERN_SHARE * len(content):
        encoding = "ENCODING"
    return f"convert the file from its encoding, e.g. {_iconv(path, encoding)}"


def _iconv(path: Path, encoding: str) -> str:
    return _pass_through(f"iconv -f {encoding} -t UTF-8", path)


def _pass_through(command: str, path: Path) -> str:
    """Return what writes the text of a file, after `command`, to another one."""
    quoted = shlex.quote(str(path))
    decompressor = DECOMPRESSORS.get(path.suffix.lower())
    if decompressor is None:
        return f"{command} < {quoted} > NEW"
    return f"{decompressor} {quoted} | {command} > NEW"
