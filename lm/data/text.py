"""Writes text files as one token file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.data.blocks import read_text_blocks
from lm.data.documents import bar_of_files
from lm.data.encoder import Document, encode_in_threads, split_document
from lm.data.files import name_files
from lm.data.signatures import NotTextError
from lm.data.token_file import TRAIN, TokenFileWriter
from lm.data.tokenizer.loading import Tokenizer
from lm.errors import ConfigError, raise_together
from lm.launch.launch import is_rank0
from lm.launch.machine import usable_cores
from lm.units import format_count

if TYPE_CHECKING:
    from tqdm import tqdm


def write_text(directory: Path, files: Sequence[Path], tokenizer: Tokenizer) -> None:
    """Write the tokens of text files to `directory`, with an end-of-text token after each file.

    Raises:
        ConfigError: files cannot be read, or are empty.
    """
    documents = _read_documents(files, tokenizer)
    with (
        closing(TokenFileWriter(directory, TRAIN, tokenizer.vocab_size)) as writer,
        closing(encode_in_threads(documents, tokenizer, usable_cores())) as chunks,
    ):
        for chunk in chunks:
            writer.add(chunk)
        if writer.n_documents == 0:
            raise ConfigError(f"{name_files(files)}: no text; use files that are not empty")
        writer.finish(tokenizer.identity)


def _read_documents(files: Sequence[Path], tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield each file as a document in parts, up to an error.

    Raises:
        ConfigError: files cannot be read; it says this of all of them. Nothing is yielded if one
            cannot be read from its start.
    """
    errors: dict[Path, ConfigError] = {}
    for path in files:
        with _collected(errors, path):
            next(read_text_blocks(path), None)
    with bar_of_files("tokenizing", files, "text", hidden=not is_rank0()) as progress:
        for path in files:
            document = Document("", 0, str(path), is_file=True)
            with _collected(errors, path):
                for part in split_document(document, _read_blocks(path, progress), tokenizer):
                    if not errors:
                        yield part
    others: dict[Path, NotTextError] = {}
    problems: list[ConfigError] = []
    for path, error in errors.items():
        if isinstance(error, NotTextError):
            others[path] = error
        else:
            problems.append(error)
    if others:
        problems.append(_not_text(others, files))
    raise_together(problems)


@contextmanager
def _collected(errors: dict[Path, ConfigError], path: Path) -> Iterator[None]:
    """Add the error of reading `path`, if any, to `errors`."""
    try:
        yield
    except ConfigError as error:
        errors[path] = error


def _read_blocks(path: Path, progress: tqdm[Any]) -> Iterator[str]:
    for block in read_text_blocks(path):
        yield block
        progress.update(len(block.encode()))


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
        globs = [f"'{root}/**/*{suffix}'" for suffix, _ in suffixes.most_common(3)]
        remedy = f"choose the text by a glob, {' or '.join(globs)}, or {remedy}"
    if len(suffixes) > 1:
        remedy += "; or, for all of the text, move the other files away"
    return ConfigError(f"{problem}; {remedy}")
