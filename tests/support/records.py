"""Text and JSON Lines as a run reads them, tokenized in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lm.data import records, text
from lm.data.packing import PackedDataset
from lm.data.token_file import TokenFile, open_token_files
from lm.data.tokenized import RecordOptions, TextOptions
from lm.data.tokenizer.loading import Tokenizer
from lm.storage.folder import write_manifest


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
    loss_on = "completion" if completion_only else "all"
    objective = "dpo" if pairs else "next-token"
    options = RecordOptions(fields, loss_on, objective, held_out is not None)
    with tempfile.TemporaryDirectory() as folder:
        records.write(Path(folder), files, tokenizer, options)
        write_manifest(Path(folder), {})
        tokens = open_token_files(Path(folder), options.splits)[held_out is True]
        return PackedDataset(tokens, seq_len, packing=packing)


def read_text(files: Sequence[Path], tokenizer: Tokenizer) -> TokenFile:
    """The tokens of text files."""
    with tempfile.TemporaryDirectory() as folder:
        text.write(Path(folder), files, tokenizer, TextOptions("text"))
        write_manifest(Path(folder), {})
        (tokens,) = open_token_files(Path(folder), ["train"])
        return tokens
