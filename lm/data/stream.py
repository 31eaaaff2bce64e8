"""Streamed Hugging Face datasets: read, shuffled, tokenized and packed in worker processes.

Each worker of each rank has its own stream, a share of the dataset that the `datasets` library
splits. Documents are shuffled within blocks, end with an end-of-text token, and are cut into
windows; a window's last target is the next window's first input. The state of a stream is the
position of the next window: block, document in the block, token in the document. A resumed stream
therefore reads one block again, instead of saving a shuffle buffer, and resumes at the exact token.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.blocks import is_compressed
from lm.data.dataset import Sample, SampleBatch, StreamPosition, StreamState
from lm.data.documents import STREAMED, format_of, stream_records
from lm.data.files import check_path, find_files, find_saved_dataset
from lm.data.record_fields import check_text, fill
from lm.data.tokenizer.loading import ByteCheck, Tokenizer, end_text
from lm.data.windows import next_token_sample
from lm.data.worker import Worker
from lm.errors import ConfigError, error_prefix, error_text, oserror_as_config_error
from lm.launch.requirements import requires
from lm.seeds import derive_seed
from lm.units import format_count

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
    return Path(where).exists() or is_glob or where.startswith((".", "/", "~"))


@oserror_as_config_error
def open_documents(where: str, key: str, split: str, name: str | None) -> tuple[Documents, str]:
    """Open local files or a dataset on the hub for streaming.

    Args:
        where: value of the hyperparameter `key`.
        split: split of a dataset on the hub.
        name: its configuration, e.g. "en" for C4.

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
    if not local:
        check_path(where, key)
    try:
        if local:
            return _open_local_documents(where, key)
        documents = datasets.load_dataset(where, name, split=split, streaming=True)
        return documents, f"{where} {name} {split}"
    except ConfigError:
        raise
    except Exception as error:  # each format and each file system raises its own
        problem = f"{key}: {where}: cannot be opened"
        if local:
            raise ConfigError(f"{problem}: {error_text(error)}") from None
        if os.environ.get("HF_HUB_OFFLINE"):
            problem += " (HF_HUB_OFFLINE is set)"
        download = f"hf download {where} --repo-type dataset --local-dir DIRECTORY"
        advice = f"run on a machine with network access: {download}, then set {key}=DIRECTORY/..."
        raise ConfigError(f"{problem}: {error_text(error)}; {advice}") from None


def _open_local_documents(where: str, key: str) -> tuple[Documents, str]:
    files = find_files(where, key)
    formats = {format_of(file) for file in files}
    (name, *others) = formats
    if others or name is None or name not in STREAMED:
        raise ConfigError(f"{key}: {where}: {_why_not_streamed(files)}")
    fingerprint = _files_fingerprint(files)
    if name in ("text", "csv"):
        # In a checkpoint whose stream `datasets` read from such files, documents are others.
        fingerprint += f", read as {name} by this package"
    with error_prefix(key):
        return stream_records(files, name), fingerprint


def _why_not_streamed(files: Sequence[Path]) -> str:
    saved = find_saved_dataset(files)
    if saved is not None:
        problem = "a directory of save_to_disk contains more than data"
        return f"{problem}; choose its data by a glob, e.g. '{saved / 'data-*.arrow'}'"
    found: set[str] = set()
    for file in files:
        n_suffixes = 2 if is_compressed(file) else 1
        found.add("".join(file.suffixes[-n_suffixes:]) or "a name without suffix")
    known = ", ".join(itertools.chain.from_iterable(STREAMED.values()))
    problem = f"files must have one format of {known}; found {', '.join(sorted(found))}"
    return f"{problem}; choose one by a glob"


def _files_fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            digest.update(json.dumps([path.name, size]).encode())
            digest.update(file.read())
    return f"{len(files)} files, sha256 of names, sizes and ends {digest.hexdigest()}"


