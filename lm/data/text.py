"""Writes documents of text, or of ids in HDF5 files, as token files."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from lm.data.encoder import encode_in_threads, split_document
from lm.data.files import format_of
from lm.data.readers import (
    Text,
    is_held_out_text,
    read_dataset,
    read_documents,
    read_ids,
    split_text,
    splits_by_content,
)
from lm.data.token_writer import TokenChunk, write_splits
from lm.data.tokenized import TextOptions
from lm.data.tokenizer.loading import Tokenizer
from lm.launch.machine import usable_cores

_CHECKED_BLOCKS = 2
"""of each file, which show where it starts with what is not text"""


class TextFiles:
    """The documents of files, some of them held out.

    Raises:
        ConfigError: a file cannot be read from its start.
    """

    def __init__(self, files: Sequence[Path], options: TextOptions) -> None:
        self.files = files
        self._options = options
        self._have_ids = any(format_of(path, options.format) == "hdf5" for path in files)
        self._cuts_tails = False
        """whether the tail of each document is held out"""
        if not self._have_ids:
            self._check_starts()
            self._cuts_tails = not self._splits_by_content()

    def _read_all(self, *paths: Path) -> Iterator[Text]:
        options = self._options
        if options.split is not None:
            where = str(self.files[0])
            return read_dataset(where, options.split, options.hf_config, options.text_field)
        return read_documents(paths or self.files, options.format, options.text_field)

    def _check_starts(self) -> None:
        for path in self.files:
            for text in itertools.islice(self._read_all(path), 1):
                for _ in itertools.islice(text.blocks(), _CHECKED_BLOCKS):
                    pass

    def _splits_by_content(self) -> bool:
        fraction = self._options.validation_fraction
        if fraction == 0:
            return True
        sizes = (
            (sum(map(len, text.blocks())), is_held_out_text(text, fraction))
            for text in self._read_all()
        )
        return splits_by_content(sizes, fraction)

    def read(self) -> Iterator[Text]:
        """Yield the documents in order, with those that are held out, or the tails of all."""
        fraction = self._options.validation_fraction
        for text in self._read_all():
            if self._cuts_tails:
                yield from split_text(text, fraction)
            else:
                text.document.held_out = is_held_out_text(text, fraction)
                yield text

    def tokenize(self, tokenizer: Tokenizer, n_skipped: int = 0) -> Generator[Sequence[TokenChunk]]:
        """Yield the tokens of the documents, each with an end-of-text token, in order.

        The first `n_skipped` pieces are not encoded.
        """
        if self._have_ids:
            n_ids = tokenizer.vocab_size
            read = (read_ids(path, n_ids, tokenizer.eos_id) for path in self.files)
            for chunk in itertools.islice(itertools.chain.from_iterable(read), n_skipped, None):
                yield [chunk]
            return
        split = (split_document(each.document, each.blocks(), tokenizer) for each in self.read())
        parts = itertools.chain.from_iterable(split)
        with closing(encode_in_threads(parts, tokenizer, usable_cores(), n_skipped)) as chunks:
            yield from chunks


def write(
    directory: Path, files: Sequence[Path], tokenizer: Tokenizer, options: TextOptions
) -> None:
    """Write the token files of documents to `directory`.

    Raises:
        ConfigError: files cannot be read, or have no text.
    """
    texts = TextFiles(files, options)
    write_splits(directory, partial(texts.tokenize, tokenizer), files, tokenizer, options)
