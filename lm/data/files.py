"""Data files: found by path or glob, and read as blocks of text or JSON Lines."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import itertools
import json
import math
import os
import shlex
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.data.signatures import (
    DECOMPRESSORS,
    advise_encoding,
    check_nul,
    check_pointer,
    check_start,
)
from lm.errors import ConfigError, limit_problems, nearest_file
from lm.launch.requirements import requires
from lm.units import format_count

_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib"})
"""directories of the standard library that hold other packages or tests"""
_DOWNLOADS = {
    "s3": "aws s3 cp --recursive {} DIRECTORY",
    "gs": "gcloud storage cp --recursive {} DIRECTORY",
    "hf": "hf download OWNER/NAME --repo-type dataset --local-dir DIRECTORY",
    "http": "wget {}",
    "https": "wget {}",
}
"""commands that download a URL, by its scheme"""
READ_BLOCK_BYTES = 1 << 20
MAX_EXPANSION = 200
"""By which factor a compressed file can expand: text has 3 to 20, tasks with examples up to 80."""
FREE_EXPANSION_BYTES = 64 << 20
"""To which any compressed file can expand."""
_ZST_READ_BYTES = 2048
"""Small, because a byte of a .zst file can decompress to ten thousand."""
_ZST_MAX_WINDOW_BYTES = 1 << 31
"""Also files made with --long can be read."""


def find_files(where: str | None, key: str) -> list[Path]:
    """Return the files that `where` names, sorted.

    Args:
        where: a file, a directory (all files below it that are not hidden or in __pycache__) or a
            glob; None = the source of the Python standard library without its tests.
        key: the hyperparameter that `where` comes from, for errors.
    """
    if where is None:
        pattern = sysconfig.get_paths()["stdlib"]
    else:
        pattern = os.path.expanduser(where)  # noqa: PTH111 - a glob
    root = Path(pattern)
    try:
        if where is None:
            below = _files_below(root, _NOT_SOURCE, set())
            files = [path for path in below if path.suffix == ".py"]
        elif pattern and root.is_dir():
            files = list(_files_below(root, (), set()))
        elif root.is_file():
            files = [root]
        else:
            matches = glob.iglob(pattern, recursive=True)  # noqa: PTH207 - accepts absolute patterns
            files = [path for path in map(Path, matches) if _is_file(path)]
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename}: {error.strerror}") from None
    if not files and pattern and root.is_dir():
        hint = "hidden files and __pycache__ are not read"
        raise ConfigError(f"{key}: the directory {pattern!r} has no files ({hint}); add text to it")
    if not files:
        check_path(pattern, key)
        advice = f"it must be a file, a directory or a glob, relative to {Path.cwd()}"
        advice += nearest_file(pattern)
        raise ConfigError(f"{key}: no file found at {pattern!r}; {advice}")
    return sorted(files)


def find_saved_dataset(files: Iterable[Path]) -> Path | None:
    """Return a directory that `save_to_disk` of `datasets` has written, if `files` are of one."""
    tables = {file.parent for file in files if file.suffix == ".arrow"}
    states = {file.parent for file in files if file.name == "state.json"}
    return min(tables & states, default=None)


def check_path(where: str, key: str) -> None:
    """Raise ConfigError if `where`, which does not exist, is a URL or contains a variable."""
    encoding = sys.getfilesystemencoding()
    if not where.isascii() and encoding != "utf-8":
        problem = f"no file found at {where!r}, as {encoding} of this locale encodes it"
        raise ConfigError(f"{key}: {problem}; set LC_ALL=C.UTF-8")
    scheme, separator, _ = where.partition("://")
    if separator:
        command = _DOWNLOADS.get(scheme, "a command of your storage").format(shlex.quote(where))
        problem = f"{where} is a URL, but data are read from disk"
        raise ConfigError(f"{key}: {problem}; download them first, e.g. with {command}")
    if "$" in where:
        expanded = os.path.expandvars(where)
        problem = f"{where}: environment variables are not expanded"
        raise ConfigError(f"{key}: {problem}; write the path, e.g. {expanded}")


def _files_below(
    directory: Path, excluded: Collection[str], entered: set[tuple[int, int]]
) -> Iterator[Path]:
    """Yield the files below `directory` that are not in a hidden directory or `__pycache__`.

    Links are followed.

    Args:
        excluded: names of directories that are not entered.
        entered: device and inode of directories; each is entered once.
    """
    status = directory.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in entered:
        return
    entered.add(identity)
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            continue
        if _is_file(path):
            yield path
        elif path.is_dir():
            is_cache = path.name.startswith("__pycache__")
            if not is_cache and path.name not in excluded:
                yield from _files_below(path, excluded, entered)


def _is_file(path: Path) -> bool:
    """Return whether `path` is a file, or a link to one.

    Raises:
        ConfigError: it is a link to nothing, as in a repository or a cache without the contents.
    """
    if path.is_symlink() and not path.exists():
        problem = f"is a link to {path.readlink()}, which does not exist"
        remedy = "restore the file, e.g. with git annex get or dvc pull, or delete the link"
        raise ConfigError(f"{path}: {problem}; {remedy}")
    return path.is_file()


def download_from_hub(source: str, files: Sequence[str], key: str) -> Path:
    """Download files of a model on the Hugging Face Hub.

    The processes of a node can call it at the same time: one downloads, the others wait.

    Args:
        source: the model, OWNER/MODEL or OWNER/MODEL@REVISION.
        files: names or patterns.
        key: the hyperparameter that `source` is the value of, for errors.

    Returns:
        The directory of the files, in the Hub's cache.
    """
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # the errors below report the problem

    def refusal(problem: str) -> ConfigError:
        return ConfigError(f"{key}: {source}: {problem}")

    name, _, revision = source.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(files)))
    except errors.GatedRepoError:
        request = f"request access at https://huggingface.co/{name}"
        raise refusal(f"gated: {request}, then `hf auth login` or set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise refusal(f"no revision {revision!r}; omit it for the default branch") from None
    except errors.RepositoryNotFoundError:
        problem = "no such file or directory, and not found on the Hub"
        advice = "if it is private, run `hf auth login` or set HF_TOKEN"
        raise refusal(f"{problem}; {advice}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        incomplete = getattr(error, "snapshot_path", None)
        if key == "tokenizer" and incomplete:
            return Path(incomplete)  # only tokenizer.json is required
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else error_text(error)
        problem = f"no such file or directory, not in the cache, and cannot be downloaded: {cause}"
        download = f"run `hf download {name} --local-dir DIRECTORY`"
        advice = f"{download} on a machine with network access and copy DIRECTORY"
        raise refusal(f"{problem}; {advice}") from None
    except errors.HFValidationError:
        problem = "no such file or directory, and not a name on the Hugging Face Hub (OWNER/MODEL)"
        raise refusal(problem) from None
    except Exception as error:  # each transport raises its own
        problem = f"download failed: {error_text(error)}"
        raise refusal(f"{problem}; rerun the same command to resume it") from None


def error_text(error: BaseException) -> str:
    """Return what a library's error, or its cause, says in one line, or else its type."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:300] or type(cause).__name__


