"""Work shared by processes has the results of one, and ends with the one that started it."""

from __future__ import annotations

import json
import operator
import os
import select
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.data.packing import PackedDataset
from lm.data.parallel import map_in_order
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import ConfigError, RunError
from tests.support import REPOSITORY
from tests.support.records import pack_files


def test_results_are_in_order() -> None:
    items = [-i for i in range(20)]
    for n_workers in (1, 3):
        assert list(map_in_order(abs, items, n_workers)) == list(range(20))
        assert list(map_in_order(abs, [], n_workers)) == []


def test_items_can_be_larger_than_a_pipe() -> None:
    items = [bytes(1 << 20) for _ in range(9)]
    assert list(map_in_order(bytes.upper, items, 2)) == items


def write_records(path: Path, n_records: int) -> Path:
    """Write texts and prompts with completions, of which some are empty, in several pieces."""
    lines: list[str] = []
    for i in range(n_records):
        record: dict[str, Any] = {"text": f"{i} " * (i % 90)}
        if i % 3 == 1:
            record = {"prompt": f"count to {i}\n", "completion": "1, 2, " * (i % 20)}
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    "held_out", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in (True, False))]
)
def test_workers_write_the_arrays_of_one_process(
    held_out: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_records(tmp_path / f"{n}.jsonl", n) for n in (2500, 1, 700)]
    lines = files[2].read_text().splitlines()
    files.append(tmp_path / "array.json")
    files[3].write_text(f"[{','.join(lines)}]")
    datasets: list[PackedDataset] = []
    for n_workers in (1, 3):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(n_workers)))
        monkeypatch.setattr("lm.data.records.count_workers", lambda _, n=n_workers: n)
        datasets.append(pack_files(files, load_tokenizer("bytes"), 128, held_out=held_out))
    one, three = datasets
    assert one.fingerprint() == three.fingerprint()
    assert one.note == three.note
    for index in range(len(one)):
        assert np.array_equal(one[index].targets, three[index].targets)
        assert one.count_terms(index) == three.count_terms(index)


def test_progress_counts_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm.data.progress.LOG_SECONDS", 0.0)
    path = write_records(tmp_path / "a.jsonl", 2500)
    pack_files([path], load_tokenizer("bytes"), 128)
    last = capsys.readouterr().err.split("\r")[-1]
    size = f"{path.stat().st_size / 1000:.0f}k"
    assert "tokenizing: 100%" in last
    assert f" {size}/{size} " in last


def test_workers_find_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_records(tmp_path / f"{i}.jsonl", 2500) for i in range(4)]
    with files[1].open("a") as file:
        file.write('\n{"text": 1}\n{"text"')
    monkeypatch.setattr("lm.data.records.count_workers", lambda _: 3)
    with pytest.raises(ConfigError) as caught:
        pack_files(files, load_tokenizer("bytes"), 128)
    rule = "'text' is 1, not text; remove or correct the record"
    assert str(caught.value) == f"{files[1]}:2501: {rule}"


def test_killed_worker_is_one_line() -> None:
    with closing(map_in_order(operator.call, [os.getpid, os.abort], 2)) as results:
        next(results)
        with pytest.raises(RunError, match=r"^dataset: a data worker was killed by SIGABRT; "):
            next(results)


OWNER = """
import operator, os, signal
from lm.data.parallel import map_in_order

jobs = [os.getpid, os.getpid, signal.pause, signal.pause]
for pid in map_in_order(operator.call, jobs, 2):
    print(pid, flush=True)
"""


def test_workers_end_with_their_owner() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        workers = [os.pidfd_open(int(owner.stdout.readline())) for _ in range(2)]
        owner.send_signal(signal.SIGKILL)
    for worker in workers:
        poll = select.poll()
        poll.register(worker, select.POLLIN)  # readable once the process has ended
        assert poll.poll(60_000)
        os.close(worker)
