"""What is computed from data is computed once, and only complete results are used."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.data import tokenized
from lm.data.packing import PackedDataset
from lm.data.token_file import open_token_files
from lm.data.tokenized import RecordOptions, TextOptions, tokenize
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import ConfigError, RunError
from lm.storage.cache import KEPT_DAYS, cache_directory, cached, describe_files, remembered
from lm.storage.folder import MANIFEST
from tests.support import PATIENCE, REPOSITORY

BUILD = """
import os, pathlib, sys
from lm.storage.cache import cached

def build(directory):
    with open("builds", "a") as file:
        file.write("x")
    (directory / "half").write_text("")
    print("building", flush=True)
    sys.stdin.readline()
    (directory / "value").write_text("complete")

print((cached({}, build) / "value").read_text(), flush=True)
"""


def start(tmp_path: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def entries() -> list[str]:
    return sorted(path.name for path in (cache_directory() / "tokens").iterdir())


def write_value(directory: Path, value: str = "complete") -> None:
    (directory / "value").write_text(value)


def test_two_processes_compute_an_entry_once(tmp_path: Path) -> None:
    with start(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "building\n"
        with start(tmp_path) as second:
            output, _ = first.communicate("\n", timeout=PATIENCE)
            assert output == "complete\n"
            assert second.communicate("\n", timeout=PATIENCE)[0] == "complete\n"
    assert (tmp_path / "builds").read_text() == "x"


def test_killed_process_leaves_no_entry(tmp_path: Path) -> None:
    with start(tmp_path) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "building\n"
        killed.send_signal(signal.SIGKILL)
    draft, lock = entries()
    assert draft.startswith(lock.removesuffix("lock"))
    cached({"kind": "another"}, write_value)
    (another,) = entries()
    with start(tmp_path) as again:
        assert again.communicate("\n", timeout=PATIENCE)[0] == "building\ncomplete\n"
    assert entries() == sorted([draft[1:65], another])


@pytest.mark.parametrize("error", [0, errno.ENOSYS])
def test_without_locks_both_compute_and_one_result_stays(
    error: int, tmp_path: Path, library: str
) -> None:
    env = {"LD_PRELOAD": library, "FLOCK": str(error)}
    with start(tmp_path, **env) as first, start(tmp_path, **env) as second:
        for process in (first, second):
            assert process.stdout is not None
            assert process.stdout.readline() == "building\n"
        for process in (first, second):
            assert process.communicate("\n", timeout=PATIENCE) == ("complete\n", "")
    assert [len(name) for name in entries()] == [64]


@pytest.mark.slow
def test_wait_for_a_stopped_process_is_said(tmp_path: Path) -> None:
    with start(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "building\n"
        first.send_signal(signal.SIGSTOP)
        with start(tmp_path) as second:
            assert second.stderr is not None
            assert f"waiting for process {first.pid} on " in second.stderr.readline()
            first.send_signal(signal.SIGCONT)
            assert first.communicate("\n", timeout=PATIENCE)[0] == "complete\n"
            assert second.communicate("\n", timeout=PATIENCE)[0] == "complete\n"


def set_to_zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


DAMAGES = [set_to_zero, truncate, empty, Path.unlink, replace_by_fifo, replace_by_link]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["value", MANIFEST])
def test_damaged_entry_is_computed_again(
    damage: Callable[[Path], None], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(cached({}, write_value) / name)
    entry = cached({}, write_value)
    assert (entry / "value").read_text() == "complete"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{entry}/{name}: ")
    assert line.endswith(": computed again")
    cached({}, Path.rmdir)  # not called
    assert entries() == [entry.name]


def give_to_another_user(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


def let_all_write(path: Path) -> None:
    path.chmod(0o777)


STRANGERS = [give_to_another_user, let_all_write, replace_by_link]


@pytest.mark.parametrize("damage", STRANGERS)
def test_entry_that_others_could_have_written_is_computed_again(
    damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(cached({}, write_value))
    entry = cached({}, lambda draft: write_value(draft, "again"))
    assert (entry / "value").read_text() == "again"
    assert capsys.readouterr().err.endswith(": computed again\n")


def test_entry_under_the_name_of_another_is_computed_again() -> None:
    first = cached({"kind": "first"}, lambda draft: write_value(draft, "first"))
    second = cached({"kind": "second"}, write_value)
    shutil.rmtree(second)
    first.rename(second)
    assert (cached({"kind": "second"}, write_value) / "value").read_text() == "complete"


@pytest.mark.parametrize("damage", STRANGERS)
def test_cache_that_others_can_write_to_is_not_used(
    damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokens", "values"):
        (cache_directory() / name).mkdir(parents=True)
        damage(cache_directory() / name)
    entry = cached({}, write_value)
    assert entry.parent.parent == Path(tempfile.gettempdir())
    assert remembered("facts", lambda: "value") == "value"
    assert capsys.readouterr().err.count("not used, as it ") == 2
    assert list((cache_directory() / "values").iterdir()) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_value_is_computed_again(
    damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    remembered("facts", lambda: "value")
    assert remembered("facts", lambda: "another") == "value"
    (path,) = (cache_directory() / "values").iterdir()
    damage(path)
    assert remembered("facts", lambda: "again") == "again"
    assert damage is Path.unlink or "computed again" in capsys.readouterr().err
    assert remembered("facts", lambda: "another") == "again"


FULL = """
import resource, sys
from pathlib import Path
from lm.data.tokenized import RecordOptions, tokenize
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import RunError

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
try:
    tokenize([Path("a.jsonl")], load_tokenizer("bytes"), RecordOptions())
