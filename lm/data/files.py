"""Files of data: found by name, read behind their compression; and JSON lines, with the line that is to blame."""

from __future__ import annotations

import codecs
import glob
import gzip
import itertools
import json
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.errors import ConfigError

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def find_files(where: str | None, key: str) -> list[Path]:
    """The files that `where` names, sorted: a file, a folder (all files below it, hidden ones excepted) or a glob.

    None is the Python standard library's own source, without its tests: real text on every machine.

    Raises:
        ConfigError: nothing is there; names `key`, the setting that asked.
    """
    if where is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = (path for path in root.rglob("*.py") if not _NOT_SOURCE & set(path.relative_to(root).parts))
    elif (root := Path(where)).is_file():
        found = iter([root])
    elif root.is_dir():
        found = (path for path in root.rglob("*") if not _is_hidden(path.relative_to(root)))
    else:
        found = map(Path, glob.glob(where, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise ConfigError(f"{key}: no file at {where or root} (a file, a folder or a glob, seen from {Path.cwd()})")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def blocks(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    """The bytes of `path` in order, without a byte-order mark, behind its compression if its name ends in .gz or .zst.

    Args:
        size: of a block (bytes; about).

    Raises:
        ConfigError: it cannot be read, or its compression is damaged or cut short.
    """
    suffix, done = path.suffix.lower(), 0
    try:
        for block in _of_zst(path, size) if suffix == ".zst" else _of_file(path, size, packed=suffix == ".gz"):
            yield block if done else block.removeprefix(codecs.BOM_UTF8)
            done += len(block)
    except (OSError, EOFError, zlib.error) as error:
        what = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read behind byte {done}: {what}") from None


def _of_file(path: Path, size: int, packed: bool) -> Iterator[bytes]:
    with gzip.open(path) if packed else path.open("rb") as file:
        while block := file.read(size):
            yield block


def _of_zst(path: Path, size: int) -> Iterator[bytes]:
    """By hand, because the package's own reader takes a file that is cut short for a whole one."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"{path}: reading .zst needs a package: pip install zstandard") from None
    frame = None
    with path.open("rb") as file:
        try:
            while data := file.read(size // 4):
                while data:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(data)
                    data = frame.unused_data
                    frame = None if frame.eof else frame
        except zstandard.ZstdError as error:
            raise EOFError(error) from None
    if frame:
        raise EOFError("ends in the middle of a frame")


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in the lines of `path`, as `blocks` reads it, with the numbers of the lines. Empty lines are none.

    Raises:
        ConfigError: as `blocks` and `parse_line`.
    """
    number, rest = 1, b""
    for block in itertools.chain(blocks(path), [b"\n"]):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.strip():
                yield number, parse_line(path, number, line)
            number += 1


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The object in a line of JSON lines.

    Raises:
        ConfigError: there is none, naming file and line.
    """
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}:{number}: byte {error.start} of the line is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}:{number}: is not a JSON object: {line[:60].strip()!r}")
    return record
