"""Text files as one array of tokens."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.cache import cached, describe_files
from lm.data.files import decode_utf8, name_files, raise_together, read_blocks
from lm.data.signatures import NotTextError
from lm.data.tokenizer import ByteCheck, Tokenizer, describe_tokenizer, encode_documents
from lm.errors import ConfigError, error_prefix
from lm.units import format_count


class TextTokens(NamedTuple):
    """The tokens of text files, (tokens,), and where the files end in them."""

    tokens: NDArray[np.uint32]
    ends: NDArray[np.int64]
    has_bytes: bool
    """whether the tokens tell how many bytes of text they are"""


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
    tokens = np.memmap(directory / "tokens", np.uint32, "r")
    has_bytes = bool(np.load(directory / "has_bytes.npy"))
    return TextTokens(tokens, np.load(directory / "ends.npy"), has_bytes)


def _write_text(directory: Path, files: Sequence[Path], tokenizer: Tokenizer) -> None:
    check = ByteCheck()
    ends = array("q")
    n_tokens = 0
    others: dict[Path, NotTextError] = {}
    errors: list[ConfigError] = []
    with (directory / "tokens").open("wb") as tokens:
        for path in files:
            try:
                content = b"".join(read_blocks(path))
                if content:
                    text = decode_utf8(path, content)
                    with error_prefix(str(path)):
                        (ids,) = encode_documents(tokenizer, [text], check)
                    tokens.write(ids.tobytes())
                    n_tokens += len(ids)
                    ends.append(n_tokens)
            except NotTextError as error:
                others[path] = error
            except ConfigError as error:
                errors.append(error)
    if others:
        errors.append(_not_text(others, files))
    raise_together(errors)
    if not ends:
        raise ConfigError(f"{name_files(files)}: no text; use files that are not empty")
    np.save(directory / "ends.npy", np.array(ends))
    np.save(directory / "has_bytes.npy", check.is_exact)


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
