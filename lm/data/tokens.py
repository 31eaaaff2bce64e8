"""Sources whose samples are token ids already: random ones, windows of a long row, token files.

A token file is what `python -m lm.prepare` writes: NAME.bin, a flat array of ids, NAME.ends, where in it each
document ends, and NAME.json, which says what they hold and is written last.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lm import seeds
from lm.data.dataset import Sample
from lm.errors import ConfigError, DataError


def window(ids: NDArray[np.int64]) -> Sample:
    """The sample whose inputs are all of `ids` but the last, and whose targets are all but the first."""
    return Sample(ids[:-1], ids[1:])


class SyntheticDataset:
    """Uniformly random tokens, each sample drawn from its own seed: nothing to learn but the samples themselves.

    Args:
        samples: how many different samples there are.
        key: what sets this source apart from others, e.g. the run's seed and "training".
    """

    def __init__(self, vocab_size: int, seq_len: int, samples: int, key: tuple[object, ...]) -> None:
        self._vocab_size = vocab_size
        self._seq_len = seq_len
        self._samples = samples
        self._key = key

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Sample:
        random = np.random.default_rng(seeds.derive_seed("synthetic", *self._key, index))
        return window(random.integers(0, self._vocab_size, self._seq_len + 1, dtype=np.int64))

    def targets(self, _index: int) -> int:
        return self._seq_len

    def fingerprint(self) -> str:
        return f"synthetic {self._samples} x {self._seq_len} of {self._vocab_size}"


class TokenWindowDataset:
    """A long row of tokens cut into windows of `seq_len`; a window's last target is the next one's first input."""

    def __init__(self, tokens: NDArray[np.integer[Any]], seq_len: int) -> None:
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> Sample:
        start = index * self._seq_len
        return window(self._tokens[start : start + self._seq_len + 1].astype(np.int64))

    def targets(self, _index: int) -> int:
        return self._seq_len

    def fingerprint(self) -> str:
        return f"{len(self._tokens)} tokens, sha256 {hashlib.sha256(self._tokens.tobytes()).hexdigest()}"


class SourceRecord(BaseModel):
    """An input file of `python -m lm.prepare`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    bytes: int = Field(ge=0)
    crc32c: int = Field(ge=0, lt=2**32)


class TokenIndex(BaseModel):
    """What NAME.json says of NAME.bin and NAME.ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1]
    tokenizer: str | None = Field(description="its identity; null: not known")
    vocab_size: int = Field(gt=0, description="ids are below it")
    tokens: int = Field(gt=0)
    documents: int = Field(gt=0)
    dtype: Literal["uint16", "uint32"] = Field(description="of an id in NAME.bin, little-endian; NAME.ends is uint64")
    crc32c: int = Field(ge=0, lt=2**32, description="of NAME.bin")
    ends_crc32c: int = Field(ge=0, lt=2**32, description="of NAME.ends")
    sources: list[SourceRecord]
    options: dict[str, str | int | float | None] = Field(default_factory=dict, description="what else it was told")

    @property
    def bytes(self) -> int:
        return self.tokens * np.dtype(self.dtype).itemsize


def read_index(path: Path) -> TokenIndex:
    """The contents of `path`, after a look at the size of the file of tokens beside it.

    Raises:
        ConfigError: it is missing or broken, or the tokens are not as many as it says.
    """
    try:
        index = TokenIndex.model_validate_json(path.read_bytes())
        size = path.with_suffix(".bin").stat().st_size
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; token files are written by: python -m lm.prepare"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "all"
        raise ConfigError(f"{path}: says not what it should of a token file: {place}: {first['msg']}") from None
    if size != index.bytes:
        raise ConfigError(
            f"{path.with_suffix('.bin')}: {size} bytes, but {index.tokens} tokens of {index.dtype} are {index.bytes}:"
            " damaged or cut short; write it anew with python -m lm.prepare"
        )
    return index


class TokenFileDataset:
    """A token file in windows of `seq_len`, as `TokenWindows`.

    It is read as it is needed, with pread: the page cache serves it as it would a memory map, and a file that
    is cut short under a run is an error with a name instead of a SIGBUS.

    Args:
        path: its NAME.json.
        vocab_size: ids must be below it.
    """

    def __init__(self, path: Path, seq_len: int, vocab_size: int) -> None:
        self.index = read_index(path)
        self._path = path.with_suffix(".bin")
        self._file = os.open(self._path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._dtype = np.dtype(self.index.dtype).newbyteorder("<")
        self._seq_len = seq_len
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return (self.index.tokens - 1) // self._seq_len

    def __getitem__(self, index: int) -> Sample:
        """Raises DataError: the file was cut short meanwhile, or an id is no token of the model's."""
        offset = index * self._seq_len * self._dtype.itemsize
        wanted = (self._seq_len + 1) * self._dtype.itemsize
        raw = os.pread(self._file, wanted, offset)
        if len(raw) < wanted:
            raise DataError(f"{self._path}: ends at byte {offset + len(raw)}; it was cut short while it was in use")
        ids = np.frombuffer(raw, self._dtype).astype(np.int64)
        if ids.max() >= self._vocab_size:
            at = int(ids.argmax())
            raise DataError(
                f"{self._path}: byte {offset + at * self._dtype.itemsize}: id {ids[at]} is not below vocab_size"
                f" {self._vocab_size}"
            )
        return window(ids)

    def targets(self, _index: int) -> int:
        return self._seq_len

    def fingerprint(self) -> str:
        return f"{self.index.tokens} tokens, crc32c {self.index.crc32c:08x}"
