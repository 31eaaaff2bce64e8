"""Data files: found by path or glob, decompressed while they are read, parsed as JSON Lines."""

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
    """Return the files that `where` names, sorted.

    Args:
        where: a file, a folder (all files below it that are not hidden) or a glob; None = the source of the Python
            standard library without its tests.
        key: the hyperparameter that `where` comes from, for errors.

    Raises:
        ConfigError: no file is found, or a folder cannot be read.
    """
    try:
        files = sorted(path for path in _candidates(where) if path.is_file())
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename}: {error.strerror}", keys=(key,)) from None
    if not files:
        place = where or sysconfig.get_paths()["stdlib"]
        advice = f"give a file, a folder or a glob, relative to {Path.cwd()}"
        raise ConfigError(f"{key}: no file found at {place}; {advice}", keys=(key,))
    return files


def _candidates(where: str | None) -> Iterable[Path]:
    if where is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return (path for path in root.rglob("*.py") if not _NOT_SOURCE & set(path.relative_to(root).parts))
    if (root := Path(where)).is_file():
        return [root]
    if root.is_dir():
        return _walk(root)
    return map(Path, glob.glob(where, recursive=True))  # noqa: PTH207 - Path.glob accepts no absolute pattern


def _walk(root: Path) -> Iterator[Path]:
    """Yield what is below `root` and not hidden; follow links, and enter each folder once."""

    def fail(error: OSError) -> None:
        raise error

    seen = set()
    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        path = Path(folder)
        identity = path.stat().st_dev, path.stat().st_ino
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        yield from (path / name for name in names if not name.startswith("."))


def is_compressed(path: Path) -> bool:
    """Return whether `path` has the suffix of a compressed file."""
    return path.suffix.lower() in (".gz", ".zst")


def blocks(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    """Yield the contents of `path`, decompressed (.gz, .zst), without a byte-order mark.

    Args:
        size: approximate size of a block (bytes).

    Raises:
        ConfigError: the file cannot be read, or its compressed data are damaged or truncated.
    """
    suffix, n_bytes = path.suffix.lower(), 0
    try:
        if is_compressed(path) and not path.stat().st_size:
            raise EOFError("the compressed file is empty")
        for block in _read_zst(path, size) if suffix == ".zst" else _read(path, size, is_gzip=suffix == ".gz"):
            yield block if n_bytes else block.removeprefix(codecs.BOM_UTF8)
            n_bytes += len(block)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read after byte {n_bytes}: {reason}") from None


def _read(path: Path, size: int, is_gzip: bool) -> Iterator[bytes]:
    with gzip.open(path) if is_gzip else path.open("rb") as file:
        while block := file.read(size):
            yield block


def _read_zst(path: Path, size: int) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"{path}: .zst files require a package: pip install zstandard") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # also files made with --long
    frame, output = None, io.BytesIO()  # frame by frame: the package's own reader accepts a truncated file
    with path.open("rb") as file:
        try:
            while data := file.read(2048):  # small, because a byte can decompress to ten thousand
                while data:
                    frame = frame or decompressor.decompressobj()
                    output.write(frame.decompress(data))
                    data = frame.unused_data
                    frame = None if frame.eof else frame
                if output.tell() >= size:
                    yield output.getvalue()
                    output = io.BytesIO()
        except zstandard.ZstdError as error:
            raise EOFError(error) from None
    if frame:
        raise EOFError("the file ends inside a frame")
    yield output.getvalue()


def is_empty_parquet(path: Path) -> bool:
    """Return whether a Parquet file has no rows, which `datasets` cannot read; False if its metadata are damaged."""
    from pyarrow import ArrowInvalid, parquet

    try:
        return parquet.read_metadata(path).num_rows == 0
    except (ArrowInvalid, OSError):
        return False


def whole_lines(content: Iterable[bytes]) -> Iterator[bytes]:
    """Regroup `content` into blocks that end at the end of a line."""
    partial: list[bytes] = []
    for block in content:
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*partial, block[:end]])
            partial.clear()
        partial.append(block[end:])
    if rest := b"".join(partial):
        yield rest


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers and objects of a JSON Lines file, which `blocks` reads; empty lines are skipped.

    Raises:
        ConfigError: as `blocks` and `parse_line`.
    """
    lines = itertools.chain.from_iterable(map(io.BytesIO, whole_lines(blocks(path))))
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, parse_line(path, number, line)


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Parse a line of a JSON Lines file.

    Raises:
        ConfigError: the line is not a JSON object; names the file and the line number.
    """
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}:{number}: byte {error.start} of the line is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}:{number}: not a JSON object: {line[:60].strip()!r}")
    return record
