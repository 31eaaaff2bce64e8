"""Data files: found by path or glob, decompressed while they are read, parsed as JSON Lines or opened as tables."""

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lm.errors import ConfigError, first_20
from lm.fileio import parse_json

if TYPE_CHECKING:
    from datasets import IterableDataset

T = TypeVar("T")

_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib"})
BLOCK = 1 << 20


def find_files(where: str | None, key: str) -> list[Path]:
    """Return the files that `where` names, sorted.

    Args:
        where: a file, a directory (all files below it that are not hidden or in __pycache__) or a
            glob; None = the source of the Python standard library without its tests.
        key: the hyperparameter that `where` comes from, for errors.
    """
    source = sysconfig.get_paths()["stdlib"] if where is None else os.path.expanduser(where)  # noqa: PTH111 - a glob
    root = Path(source)
    try:
        if where is None:
            found = (path for path in _walk(root, _NOT_SOURCE, set()) if path.suffix == ".py")
        elif source and root.is_dir():
            found = _walk(root, (), set())
        elif root.is_file():
            found = [root]
        else:
            paths = map(Path, glob.iglob(source, recursive=True))  # noqa: PTH207 - Path.glob accepts no absolute pattern
            found = filter(Path.is_file, paths)
        if files := sorted(found):
            return files
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename}: {error.strerror}") from None
    advice = f"it must be a file, a directory or a glob, relative to {Path.cwd()}"
    raise ConfigError(f"{key}: no file found at {source!r}; {advice}")


def _walk(
    directory: Path, excluded: Collection[str], entered: set[tuple[int, int]]
) -> Iterator[Path]:
    """Yield the files below `directory`, but in no directory that is hidden, `__pycache__` or `excluded`; follow links.

    Args:
        entered: device and inode of directories; each is entered once.
    """
    status = directory.stat()
    if (status.st_dev, status.st_ino) in entered:
        return
    entered.add((status.st_dev, status.st_ino))
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_file():
            yield path
        elif (
            path.is_dir() and not path.name.startswith("__pycache__") and path.name not in excluded
        ):
            yield from _walk(path, excluded, entered)


