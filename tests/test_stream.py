"""A streamed dataset: every document once an epoch over all workers, and a resume that goes on to the token."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm.data.loader import DataConfig, open_data
from lm.data.stream import StreamingDataset, TokenStream, Window, _Guarded, first_tokens, open_documents
from lm.data.tokenizer import ByteTokenizer
from lm.errors import ConfigError, DataError, RankError
from tests.support import TINY, checkpoints, reports, run

BYTES = ByteTokenizer()
SEQ_LEN = 16


def write(folder: Path, files: int = 4, documents: int = 10) -> Path:
    """JSON files of documents whose texts are all different."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(files):
        lines = (json.dumps({"text": f"<{file}.{at}" + "-" * (at * 7 % 23) + ">"}) for at in range(documents))
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def documents_in(folder: Path) -> Counter[str]:
    lines = [json.loads(line)["text"] for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return Counter(lines)


def windows(folder: Path, count: int, state: Mapping[str, Any] | None = None, **parts: int) -> list[Window]:
    """The first windows of one stream, read in this process."""
    from datasets.distributed import split_dataset_by_node

    whole, _ = open_documents(str(folder), "train_data", "train", None)
    number, of = parts.get("number", 0), parts.get("of", 1)
    key = (1, number) if parts.get("shuffle", 1) else None
    part = split_dataset_by_node(whole, number, of)
    row = iter(TokenStream(part, "text", BYTES, SEQ_LEN, key, parts.get("block", 8), state or {}))
    return [next(row) for _ in range(count)]


def text(row: list[Window]) -> str:
    return BYTES.decode(int(token) for window in row for token in window.ids[:-1])


# ---- the order of documents ----------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [1, 2, 3, 4])
def test_over_all_streams_every_document_comes_once_an_epoch(of: int, tmp_path: Path) -> None:
    folder = write(tmp_path)
    seen: Counter[str] = Counter()
    for number in range(of):
        row = text(windows(folder, 120, number=number, of=of)).split("\n\n")
        epoch = len(set(row[:-1]))  # every text is there once an epoch, and the row is longer than that
        seen += Counter(row[:epoch])
        assert sorted(row[epoch : 2 * epoch]) == sorted(row[:epoch])
    assert seen == documents_in(folder)


def test_documents_are_shuffled_block_by_block_by_the_seed(tmp_path: Path) -> None:
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


def test_a_windows_last_target_is_the_nexts_first_input(tmp_path: Path) -> None:
    row = windows(write(tmp_path), 20)
    assert all(len(window.ids) == SEQ_LEN + 1 for window in row)
    for one, two in itertools.pairwise(row):
        assert one.ids[-1] == two.ids[0]


# ---- resuming ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 3, 8, 100])
def test_a_resumed_stream_goes_on_to_the_token_also_the_second_and_third_time(block: int, tmp_path: Path) -> None:
    folder = write(tmp_path)
    undisturbed = windows(folder, 90, block=block)
    expected = [window.ids.tolist() for window in undisturbed]
    for start in (0, 1, 13, 37):
        at, state = start, json.loads(json.dumps(undisturbed[start].state))
        for _ in range(3):
            resumed = windows(folder, 17, state, block=block)
            assert [window.ids.tolist() for window in resumed] == expected[at + 1 : at + 18]
            at, state = at + 16, json.loads(json.dumps(resumed[15].state))


def streams(folder: Path, *, rank: int = 0, ranks: int = 1, workers: int = 1) -> StreamingDataset:
    whole, identity = open_documents(str(folder), "train_data", "train", None)
    sizes = {"batch_size": 2, "rank": rank, "ranks": ranks, "workers": workers}
    return StreamingDataset(whole, identity, "text", BYTES, SEQ_LEN, **sizes, seed=1, block=8)


def take(source: StreamingDataset, count: int) -> Iterator[tuple[list[list[int]], dict[str, Any]]]:
    row = iter(source)
    for _ in range(count):
        ids, state = next(row)
        yield ids.tolist(), state


def test_workers_take_turns_and_go_on_where_they_stood(tmp_path: Path) -> None:
    folder = write(tmp_path)
    undisturbed = list(take(streams(folder, workers=2), 9))
    alone = [[window.ids.tolist() for window in windows(folder, 10, number=number, of=2)] for number in range(2)]
    assert undisturbed[0][0] == alone[0][:2]
    assert undisturbed[3][0] == alone[1][2:4]
    resumed = streams(folder, workers=2)
    assert resumed.resume([json.loads(json.dumps(undisturbed[4][1]))]) is None
    assert list(take(resumed, 4)) == undisturbed[5:]


def test_another_number_of_workers_goes_on_behind_its_share_of_the_documents_and_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (*_, (_, state)) = take(streams(folder, workers=1), 10)
    read = state["streams"][0]["read"] + state["streams"][0]["document"]
    assert read > 10
    source = streams(folder, rank=1, ranks=2)
    assert source.resume([state]) == f"1 data workers before, 2 now: each goes on behind {read // 2} documents"
    ((_, behind),) = take(source, 1)
    assert behind["streams"][0]["read"] == read // 2


def test_ranks_and_workers_may_be_swapped_and_documents_are_counted_through_two_changes(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (*_, (_, state)) = take(streams(folder, workers=2), 3)
    assert state["turn"] == 1
    swapped = streams(folder, rank=1, ranks=2)
    assert swapped.resume([state]) is None
    assert [len(ids) for ids, _ in take(swapped, 2)] == [2, 2]

    (*_, (_, state)) = take(streams(folder), 20)
    counts = []
    for workers in (2, 1, 3):  # none of them reads anything
        between = streams(folder, workers=workers)
        said = between.resume([state])
        assert said is not None
        counts.append(int(said.split()[-2]) * workers)
        state = between.state()
    assert counts[0] > 20
    assert counts[0] - max(counts[1:]) < 3


# ---- what is read --------------------------------------------------------------------------------------------


def test_parquet_arrow_csv_and_text_are_read_by_the_library(tmp_path: Path) -> None:
    table = pa.table({"text": ["one", "two"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    for name in ("a.parquet", "a.arrow", "a.csv", "a.txt"):
        documents, _ = open_documents(str(tmp_path / name), "train_data", "train", None)
        assert BYTES.decode(first_tokens(documents, "text", BYTES, 100).tolist()) == "one\n\ntwo\n\n", name


def test_a_parquet_file_without_rows_is_passed_over(tmp_path: Path) -> None:
    for name, rows in (("a", []), ("b", ["one"]), ("c", [])):
        pq.write_table(pa.table({"text": pa.array(rows, pa.string())}), tmp_path / f"{name}.parquet")
    documents, _ = open_documents(str(tmp_path), "train_data", "train", None)
    assert BYTES.decode(first_tokens(documents, "text", BYTES, 100).tolist()) == "one\n\n"


def test_the_identity_follows_names_and_sizes(tmp_path: Path) -> None:
    first = open_documents(str(write(tmp_path / "a")), "train_data", "train", None)[1]
    assert open_documents(str(write(tmp_path / "b")), "train_data", "train", None)[1] == first
    assert open_documents(str(write(tmp_path / "b", documents=11)), "train_data", "train", None)[1] != first


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("/none/*.jsonl", "train_data: no file at /none/*.jsonl"),
        ("mixed", "train_data: mixed: files of one kind are needed, of .json, .jsonl, "),
        ("acme/none", "cannot be had (HF_HUB_OFFLINE is set): "),
    ],
)
def test_a_dataset_that_cannot_be_read_is_refused(
    where: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mixed").mkdir()
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / "mixed" / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        open_documents(where, "train_data", "train", None)
    assert problem in str(caught.value)
    if "/none" in where and not where.startswith("/"):
        advice = "on a machine with network: hf download acme/none --repo-type dataset --local-dir FOLDER, then"
        assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b'{"text": "a"}\n{\n', "val_data: cannot be read: "),
        ("a.jsonl", b"", "val_data"),
        ("a.csv", b"", "val_data"),
        ("a.txt", b"\xff\n", "val_data"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999)[:-9], "val_data"),
    ],
)
def test_validation_data_that_cannot_be_read_are_refused_in_one_line(
    name: str, content: bytes, problem: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    settings = {"dataset": "hf", "train_data": str(write(tmp_path / "train")), "val_data": str(tmp_path / name)}
    with pytest.raises(ConfigError) as caught:
        open_data(DataConfig.model_validate(settings), 300, SEQ_LEN, 2, 0)
    (line,) = caught.value.problems
    assert line.startswith(problem)
    assert "\n" not in line


def test_an_error_without_words_is_named_by_its_kind() -> None:
    class Silent(TokenStream):
        def __init__(self) -> None: ...

        def __iter__(self) -> Iterator[Window]:
            raise TimeoutError

    assert list(_Guarded(Silent())) == ["dataset: cannot be read: TimeoutError"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"txt": "a"}', "dataset: its documents have no text (text_field); they have txt"),
        ('{"text": null}', "dataset: document 0: text is None, not text"),
        ("{", "dataset: cannot be read: "),
    ],
)
def test_a_document_that_is_no_text_ends_the_stream_with_its_number(line: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises((DataError, ConfigError)) as caught:
        next(iter(streams(tmp_path)))
    assert problem in str(caught.value)


def test_records_with_other_keys_are_named_by_them(tmp_path: Path) -> None:
    for name, record in (("a", {"text": "a", "url": "b"}), ("b", {"text": "a", "score": 0.5})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    documents, _ = open_documents(str(tmp_path), "val_data", "train", None)
    with pytest.raises(ConfigError, match=r"val_data: cannot be read: .*score.*url") as caught:
        first_tokens(documents, "text", BYTES, 100)
    assert "\n" not in str(caught.value)


def test_a_killed_worker_is_an_error_and_no_hang(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    row = iter(streams(write(tmp_path, files=1, documents=3000)))
    next(row)
    for child in set(psutil.Process().children()) - before:  # the worker, and what multiprocessing starts beside it
        child.kill()
    with pytest.raises(RankError, match=r"a data worker was killed .*; if by lack of memory, lower data_workers"):
        deque(row, maxlen=0)


def test_validation_data_are_needed_beside_local_files(tmp_path: Path) -> None:
    config = DataConfig.model_validate({"dataset": "hf", "train_data": str(write(tmp_path))})
    with pytest.raises(ConfigError, match="val_data: local files of a streamed dataset need some beside them"):
        open_data(config, 300, SEQ_LEN, 2, 0)


# ---- a run ---------------------------------------------------------------------------------------------------


def test_a_run_resumes_to_the_last_bit_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    write(tmp_path / "train", documents=40)
    write(tmp_path / "val")
    data = {"dataset": "hf", "train_data": "../train", "val_data": "../val", "vocab_size": 264, "total_batch_size": 4}
    config = TINY | data | {"report_rate": 1, "keep_checkpoints": None, "data_workers": 2}
    for folder, *lengths in (("whole", 6), ("parts", 3, 6)):
        for steps in lengths:
            done = run(tmp_path / folder, f"max_steps={steps}", config=config)
            assert done.returncode == 0, done.stderr
    whole, parts = ([line["loss"] for line in reports(tmp_path / name).values()] for name in ("whole", "parts"))
    assert len(whole) == 6
    assert parts == whole
    done = run(tmp_path / "parts", "max_steps=8", "data_workers=1", ranks=2, config=config)
    assert done.returncode == 0, done.stderr
    other = run(tmp_path / "parts", "max_steps=9", "data_workers=1", config=config)
    assert "2 data workers before, 1 now: each goes on behind" in other.stdout
    manifest = json.loads((checkpoints(tmp_path / "parts")[8] / "manifest.json").read_text())
    assert [len(state["streams"]) for state in manifest["dataset_state"]] == [1, 1]
