"""Sources that begin as text: files found and read, and the tokenizer that makes ids of them."""

from __future__ import annotations

import codecs
import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm.errors import ConfigError

VALIDATION_SHARE = 0.05
"""Part of the text that is held out where no validation data is named."""

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; the end of a document becomes a blank line, what is no UTF-8 U+FFFD."""
        return "".join(self.stream(ids))

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Text as `ids` come in, each character once all of its bytes have."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in ids:
            if token < 256:
                yield decoder.decode(bytes([token]))
            else:
                yield decoder.decode(b"", final=True) + ("\n\n" if token == self.end_of_text else "\ufffd")
        yield decoder.decode(b"", final=True)


def find_files(where: str | None, key: str) -> list[Path]:
    """The files that `where` names, sorted: a file, a folder (all files below it, hidden ones excepted) or a glob.

    None is the Python standard library's own source, without its tests: real text on every machine.

    Raises:
        ConfigError: nothing is there; names `key`, the setting that asked.
    """
    if where is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = (path for path in root.rglob("*.py") if not _NOT_SOURCE & set(path.relative_to(root).parts))
    elif (root := Path(where)).is_dir():
        found = (path for path in root.rglob("*") if not _is_hidden(path.relative_to(root)))
    else:
        found = map(Path, glob.glob(where, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise ConfigError(f"{key}: no file at {where or root} (a file, a folder or a glob, seen from {Path.cwd()})")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read_tokens(files: list[Path], tokenizer: ByteTokenizer) -> NDArray[np.uint16]:
    """All files' tokens in one row, each file ended by the end-of-text token.

    Files are put in an order that has nothing to do with their names, so that a cut anywhere leaves a
    fair sample on both sides.

    Raises:
        ConfigError: a file that cannot be read or is no UTF-8 (with the offset), or no text at all.
    """
    pieces = []
    problems = []
    for path in sorted(files, key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        try:
            data = path.read_bytes()
            data.decode()
        except UnicodeDecodeError as error:
            problems.append(f"{path}: byte {error.start} is not UTF-8; convert the file, e.g. with iconv")
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        else:
            if data:
                pieces.append(np.frombuffer(data, np.uint8).astype(np.uint16))
                pieces.append(np.array([tokenizer.end_of_text], np.uint16))
    if problems:
        raise ConfigError(*problems)
    if not pieces:
        raise ConfigError(f"{files[0]}{' and others' if len(files) > 1 else ''}: no text in {len(files)} file(s)")
    return np.concatenate(pieces)


def split_validation(tokens: NDArray[np.uint16]) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Cut off the last `VALIDATION_SHARE` of `tokens` as validation data."""
    cut = len(tokens) - max(1, round(len(tokens) * VALIDATION_SHARE))
    return tokens[:cut], tokens[cut:]
