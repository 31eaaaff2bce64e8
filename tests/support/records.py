"""Text and JSON Lines as a run reads them, tokenized in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lm.data.packing import PackedDataset
from lm.data.records import write_records
from lm.data.text import write_text
from lm.data.token_file import TokenFile
from lm.data.tokenized import RecordOptions, TextOptions
from lm.data.tokenizer.loading import Tokenizer


def pack_files(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    seq_len: int,
    fields: Mapping[str, str] | None = None,
    completion_only: bool = False,
    packing: bool = True,
    held_out: bool | None = None,
    pairs: bool = False,
) -> PackedDataset:
    """The samples of files; `held_out`: True = those for validation, False = the others."""
    options = RecordOptions(fields, completion_only, pairs, held_out is not None)
    with tempfile.TemporaryDirectory() as folder:
        write_records(Path(folder), files, tokenizer, options)
        tokens = TokenFile(Path(folder, f"{options.splits[held_out is True]}.json"))
        return PackedDataset(tokens, seq_len, packing=packing)


def read_text(files: Sequence[Path], tokenizer: Tokenizer) -> TokenFile:
    """The tokens of text files."""
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder), files, tokenizer, TextOptions("text"))
        return TokenFile(Path(folder, "train.json"))
