"""Contents of files, decompressed, as blocks of bytes, text or lines."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator
from pathlib import Path

from lm.data.files import CODECS, is_compressed
from lm.errors import ConfigError
from lm.fileio import find_pointer

READ_BLOCK_BYTES = 1 << 20
MAX_EXPANSION = 200
"""By which factor a compressed file can expand: text has 3 to 20, tasks with examples up to 80."""
FREE_EXPANSION_BYTES = 64 << 20
"""To which any compressed file can expand."""
TO_UTF8 = (
    "convert it, e.g. iconv -f UTF-16 -t UTF-8 < FILE > NEW, or if it is not text, choose files of"
    " text by a glob, e.g. 'DIRECTORY/**/*.txt'"
)
"""what to do with a file that is not UTF-8"""


def check_pointer(path: Path) -> None:
    """Raise ConfigError if `path` is a pointer, as of Git LFS, to what was not downloaded."""
    with path.open("rb") as file:
        pointer = find_pointer(file.read(64))
    if pointer is not None:
        its_format, remedy = pointer
        raise ConfigError(f"{path}: {its_format}, not text; {remedy}")


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the contents of the text file `path` in blocks of about `READ_BLOCK_BYTES`.

    They are decompressed, and a byte-order mark is left out.

    Raises:
        ConfigError: the file cannot be read, is a pointer, has NUL bytes, or expands to more than
            `MAX_EXPANSION` allows.
    """
    n_bytes = 0
    limit = math.inf
    try:
        check_pointer(path)
        if is_compressed(path):
            limit = max(MAX_EXPANSION * path.stat().st_size, FREE_EXPANSION_BYTES)
        for block in _read_raw_blocks(path):
            if n_bytes + len(block) > limit:
                problem = f"expands to more than {limit:,} bytes"
                raise ConfigError(f"{path}: {problem}; if this is right, decompress it first")
            nul = block.find(0)
            if nul >= 0:
                raise ConfigError(f"{path}: byte {n_bytes + nul} is NUL, not text; {TO_UTF8}")
            yield block.removeprefix(codecs.BOM_UTF8) if n_bytes == 0 else block
            n_bytes += len(block)
    except OSError as error:
        problem = error.strerror
        if problem is None:  # of the decompressor
            problem = f"{error}; download or compress it again"
        raise ConfigError(f"{path}: cannot be read after byte {n_bytes}: {problem}") from None


def _read_raw_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        if not is_compressed(path):
            while block := file.read(READ_BLOCK_BYTES):
                yield block
            return
        if path.stat().st_size == 0:
            raise OSError("the compressed file is empty")
        import pyarrow

        with pyarrow.input_stream(file, compression=CODECS[path.suffix.lower()]) as contents:
            while block := contents.read(READ_BLOCK_BYTES):
                yield block


def decode_utf8(path: Path, content: bytes, offset: int = 0) -> str:
    """Decode UTF-8 that starts at byte `offset` of `path`; errors name the byte."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        problem = f"byte {offset + error.start} is not UTF-8"
        raise ConfigError(f"{path}: {problem}; {TO_UTF8}") from None


def read_text_blocks(path: Path) -> Iterator[str]:
    """Yield the text of `path` in blocks; see `read_blocks`."""
    offset = 0
    content = b""
    n_decoded = 0
    for block in read_blocks(path):
        offset += n_decoded
        content = content[n_decoded:] + block
        try:
            text, n_decoded = codecs.utf_8_decode(content)  # without an incomplete last character
        except UnicodeDecodeError:
            n_decoded = 0
            break
        yield text
    if n_decoded < len(content):
        decode_utf8(path, content, offset)  # raises an error that says why


def read_line_blocks(path: Path) -> Iterator[bytes]:
    """Yield the contents of `path` as `read_blocks` does, in blocks that end with a line."""
    partial_line: list[bytes] = []
    for block in read_blocks(path):
        end = block.rfind(b"\n") + 1
        if end > 0:
            yield b"".join([*partial_line, block[:end]])
            partial_line.clear()
        partial_line.append(block[end:])
    last_line = b"".join(partial_line)
    if last_line:
        yield last_line
