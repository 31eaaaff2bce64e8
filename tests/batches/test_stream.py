"""Streams have each document once an epoch over all workers, and resume at the exact token."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from datasets import Dataset, DatasetDict
from pyarrow import ipc
from pydantic import TypeAdapter, ValidationError

from lm.data.dataset import StreamPosition, StreamState, ValidationSet
from lm.data.loader import Loader, resume_streams
from lm.data.run_data import Data, DataConfig, open_data
from lm.data.stream import (
    StreamedSource,
    TokenStream,
    Window,
    open_documents,
    open_windows,
)
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.windows import WindowDataset
from lm.errors import ConfigError, RunError
from tests.support.hyperparameters import TINY, named_keys
from tests.support.runs import checkpoints_by_step, read_reports, run_fsdp

BYTES = ByteTokenizer()
SEQ_LEN = 16


def write(folder: Path, files: int = 4, documents: int = 10, suffix: str = ".jsonl") -> Path:
    """Files of documents whose texts are all different."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(files):
        texts = [f"<{file}.{at}" + "-" * (at * 7 % 23) + ">" for at in range(documents)]
        path = folder / f"{file}{suffix}"
        match suffix:
            case ".jsonl":
                lines = [json.dumps({"text": text}) for text in texts]
                path.write_text("\n".join(lines) + "\n")
            case ".csv" | ".tsv":
                path.write_text("\n".join(["text", *texts]) + "\n")
            case _:
                pq.write_table(pa.table({"text": texts}), path)
    return folder


