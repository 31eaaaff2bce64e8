"""Files of data: found by name, read behind their compression; and JSON lines, with the line that is to blame."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import itertools
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lm.errors import ConfigError

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def find_files(where: str | None, key: str) -> list[Path]:
    """The files that `where` names, sorted: a file, a folder (all files below it, hidden ones excepted) or a glob.

    None is the Python standard library's own source, without its tests: real text on every machine.

    Raises:
        ConfigError: nothing is there, or a folder cannot be read; names `key`, the setting that asked.
    """
    try:
        files = sorted(path for path in _found(where) if path.is_file())
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename}: {error.strerror}") from None
    if not files:
        place = where or sysconfig.get_paths()["stdlib"]
        raise ConfigError(f"{key}: no file at {place} (a file, a folder or a glob, seen from {Path.cwd()})")
    return files


def _found(where: str | None) -> Iterable[Path]:
    if where is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return (path for path in root.rglob("*.py") if not _NOT_SOURCE & set(path.relative_to(root).parts))
    if (root := Path(where)).is_file():
        return [root]
    if root.is_dir():
        return _below(root)
    return map(Path, glob.glob(where, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern


def _below(root: Path) -> Iterator[Path]:
    """What is in `root` and its folders, those that links lead to included, each once."""

    def refuse(error: OSError) -> None:
        raise error

    seen = set()
    for folder, inner, names in os.walk(root, onerror=refuse, followlinks=True):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        place = Path(folder)
        identity = place.stat().st_dev, place.stat().st_ino
        if identity in seen:
            inner.clear()
            continue
        seen.add(identity)
        yield from (place / name for name in names if not name.startswith("."))


def is_compressed(path: Path) -> bool:
    """Whether the name of `path` says that it is compressed as a whole."""
    return path.suffix.lower() in (".gz", ".zst")


def blocks(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    """The bytes of `path` in order, without a byte-order mark, behind its compression if its name ends in .gz or .zst.

    Args:
        size: of a block (bytes; about).

    Raises:
        ConfigError: it cannot be read, or its compression is damaged or cut short.
    """
    suffix, done = path.suffix.lower(), 0
    try:
        if is_compressed(path) and not path.stat().st_size:
            raise EOFError("is empty, where compression leaves some bytes even of nothing")
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
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # what is made with --long, too
    frame, held = None, io.BytesIO()
    with path.open("rb") as file:
        try:
            while data := file.read(2048):  # little, since a byte can stand for ten thousand
                while data:
                    frame = frame or decompressor.decompressobj()
                    held.write(frame.decompress(data))
                    data = frame.unused_data
                    frame = None if frame.eof else frame
                if held.tell() >= size:
                    yield held.getvalue()
                    held = io.BytesIO()
        except zstandard.ZstdError as error:
            raise EOFError(error) from None
    if frame:
        raise EOFError("ends in the middle of a frame")
    yield held.getvalue()


def is_empty_parquet(path: Path) -> bool:
    """Whether a Parquet file holds no row, which `datasets` takes amiss. False where it cannot be told."""
    from pyarrow import ArrowInvalid, parquet

    try:
        return parquet.read_metadata(path).num_rows == 0
    except (ArrowInvalid, OSError):
        return False


def whole_lines(content: Iterable[bytes]) -> Iterator[bytes]:
    """`content` in blocks that end with a line each, the last one perhaps excepted."""
    held: list[bytes] = []
    for block in content:
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*held, block[:end]])
            held.clear()
        held.append(block[end:])
    if rest := b"".join(held):
        yield rest


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in the lines of `path`, as `blocks` reads it, with the numbers of the lines. Empty lines are none.

    Raises:
        ConfigError: as `blocks` and `parse_line`.
    """
    lines = itertools.chain.from_iterable(map(io.BytesIO, whole_lines(blocks(path))))
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, parse_line(path, number, line)


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