def download(source: str, files: Sequence[str], key: str) -> Path:
    """Download `files`, names or patterns, of a model OWNER/MODEL or OWNER/MODEL@REVISION on the Hugging Face Hub.

    The processes of a node can call it at the same time: one downloads, the others wait.

    Args:
        key: the hyperparameter that `source` is the value of, for errors.

    Returns:
        The directory of the files, in the Hub's cache.
    """
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # the errors below report the problem

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"{key}: {source}: {problem}")

    name, _, revision = source.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(files)))
    except errors.GatedRepoError:
        advice = (
            f"request access at https://huggingface.co/{name}, then `hf auth login` or set HF_TOKEN"
        )
        raise refuse(f"gated: {advice}") from None
    except errors.RevisionNotFoundError:
        raise refuse(f"no revision {revision!r}; omit it for the default branch") from None
    except errors.RepositoryNotFoundError:
        advice = "if it is private, run `hf auth login` or set HF_TOKEN"
        raise refuse(f"no such file or directory, and not found on the Hub; {advice}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if key == "tokenizer" and (incomplete := getattr(error, "snapshot_path", None)):
            return Path(incomplete)  # only tokenizer.json is required
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else reason(error)
        elsewhere = (
            f"run `hf download {name} --local-dir DIRECTORY` on a machine with network access"
        )
        problem = f"no such file or directory, not in the cache, and cannot be downloaded: {cause}"
        raise refuse(f"{problem}; {elsewhere} and copy DIRECTORY") from None
    except errors.HFValidationError:
        raise refuse(
            "no such file or directory, and not a name on the Hugging Face Hub (OWNER/MODEL)"
        ) from None
    except Exception as error:  # each transport raises its own
        raise refuse(
            f"download failed: {reason(error)}; rerun the same command to resume it"
        ) from None


def reason(error: Exception) -> str:
    """Return what a library's error, or its cause, says in one line, or else its type."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:300] or type(cause).__name__


def name_files(files: Sequence[Path]) -> str:
    """Return the first of `files` and the number of others, for errors."""
    return f"{files[0]} and {len(files) - 1} other file(s)" if files[1:] else str(files[0])


def is_compressed(path: Path) -> bool:
    """Return whether `path` has the suffix of a compressed file."""
    return path.suffix.lower() in (".gz", ".zst")


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the contents of `path` in blocks of about `BLOCK` bytes, decompressed, without a byte-order mark."""
    suffix, n_bytes = path.suffix.lower(), 0
    try:
        if is_compressed(path) and not path.stat().st_size:
            raise EOFError("the compressed file is empty")
        for block in _read_zst(path) if suffix == ".zst" else _read(path, is_gzip=suffix == ".gz"):
            yield block if n_bytes else block.removeprefix(codecs.BOM_UTF8)
            n_bytes += len(block)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read after byte {n_bytes}: {reason}") from None


def _read(path: Path, is_gzip: bool) -> Iterator[bytes]:
    with gzip.open(path) if is_gzip else path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def _read_zst(path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"{path}: .zst files require a package: pip install zstandard") from None
    decompressor = zstandard.ZstdDecompressor(
        max_window_size=1 << 31
    )  # also files made with --long
    frame = None  # frame by frame: the package's own reader accepts a truncated file
    with path.open("rb") as file:
        try:
            while data := file.read(2048):  # small, because a byte can decompress to ten thousand
                while data:
                    frame = frame or decompressor.decompressobj()
                    if block := frame.decompress(data):
                        yield block
                    data, frame = frame.unused_data, None if frame.eof else frame
        except zstandard.ZstdError as error:
            raise EOFError(error) from None
    if frame:
        raise EOFError("the file ends inside a frame")


def open_table(builder: str, files: Sequence[Path]) -> IterableDataset:
    """Open files for streaming with `datasets`; `builder` is one of its formats, e.g. "parquet"."""
    from datasets import IterableDataset, load_dataset

    if builder == "json":  # the library's parser names no line, and deep nesting crashes it
        return IterableDataset.from_generator(
            _json_records, gen_kwargs={"files": [str(file) for file in files]}
        )
    options: Any = (
        {"batch_size": 1024} if builder == "parquet" else {}
    )  # by default, a file without rows is an error
    names = [glob.escape(str(file)) for file in files]
    return load_dataset(builder, data_files=names, split="train", streaming=True, **options)


def _json_records(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    for path in map(Path, files):
        if not next(blocks(path), b"").lstrip().startswith(b"["):
            yield from (record for _, record, _ in read_jsonl(path))
            continue
        try:
            yield from parse_json(b"".join(blocks(path)))
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from None


def decode(path: Path, content: bytes, offset: int = 0) -> str:
    """Decode UTF-8 that starts at byte `offset` of `path`; errors name the byte."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        position = offset + error.start
        raise ConfigError(
            f"{path}: byte {position} is not UTF-8; convert the file, e.g. with iconv"
        ) from None


def read_all(files: Iterable[Path], read: Callable[[Path], T]) -> list[T]:
    """Return what `read` returns for each file, or raise the errors of all files, up to 20 of them in full."""
    results: list[T] = []
    errors: list[ConfigError] = []
    for path in files:
        try:
            results.append(read(path))
        except ConfigError as error:
            errors.append(error)
    if errors:
        merged = ConfigError.merge(errors)
        merged.problems = tuple(first_20(merged.problems))
        raise merged
    return results


def complete_lines(path: Path) -> Iterator[bytes]:
    """Yield the contents of `path` as `blocks` does, in blocks that end at the end of a line."""
    partial: list[bytes] = []
    for block in blocks(path):
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*partial, block[:end]])
            partial.clear()
        partial.append(block[end:])
    if rest := b"".join(partial):
        yield rest


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield place, object and size (bytes) of each line of a JSON Lines file; empty lines are skipped.

    Raises:
        ConfigError: a line is not a JSON object, or the file cannot be read.
    """
    lines = itertools.chain.from_iterable(map(io.BytesIO, complete_lines(path)))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place}: byte {error.start} of the line is not UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: not valid JSON: {error}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{place}: not a JSON object: {line[:60].strip()!r}")
        yield place, record, len(line)


def get_text(record: Mapping[str, Any], key: str, setting: str = "text_field") -> str:
    """Return the text in the field `key` of a record. Errors say to change `setting`; the caller adds the place."""
    if key not in record:
        problem = f"has no {key!r}, only {', '.join(map(repr, record)) or 'nothing'}; set {setting} to one of them"
        raise ConfigError(problem)
    text = record[key]
    if not isinstance(text, str):
        raise ConfigError(
            f"{key!r} is {json.dumps(text, default=str):.60}, not text; remove or correct the record"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{key!r} is not valid Unicode: character {error.start} is an unpaired surrogate"
        raise ConfigError(f"{problem}; remove or correct the record") from None
    return text
