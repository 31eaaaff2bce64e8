"""Samples of JSON Lines, as a run makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lm.data.files import name_files
from lm.data.packing import PackedDataset
from lm.data.records import RecordOptions, tokenize_records
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
    token_files = tokenize_records(files, tokenizer, options)
    return PackedDataset(token_files[held_out is True], seq_len, name_files(files), packing=packing)
