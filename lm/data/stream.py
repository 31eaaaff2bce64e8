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
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from lm.data.dataset import SampleBatch
from lm.data.files import error_text, find_files, get_text, open_table
from lm.data.tokenizer import Tokenizer, encode_documents
from lm.data.tokens import window
from lm.errors import ConfigError, RunError, oserror_as_config_error
from lm.launch.spawn import die_with_parent
from lm.seeds import derive_seed

if TYPE_CHECKING:
    from datasets import IterableDataset as Documents

BLOCK = 8192
"""Documents that are shuffled together."""
_BATCH = 64
"""Documents tokenized in one call."""
_TAIL = 1 << 16
"""Bytes at the end of a file that identify it: there, Parquet has statistics of all columns, and gzip a checksum."""
_GRACE = 30
"""Seconds that a worker runs after SIGTERM."""

BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".txt": "text",
}


def is_local(where: str) -> bool:
    """Return whether `where` names local files and not a dataset on the hub."""
    return (
        Path(where).exists()
        or any(sign in where for sign in "*?[")
        or where.startswith((".", "/", "~"))
    )


@oserror_as_config_error
def open_documents(where: str, key: str, split: str, name: str | None) -> tuple[Documents, str]:
    """Open local files or a dataset on the hub for streaming. Return the documents and their fingerprint.

    Args:
        where: value of the hyperparameter `key`.
        split: split of a dataset on the hub.
        name: its configuration, e.g. "en" for C4.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError("dataset: hf requires a package: pip install datasets") from None
    datasets.disable_progress_bars()
    local = is_local(where)
    try:
        if not local:
            return datasets.load_dataset(
                where, name, split=split, streaming=True
            ), f"{where} {name} {split}"
        files = find_files(where, key)
        formats = {
            Path(file.name.removesuffix(".gz").removesuffix(".zst")).suffix for file in files
        }
        if len(formats) > 1 or not formats <= BUILDERS.keys():
            problem = f"{key}: {where}: files must have one format of {', '.join(BUILDERS)}"
            raise ConfigError(f"{problem}; found {', '.join(sorted(formats))}")
        digest = hashlib.sha256()
        for file in files:
            with file.open("rb") as content:
                size = content.seek(0, os.SEEK_END)
                content.seek(max(0, size - _TAIL))
                digest.update(json.dumps([file.name, size]).encode() + content.read())
        fingerprint = f"{len(files)} files, sha256 of names, sizes and ends {digest.hexdigest()}"
        return open_table(BUILDERS[formats.pop()], files), fingerprint
    except ConfigError:
        raise
    except Exception as error:  # each format and each file system raises its own
        problem = f"{key}: {where}: cannot be opened"
        if local:
            raise ConfigError(f"{problem}: {error_text(error)}") from None
        download = f"hf download {where} --repo-type dataset --local-dir DIRECTORY"
        advice = f"run on a machine with network access: {download}, then set {key}=DIRECTORY/..."
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ConfigError(f"{problem}{offline}: {error_text(error)}; {advice}") from None


def first_tokens(
    documents: Documents, text_field: str, tokenizer: Tokenizer, count: int
) -> NDArray[np.int64]:
    """Return at most `count` tokens of validation documents, each document with an end-of-text token."""
    texts = (_get_text(record, text_field, number) for number, record in enumerate(documents))
    tokens = itertools.chain.from_iterable(ids.tolist() for ids in _encode(texts, tokenizer))
    try:
        return np.fromiter(itertools.islice(tokens, count), np.int64)
    except ConfigError as error:
        raise ConfigError(f"val_data: {error}") from None
    except Exception as error:
        raise ConfigError(f"val_data: cannot be read: {error_text(error)}") from None


def _get_text(record: Mapping[str, Any], key: str, number: int) -> str:
    try:
        return get_text(record, key)
    except ConfigError as error:
        raise ConfigError(f"text_field: document {number}: {error}") from None


def _encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[NDArray[np.uint32]]:
    """Yield the tokens of each text, with an end-of-text token."""
    texts = iter(texts)
    while batch := list(itertools.islice(texts, _BATCH)):
        yield from encode_documents(tokenizer, batch)


class Window(NamedTuple):
    """Consecutive tokens of a stream, (seq_len + 1,), and the position of the next window as JSON."""

    ids: NDArray[np.int64]
    state: dict[str, Any]


@dataclass(eq=False)
class TokenStream(IterableDataset["Window | ConfigError"]):
    """An endless sequence of windows of one worker's share of the documents.

    Args:
        documents: the share, from its start.
        seed: of the order of documents; None = the order of the dataset.
        number: of the stream, over all ranks; each has another order.
        block: documents that are shuffled together.
        state: of a window; {} = the start; {"skip": n} = after n documents.
    """

    documents: Documents
    text_field: str
    tokenizer: Tokenizer
    seq_len: int
    seed: int | None
    number: int = 0
    block: int = BLOCK
    state: Mapping[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Window | ConfigError]:
        """Yield windows, or the error that ends them: raised in a worker, it would arrive as a traceback."""
        try:
            yield from self.windows()
        except ConfigError as error:
            yield ConfigError(f"train_data: {error}", rank_local=True)
        except Exception as error:  # each format and each file system raises its own
            yield ConfigError(f"train_data: cannot be read: {error_text(error)}", rank_local=True)

    def windows(self) -> Iterator[Window]:
        """Yield windows from `state` on."""
        ids = np.empty(0, np.int64)
        parts: deque[tuple[dict[str, Any], int]] = (
            deque()
        )  # state at the start of each part of `ids`, and its length
        for state, document in self._tokenized():
            rest = document[state["token"] :]
            parts.append((state, len(rest)))
            ids = np.concatenate([ids, rest], dtype=np.int64)
            while len(ids) > self.seq_len:
                window_ids, ids = ids[: self.seq_len + 1], ids[self.seq_len :]
                used = self.seq_len
                while parts[0][1] <= used:
                    used -= parts.popleft()[1]
                state, length = parts[0]
                parts[0] = state | {"token": state["token"] + used}, length - used
                yield Window(window_ids, parts[0][0])

    def _tokenized(self) -> Iterator[tuple[dict[str, Any], NDArray[np.uint32]]]:
        """Yield documents' tokens, each with the state at its start (the first one's may be inside it)."""
        for state, texts in self._blocks():
            if self.seed is not None:
                rng = np.random.default_rng(
                    derive_seed("stream", self.seed, self.number, state["block"])
                )
                texts = [texts[i] for i in rng.permutation(len(texts))]
            token, first = state["token"], state["document"]
            for document, ids in enumerate(_encode(texts[first:], self.tokenizer), first):
                yield state | {"document": document, "token": token}, ids
                token = 0

    def _blocks(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Yield blocks of documents, epoch after epoch, each with the state at its start."""
        start = {"block": 0, "read": 0, "dataset": None, "document": 0, "token": 0}
        state = start | dict(self.state)
        skip = state.pop("skip", 0)
        while True:
            documents = copy.deepcopy(
                self.documents
            )  # a dataset that loaded a state would start each epoch there
            if state["dataset"] is not None:
                documents.load_state_dict(copy.deepcopy(state["dataset"]))
            records, read_before = iter(documents), state["read"]
            if n_skipped := sum(1 for _ in itertools.islice(records, skip)):
                skip -= n_skipped
                state |= {"read": read_before + n_skipped, "dataset": documents.state_dict()}
            texts: list[str] = []
            for record in records:
                texts.append(_get_text(record, self.text_field, state["read"] + len(texts)))
                if len(texts) == self.block:
                    position = {
                        "read": state["read"] + self.block,
                        "dataset": documents.state_dict(),
                    }
                    yield state, texts
                    state, texts = start | {"block": state["block"] + 1} | position, []
            if texts:
                yield state, texts
            read = state["read"] + len(texts)
            if read == read_before and state["dataset"] is None:
                problem = "data_workers: a worker's share of the dataset is empty; lower data_workers, or add files"
                raise ConfigError(problem)
            state = start | {"block": state["block"] + 1, "read": read}