def first_tokens(
    documents: Documents,
    text_source: str,
    tokenizer: Tokenizer,
    count: int,
    key: str,
    check: ByteCheck | None = None,
) -> NDArray[np.int64]:
    """Return the first tokens of validation documents, at most `count`: shape (tokens,).

    Each document ends with an end-of-text token; empty ones are left out. `key` names them in
    errors. `text_source` is a key of their records, or a template of keys.
    """
    texts = (_document_text(record, text_source, i) for i, record in enumerate(documents))
    tokenized = _tokenize_documents(filter(None, texts), tokenizer, check)
    tokens = itertools.chain.from_iterable(ids.tolist() for ids in tokenized)
    try:
        return np.fromiter(itertools.islice(tokens, count), np.int64)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    except Exception as error:
        raise ConfigError(f"{key}: cannot be read: {error_text(error)}") from None


def read_once(where: str, key: str, split: str, name: str | None) -> Iterator[dict[str, Any]]:
    """Yield the records of a dataset; see `open_documents`."""
    documents, _ = open_documents(where, key, split, name)
    try:
        yield from documents
    except Exception as error:  # each format and each file system raises its own
        raise ConfigError(f"{key}: {where}: cannot be read: {error_text(error)}") from None


def _document_text(record: Mapping[str, Any], text_source: str, number: int) -> str:
    try:
        return check_text(fill(text_source, record), text_source)
    except ConfigError as error:
        raise ConfigError(f"document {number}: {error}") from None


def _tokenize_documents(
    texts: Iterable[str], tokenizer: Tokenizer, check: ByteCheck | None = None
) -> Iterator[NDArray[np.uint32]]:
    """Yield the tokens of each text, with an end-of-text token, once."""
    remaining = iter(texts)
    while batch := list(itertools.islice(remaining, _DOCUMENTS_PER_CALL)):
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            if check is not None:
                check.add(tokenizer, text, ids)
            yield end_text(ids, tokenizer.eos_id)


class Window(NamedTuple):
    """Consecutive tokens of a stream."""

    ids: NDArray[np.int64]
    """shape (seq_len + 1,)"""
    state: StreamPosition
    """where the next window starts"""


class _BlockStart(NamedTuple):
    """Where a block of documents starts."""

    number: int
    """of the block, counted over all epochs"""
    n_read: int
    """documents before the block, over all epochs"""
    dataset_state: dict[str, Any] | None
    """of the `datasets` library; None = the start of an epoch"""
    digest: str | None = None
    """of the documents in the block; None = they were not read yet"""


