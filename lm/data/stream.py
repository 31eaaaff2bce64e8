"""A Hugging Face dataset as an endless stream of windows of tokens, read, shuffled and packed in worker processes.

Every worker of every rank has a stream of its own: the library splits the dataset among them all. Documents are
shuffled block by block, and end in the end-of-text token; a window's last target is the next one's first input.
A window's state says where the next one begins: which document of which block, and where in it. So a resumed
stream reads one block again instead of carrying a shuffle buffer along, and goes on to the token.
"""

from __future__ import annotations

import copy
import glob
import hashlib
import itertools
import json
import os
import signal
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from lm import seeds
from lm.data.files import find_files, is_empty_parquet
from lm.data.tokenizer import Tokenizer
from lm.errors import ConfigError, DataError, RankError, RunError, oserror_as_config_error
from lm.launch.spawn import die_with_parent

if TYPE_CHECKING:
    from datasets import IterableDataset as Documents

BLOCK = 8192
_TOGETHER = 64
"""Documents that are tokenised at once."""
_GRACE = 30
"""Seconds from SIGTERM to a worker's end."""

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".txt": "text"}


def is_local(where: str) -> bool:
    """Whether a dataset's name means files here rather than one of the hub."""
    return Path(where).exists() or any(sign in where for sign in "*?[") or where.startswith((".", "/", "~"))


@oserror_as_config_error
def open_documents(where: str, key: str, split: str, name: str | None) -> tuple[Documents, str]:
    """The dataset that the setting `key` names: local files (a file, a folder or a glob), or one of the hub.

    Args:
        split: of a dataset of the hub.
        name: of its configuration, e.g. "en" for C4.

    Returns:
        The documents, and a text that changes when they do (as far as names and sizes of files say).

    Raises:
        ConfigError: it is nowhere to be found, of no kind that can be read, or `datasets` is missing.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError("dataset: hf needs a package: pip install datasets") from None
    datasets.disable_progress_bars()
    local = is_local(where)
    try:
        if not local:
            return datasets.load_dataset(where, name, split=split, streaming=True), f"{where} {name} {split}"
        files = find_files(where, key)
        kinds = {Path(file.name.removesuffix(".gz").removesuffix(".zst")).suffix for file in files}
        builders = [BUILDERS[kind] for kind in kinds if kind in BUILDERS]
        if len(builders) != 1 or len(kinds) > 1:
            found = ", ".join(sorted(kinds))
            raise ConfigError(f"{key}: {where}: files of one kind are needed, of {', '.join(BUILDERS)}; found {found}")
        if builders == ["parquet"]:
            files = [file for file in files if not is_empty_parquet(file)] or files[:1]
        names = [glob.escape(str(file)) for file in files]
        sizes = json.dumps([(file.name, file.stat().st_size) for file in files])
        digest = hashlib.sha256(sizes.encode()).hexdigest()
        documents = datasets.load_dataset(builders[0], data_files=names, split="train", streaming=True)
        return documents, f"{len(files)} files, sha256 of names and sizes {digest}"
    except ConfigError:
        raise
    except Exception as error:  # every format and every store has its own
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        fetch = "" if local else f"; on a machine with network: hf download {where} --repo-type dataset --local-dir"
        advice = fetch and f"{fetch} FOLDER, then {key}=FOLDER/..."
        raise ConfigError(f"{key}: {where}: cannot be had{offline}: {_reason(error)}{advice}") from None


def _reason(error: Exception) -> str:
    """What was the matter, on one line."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:300] or type(cause).__name__


def first_tokens(documents: Documents, text_field: str, tokenizer: Tokenizer, count: int) -> NDArray[np.int64]:
    """The first `count` tokens of the documents, each ended by the end-of-text token; fewer where they end.

    Raises:
        DataError: a document is no text.
        ConfigError: `val_data` cannot be read.
    """
    pieces: list[NDArray[np.uint32]] = [np.empty(0, np.uint32)]
    held = 0
    end = np.array([tokenizer.eos_id], np.uint32)
    records = enumerate(documents)
    try:
        while held < count and (together := list(itertools.islice(records, _TOGETHER))):
            for ids in tokenizer.encode_batch([_text(record, text_field, number) for number, record in together]):
                pieces += [ids, end]
                held += len(ids) + 1
    except DataError:
        raise
    except Exception as error:
        raise ConfigError(f"val_data: cannot be read: {_reason(error)}") from None
    return np.concatenate(pieces)[:count].astype(np.int64)


