"""Streamed Hugging Face datasets: read, shuffled, tokenized and packed in worker processes.

Each worker of each rank has its own stream, a share of the dataset that the `datasets` library
splits. Documents are shuffled within blocks, end with an end-of-text token, and are cut into
windows; a window's last target is the next window's first input. The state of a stream is the
position of the next window: block, and token in the block. A resumed stream therefore reads one
block again, instead of saving a shuffle buffer, and resumes at the exact token.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.blocks import check_pointer
from lm.data.dataset import Sample, SampleBatch, StreamPosition, StreamState
from lm.data.documents import RECORD_FORMATS, stream_records
from lm.data.files import find_files, format_of
from lm.data.record_fields import check_text, fill
from lm.data.tokenizer.loading import Tokenizer, end_text
from lm.data.windows import WindowDataset, next_token_sample
from lm.data.worker import Worker
from lm.errors import ConfigError, error_text, oserror_as_config_error
from lm.launch.requirements import requires
from lm.seeds import derive_seed

if TYPE_CHECKING:
    from datasets import IterableDataset as Documents

SHUFFLED_TOGETHER = 8192
"""Documents in a block."""
_DOCUMENTS_PER_CALL = 64
"""Documents in one call of the tokenizer."""
_END_BYTES = 1 << 16
"""At the end of a file, these identify it: Parquet has statistics there, and gzip a checksum."""


def is_local(where: str) -> bool:
    """Return whether `where` names local files and not a dataset on the hub."""
    is_glob = any(sign in where for sign in "*?[")
    is_path = where.startswith((".", "/", "~")) or "://" in where
    return is_path or is_glob or Path(where).exists()


@oserror_as_config_error
def open_documents(
    where: str, key: str, split: str, name: str | None, field: str | None = None
) -> tuple[Documents, str]:
    """Open local files or a dataset on the hub for streaming.

    Args:
        where: value of the hyperparameter `key`.
        split: split of a dataset on the hub.
        name: its configuration, e.g. "en" for C4.
        field: the key that is read of local records; None or a template of keys = all.

    Returns:
        The documents and their fingerprint.
    """
    try:
        import datasets.config
    except ImportError:
        raise ConfigError(f"dataset: hf {requires('datasets')}") from None
    datasets.disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False  # or its epoch is a tensor, and each worker imports it
    local = is_local(where)
    if local and split != "train":
        raise ConfigError(f"{key}: {where}: local files have no split {split!r}; use --split train")
    if local and name is not None:
        problem = f"{name} is of a dataset on the hub, and {where} is local"
        raise ConfigError(f"hf_config: {problem}; remove it")
    try:
        if local:
            return _open_local_documents(where, key, field)
        documents = datasets.load_dataset(where, name, split=split, streaming=True)
        return documents, f"{where} {name} {split}"
    except ConfigError:
        raise
    except Exception as error:  # each format and each file system raises its own
        download = f"hf download {where} --repo-type dataset --local-dir DIRECTORY"
        advice = f"run on a machine with network access: {download}, then set {key}=DIRECTORY/..."
        problem = f"{key}: {where}: cannot be opened: {error_text(error)}"
        raise ConfigError(f"{problem}; {advice}") from None


def _open_local_documents(where: str, key: str, field: str | None) -> tuple[Documents, str]:
    files = find_files(where, key)
    formats = {format_of(file) for file in files}
    (name, *others) = formats
    if others or name is None or name not in RECORD_FORMATS:
        known = ", ".join(itertools.chain.from_iterable(RECORD_FORMATS.values()))
        found = ", ".join(sorted({file.suffix for file in files}))
        problem = f"{key}: {where}: files must have one format of {known}; found {found}"
        remedy = (
            "choose one by a glob; text is read by dataset: text, or lm.prepare without --split"
        )
        raise ConfigError(f"{problem}; {remedy}")
    for file in files:
        check_pointer(file)
    return stream_records(files, name, field), _files_fingerprint(files)


def _files_fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            digest.update(json.dumps([path.name, size]).encode())
            digest.update(file.read())
    return f"{len(files)} files, sha256 of names, sizes and ends {digest.hexdigest()}"


def open_windows(
    documents: Documents,
    text_source: str,
    tokenizer: Tokenizer,
    n_samples: int,
    seq_len: int,
    key: str,
) -> WindowDataset:
    """Return the first samples of validation documents, at most `n_samples`.

    Each document ends with an end-of-text token; empty ones are left out. `key` names them in
    errors. `text_source` is a key of their records, or a template of keys.
    """
    n_tokens = n_samples * seq_len + 1  # the last one as a target only
    ids: list[NDArray[np.uint32]] = []
    n_read = 0
    has_bytes = True
    with _reading(key):
        texts = (_document_text(record, text_source, i) for i, record in enumerate(documents))
        for document in _tokenize_documents(texts, tokenizer):
            ids.append(document.ids)
            n_read += len(document.ids)
            has_bytes = has_bytes and tokenizer.tells_bytes(document.text, document.ids)
            if n_read >= n_tokens:
                break
    tokens = np.concatenate([np.empty(0, np.int64), *ids], dtype=np.int64)[:n_tokens]
    return WindowDataset(tokens, seq_len, has_bytes=has_bytes)


@contextmanager
def _reading(key: str, *, rank_local: bool = False) -> Iterator[None]:
    """Name the hyperparameter `key` in what reading its data raises."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}", rank_local=rank_local) from None
    except Exception as error:  # each format and each file system raises its own
        problem = f"{key}: cannot be read: {error_text(error)}"
        raise ConfigError(problem, rank_local=rank_local) from None


