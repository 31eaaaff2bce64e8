"""A first start that is killed while it tokenizes is continued by the next one, not repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lm.storage.cache import cache_directory
from tests.support import REPOSITORY

TOKENIZE = """
import os, sys
from contextlib import redirect_stdout
from importlib import import_module
from itertools import count
from pathlib import Path
from lm import prepare
from lm.data import encoder, records, token_writer, tokenized
from lm.data.token_file import open_token_files
from lm.data.tokenizer.loading import load_tokenizer

kind, n_before_kill, changes = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
token_writer.SAVE_SECONDS = 0.0

def call_in_this_process(module, function, *arguments):
    return getattr(import_module(module), function)(*arguments)

tokenized.call_in_worker = call_in_this_process
pieces = count(1)

def counted(function):
    def call(*arguments):
        if next(pieces) > n_before_kill:
            os.kill(os.getpid(), 9)
        if changes:
            Path("in/01").write_text("x" * 99_999)  # before it is read
        return function(*arguments)
    return call

tokenizer = load_tokenizer("bytes")
encoder._encode_parts = counted(encoder._encode_parts)
encoder.CHUNKS_PER_THREAD = 0  # none ahead of what is written
if kind == "text":
    options = tokenized.TextOptions("text", validation_fraction=0.05)
    files = tokenized.tokenize(sorted(Path("in").iterdir()), tokenizer, options)
elif kind == "prepare":
    out = Path(os.environ["XDG_CACHE_HOME"], "lm", "tokens", "out")
    arguments = ["--format", "text", "--tokenizer", "bytes", "--out", str(out)]
    with redirect_stdout(sys.stderr):
        assert prepare.main(["in", *arguments, "--validation-fraction", "0.05"]) == 0
    files = open_token_files(out, ["train"])
else:
    records._check_first_lines = lambda *_: None
    records.count_workers = lambda _: 1
    records._PieceTokenizer.__call__ = counted(records._PieceTokenizer.__call__)
    options = tokenized.RecordOptions(loss_on="completion", holds_out=True)
    files = tokenized.tokenize(sorted(Path("in").iterdir()), tokenizer, options)
print(next(pieces) - 1, files[0].path.parent)
"""
ALL = 1000
"""pieces, more than there are"""


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "in").mkdir()
    for number in range(12):
        lines = [f"{number} {i} " * 60 for i in range(500)]  # more than a piece
        if request.param == "jsonl":
            lines = [json.dumps({"prompt": line, "completion": line[:99]}) for line in lines]
        (tmp_path / "in" / f"{number:02}").write_text("\n".join(lines))
    return request.param


def start(
    folder: Path, kind: str, n_before_kill: int, *, changes: bool = False
) -> tuple[int, int, Path | None]:
    """Tokenize. Return the exit code, the pieces that were tokenized, and where they are.

    Args:
        changes: whether the second file has another text meanwhile.
    """
    command = [sys.executable, "-c", TOKENIZE, kind, str(n_before_kill), str(changes)]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        assert done.returncode == -signal.SIGKILL, done.stderr
        return done.returncode, n_before_kill, None
    n_pieces, where = done.stdout.split()
    return 0, int(n_pieces), Path(where)


def contents(where: Path | None) -> dict[str, bytes]:
    assert where is not None
    return {path.name: path.read_bytes() for path in where.iterdir()}


@pytest.mark.parametrize(
    "kind",
    ["text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("jsonl", "prepare"))],
    indirect=True,
)
def test_killed_tokenizing_is_continued(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = os.environ["XDG_CACHE_HOME"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    _, n_pieces, whole = start(tmp_path, kind, ALL)
    assert n_pieces > 10
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert start(tmp_path, kind, 4)[0] != 0
    assert start(tmp_path, kind, 3)[0] != 0
    code, n_left, where = start(tmp_path, kind, ALL)
    assert code == 0
    assert n_pieces - 7 <= n_left <= n_pieces - 6, "the last of a process may not be written"
    assert contents(where) == contents(whole)
    assert where is not None
    assert [path.name for path in (cache_directory() / "tokens").iterdir()] == [where.name]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text"], indirect=True)
def test_killed_tokenizing_of_other_text_is_not_continued(kind: str, tmp_path: Path) -> None:
    assert start(tmp_path, kind, 4)[0] != 0
    with (tmp_path / "in" / "00").open("a") as file:
        file.write("more")
    _, n_pieces, _ = start(tmp_path, kind, ALL)
    assert n_pieces > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "prepare"], indirect=True)
def test_killed_tokenizing_of_text_that_was_another_meanwhile_is_not_continued(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "in" / "01"
    text = path.read_text()
    assert start(tmp_path, kind, 5, changes=True)[0] != 0
    path.write_text(text)
    _, n_pieces, where = start(tmp_path, kind, ALL)
    assert n_pieces > 10
    assert where is not None
    texts = sum(file.stat().st_size + 1 for file in path.parent.iterdir())
    assert sum(file.stat().st_size // 2 for file in where.glob("*.bin")) >= texts