def _text(record: Mapping[str, Any], field: str, number: int) -> str:
    text = record.get(field)
    if isinstance(text, str):
        return text
    if field in record:
        raise DataError(f"dataset: document {number}: {field} is {text!r:.60}, not text")
    raise DataError(f"dataset: its documents have no {field} (text_field); they have {', '.join(record)}")


class Window(NamedTuple):
    ids: NDArray[np.int64]  # (seq_len + 1,)
    state: dict[str, Any]
    """where the next window begins; JSON"""


class TokenStream(IterableDataset[Window]):
    """The windows of one worker's part of the documents, from a state on.

    Args:
        documents: this stream's part, from its beginning.
        key: of the order, another one for every stream; None = as the documents come.
        block: documents that are shuffled together.
        state: a window's; {} = the beginning; {"skip": n} = behind so many documents.
    """

    def __init__(
        self,
        documents: Documents,
        text_field: str,
        tokenizer: Tokenizer,
        seq_len: int,
        key: tuple[int, int] | None,
        block: int,
        state: Mapping[str, Any],
    ) -> None:
        self._documents = documents
        self._text_field = text_field
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._key = key
        self._block = block
        self._state = state

    def __iter__(self) -> Iterator[Window]:
        ids = np.empty(0, np.int64)
        begins: deque[tuple[dict[str, Any], int, int]] = deque()  # state, first token, and length of what `ids` holds
        for state, document in self._tokenized():
            first = state["token"]
            begins.append((state, first, len(document) - first))
            ids = np.concatenate([ids, document[first:]])
            while len(ids) > self._seq_len:
                window, ids = ids[: self._seq_len + 1], ids[self._seq_len :]
                ahead = self._seq_len
                while begins[0][2] <= ahead:
                    ahead -= begins.popleft()[2]
                state, first, length = begins[0]
                begins[0] = (state, first + ahead, length - ahead)
                yield Window(window, state | {"token": first + ahead})

    def _tokenized(self) -> Iterator[tuple[dict[str, Any], NDArray[np.int64]]]:
        end = np.array([self._tokenizer.eos_id], np.int64)
        for block, texts in self._blocks():
            order = np.arange(len(texts))
            if self._key is not None:
                random = np.random.default_rng(seeds.derive_seed("stream", *self._key, block["block"]))
                order = random.permutation(order)
            at, token = block["document"], block["token"]
            for start in range(at, len(texts), _TOGETHER):
                position_ids = range(start, min(start + _TOGETHER, len(texts)))
                encoded = self._tokenizer.encode_batch([texts[order[place]] for place in position_ids])
                for place, ids in zip(position_ids, encoded, strict=True):
                    yield block | {"document": place, "token": token}, np.append(ids.astype(np.int64), end)
                    token = 0

    def _blocks(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Blocks of documents with the state that leads to each, epoch after epoch."""
        fresh = {"block": 0, "read": 0, "source": None, "document": 0, "token": 0}
        state = fresh | dict(self._state)
        skip = state.pop("skip", 0)
        while True:
            documents = copy.deepcopy(self._documents)  # a resumed one would begin every epoch where it was resumed
            if state["source"] is not None:
                documents.load_state_dict(copy.deepcopy(state["source"]))
            begun = state["read"]
            texts: list[str] = []
            for record in documents:
                if skip:
                    skip -= 1
                    state |= {"read": state["read"] + 1}
                    if not skip:
                        state |= {"source": documents.state_dict()}
                    continue
                texts.append(_text(record, self._text_field, state["read"] + len(texts)))
                if len(texts) == self._block:
                    source = documents.state_dict()
                    yield state, texts
                    state = fresh | {"block": state["block"] + 1, "read": state["read"] + self._block, "source": source}
                    texts = []
            if texts:
                yield state, texts
            read = state["read"] + len(texts)
            if read == begun and state["source"] is None:
                raise RunError("dataset: a worker's part of it is empty; lower data_workers, or give more files")
            state = fresh | {"block": state["block"] + 1, "read": read}


class _Guarded(IterableDataset[Window | str]):
    """A stream whose own errors come out as texts: what a worker raises would arrive as a long traceback."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Window | str]:
        try:
            yield from self._stream
        except RunError as error:
            yield str(error)
        except Exception as error:  # every format and every store has its own
            yield f"dataset: cannot be read: {_reason(error)}"


def _begin_worker(_worker: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core's work
    # A scheduler signals every process of a job. The rank may need one more batch before it saves and ends.
    for signum in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE))
    die_with_parent(signal.SIGKILL)