def name_files(files: Sequence[Path]) -> str:
    """Return the first of `files` and the number of others, for errors."""
    if len(files) == 1:
        return str(files[0])
    return f"{files[0]} and {format_count(len(files) - 1, 'other file')}"


def is_compressed(path: Path) -> bool:
    """Return whether `path` has the suffix of a compressed file."""
    return path.suffix.lower() in DECOMPRESSORS


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the contents of the text file `path` in blocks of about `READ_BLOCK_BYTES`.

    They are decompressed, and a byte-order mark is left out.

    Raises:
        ConfigError: the file cannot be read, is of a format that is not text, or expands to more
            than `MAX_EXPANSION` allows.
    """
    n_bytes = 0
    size = 0
    limit = math.inf
    try:
        if is_compressed(path):
            check_pointer(path)
            size = path.stat().st_size
            limit = max(MAX_EXPANSION * size, FREE_EXPANSION_BYTES)
        for block in _read_raw_blocks(path):
            if n_bytes + len(block) > limit:
                problem = f"{size:,} bytes expand to more than {limit:,}"
                raise ConfigError(f"{path}: {problem}; if this is right, decompress it first")
            if n_bytes == 0:
                check_start(path, block)
            check_nul(path, block, n_bytes)
            yield block.removeprefix(codecs.BOM_UTF8) if n_bytes == 0 else block
            n_bytes += len(block)
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read after byte {n_bytes}: {problem}") from None


def _read_raw_blocks(path: Path) -> Iterator[bytes]:
    if is_compressed(path) and path.stat().st_size == 0:
        raise EOFError("the compressed file is empty")
    match path.suffix.lower():
        case ".zst":
            yield from _read_zst_blocks(path)
        case ".gz":
            with gzip.open(path) as file:
                yield from _read_to_end(file)
        case _:
            with path.open("rb") as file:
                yield from _read_to_end(file)


def _read_to_end(file: io.BufferedIOBase) -> Iterator[bytes]:
    while block := file.read(READ_BLOCK_BYTES):
        yield block


def _read_zst_blocks(path: Path) -> Iterator[bytes]:
    """Decompress frame by frame, as the package's own reader accepts a truncated file."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"{path}: {requires('zstandard')}") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZST_MAX_WINDOW_BYTES)
    frame = None
    with path.open("rb") as file:
        try:
            while data := file.read(_ZST_READ_BYTES):
                while data:
                    if frame is None:
                        frame = decompressor.decompressobj()
                    block = frame.decompress(data)
                    if block:
                        yield block
                    data = frame.unused_data
                    if frame.eof:
                        frame = None
        except zstandard.ZstdError as error:
            raise EOFError(error) from None
    if frame is not None:
        raise EOFError("the file ends inside a frame")


