"""Tokens of text files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm.data.files import blocks, decode, name_files
from lm.data.tokenizer import Tokenizer
from lm.errors import ConfigError

VALIDATION_SHARE = 0.05
"""Fraction of the text that is held out if no validation data are given."""


def read_tokens(files: list[Path], tokenizer: Tokenizer) -> NDArray[np.uint32]:
    """Return the tokens of all files, (tokens,), with an end-of-text token after each file.

    Files are ordered by a hash of their names, so that a cut anywhere leaves a fair sample on both sides.
    """
    pieces: list[NDArray[np.uint32]] = []
    errors: list[ConfigError] = []
    end = np.array([tokenizer.eos_id], np.uint32)
    for path in sorted(files, key=lambda path: hashlib.sha256(os.fsencode(path.name)).digest()):
        try:
            if content := decode(path, b"".join(blocks(path))):
                pieces += [*tokenizer.encode_batch([content]), end]
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise ConfigError.merge(errors[:20])
    if not pieces:
        raise ConfigError(f"{name_files(files)}: no text; give files that are not empty")
    return np.concatenate(pieces)


def split_validation(tokens: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Split off the last `VALIDATION_SHARE` of `tokens` as validation data."""
    cut = len(tokens) - max(1, round(len(tokens) * VALIDATION_SHARE))
    return tokens[:cut], tokens[cut:]