class StreamingDataset:
    """This rank's streams, taken in turn, one micro-batch from each.

    Args:
        documents: the whole dataset.
        identity: a text that changes when it does.
        workers: processes, and streams, of this rank.
        seed: of the order of documents; None = as they come.
        block: documents that are shuffled together.
    """

    def __init__(
        self,
        documents: Documents,
        identity: str,
        text_field: str,
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        batch_size: int,
        rank: int,
        ranks: int,
        workers: int,
        seed: int | None,
        block: int = BLOCK,
    ) -> None:
        from datasets.distributed import split_dataset_by_node

        self._identity = identity
        self._count = ranks * workers
        self._numbers = range(rank * workers, (rank + 1) * workers)
        self._batch_size = batch_size
        self._states: list[dict[str, Any]] = [{} for _ in self._numbers]
        self._turn = 0
        self._streams = [
            (
                split_dataset_by_node(documents, number, self._count),
                text_field,
                tokenizer,
                seq_len,
                None if seed is None else (seed, number),
                block,
            )
            for number in self._numbers
        ]
        files = documents.num_shards
        self.note = None
        if files % self._count:
            self.note = f"{files} files for {self._count} data workers: each reads all; a multiple would be faster"

    def fingerprint(self) -> str:
        return self._identity

    def state(self) -> dict[str, Any]:
        """Where this rank's streams stand, and whose turn it is."""
        return {"streams": [dict(state) for state in self._states], "turn": self._turn}

    def resume(self, everyone: Sequence[Mapping[str, Any]]) -> str | None:
        """Go on where a checkpoint's streams stood.

        Args:
            everyone: `state` of every rank that saved, by rank.

        Returns:
            What to say, where it is another number of streams: each begins behind its share of the documents.
        """
        states = [state for rank in everyone for state in rank["streams"]]
        if len(states) == self._count:
            self._states = [dict(states[number]) for number in self._numbers]
            self._turn = everyone[0]["turn"] % len(self._numbers)
            return None
        read = sum(state.get(key, 0) for state in states for key in ("skip", "read", "document"))
        self._states = [{"skip": read // self._count} for _ in self._numbers]
        return (
            f"{len(states)} data workers before, {self._count} now: each goes on behind {read // self._count} documents"
        )

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], dict[str, Any]]]:
        """Micro-batches `(batch_size, seq_len + 1)`, each with the `state` behind it.

        Raises:
            DataError: a document cannot be read, or is no text.
            RankError: a worker was killed.
        """
        readers = [self._reader(*parts, state) for parts, state in zip(self._streams, self._states, strict=True)]
        while True:
            try:
                windows = next(readers[self._turn])
            except RuntimeError as error:
                if "exited unexpectedly" not in str(error):
                    raise
                raise RankError(
                    f"a data worker was killed ({error}); if by lack of memory, lower data_workers"
                ) from None
            sound = [window for window in windows if isinstance(window, Window)]
            if len(sound) < len(windows):
                raise DataError(str(windows[-1]))
            self._states[self._turn] = sound[-1].state
            self._turn = (self._turn + 1) % len(readers)
            yield np.stack([window.ids for window in sound]), self.state()

    def _reader(self, *of_stream: Any) -> Iterator[list[Window | str]]:
        loader = DataLoader(
            _Guarded(TokenStream(*of_stream)),
            batch_size=self._batch_size,
            num_workers=1,
            collate_fn=list,
            multiprocessing_context="spawn",
            worker_init_fn=_begin_worker,
            prefetch_factor=4,
        )
        return iter(loader)
