"""Text files as one array of tokens."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.cache import cached, describe_files, remembered
from lm.data.encoder import Document, encode_in_threads, split_document
from lm.data.files import READ_BLOCK_BYTES, name_files, raise_together, read_text_blocks
from lm.data.progress import bar_of_files
from lm.data.signatures import NotTextError
from lm.data.tokenizer import Tokenizer, describe_tokenizer
from lm.errors import ConfigError
from lm.launch.launch import is_rank0
from lm.launch.machine import usable_cores
from lm.units import format_count

if TYPE_CHECKING:
    from tqdm import tqdm


class TextTokens(NamedTuple):
    """The tokens of text files, (tokens,), and where the files end in them."""

    tokens: NDArray[np.uint32]
    ends: NDArray[np.int64]
    has_bytes: bool
    """whether the tokens tell how many bytes of text they are"""
    path: Path
    """of the tokens"""

    def hash_tokens(self, start: int, stop: int) -> str:
        """Return the SHA-256 of some of the tokens, which is computed once."""
        facts = (self.path.parent.name, start, stop)
        return remembered(facts, lambda: _hash_tokens(self.path, start, stop))


def _hash_tokens(path: Path, start: int, stop: int) -> str:
    token_bytes = np.dtype(np.uint32).itemsize
    digest = sha256()
    with path.open("rb") as file:
        file.seek(start * token_bytes)
        n_left = (stop - start) * token_bytes
        while block := file.read(min(n_left, READ_BLOCK_BYTES)):
            digest.update(block)
            n_left -= len(block)
    return digest.hexdigest()


def read_text(files: Sequence[Path], tokenizer: Tokenizer) -> TextTokens:
    """Return the tokens of text files, with an end-of-text token after each file.

    Files are ordered by a hash of their names, so that a cut anywhere leaves a fair sample on both
    sides.
    """
    ordered = sorted(files, key=_name_hash)
    facts = {
        "kind": "text",
        "files": describe_files(ordered),
        "tokenizer": describe_tokenizer(tokenizer),
    }
    directory = cached(facts, lambda draft: _write_text(draft, ordered, tokenizer))
    path = directory / "tokens"
    tokens = np.memmap(path, np.uint32, "r")
    has_bytes = bool(np.load(directory / "has_bytes.npy"))
    return TextTokens(tokens, np.load(directory / "ends.npy"), has_bytes, path)


def _write_text(directory: Path, files: Sequence[Path], tokenizer: Tokenizer) -> None:
    reader = _TextReader(files, tokenizer)
    n_tokens = 0
    ends = array("q")
    has_bytes = True
    with (
        (directory / "tokens").open("wb") as tokens,
        closing(encode_in_threads(reader.read(), tokenizer, usable_cores())) as chunks,
    ):
        for chunk in chunks:
            tokens.write(chunk.ids.tobytes())
            ends.extend((chunk.ends + n_tokens).tolist())
            n_tokens += len(chunk.ids)
            has_bytes = has_bytes and chunk.has_bytes
    reader.raise_errors()
    if not ends:
        raise ConfigError(f"{name_files(files)}: no text; use files that are not empty")
    np.save(directory / "ends.npy", np.array(ends))
    np.save(directory / "has_bytes.npy", has_bytes)


class _TextReader:
    """Reads text files, each a document in parts, until one has an error, and checks the others."""

    def __init__(self, files: Sequence[Path], tokenizer: Tokenizer) -> None:
        self._files = files
        self._tokenizer = tokenizer
        self._others: dict[Path, NotTextError] = {}
        self._errors: list[ConfigError] = []

    def read(self) -> Iterator[Document]:
        with bar_of_files("tokenizing", self._files, "text", hidden=not is_rank0()) as progress:
            for path in self._files:
                blocks = self._read_blocks(path, progress)
                document = Document("", 0, str(path))
                for part in split_document(document, blocks, self._tokenizer):
                    if not self._errors and not self._others:
                        yield part

    def _read_blocks(self, path: Path, progress: tqdm[Any]) -> Iterator[str]:
        try:
            for block in read_text_blocks(path):
                yield block
                progress.update(len(block.encode()))
        except NotTextError as error:
            self._others[path] = error
        except ConfigError as error:
            self._errors.append(error)

    def raise_errors(self) -> None:
        """Raise the errors of all files together."""
        if self._others:
            self._errors.append(_not_text(self._others, self._files))
        raise_together(self._errors)


def _not_text(others: Mapping[Path, NotTextError], files: Sequence[Path]) -> ConfigError:
    """Return the error that of `files`, `others` are not text, by format."""
    by_format: dict[str, list[Path]] = {}
    for path, error in others.items():
        by_format.setdefault(error.format, []).append(path)
    kinds: list[str] = []
    for its_format, paths in sorted(by_format.items()):
        kinds.append(f"{len(paths)} x {its_format} ({min(paths).name})")
    root = Path(os.path.commonpath(files))
    share = f"{len(others)} of {format_count(len(files), 'file')}"
    problem = f"{root}: {share} cannot be read as text: {'; '.join(kinds)}"
    remedies = dict.fromkeys(others[min(paths)].remedy for paths in by_format.values())
    remedy = "; or ".join(remedies)
    suffixes = Counter(path.suffix for path in files if path not in others and path.suffix)
    if suffixes:
        suffix, _ = suffixes.most_common(1)[0]
        remedy = f"choose the text by a glob, e.g. '{root}/**/*{suffix}', or {remedy}"
    return ConfigError(f"{problem}; {remedy}")


def _name_hash(path: Path) -> bytes:
    return sha256(os.fsencode(path.name)).digest()
