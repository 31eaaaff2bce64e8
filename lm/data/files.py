"""Data files: found by path or glob, and their formats."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from lm.errors import ConfigError, nearest_file
from lm.units import format_count

TOKENIZING_PACKAGES = ("jinja2", "numpy", "tokenizers", "transformers", "trl")
"""those whose versions the tokens of files depend on"""
FORMATS = {
    "text": (".txt", ".md", ".py"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "hdf5": (".h5", ".hdf5"),
}
"""suffixes of files by format"""
_FORMAT_OF_SUFFIX = {suffix: name for name, known in FORMATS.items() for suffix in known}
_READ_COMPRESSED = ("text", "jsonl", "csv", "tsv")
"""formats that are also read from .gz and .zst files"""
CODECS = {".gz": "gzip", ".zst": "zstd"}
"""of pyarrow, by suffix"""
_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib"})
"""directories of the standard library that hold other packages or tests"""


def format_of(path: Path, override: str | None = None) -> str | None:
    """Return the format of `path` by its suffix, or `override`.

    None if it is unknown or not readable compressed.
    """
    name = override
    if name is None:
        uncompressed = Path(path.stem) if is_compressed(path) else path
        name = _FORMAT_OF_SUFFIX.get(uncompressed.suffix.lower())
    if is_compressed(path) and name not in _READ_COMPRESSED:
        return None
    return name


def is_compressed(path: Path) -> bool:
    """Return whether `path` has the suffix of a compressed file."""
    return path.suffix.lower() in CODECS


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
    if not files:
        rule = "name a file, a directory with files that are not hidden, or a glob"
        problem = f"{key}: no file found at {pattern!r} in {Path.cwd()}"
        hint = nearest_file(pattern)
        raise ConfigError(f"{problem}; {rule}, and download what has a URL first{hint}")
    return sorted(files)


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


def name_files(files: Sequence[Path]) -> str:
    """Return the first of `files` and the number of others, for errors."""
    if len(files) == 1:
        return str(files[0])
    return f"{files[0]} and {format_count(len(files) - 1, 'other file')}"
