"""Text files as one token file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.data.blocks import read_text_blocks
from lm.data.cache import cached, describe_files, remembered
from lm.data.encoder import Document, encode_in_threads, split_document
from lm.data.files import name_files
from lm.data.progress import bar_of_files
from lm.data.signatures import NotTextError
from lm.data.token_file import TRAIN, TokenFile, TokenFileWriter
from lm.data.tokenizer import Tokenizer, describe_tokenizer
from lm.errors import ConfigError, raise_together
from lm.launch.launch import is_rank0
from lm.launch.machine import usable_cores
from lm.units import format_count

if TYPE_CHECKING:
    from tqdm import tqdm

_HASHED_TOGETHER = 1 << 18
"""tokens"""


def read_text(files: Sequence[Path], tokenizer: Tokenizer, *, with_ends: bool = True) -> TokenFile:
    """Return the tokens of text files, with an end-of-text token after each file.

    Files are ordered by a hash of their names, so that a cut anywhere leaves a fair sample on both
    sides.

    Args:
        with_ends: open where the files end in the tokens, too.
    """
    ordered = sorted(files, key=_name_hash)
    facts = {
        "kind": "text",
        "files": describe_files(ordered),
        "tokenizer": describe_tokenizer(tokenizer),
    }
    directory = cached(facts, lambda draft: _write_text(draft, ordered, tokenizer))
    remedy = f"delete {directory}: it is written again"
    return TokenFile(directory / f"{TRAIN}.json", with_ends=with_ends, remedy=remedy)


def hash_tokens(text: TokenFile, start: int, stop: int) -> str:
    """Return the SHA-256 of some of the tokens, as uint32, which is computed once."""
    facts = (text.path.parent.name, start, stop)
    return remembered(facts, lambda: _hash_tokens(text, start, stop))


def _hash_tokens(text: TokenFile, start: int, stop: int) -> str:
    digest = sha256()
    for first in range(start, stop, _HASHED_TOGETHER):
        ids = text[first : min(first + _HASHED_TOGETHER, stop)]
        digest.update(ids.astype(np.uint32).data)
    return digest.hexdigest()


def _write_text(directory: Path, files: Sequence[Path], tokenizer: Tokenizer) -> None:
    reader = _TextReader(files, tokenizer)
    with (
        closing(TokenFileWriter(directory, TRAIN, tokenizer.vocab_size)) as writer,
        closing(encode_in_threads(reader.read(), tokenizer, usable_cores())) as chunks,
    ):
        for chunk in chunks:
            writer.add(chunk)
        reader.raise_errors()
        if writer.n_documents == 0:
            raise ConfigError(f"{name_files(files)}: no text; use files that are not empty")
        writer.finish(tokenizer.identity)


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