def _init_worker(_worker: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker has one core
    # A scheduler signals every process of a job, but the rank may need one more batch before it
    # saves and exits.
    for signum in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE))
    die_with_parent(signal.SIGKILL)


class StreamingDataset:
    """Training source of a streamed dataset: one rank's streams take turns, a micro-batch each.

    Args:
        stream: of all documents; it is split among the streams of all ranks.
        workers: processes of this rank, with one stream each.
    """

    samples_per_epoch = None

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
        self._n_target_tokens = global_batch_size * stream.seq_len
        self._n_streams = n = dp_size * workers
        numbers = range(dp_rank * workers, (dp_rank + 1) * workers)
        shares = (split_dataset_by_node(stream.documents, number, n) for number in numbers)
        self._streams = [
            replace(stream, documents=s, number=i) for s, i in zip(shares, numbers, strict=True)
        ]
        self._states: list[dict[str, Any]] = [{} for _ in self._streams]
        self._turn = 0
        self.note = None
        if (n_files := stream.documents.num_shards) % n:
            advice = f"each worker reads all files; a multiple of {n} files is faster"
            self.note = (
                f"train_data: {n_files} file(s) for {n} data workers over all ranks: {advice}"
            )

    def fingerprint(self) -> str:
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's streams, and which of them is next."""
        return {"streams": [dict(state) for state in self._states], "turn": self._turn}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> str | None:
        """Set the position from the state dicts of all ranks that saved.

        If the number of streams differs, each resumes after its share of the documents that were
        read, not at the exact token, and a note says so.
        """
        saved = [state for rank in states for state in rank["streams"]]
        if len(saved) == self._n_streams:
            self._states = [dict(saved[stream.number]) for stream in self._streams]
            self._turn = states[0]["turn"] % len(self._streams)
            return None
        n_read = sum(state.get(key, 0) for state in saved for key in ("skip", "read", "document"))
        skip = n_read // self._n_streams
        self._states = [{"skip": skip} for _ in self._streams]
        change = f"{len(saved)} over all ranks in the checkpoint, {self._n_streams} now"
        return f"data_workers: {change}: each worker resumes after {skip} documents of its share"

    def batches(self, start_step: int) -> Generator[SampleBatch]:  # noqa: ARG002 - the position is in the state
        """Yield batches from the current position."""
        streams = zip(self._streams, self._states, strict=True)
        readers = [self._read(replace(stream, state=state)) for stream, state in streams]
        while True:
            samples = []
            for _ in range(self._n_micro_batches):
                try:
                    windows = next(readers[self._turn])
                except RuntimeError as error:
                    if "exited unexpectedly" not in str(error):
                        raise
                    problem = f"data_workers: a data worker was killed ({error}); if memory ran out, lower data_workers"
                    raise RunError(problem, rank_local=True) from None
                for item in windows:
                    if isinstance(item, ConfigError):
                        raise item
                    samples.append(window(item.ids))
                    self._states[self._turn] = item.state
                self._turn = (self._turn + 1) % len(readers)
            yield SampleBatch(samples, self._n_target_tokens, self.state_dict())

    def _read(self, stream: TokenStream) -> Iterator[list[Window | ConfigError]]:
        process: Any = {
            "num_workers": 1,
            "multiprocessing_context": "spawn",
            "worker_init_fn": _init_worker,
        }
        return iter(
            DataLoader(stream, self._batch_size, collate_fn=list, prefetch_factor=4, **process)
        )
