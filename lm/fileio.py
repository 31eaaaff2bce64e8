"""Reading of files that are not trusted, up to a limit; checksums; crash-safe writing.

The limits keep what a stranger's checkpoint, model or dataset can cost below 1 GB of memory and 10
s beyond its real tensors; what its tokenizer and chat template compute has none. Parsed JSON takes
up to 25 times its size.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import google_crc32c
from pydantic import BaseModel, Field, ValidationError

from lm.errors import ConfigError, make_printable, oserror_as_config_error

REPOSITORY = Path(__file__).parent.parent
"""The directory of fsdp.py."""
MAX_JSON_BYTES = 8 << 20
"""Of a manifest, a config.json, an index or a safetensors header.

It is enough for 40,000 tensors, or some 10,000 ranks.
"""
MAX_JSON_DEPTH = 32
"""Of a manifest, a config.json or an index. Ours have 6 levels."""
MAX_TOKENIZER_BYTES = 40 << 20
"""Of a tokenizer.json. The largest in use has 33 MB."""
MAX_INDEX_BYTES = 512 << 20
"""Of the index of a token file, which lists its sources: some 3 million."""
MAX_SLICES = 1 << 16
"""Entries in the headers of a checkpoint or a model, in addition to one per KiB of its files."""
_CHECKSUM_BLOCK_BYTES = 1 << 18
"""Read at a time: what fits into the cache of a core."""
_POINTERS = {
    re.compile(rb"version https://git-lfs"): ("Git LFS pointer", "git lfs pull"),
    # Also a link, as Git writes it where there are none.
    re.compile(rb"((\.\./)*\.git)?/annex/objects/"): ("git-annex pointer", "git annex get"),
    re.compile(rb"outs:\n- (md5|hash|etag|size|path): "): ("DVC pointer", "dvc pull"),
}
"""what a file starts with that was not downloaded with its repository, and the command for it"""
_NO_DIRECTORY_SYNC = (
    errno.EINVAL,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EBADF,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
)
"""of file systems that flush files only, e.g. CIFS and DrvFs"""


def expand_home(text: str) -> str:
    """Return the path, URL or name on the Hub `text` with the home directory for `~`.

    Raises:
        ConfigError: it is empty, which would be the current directory.
    """
    if not text:
        raise ConfigError("a path is empty; the current directory is .")
    return os.path.expanduser(text)  # noqa: PTH111 - Path's raises for an unknown user


def home_path(text: str) -> Path:
    """Return the path `text` of a command line, in which shells leave `'~'` and `--option=~`."""
    return Path(expand_home(text))


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open the regular file `path` and return its descriptor.

    No link is followed, and a FIFO does not block. The function can be the `opener` of `open`.

    Raises:
        OSError: the file cannot be opened, or is a link, a FIFO or a device.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a symbolic link, not a regular file", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def find_stranger(directory: Path, owner: int) -> str | None:
    """Return why not only the user `owner` decides what is in `directory`; None = only they do.

    Raises:
        OSError: it does not exist.
    """
    status = directory.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if not stat.S_ISDIR(status.st_mode):
        return "is no directory"
    if status.st_uid != owner:
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by other users"
    return None


@oserror_as_config_error
def choose_compiler_cache() -> None:
    """Let PyTorch cache compiled code, which it executes, where no other user can write.

    Its default is in /tmp, for whoever comes first. It sets the variable to it when it is imported.
    """
    remedy = "set TORCHINDUCTOR_CACHE_DIR to a directory of yours"
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        try:
            cache.mkdir(parents=True, exist_ok=True)  # PyTorch does it when it is imported
        except OSError as error:
            raise ConfigError(f"{cache}: {error.strerror}; {remedy}") from None
        return
    cache = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    cache.mkdir(mode=0o700, exist_ok=True)
    stranger = find_stranger(cache, os.getuid())
    if stranger is not None:
        raise ConfigError(f"{cache}: {stranger}; {remedy}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of the regular file `path`, which has at most `limit` bytes.

    Raises:
        OSError: it cannot be read, is not a regular file, is larger, or a pointer to the content.
    """
    with open(path, "rb", opener=open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes, but at most {limit:,} are read", str(path))
        content = file.read(limit)
    pointer = find_pointer(content)
    if pointer is not None:
        name, remedy = pointer
        raise OSError(errno.EINVAL, f"a {name}; {remedy}", str(path))
    return content


def find_pointer(start: bytes) -> tuple[str, str] | None:
    """Return what a file is that starts with `start`, and the remedy, if it is not downloaded."""
    for pattern, (name, command) in _POINTERS.items():
        if pattern.match(start):
            return name, f"download the file, `{command}` in its repository"
    return None


def parse_json(text: bytes) -> Any:
    """Return the value of the JSON `text`.

    Raises:
        ValueError: it is invalid, or nested more than `MAX_JSON_DEPTH` levels deep.
    """
    too_deep = f"more than {MAX_JSON_DEPTH} levels"
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [content]  # the values at one depth
    for _ in range(MAX_JSON_DEPTH + 1):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                next_level.extend(value.values())
            elif isinstance(value, list):
                next_level.extend(value)
        level = next_level
    if level:
        raise ValueError(too_deep)
    return content


Seconds = Annotated[float, Field(ge=0, lt=2**36)]
"""since 1970"""


class Line(BaseModel, frozen=True):
    """A line of the records of a run. Versions of this program may add keys."""

    step: int = Field(ge=0, lt=2**63)
    time: Seconds


L = TypeVar("L", bound=Line)


def read_records(path: Path, kind: type[L], size: int | None = None) -> Iterator[L]:
    """Yield the lines of a file of JSON objects that are of the given kind, as they are read.

    If others are left out, a line to stderr names the first and its key, once. A last line without
    an end is not mentioned: a kill truncated it, or its writer has yet to complete it. A file that
    does not exist has no lines.

    Args:
        size: how many bytes of the file are read; None = all.
    """
    first_left_out = 0
    problem = ""
    n_left_out = 0
    with suppress(FileNotFoundError), open(path, "rb", opener=open_regular) as file:
        if size is None:
            size = os.fstat(file.fileno()).st_size
        for number, line in enumerate(_read_lines(file, size), start=1):
            try:
                record = kind.model_validate_json(line)
            except ValidationError as error:
                if line.endswith(b"\n") or file.tell() < size:
                    n_left_out += 1
                    if n_left_out == 1:
                        first_left_out = number
                        problem = describe_invalid(error)
                continue
            yield record
    if n_left_out:
        print_once(f"{path}:{first_left_out}: left out ({n_left_out:,} in all): {problem}")


def _read_lines(file: BufferedReader, end: int) -> Iterator[bytes]:
    """Yield the lines up to the byte `end` of the file, longer ones in parts."""
    position = file.tell()
    while line := file.readline(min(MAX_JSON_BYTES, end - position)):
        position += len(line)
        yield line


@functools.cache
def print_once(line: str) -> None:
    """Print `line` to stderr, unless this process has already printed it."""
    print(make_printable(line), file=sys.stderr)


def drop_records(path: Path, kind: type[L], is_kept: Callable[[L], bool]) -> None:
    """Remove the lines of a file of records that are not `is_kept`; crash-safe.

    A file that does not exist is created.
    """
    open(path, "a+b", opener=open_regular).close()  # which does not wait for a FIFO
    draft = path.with_name(f"{path.name}.draft")
    draft.unlink(missing_ok=True)
    with open(path, "rb", opener=open_regular) as file, draft.open("xb") as kept:
        size = os.fstat(file.fileno()).st_size
        for line in _read_lines(file, size):
            with suppress(ValidationError):
                if is_kept(kind.model_validate_json(line)):
                    kept.write(line.removesuffix(b"\n") + b"\n")  # which a full disk can cut off
        sync(kept)
    draft.replace(path)


def describe_invalid(error: ValidationError, *outer: str) -> str:
    """Return the first field that is invalid, after the names of the `outer` ones, and why."""
    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ").splitlines()[0]
    field = ".".join(map(str, (*outer, *first["loc"])))
    if not field:  # of the JSON, or of all fields together
        return reason
    return f"{field[:80]}: {reason}"


def crc32c(path: Path) -> int:
    """Return the CRC-32C of the regular file at `path`; processors have an instruction for it.

    Raises:
        OSError: the file cannot be read.
    """
    value = 0
    with open(path, "rb", opener=open_regular) as file:
        while block := file.read(_CHECKSUM_BLOCK_BYTES):
            value = google_crc32c.extend(value, block)
    return value


def sync(file: BinaryIO) -> None:
    """Flush `file` to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush the entries of the directory `path` to disk: which files exist, under which names.

    Where the file system cannot, it is left to the kernel.
    """
    handle: int | None = None
    try:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        if handle is not None:
            os.close(handle)


def replace_durably(path: Path, content: bytes) -> None:
    """Write `content` to `path`; a crash leaves either the old file or the complete new one."""
    draft = path.with_name(f"{path.name}.draft")
    write_durably(draft, content)
    draft.replace(path)


def write_durably(path: Path, content: bytes) -> None:
    """Write `content` to a new file at `path`, in place of any other, and flush it to disk."""
    path.unlink(missing_ok=True)  # "xb" does not follow a link that someone makes here
    with path.open("xb") as file:
        file.write(content)
        sync(file)
