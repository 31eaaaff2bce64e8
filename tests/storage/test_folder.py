"""A folder appears complete, is replaced without being lost, and its drafts are deleted."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.errors import ConfigError, RunError
from lm.storage.folder import (
    IDLE_SECONDS,
    MANIFEST,
    drafted,
    read_manifest,
    recover,
    settle,
    write_manifest,
    writing,
)
from tests.support import REPOSITORY


def write(path: Path, content: str, **options: Any) -> None:
    with writing(path), drafted(path, **options) as draft:
        for name in ("a", "b"):
            (draft / name).write_text(content)


def read(path: Path) -> list[str]:
    return [file.read_text() for file in sorted(path.iterdir())]


def test_folder_appears_complete(tmp_path: Path) -> None:
    path = tmp_path / "parent" / "x"
    left: list[Path] = []

    def fail() -> None:
        with writing(path), drafted(path) as draft:
            left.append(draft)
            assert not path.exists()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not left[0].exists()
    write(path, "new")
    assert read(path) == ["new", "new"]
    assert list(path.parent.iterdir()) == [path]


def test_folder_that_appears_meanwhile_is_kept_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write(path, "first")
    write(path, "second", if_exists="keep")
    with pytest.raises(ConfigError, match="use another directory"):
        write(path, "second")
    assert read(path) == ["first", "first"]
    assert list(tmp_path.iterdir()) == [path]


def test_lock_file_that_cannot_be_deleted_does_not_fail_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x"
    lock = tmp_path / ".x.lock"
    with writing(path), drafted(path) as draft:
        (draft / "a").write_text("new")
        lock.unlink()
        lock.mkdir()
    assert read(path) == ["new"]


def test_disk_without_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="disk full: 1,000,000,000,000,000,000 bytes are needed"):
        write(tmp_path / "x", "new", n_bytes=10**18)
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    pass


def test_kill_while_a_folder_is_replaced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0

    def step(act: Callable[..., Any], *args: Any, **how: Any) -> Any:
        nonlocal steps
        if not steps:
            raise Killed
        steps -= 1
        return act(*args, **how)

    owners: list[tuple[Any, str]] = [(Path, "rename"), (Path, "mkdir"), (shutil, "rmtree")]
    for owner, name in owners:
        act = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, act=act, **how: step(act, *args, **how))
    kills = 0
    for kills in itertools.count():
        steps = 100
        path = tmp_path / str(kills) / "x"
        write(path, "old")
        steps = kills
        try:
            write(path, "new", if_exists="replace")
            break
        except Killed:
            pass
        steps = 100
        recover(path)  # as a reader does
        assert read(path) in (["old", "old"], ["new", "new"])
        write(path, "new", if_exists="replace")
        assert read(path) == ["new", "new"]
        assert list(path.parent.iterdir()) == [path]
    assert kills >= 5


WRITE = """
import os, signal, sys
from pathlib import Path
from lm.storage.folder import drafted, write_manifest, writing

path = Path(sys.argv[1])
with writing(path), drafted(path, made_from={}) as draft:
    (draft / "a").write_text("old")
    write_manifest(draft, {})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_after_the_manifest_leaves_a_draft_that_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "x"
    killed = subprocess.run([sys.executable, "-c", WRITE, path], cwd=REPOSITORY, check=False)
    assert killed.returncode == -signal.SIGKILL
    with writing(path), drafted(path, made_from={}) as draft:
        assert (draft / "a").read_text() == "old"
        (draft / "a").write_text("new")
        write_manifest(draft, {})
    assert list(read_manifest(path).files) == ["a"]


@pytest.mark.parametrize("name", ["../a", "/a", "b/a", ".a", "a\0"])
def test_manifest_names_files_of_its_folder_alone(name: str, tmp_path: Path) -> None:
    """Its folder may be of others."""
    files = {name: {"bytes": 0, "crc32c": 0}}
    (tmp_path / MANIFEST).write_text(json.dumps({"made_from": {}, "files": files}))
    with pytest.raises(ConfigError, match=f"^{tmp_path / MANIFEST}: not a manifest: "):
        read_manifest(tmp_path)


def test_draft_of_another_machine_is_deleted_when_nothing_writes_it(tmp_path: Path) -> None:
    draft = tmp_path / ".x.draft-elsewhere-12345678"
    draft.mkdir()
    (draft / "a").touch()
    long_ago = time.time() - IDLE_SECONDS - 60
    os.utime(draft, (long_ago, long_ago))
    settle(tmp_path)
    assert draft.exists()
    os.utime(draft / "a", (long_ago, long_ago))
    settle(tmp_path)
    assert list(tmp_path.iterdir()) == []