def read_once(
    where: str, key: str, split: str, name: str | None, field: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records of a dataset; see `open_documents`."""
    documents, _ = open_documents(where, key, split, name, field)
    with _reading(f"{key}: {where}"):
        yield from documents


def _document_text(record: Mapping[str, Any], text_source: str, number: int) -> str:
    try:
        return check_text(fill(text_source, record), text_source)
    except ConfigError as error:
        raise ConfigError(f"document {number}: {error}") from None


class _Document(NamedTuple):
    text: str
    ids: NDArray[np.uint32]
    """with an end-of-text token, once"""


def _tokenize_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[_Document]:
    """Yield each text that is not empty with its tokens."""
    remaining = filter(None, texts)
    while batch := list(itertools.islice(remaining, _DOCUMENTS_PER_CALL)):
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            yield _Document(text, end_text(ids, tokenizer.eos_id))


class Window(NamedTuple):
    """Consecutive tokens of a stream."""

    ids: NDArray[np.int64]
    """shape (seq_len + 1,)"""
    state: StreamPosition
    """where the next window starts"""


@dataclass
class TokenStream:
    """An endless sequence of windows of one worker's share of the documents.

    Args:
        documents: the share, from its start.
        text_source: a key of their records, or a template of keys.
        seed: of the order of documents; None = the order of the dataset.
        number: of the stream, over all ranks; each has another order.
        block_size: documents that are shuffled together.
        state: where it starts.
    """

    documents: Documents
    text_source: str
    tokenizer: Tokenizer
    seq_len: int
    seed: int | None
    number: int = 0
    block_size: int = SHUFFLED_TOGETHER
    state: StreamPosition = field(default_factory=StreamPosition)

    def __iter__(self) -> Iterator[Window]:
        """Yield windows from `state` on."""
        with _reading("train_data", rank_local=True):
            yield from self._windows()

    def _windows(self) -> Iterator[Window]:
        ids = np.empty(0, np.int64)  # that no window holds yet but as its last target
        first = 0  # number of the first of them, from the block on where the stream was resumed
        start = self.state.get("token", 0)
        blocks: deque[tuple[int, StreamPosition]] = deque()  # those of `ids`, by their first token
        for position, texts in self._blocks():
            blocks.append((first + len(ids), position))
            for n_documents, document in enumerate(_tokenize_documents(texts, self.tokenizer), 1):
                ids = np.concatenate([ids, document.ids], dtype=np.int64)
                n_resumed = min(max(start - first, 0), len(ids))
                ids = ids[n_resumed:]
                first += n_resumed
                while len(ids) > self.seq_len:
                    window_ids = ids[: self.seq_len + 1]
                    ids = ids[self.seq_len :]
                    first += self.seq_len
                    while len(blocks) > 1 and blocks[1][0] <= first:
                        blocks.popleft()
                    block_start, block = blocks[0]
                    n_read = position.get("read", 0) + n_documents
                    token = first - block_start
                    yield Window(window_ids, {**block, "token": token, "documents": n_read})

    def _blocks(self) -> Iterator[tuple[StreamPosition, list[str]]]:
        """Yield the start of each block, and its documents in their order, epoch after epoch."""
        number = self.state.get("block", 0)
        n_read = self.state.get("read", 0)
        block_start = self.state.get("dataset")
        n_to_skip = self.state.get("skip", 0)
        saved_digest = self.state.get("digest")
        while True:
            # A dataset that loaded a state would start each epoch there: each epoch has a copy.
            documents = copy.deepcopy(self.documents)
            if block_start is not None:
                documents.load_state_dict(copy.deepcopy(block_start))
            records = iter(documents)
            n_skipped = sum(1 for _ in itertools.islice(records, n_to_skip))
            if n_skipped > 0:
                n_to_skip -= n_skipped
                n_read += n_skipped
                block_start = documents.state_dict()
            is_complete_epoch = block_start is None
            has_text = False
            first = list(itertools.islice(records, 1))
            after_first = documents.state_dict()  # before it, the library has none
            records = itertools.chain(first, records)
            while texts := self._read_texts(records, n_read):
                has_text = has_text or any(texts)
                digest = _digest(texts)
                if saved_digest is not None and digest != saved_digest:
                    raise ConfigError(_other_documents(n_read, len(texts)))
                saved_digest = None
                block_end = documents.state_dict()
                if block_end == block_start or (len(texts) > 1 and block_end == after_first):
                    raise ConfigError(_standing_position())
                position: StreamPosition = {
                    "block": number,
                    "read": n_read,
                    "dataset": block_start,
                    "digest": digest,
                }
                yield position, self._shuffled(texts, number)
                number += 1
                n_read += len(texts)
                block_start = block_end
            if is_complete_epoch and not has_text:
                problem = "a worker's share of the dataset has no text"
                raise ConfigError(f"data_workers: {problem}; lower data_workers, or add files")
            block_start = None  # the next epoch starts at the first document

    def _read_texts(self, records: Iterator[Mapping[str, Any]], n_read: int) -> list[str]:
        block = itertools.islice(records, self.block_size)
        numbered = enumerate(block, n_read)
        return [_document_text(record, self.text_source, number) for number, record in numbered]

    def _shuffled(self, texts: list[str], block: int) -> list[str]:
        if self.seed is None:
            return texts
        rng = np.random.default_rng(derive_seed("stream", self.seed, self.number, block))
        return [texts[i] for i in rng.permutation(len(texts))]


def _digest(texts: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()


def _standing_position() -> str:
    problem = f"datasets {_library_version()} reports one position before and after documents"
    reason = "a checkpoint of it would read documents again"
    return f"{problem}, so that {reason}; install another version, e.g. pip install -U datasets"


def _other_documents(first: int, count: int) -> str:
    problem = f"documents {first} to {first + count - 1} differ from those before the checkpoint"
    causes = f"the data changed, or datasets {_library_version()} resumes at another document"
    return f"{problem}: {causes}; restore the data, or the version that wrote the checkpoint"


def _library_version() -> str:
    import datasets

    return datasets.__version__


class StreamedSource:
    """Training source of a streamed dataset: a rank's streams take turns, a micro-batch each.

    Args:
        stream: of all documents; it is split among the streams of all ranks.
        workers: processes of this rank, with one stream each.
    """

    samples_per_epoch = None
    """unknown"""

    def __init__(
        self,
        stream: TokenStream,
        fingerprint: str,
        batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        workers: int,
    ) -> None:
        from datasets.distributed import split_dataset_by_node

        self._fingerprint = fingerprint
        self._batch_size = batch_size
        self._n_micro_batches = global_batch_size // (batch_size * dp_size)
        self._n_terms = global_batch_size * stream.seq_len
        n_streams = dp_size * workers
        self._streams: list[TokenStream] = []
        for number in range(dp_rank * workers, (dp_rank + 1) * workers):
            share = split_dataset_by_node(stream.documents, number, n_streams)
            self._streams.append(replace(stream, documents=share, number=number))
        self.initial_stream_state = StreamState([{} for _ in self._streams])

    def fingerprint(self) -> str:
        return self._fingerprint

    def batches(
        self,
        step: int,  # noqa: ARG002 - the state determines the batch
        stream_state: StreamState | None,
    ) -> Generator[SampleBatch]:
        """Yield this rank's batches from `stream_state` on, endlessly."""
        assert stream_state is not None
        states = list(stream_state.streams)
        turn = stream_state.turn
        workers: list[Worker] = []
        try:
            for stream, state in zip(self._streams, states, strict=True):
                share = replace(stream, state=state)
                workers.append(Worker(partial(_batch_windows, share, self._batch_size)))
            while True:
                samples: list[Sample] = []
                for _ in range(self._n_micro_batches):
                    windows: list[Window] = next(workers[turn])
                    samples += [next_token_sample(window.ids) for window in windows]
                    states[turn] = windows[-1].state
                    turn = (turn + 1) % len(workers)
                stream_state = StreamState(list(states), turn)
                yield SampleBatch(samples, self._n_terms, stream_state)
        finally:
            for worker in workers:
                worker.close()


def _batch_windows(
    stream: TokenStream, batch_size: int, _received: Iterator[Any]
) -> Iterator[list[Window]]:
    windows = iter(stream)
    while batch := list(itertools.islice(windows, batch_size)):
        yield batch
