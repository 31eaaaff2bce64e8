"""Tokens of text files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm.data.files import blocks
from lm.data.tokenizer import Tokenizer
from lm.errors import ConfigError

VALIDATION_SHARE = 0.05
"""Fraction of the text that is held out if no validation data are given."""


def read_tokens(files: list[Path], tokenizer: Tokenizer) -> NDArray[np.uint32]:
    """Return the tokens of all files, (tokens,), with an end-of-text token after each file.

    Files are ordered by a hash of their names, so that a cut anywhere leaves a fair sample on both sides.

    Raises:
        ConfigError: files cannot be read or are not UTF-8 (with the offset), or all are empty.
    """
    pieces: list[NDArray[np.uint32]] = []
    errors = []
    end = np.array([tokenizer.eos_id], np.uint32)
    for path in sorted(files, key=lambda path: hashlib.sha256(os.fsencode(path.name)).digest()):
        try:
            if content := b"".join(blocks(path)).decode():
                pieces += [*tokenizer.encode_batch([content]), end]
        except UnicodeDecodeError as error:
            problem = f"{path}: byte {error.start} is not UTF-8; convert the file, e.g. with iconv"
            errors.append(ConfigError(problem))
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise ConfigError.merge(errors[:20])
    if not pieces:
        others = f" and {len(files) - 1} other file(s)" if files[1:] else ""
        raise ConfigError(f"{files[0]}{others}: no text; give files that are not empty")
    return np.concatenate(pieces)


def split_validation(tokens: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Split off the last `VALIDATION_SHARE` of `tokens` as validation data."""
    cut = len(tokens) - max(1, round(len(tokens) * VALIDATION_SHARE))
    return tokens[:cut], tokens[cut:]