class _Document(NamedTuple):
    """The rest of a document, which no window holds yet."""

    block: _BlockStart
    number: int
    """in the shuffled block"""
    token: int
    """number of its first token in the document"""
    ids: NDArray[np.uint32]

    def position(self) -> StreamPosition:
        return {
            "block": self.block.number,
            "read": self.block.n_read,
            "dataset": self.block.dataset_state,
            "digest": self.block.digest,
            "document": self.number,
            "token": self.token,
        }


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
        try:
            yield from self._windows()
        except ConfigError as error:
            raise ConfigError(f"train_data: {error}", rank_local=True) from None
        except Exception as error:  # each format and each file system raises its own
            problem = f"train_data: cannot be read: {error_text(error)}"
            raise ConfigError(problem, rank_local=True) from None

    def _windows(self) -> Iterator[Window]:
        pending: deque[_Document] = deque()
        ids = np.empty(0, np.int64)  # of the pending documents
        for document in self._tokenized_documents():
            ids = np.concatenate([ids, document.ids], dtype=np.int64)
            pending.append(document)
            while len(ids) > self.seq_len:
                window_ids = ids[: self.seq_len + 1]
                ids = ids[self.seq_len :]
                _drop_tokens(pending, self.seq_len)
                yield Window(window_ids, pending[0].position())

    def _tokenized_documents(self) -> Iterator[_Document]:
        """Yield the documents, the first one from where the stream was resumed.

        Empty documents are left out.
        """
        first_document = self.state.get("document", 0)
        first_token = self.state.get("token", 0)
        saved_digest = self.state.get("digest")
        for start, texts in self._blocks():
            block = start._replace(digest=_digest(texts))
            if saved_digest not in (None, block.digest):
                raise ConfigError(_other_documents(block.n_read, len(texts)))
            saved_digest = None
            if self.seed is not None:
                seed = derive_seed("stream", self.seed, self.number, block.number)
                permutation = np.random.default_rng(seed).permutation(len(texts))
                texts = [texts[i] for i in permutation]
            tokenized = _tokenize_documents(texts[first_document:], self.tokenizer)
            for number, ids in enumerate(tokenized, first_document):
                if texts[number]:
                    yield _Document(block, number, first_token, ids[first_token:])
                first_token = 0
            first_document = 0

    def _blocks(self) -> Iterator[tuple[_BlockStart, list[str]]]:
        """Yield the start of each block, and its documents, epoch after epoch."""
        block = _BlockStart(
            self.state.get("block", 0), self.state.get("read", 0), self.state.get("dataset")
        )
        n_to_skip = self.state.get("skip", 0)
        while True:
            # A dataset that loaded a state would start each epoch there: each epoch has a copy.
            documents = copy.deepcopy(self.documents)
            if block.dataset_state is not None:
                documents.load_state_dict(copy.deepcopy(block.dataset_state))
            records = iter(documents)
            n_skipped = sum(1 for _ in itertools.islice(records, n_to_skip))
            if n_skipped > 0:
                n_to_skip -= n_skipped
                n_read = block.n_read + n_skipped
                block = _BlockStart(block.number, n_read, documents.state_dict())
            is_epoch = block.dataset_state is None
            has_text = False
            first_state = None
            texts: list[str] = []
            for count, record in enumerate(records):
                if count == 0:
                    first_state = documents.state_dict()
                elif count == 1 and documents.state_dict() == first_state:
                    raise ConfigError(_standing_position())
                number = block.n_read + len(texts)
                texts.append(_document_text(record, self.text_source, number))
                has_text = has_text or texts[-1] != ""
                if len(texts) == self.block_size:
                    n_read = block.n_read + len(texts)
                    next_block = _BlockStart(block.number + 1, n_read, documents.state_dict())
                    yield block, texts
                    block = next_block
                    texts = []
            if texts:
                yield block, texts
            n_read = block.n_read + len(texts)
            if is_epoch and not has_text:
                problem = "a worker's share of the dataset has no text"
                raise ConfigError(f"data_workers: {problem}; lower data_workers, or add files")
            block = _BlockStart(block.number + 1, n_read, dataset_state=None)


def _digest(texts: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()


def _standing_position() -> str:
    problem = f"datasets {_library_version()} reports one position after two documents"
    reason = "a checkpoint of it would read documents again"
    return f"{problem}, so that {reason}; install another version, e.g. pip install -U datasets"


def _other_documents(first: int, count: int) -> str:
    problem = f"documents {first} to {first + count - 1} differ from those before the checkpoint"
    causes = f"the data changed, or datasets {_library_version()} resumes at another document"
    return f"{problem}: {causes}; restore the data, or the version that wrote the checkpoint"


def _library_version() -> str:
    import datasets

    return datasets.__version__


def _drop_tokens(pending: deque[_Document], count: int) -> None:
    """Drop the first `count` tokens, of more."""
    while len(pending[0].ids) <= count:
        count -= len(pending.popleft().ids)
    first = pending[0]
    pending[0] = first._replace(token=first.token + count, ids=first.ids[count:])


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
        self.note: str | None = None
        n_files = stream.documents.num_shards
        if n_files % n_streams != 0:
            workers_of_all = format_count(n_streams, "data worker")
            problem = f"{format_count(n_files, 'file')} for {workers_of_all} over all ranks"
            advice = f"each worker reads all files; a multiple of {n_streams} files is faster"
            self.note = f"train_data: {problem}: {advice}"

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