def decode_utf8(path: Path, content: bytes, offset: int = 0) -> str:
    """Decode UTF-8 that starts at byte `offset` of `path`; errors name the byte."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        problem = f"byte {offset + error.start} is not UTF-8"
        raise ConfigError(f"{path}: {problem}; {advise_encoding(path, content)}") from None


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


def raise_together(errors: Sequence[ConfigError]) -> None:
    """Raise one error with the problems of all `errors`, up to 20 of them in full, if any."""
    if errors:
        problems = ConfigError.merge(errors).problems
        raise ConfigError(*limit_problems(problems))


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


class RawLine(NamedTuple):
    """A line of a JSON Lines file, or an element of a JSON array."""

    place: str
    """file and line number, for errors"""
    content: Any
    """the bytes of a line, or the value of an element"""
    size: int
    """of the line (bytes)"""


class JsonLine(NamedTuple):
    """A line of a JSON Lines file."""

    place: str
    """file and line number, for errors"""
    record: dict[str, Any]
    size: int
    """of the line (bytes)"""


def read_json_lines(path: Path) -> Iterator[JsonLine]:
    """Yield the lines of a JSON Lines file, or the elements of a file that is one JSON array.

    Empty lines are skipped. An array is parsed in memory.

    Raises:
        ConfigError: a line or an element is not a JSON object, or the file cannot be read.
    """
    for line in read_raw_lines(path):
        yield parse_line(line, path)


def parse_line(line: RawLine, path: Path) -> JsonLine:
    """Return the record of a line of the file `path`."""
    record = line.content
    if isinstance(record, bytes):
        record = _parse_json(record, line.place, path)
    return JsonLine(line.place, _check_record(record, line.place), line.size)


def read_raw_lines(path: Path) -> Iterator[RawLine]:
    """Yield what `read_json_lines` parses."""
    blocks = read_line_blocks(path)
    first_block = next(blocks, b"")
    if first_block.lstrip().startswith(b"["):
        yield from _read_json_array(path, b"".join([first_block, *blocks]))
        return
    number = 0
    for block in itertools.chain([first_block], blocks):
        for line in io.BytesIO(block):
            number += 1
            if line.strip():
                yield RawLine(f"{path}:{number}", line, len(line))


def _read_json_array(path: Path, content: bytes) -> Iterator[RawLine]:
    records = _parse_json(content, str(path), path)
    for i, record in enumerate(records):
        yield RawLine(f"{path}[{i}]", record, len(content) // len(records))


def _parse_json(content: bytes, place: str, path: Path) -> Any:
    try:
        return load_json(content.decode())
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8"
        raise ConfigError(f"{place}: {problem}; {advise_encoding(path, content)}") from None
    except json.JSONDecodeError as error:  # whose line number is that within `content`
        problem = f"{error.msg} at character {error.pos + 1}"
        raise ConfigError(f"{place}: not valid JSON: {problem}; {_advise_json(path)}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not valid JSON: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def load_json(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
        ConfigError: an object has a key twice, of which one value would be lost.
    """
    return json.loads(text, object_pairs_hook=_make_object)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        (key, _), *_ = counts.most_common(1)
        raise ConfigError(f"an object has the key {key!r} twice; remove or rename one")
    return made


def _advise_json(path: Path) -> str:
    """Return what to do with a file that is not JSON Lines."""
    suffixes = set(path.suffixes)
    if suffixes & {".csv", ".tsv"}:
        command = "read_csv(OLD).to_json(NEW, orient='records', lines=True)"
        return f"convert it, e.g. with pandas: {command}"
    if ".json" in suffixes:
        return "write its records one a line, e.g. jq -c '.KEY[]' OLD.json > NEW.jsonl"
    if suffixes & {".jsonl", ".ndjson"}:
        return "each line must be one JSON object"
    glob_of_lines = "'DIRECTORY/**/*.jsonl'"
    return f"choose JSON Lines by a glob, e.g. {glob_of_lines}; dataset: text reads text"


def _check_record(record: Any, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ConfigError(f"{place}: not a JSON object: {json.dumps(record)[:60]}")
    return record


def get_text(record: Mapping[str, Any], key: str, setting: str = "text_field") -> str:
    """Return the text in the field `key` of a record.

    Raises:
        ConfigError: there is no text. It says to change `setting`; the caller adds the place.
    """
    if key not in record:
        fields = ", ".join(repr(field) for field in record) or "nothing"
        problem = f"has no {key!r}, only {fields}"
        if "messages" in record:
            raise ConfigError(f"{problem}; train on chats with dataset: jsonl")
        raise ConfigError(f"{problem}; set {setting} to one of them")
    text = record[key]
    advice = "remove or correct the record"
    if not isinstance(text, str):
        shown = json.dumps(text, default=str)[:60]
        raise ConfigError(f"{key!r} is {shown}, not text; {advice}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{key!r} is not valid Unicode: character {error.start} is an unpaired surrogate"
        raise ConfigError(f"{problem}; {advice}") from None
    return text