except RunError as error:
    print(error.exit_code, error)
"""


@pytest.mark.parametrize("n_bytes", [4096, 30_000])
def test_full_disk_is_one_line_and_leaves_nothing(n_bytes: int, tmp_path: Path) -> None:
    """A limit of the size of files fails like a full disk."""
    (tmp_path / "a.jsonl").write_text('{"text": "to be or not to be"}\n' * 1000)
    command = [sys.executable, "-c", FULL, str(n_bytes)]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"1 {cache_directory()}/tokens/")
    assert line.endswith("; set XDG_CACHE_HOME to a directory of another disk")
    assert entries() == []


def test_failed_computation_leaves_nothing() -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("")
        raise ConfigError("line 3: wrong")

    with pytest.raises(ConfigError, match="line 3: wrong"):
        cached({}, fail)
    assert entries() == []


def test_entries_that_nobody_uses_are_deleted() -> None:
    old = cached({"kind": "old"}, write_value)
    used = cached({"kind": "used"}, write_value)
    then = time.time() - (KEPT_DAYS + 1) * 86400
    for path in (old, used):
        os.utime(path, (then, then))
    cached({"kind": "used"}, write_value)
    new = cached({"kind": "new"}, write_value)
    assert entries() == sorted([used.name, new.name])


def test_cache_that_cannot_be_written_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    directory = cached({"kind": "elsewhere"}, write_value)
    assert (directory / "value").read_text() == "complete"
    assert cached({"kind": "elsewhere"}, Path.rmdir) == directory


TEMPORARY = """
import sys
from pathlib import Path
from lm.storage.cache import cached
from lm.launch.process import run_and_exit

def compute():
    directory = cached({}, lambda draft: (draft / "value").write_text("complete"))
    assert directory.parent.parent == Path(sys.argv[1])
    print((directory / "value").read_text())
    return int(sys.argv[2])

