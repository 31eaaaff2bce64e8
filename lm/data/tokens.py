"""Datasets of token ids: random ones, windows of an array, and token files.

`python -m lm.prepare` writes a token file as three files: NAME.bin is a flat array of ids,
NAME.ends holds the end of each document in it, and NAME.json, written last, describes both.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from lm.data.cache import cache_directory
from lm.data.dataset import Dataset, Sample
from lm.data.signatures import check_pointer
from lm.errors import ConfigError
from lm.fileio import MAX_INDEX_BYTES, crc32c, open_regular, read_bytes
from lm.model_config import IGNORE_INDEX
from lm.seeds import derive_seed

_WRITE_AGAIN = "write it again with python -m lm.prepare"


def next_token_sample(ids: NDArray[np.int64]) -> Sample:
    """Return the sample of `ids`, (seq_len + 1,): each target is the token after its input."""
    return Sample(inputs=ids[:-1], targets=ids[1:])


@dataclass(frozen=True)
class SyntheticDataset(Dataset):
    """Uniformly random tokens, each sample with its own seed: a model can only memorize samples.

    Args:
        key: parts of the seed, e.g. the run's seed and "training".
    """

    vocab_size: int
    seq_len: int
    n_samples: int
    key: tuple[object, ...]

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng(derive_seed("synthetic", *self.key, index))
        ids = rng.integers(0, self.vocab_size, self.seq_len + 1, dtype=np.int64)
        return next_token_sample(ids)

    def fingerprint(self) -> str:
        return f"synthetic {self.n_samples} x {self.seq_len} of {self.vocab_size}"


@dataclass(frozen=True)
class Documents:
    """Where the documents in an array of tokens end."""

    ends: NDArray[np.integer[Any]]
    """the position after the last token of each, sorted"""

    def separate(self, sample: Sample, start: int) -> Sample:
        """Return the sample at position `start` as one in which documents do not see each other.

        The last token of a document has no target, as what follows is another one.
        """
        positions = np.arange(start, start + len(sample.inputs))
        document_ids = np.searchsorted(self.ends, positions, side="right")
        is_last = np.isin(positions + 1, self.ends[document_ids[0] : document_ids[-1] + 1])
        targets = np.where(is_last, IGNORE_INDEX, sample.targets)
        return Sample(sample.inputs, targets, document_ids - document_ids[0])

    def count_targets(self, start: int, seq_len: int) -> int:
        """Return how many tokens of the sample at `start` have a target."""
        first, last = np.searchsorted(self.ends, [start, start + seq_len], side="right")
        return seq_len - int(last - first)


@dataclass(frozen=True, eq=False)
class TokenWindowDataset(Dataset):
    """An array of tokens cut into windows: a window's last target is the next one's first input.

    Args:
        documents: that do not see each other; None = attention crosses them.
        digest: SHA-256 of the tokens; None = it is computed when it is asked for.
    """

    tokens: NDArray[np.integer[Any]]
    seq_len: int
    documents: Documents | None = None
    has_bytes: bool = True
    digest: str | None = None

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Sample:
        start = index * self.seq_len
        ids = np.asarray(self.tokens[start : start + self.seq_len + 1], np.int64)
        sample = next_token_sample(ids)
        if self.documents is None:
            return sample
        return self.documents.separate(sample, start)

    def count_terms(self, index: int) -> int:
        if self.documents is None:
            return self.seq_len
        return self.documents.count_targets(index * self.seq_len, self.seq_len)

    def fingerprint(self) -> str:
        digest = self.digest
        if digest is None:
            digest = sha256(np.ascontiguousarray(self.tokens).data).hexdigest()
        return f"{len(self.tokens)} tokens, sha256 {digest}"


class SourceRecord(BaseModel, frozen=True, extra="forbid"):
    """An input file of `python -m lm.prepare`."""

    name: str
    bytes: int = Field(ge=0)
    crc32c: int = Field(ge=0, lt=2**32)


class TokenIndex(BaseModel, frozen=True, extra="forbid"):
    """Contents of NAME.json: description of NAME.bin and NAME.ends."""

    format: Literal[1]
    tokenizer: str | None = Field(description="identity of the tokenizer; null = unknown")
    vocab_size: int = Field(gt=0, description="exclusive upper bound of the ids")
    tokens: int = Field(gt=0)
    documents: int = Field(gt=0)
    dtype: Literal["uint16", "uint32"] = Field(
        description="of NAME.bin, little-endian; NAME.ends is uint64"
    )
    crc32c: int = Field(ge=0, lt=2**32, description="of NAME.bin")
    ends_crc32c: int = Field(ge=0, lt=2**32, description="of NAME.ends")
    has_bytes: bool = Field(
        True, description="the ids tell how many bytes of text they are, if the tokenizer is known"
    )
    sources: list[SourceRecord]
    options: dict[str, str | int | float | None] = Field(
        default_factory=dict, description="of `lm.prepare`"
    )


def read_index(path: Path) -> TokenIndex:
    """Read NAME.json and check the size of NAME.bin."""
    tokens_path = path.with_suffix(".bin")
    try:
        content = read_bytes(path, MAX_INDEX_BYTES)
        check_pointer(path, content)
        index = TokenIndex.model_validate_json(content)
        size = tokens_path.stat().st_size
    except OSError as error:
        advice = "write token files with python -m lm.prepare"
        raise ConfigError(f"{error.filename}: {error.strerror}; {advice}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "contents"
        problem = f"not the index of a token file: {field}: {first['msg']}"
        raise ConfigError(f"{path}: {problem}") from None
    expected = index.tokens * np.dtype(index.dtype).itemsize
    if size != expected:
        check_pointer(tokens_path)
        problem = f"{size} bytes, but {index.tokens} tokens of {index.dtype} are {expected} bytes"
        advice = "the file is damaged or truncated; write it again with python -m lm.prepare"
        raise ConfigError(f"{tokens_path}: {problem}: {advice}")
    return index


class TokenFileDataset(Dataset):
    """A token file cut into windows as in `TokenWindowDataset`.

    Windows are read with pread: the page cache serves it like a memory map, and a file that is
    truncated during the run raises an error instead of SIGBUS.

    Args:
        path: NAME.json.
        vocab_size: exclusive upper bound of valid ids.
        attends_across: whether attention crosses the ends of documents.
    """

    def __init__(
        self, path: Path, seq_len: int, vocab_size: int, *, attends_across: bool = True
    ) -> None:
        self.index = read_index(path)
        self.documents: Documents | None = None
        if not attends_across:
            self.documents = Documents(_open_ends(path.with_suffix(".ends"), self.index))
        self.path = path.with_suffix(".bin")
        self._file = open_regular(self.path)
        weakref.finalize(self, os.close, self._file)
        self._dtype = np.dtype(self.index.dtype).newbyteorder("<")
        self.seq_len = seq_len
        self.has_bytes = self.index.has_bytes
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return (self.index.tokens - 1) // self.seq_len

    def __getitem__(self, index: int) -> Sample:
        token_bytes = self._dtype.itemsize
        offset = index * self.seq_len * token_bytes
        n_bytes = (self.seq_len + 1) * token_bytes
        content = os.pread(self._file, n_bytes, offset)
        if len(content) < n_bytes:
            problem = f"ends at byte {offset + len(content)}: it was truncated during the run"
            raise ConfigError(f"{self.path}: {problem}", rank_local=True)
        ids = np.frombuffer(content, self._dtype).astype(np.int64)
        if ids.max() >= self._vocab_size:
            at = int(ids.argmax())
            place = f"{self.path}: byte {offset + at * token_bytes}"
            problem = f"id {ids[at]} is not less than vocab_size {self._vocab_size}"
            advice = f"set vocab_size to {self.index.vocab_size}"
            raise ConfigError(f"{place}: {problem}; {advice}", rank_local=True)
        sample = next_token_sample(ids)
        if self.documents is None:
            return sample
        return self.documents.separate(sample, index * self.seq_len)

    def count_terms(self, index: int) -> int:
        if self.documents is None:
            return self.seq_len
        return self.documents.count_targets(index * self.seq_len, self.seq_len)

    def check_ids(self) -> None:
        """Raise ConfigError for ids beyond `vocab_size`, which a larger tokenizer may have."""
        if self.index.vocab_size > self._vocab_size:
            for i in range(len(self)):
                _ = self[i]

    def fingerprint(self) -> str:
        return f"{self.index.tokens} tokens, crc32c {self.index.crc32c:08x}"


def _open_ends(path: Path, index: TokenIndex) -> NDArray[np.int64]:
    """Map NAME.ends; its checksum is compared with that of NAME.bin."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {_WRITE_AGAIN}") from None
    if size != 8 * index.documents:
        problem = f"{size} bytes, but the ends of {index.documents} documents are 8 bytes each"
        raise ConfigError(f"{path}: {problem}; {_WRITE_AGAIN}")
    return np.memmap(path, "<i8", "r")  # written as unsigned, which NumPy would compare as floats


