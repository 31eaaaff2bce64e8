"""Sources that begin as text: files found, read, and turned into ids."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm.data.tokenizer import Tokenizer
from lm.errors import ConfigError

VALIDATION_SHARE = 0.05
"""Part of the text that is held out where no validation data is named."""


def read_tokens(files: list[Path], tokenizer: Tokenizer) -> NDArray[np.uint32]:
    """All files' tokens in one row, each file ended by the end-of-text token.

    Files are put in an order that has nothing to do with their names, so that a cut anywhere leaves a
    fair sample on both sides.

    Raises:
        ConfigError: a file that cannot be read or is no UTF-8 (with the offset), or no text at all.
    """
    pieces: list[NDArray[np.uint32]] = []
    problems = []
    end = np.array([tokenizer.eos_id], np.uint32)
    for path in sorted(files, key=lambda path: hashlib.sha256(os.fsencode(path.name)).digest()):
        try:
            content = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            problems.append(f"{path}: byte {error.start} is not UTF-8; convert the file, e.g. with iconv")
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        else:
            if content:
                pieces += [*tokenizer.encode_batch([content]), end]
    if problems:
        raise ConfigError(*problems[:20])
    if not pieces:
        raise ConfigError(f"{files[0]}{' and others' if len(files) > 1 else ''}: no text in {len(files)} file(s)")
    return np.concatenate(pieces)


def split_validation(tokens: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Cut off the last `VALIDATION_SHARE` of `tokens` as validation data."""
    cut = len(tokens) - max(1, round(len(tokens) * VALIDATION_SHARE))
    return tokens[:cut], tokens[cut:]