def documents_in(folder: Path) -> Counter[str]:
    lines = [
        json.loads(line)["text"]
        for file in folder.glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return Counter(lines)


def windows(
    folder: Path, count: int, state: StreamPosition | None = None, **parts: int
) -> list[Window]:
    """The first windows of one stream, read in this process."""
    from datasets.distributed import split_dataset_by_node

    documents, _ = open_documents(str(folder), "train_data", "train", None)
    number, of = parts.get("number", 0), parts.get("of", 1)
    seed = 1 if parts.get("shuffle", 1) else None
    part = split_dataset_by_node(documents, number, of)
    stream = TokenStream(
        part, "text", BYTES, SEQ_LEN, seed, number, parts.get("block", 8), state or {}
    )
    return list(itertools.islice(stream, count))


def text(stream: list[Window]) -> str:
    return BYTES.decode(int(token) for window in stream for token in window.ids[:-1])


# ---- the order of documents


@pytest.mark.parametrize("of", [1, 2, 3, 4])
def test_stream_epoch_holds_every_document_once(of: int, tmp_path: Path) -> None:
    folder = write(tmp_path)
    seen: Counter[str] = Counter()
    for number in range(of):
        texts = text(windows(folder, 120, number=number, of=of)).split("\n\n")
        epoch = len(set(texts[:-1]))  # all texts differ, and there is more than one epoch
        seen += Counter(texts[:epoch])
        assert sorted(texts[epoch : 2 * epoch]) == sorted(texts[:epoch])
    assert seen == documents_in(folder)


def test_stream_shuffles_within_blocks(tmp_path: Path) -> None:
    folder = write(tmp_path, files=1, documents=24)
    plain = text(windows(folder, 30, shuffle=0)).split("\n\n")[:24]
    mixed = text(windows(folder, 30)).split("\n\n")[:24]
    assert mixed != plain
    for start in range(0, 24, 8):
        assert sorted(mixed[start : start + 8]) == sorted(plain[start : start + 8])
    assert text(windows(folder, 30, number=0)).split("\n\n")[:24] == mixed
    second = text(windows(folder, 60)).split("\n\n")[24:48]
    assert sorted(second) == sorted(mixed)
    assert second != mixed
    for one, two in itertools.pairwise(windows(folder, 20)):
        assert one.ids[-1] == two.ids[0]


# ---- resuming


@pytest.mark.parametrize(
    ("block", "suffix"),
    [
        *((block, ".jsonl") for block in (1, 8)),
        *((3, suffix) for suffix in (".csv", ".tsv", ".parquet")),
    ],
)
def test_stream_resumes_at_the_exact_token(block: int, suffix: str, tmp_path: Path) -> None:
    folder = write(tmp_path, suffix=suffix)
    undisturbed = windows(folder, 90, block=block)
    expected = [window.ids.tolist() for window in undisturbed]
    for start in (0, 1, 13, 37):
        at, state = start, json.loads(json.dumps(undisturbed[start].state))
        for _ in range(3):
            resumed = windows(folder, 17, state, block=block)
            assert [window.ids.tolist() for window in resumed] == expected[at + 1 : at + 18]
            at, state = at + 16, json.loads(json.dumps(resumed[15].state))


class Library:
    """Documents whose position after a resume is wrong.

    Args:
        fault: "stands" = it does not advance, as with datasets 5.0.0; "lags" = it is that of the
            document before; "never moves" = nor without a resume.
    """

    def __init__(self, fault: str, n_documents: int = 30) -> None:
        self.fault = fault
        self.n_documents = n_documents
        self.position = 0
        self.loaded: int | None = None

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["at"]

    def state_dict(self) -> dict[str, int]:
        if self.loaded is None:
            return {"at": 0 if self.fault == "never moves" else self.position}
        return {"at": 0 if self.fault == "stands" else self.position - 1}

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in range(self.loaded or 0, self.n_documents):
            self.position = number + 1
            yield {"text": f"<{number}>" + "-" * 20}


@pytest.mark.parametrize(
    ("fault", "session", "part"),
    [("stands", 2, "one position before and after"), ("lags", 3, "documents 16 to 23 differ")],
)
def test_stream_whose_library_resumes_elsewhere_is_refused(
    fault: str, session: int, part: str
) -> None:
    state: StreamPosition = {}
    for _ in range(session - 1):
        stream = TokenStream(Library(fault), "text", BYTES, SEQ_LEN, 1, block_size=8, state=state)  # type: ignore
        for item in itertools.islice(stream, 18):
            state = json.loads(json.dumps(item.state))
    stream = TokenStream(Library(fault), "text", BYTES, SEQ_LEN, 1, block_size=8, state=state)  # type: ignore
    with pytest.raises(ConfigError, match=part) as raised:
        deque(itertools.islice(stream, 18), maxlen=0)
    assert f"datasets {datasets.__version__}" in str(raised.value)


def test_position_that_never_moves_is_found_in_the_first_block() -> None:
    stream = TokenStream(Library("never moves"), "text", BYTES, SEQ_LEN, 1, block_size=8)  # type: ignore
    with pytest.raises(ConfigError, match="one position before and after"):
        next(iter(stream))


def test_stream_of_data_that_changed_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    state = windows(folder, 20)[-1].state
    path = folder / "1.jsonl"
    path.write_text(path.read_text().replace("<1.7", "<1.x"))
    with pytest.raises(ConfigError, match=r"documents 16 to 23 differ .*the data changed"):
        windows(folder, 1, state)


def source(folder: Path, *, dp_rank: int = 0, dp_size: int = 1, workers: int = 1) -> StreamedSource:
    """A source whose batches are one micro-batch of 2 sequences on each rank."""
    documents, fingerprint = open_documents(str(folder), "train_data", "train", None)
    stream = TokenStream(documents, "text", BYTES, SEQ_LEN, 1, block_size=8)
    return StreamedSource(stream, fingerprint, 2, 2 * dp_size, dp_rank, dp_size, workers)


Taken = list[tuple[list[list[int]], StreamState]]


def take(source: StreamedSource, count: int, state: StreamState | None = None) -> Taken:
    """The inputs and states of the next batches after `state`."""
    start = state or source.initial_stream_state
    taken = []
    for batch in itertools.islice(source.batches(0, start), count):
        assert batch.stream_state is not None
        taken.append(([sample.inputs.tolist() for sample in batch.samples], batch.stream_state))
    return taken


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def by_one(folder: Path) -> Taken:
    """What one worker reads from `folder`."""
    return take(source(folder), 10)


@pytest.fixture(scope="module")
def by_two(folder: Path) -> Taken:
    """What two workers read from `folder`."""
    return take(source(folder, workers=2), 9)


@pytest.mark.slow
def test_data_workers_resume_where_they_stopped(folder: Path, by_two: Taken) -> None:
    alone = [
        [window.ids[:-1].tolist() for window in windows(folder, 10, number=i, of=2)]
        for i in range(2)
    ]
    assert by_two[0][0] == alone[0][:2]
    assert by_two[3][0] == alone[1][2:4]
    saved = StreamState(**json.loads(json.dumps(asdict(by_two[4][1]))))
    state, note = resume_streams([saved], dp_rank=0, dp_size=1, workers=2)
    assert note is None
    assert take(source(folder, workers=2), 4, state) == by_two[5:]


@pytest.mark.slow
def test_loader_state_does_not_run_ahead_with_prefetching(folder: Path, by_one: Taken) -> None:
    validation = ValidationSet(None, WindowDataset(np.arange(SEQ_LEN + 1), SEQ_LEN))
    data = Data(source(folder), [validation], BYTES)
    loader = Loader(
        DataConfig.model_validate({"batch_size": 2}), data, 2, 0, 1, torch.device("cpu")
    )
    assert loader.stream_state == StreamState([{}])
    for batch, (inputs, state) in zip(loader.training(0), by_one[:3], strict=False):
        assert batch.micro_batches[0].inputs.tolist() == inputs
        assert loader.stream_state == state


@pytest.mark.slow
def test_data_workers_resume_with_another_number(folder: Path, by_one: Taken) -> None:
    _, state = by_one[-1]
    read = state.streams[0].get("documents", 0)
    assert read > 10
    other, note = resume_streams([state], dp_rank=1, dp_size=2, workers=1)
    assert note is not None
    assert re.match(rf"data_workers: 1 .*, 2 now: .* {read // 2} documents", note)
    ((_, after),) = take(source(folder, dp_rank=1, dp_size=2), 1, other)
    assert after.streams[0].get("read") == read // 2
    for workers in (2, 1, 3):  # none of them reads anything
        state, note = resume_streams([state], dp_rank=0, dp_size=1, workers=workers)
        assert note is not None
        assert read - 3 < state.streams[0].get("skip", 0) * workers <= read


def test_positions_of_an_earlier_version_are_refused() -> None:
    """They have the number of a document, and a token of it, which would be one of the block."""
    earlier = {"block": 1, "read": 8192, "dataset": None, "digest": "", "document": 5, "token": 3}
    with pytest.raises(ValidationError, match="document"):
        TypeAdapter(StreamState).validate_python({"streams": [earlier]})


@pytest.mark.slow
def test_data_workers_and_ranks_may_be_swapped(folder: Path, by_two: Taken) -> None:
    _, state = by_two[2]
    assert state.turn == 1
    swapped, note = resume_streams([state], dp_rank=1, dp_size=2, workers=1)
    assert note is None
    taken = take(source(folder, dp_rank=1, dp_size=2), 2, swapped)
    assert [len(inputs) for inputs, _ in taken] == [2, 2]


# ---- what is read


def test_stream_reads_every_format(tmp_path: Path) -> None:
    table = pa.table({"text": ["one", "two"]})
    (tmp_path / "parquet").mkdir()
    for name, rows in (("a", []), ("b", ["one", "two"]), ("c", [])):
        pq.write_table(
            pa.table({"text": pa.array(rows, pa.string())}), tmp_path / f"parquet/{name}.parquet"
        )
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    for name in ("parquet", "a.arrow", "a.csv"):
        documents, _ = open_documents(str(tmp_path / name), "train_data", "train", None)
        assert (
            BYTES.decode(
                open_windows(documents, "text", BYTES, 100, 1, "val_data").tokens[:].tolist()
            )
            == "one\n\ntwo\n\n"
        ), name


def test_stream_fingerprint(tmp_path: Path) -> None:
    first = open_documents(str(write(tmp_path / "a")), "train_data", "train", None)[1]
    assert open_documents(str(write(tmp_path / "b")), "train_data", "train", None)[1] == first
    assert (
        open_documents(str(write(tmp_path / "b", documents=11)), "train_data", "train", None)[1]
        != first
    )
    for content in (b"one " * 50, b"two " * 50):
        (tmp_path / "a.csv.gz").write_bytes(gzip.compress(content * 999, compresslevel=0, mtime=0))
        last, first = (
            first,
            open_documents(str(tmp_path / "a.csv.gz"), "train_data", "train", None)[1],
        )
    assert first != last


def test_stream_reads_json_lines_or_one_array(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_text(
        '[{"text": "one", "x": 1},\n{"text": "two", "x": "1", "y": null}]'
    )
    documents, _ = open_documents(str(tmp_path / "a.json"), "train_data", "train", None)
    assert (
        BYTES.decode(open_windows(documents, "text", BYTES, 100, 1, "val_data").tokens[:].tolist())
        == "one\n\ntwo\n\n"
    )
    lines = np.random.default_rng(0).bytes(9999).hex()  # more than one block of a compressed file
    (tmp_path / "c.json.zst").write_bytes(
        zstandard.compress(json.dumps([{"text": lines}]).encode())
    )
    documents, _ = open_documents(str(tmp_path / "c.json.zst"), "train_data", "train", None)
    assert (
        BYTES.decode(
            open_windows(documents, "text", BYTES, 30_000, 1, "val_data").tokens[:].tolist()
        )
        == lines + "\n\n"
    )
    deep = "[" * 200_000 + "]" * 200_000
    (tmp_path / "b.jsonl").write_text(f'{{"text": "one"}}\n{{"text": "two", "x": {deep}}}\n')
    documents, _ = open_documents(str(tmp_path / "b.jsonl"), "train_data", "train", None)
    with pytest.raises(ConfigError, match=r"b\.jsonl:2: "):
        open_windows(documents, "text", BYTES, 100, 1, "val_data")


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ("/none/*.jsonl", "^train_data: .*'/none/\\*.jsonl'"),
        ("mixed", "^train_data: mixed: .*found .csv, .jsonl"),
        ("saved", "^train_data: saved: .*found .arrow, .json; choose"),
        ("a.txt", "^train_data: a.txt: .*found .txt; .*dataset: text"),
        ("acme/none", "^train_data: acme/none: .*hf download acme/none "),
    ],
)
def test_stream_that_cannot_be_opened_is_refused(
    where: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mixed").mkdir()
    saved = DatasetDict({"train": Dataset.from_dict({"text": ["a"]})})
    saved.save_to_disk(tmp_path / "saved")
    write(tmp_path / "train")
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / "mixed" / name).touch()
    (tmp_path / "a.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=part):
        open_data(
            DataConfig.model_validate({"dataset": "hf", "train_data": where}), 300, SEQ_LEN, 2, 0
        )


@pytest.mark.parametrize(
    "files",
    [
        {"a.jsonl": b'{"text": "a"}\n{\n'},
        {"a.jsonl": b""},
        {"a.csv": b"\xff\n"},
        {"a.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 999)[:-9]},
    ],
    ids=["json", "empty", "utf8", "truncated"],
)
def test_stream_error_of_validation_data_is_one_line(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "val").mkdir()
    for name, content in files.items():
        (tmp_path / "val" / name).write_bytes(content)
    settings = {
        "dataset": "hf",
        "train_data": str(write(tmp_path / "train")),
        "val_data": str(tmp_path / "val"),
    }
    with pytest.raises(ConfigError) as caught:
        open_data(DataConfig.model_validate(settings), 300, SEQ_LEN, 2, 0)
    (line,) = caught.value.problems
    assert line.startswith("val_data: ")
    assert "val_data" in named_keys(caught.value)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (
            '{"txt": "a"}',
            "train_data: document 0: has no text, only txt",
        ),
        ('{"text": null}', "train_data: document 0: 'text' is null"),
        ("{", "train_data: .*/a.jsonl:1: not valid JSON"),
    ],
    ids=["missing", "null", "json"],
)
def test_stream_document_that_is_no_text_is_refused(line: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    documents, _ = open_documents(str(tmp_path), "train_data", "train", None)
    with pytest.raises(ConfigError, match=f"^{part}"):
        list(TokenStream(documents, "text", BYTES, SEQ_LEN, None))


@pytest.mark.slow
def test_data_worker_error_is_raised(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl"):
        take(source(tmp_path), 1)


@pytest.mark.slow
def test_data_worker_that_is_killed_is_an_error(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    train = source(write(tmp_path, files=1, documents=3000))
    batches = train.batches(0, train.initial_stream_state)
    next(batches)
    (child,) = set(psutil.Process().children()) - before
    assert not any("libtorch" in file.path for file in child.memory_maps())
    child.kill()
    with pytest.raises(RunError, match=r"data_workers: .*SIGKILL"):
        deque(batches, maxlen=0)


# ---- a run


@pytest.mark.slow
def test_stream_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path / "train", documents=40)
    write(tmp_path / "val")
    data = {
        "dataset": "hf",
        "train_data": "../train",
        "val_data": "../val",
        "vocab_size": 264,
        "total_batch_size": 4,
    }
    config = TINY | data | {"report_rate": 1, "keep_checkpoints": None, "data_workers": 1}
    config |= {"amp_dtype": None}
    for folder, *lengths in (("straight", 9), ("parts", 3, 6)):
        for steps in lengths:
            run_fsdp(tmp_path / folder, f"max_steps={steps}", config=config, code=0)
    # Ranks with parts of the same sequences read the same stream.
    divided = ("max_steps=9", "context_parallel=2")
    done = run_fsdp(tmp_path / "parts", *divided, ranks=2, config=config, code=0)
    assert "over all ranks in the checkpoint" not in done.stdout
    straight, parts = (
        [line["loss"] for line in read_reports(tmp_path / name).values()]
        for name in ("straight", "parts")
    )
    assert len(straight) == 9
    assert parts[:6] == straight[:6]
    assert parts == pytest.approx(straight, rel=1e-5)
    done = run_fsdp(tmp_path / "parts", "max_steps=10", ranks=2, config=config, code=0)
    assert "data_workers: 1 over all ranks in the checkpoint, 2 now" in done.stdout
    manifest = json.loads(
        (checkpoints_by_step(tmp_path / "parts")[10] / "manifest.json").read_text()
    )
    assert [len(state["streams"]) for state in manifest["dataset_state"]] == [1, 1]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_stream_of_local_tables_reads_the_columns_that_it_needs(
    suffix: str, tmp_path: Path
) -> None:
    table = pa.table({"text": ["to be"], "title": ["Hamlet"], "scan": [b"x" * 1000]})
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    for field, read in (("text", {"text"}), ("{title}: {text}", {*table.schema.names})):
        documents, _ = open_documents(str(path), "train_data", "train", None, field)
        (record,) = documents
        assert record.keys() == read