def check_token_files(datasets: Iterable[Dataset]) -> None:
    """Compare each token file in `datasets` with its checksums and with the model's ids.

    A file is read once: what was intact is remembered in the user's cache by name, size, time of
    change and inode.

    Raises:
        ConfigError: a file is damaged or cannot be read, or holds an id that the model lacks.
    """
    for dataset in datasets:
        if not isinstance(dataset, TokenFileDataset):
            continue
        _check_token_file(dataset.path, dataset.index.crc32c)
        if dataset.documents is not None:
            _check_token_file(dataset.path.with_suffix(".ends"), dataset.index.ends_crc32c)
        dataset.check_ids()


def _check_token_file(path: Path, checksum: int) -> None:
    try:
        marker = _intact_marker(path, checksum)
        is_known = os.path.exists(marker)  # noqa: PTH110 - Path.exists may raise
        if not is_known and crc32c(path) != checksum:
            problem = f"damaged: differs from {path.stem}.json"
            raise ConfigError(f"{path}: {problem}; {_WRITE_AGAIN}", rank_local=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {_WRITE_AGAIN}", rank_local=True) from None
    with suppress(OSError):  # the cache is read-only
        marker.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker.touch()


def _intact_marker(path: Path, checksum: int) -> Path:
    """Return the file that exists once `path`, as it is now, was found to have `checksum`."""
    status = path.lstat()
    facts = (
        socket.gethostname(),
        path.absolute(),
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        checksum,
    )
    return cache_directory() / "checked" / sha256(repr(facts).encode()).hexdigest()