run_and_exit(compute)
"""


@pytest.mark.parametrize("code", [0, 2])
def test_command_deletes_what_replaced_the_cache(code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TEMPORARY, str(tmp_path), str(code)]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    env["XDG_CACHE_HOME"] = "/dev/null"
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "complete\n", "")
    assert list(tmp_path.iterdir()) == []


def test_killed_command_leaves_nothing_for_long(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    env["XDG_CACHE_HOME"] = "/dev/null"
    kill = TEMPORARY.replace("return int(sys.argv[2])", "os.kill(os.getpid(), 9)")
    for script, n_left in ((kill, 1), (kill, 1), (TEMPORARY, 0)):
        command = [sys.executable, "-c", f"import os\n{script}", str(tmp_path), "0"]
        subprocess.run(command, env=env, check=False)
        assert len(list(tmp_path.iterdir())) == n_left


def test_other_content_is_another_entry(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(17 << 20))
    (before,) = describe_files([path])
    assert describe_files([path]) == [before], "remembered"
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(0, 0))
    (after,) = describe_files([path])
    assert before != after
    assert before.startswith("large, sha256 ")


def pack(path: Path, seq_len: int, *, holds_out: bool = False) -> PackedDataset:
    options = RecordOptions(holds_out=holds_out)
    tokens, *_ = tokenize([path], load_tokenizer("bytes"), options)
    return PackedDataset(tokens, seq_len, packing=True)


def test_dataset_is_tokenized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "to be or not to be"}\n' * 8)
    first = pack(path, 32)
    monkeypatch.delattr("lm.data.tokenized.call_in_worker")
    second = pack(path, 32)
    assert second.fingerprint() == first.fingerprint()
    assert second.note == first.note
    for index in range(len(first)):
        for ours, theirs in zip(first[index][:3], second[index][:3], strict=True):
            assert ours is not None
            assert theirs is not None
            assert np.array_equal(ours, theirs)
            assert torch.from_numpy(ours).dtype == torch.int64
    assert len(pack(path, 15)) == 8
    with pytest.raises(NameError):
        pack(path, 32, holds_out=True)


def test_text_is_tokenized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("to be or not to be" * 100)
    tokenizer = load_tokenizer("bytes")
    held_out = TextOptions("text", validation_fraction=0.05)
    first = tokenize([path], tokenizer, held_out)
    monkeypatch.delattr("lm.data.tokenized.call_in_worker")
    second = tokenize([path], tokenizer, held_out)
    for ours, theirs in zip(first, second, strict=True):
        assert np.array_equal(ours[:], theirs[:])
    with pytest.raises(NameError):
        tokenize([path], tokenizer, TextOptions("text"))


@pytest.mark.parametrize("at_end", ["or not", "to be"])
def test_file_that_changes_while_it_is_tokenized_is_refused(
    at_end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the entry of one content would be kept with the tokens of another."""
    path = tmp_path / "a.txt"
    path.write_text("to be")
    call = tokenized.call_in_worker

    def call_and_change(*arguments: Any) -> None:
        path.write_text("or not")
        call(*arguments)
        path.write_text(at_end)

    monkeypatch.setattr(tokenized, "call_in_worker", call_and_change)
    with pytest.raises(RunError, match=f"^{path}: changed while it was read"):
        tokenize([path], load_tokenizer("bytes"), TextOptions("text"))
    assert entries() == []


PARTS = ["train.bin", "train.ends", "train.mask", "train.json"]


@pytest.mark.parametrize(
    "name", [PARTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in PARTS[1:])]
)
def test_damaged_records_are_tokenized_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "to be or not to be"}\n' * 8)
    expected = pack(path, 32)[1]
    (damaged,) = (cache_directory() / "tokens").glob(f"*/{name}")
    set_to_zero(damaged)
    found = pack(path, 32)[1]
    assert np.array_equal(found.inputs, expected.inputs)
    assert np.array_equal(found.targets, expected.targets)


def test_damaged_text_is_tokenized_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("to be or not to be" * 100)
    (text,) = tokenize([path], load_tokenizer("bytes"), TextOptions("text"))
    expected = text[:]
    text.path.write_bytes(bytes(text.path.stat().st_size))
    with pytest.raises(ConfigError, match=f"^{text.path}: damaged: differs from manifest.json; "):
        open_token_files(text.path.parent, ["train"])
    (text,) = tokenize([path], load_tokenizer("bytes"), TextOptions("text"))
    assert np.array_equal(text[:], expected)
