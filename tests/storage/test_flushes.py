"""What a rename makes complete is flushed to the disk before it, and the rename after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from lm.checkpoint.manifest import MANIFEST, read_manifest
from lm.data.token_file import read_index
from lm.fileio import replace_durably, sync_directory
from lm.prepare import main as prepare
from lm.storage.folder import drafted, writing
from tests.support.checkpoints import open_checkpointer, save_toy
from tests.support.ranks import in_world

Events = list[int | Path]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """The inodes that this process flushes and the paths that it renames to, in their order."""
    found: Events = []
    flush = os.fsync

    def flush_and_record(file: int) -> None:
        flush(file)
        found.append(os.fstat(file).st_ino)

    def recorded(rename: Callable[..., None]) -> Callable[..., None]:
        def rename_and_record(source: Any, target: Any, **options: Any) -> None:
            rename(source, target, **options)
            found.append(Path(target))

        return rename_and_record

    monkeypatch.setattr(os, "fsync", flush_and_record)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, recorded(getattr(os, name)))
    return found


def require_flushed(events: Events, files: Iterable[Path], completes: Path) -> None:
    """All `files` before the rename to `completes`, and the rename itself after it."""
    at = events.index(completes)
    inodes = {path.name: path.stat().st_ino for path in files}
    assert inodes
    assert [name for name, inode in inodes.items() if inode not in events[:at]] == []
    assert completes.parent.stat().st_ino in events[at:]


def test_folder_is_flushed_before_it_appears(events: Events, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with writing(path), drafted(path) as draft:
        (draft / "a").write_text("a")
    require_flushed(events, path.iterdir(), path)


def test_token_files_are_flushed_before_they_appear(events: Events, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be")
    out = tmp_path / "out"
    assert prepare([str(tmp_path / "a.txt"), "--tokenizer", "bytes", "--out", str(out)]) == 0
    assert read_index(out / "train.json").tokens == 6
    require_flushed(events, out.iterdir(), out)


def test_file_is_flushed_before_it_is_replaced(events: Events, tmp_path: Path) -> None:
    path = tmp_path / "x"
    replace_durably(path, b"new")
    sync_directory(tmp_path)
    require_flushed(events, [path], path)


def test_checkpoint_is_flushed_before_its_manifest_appears(events: Events, tmp_path: Path) -> None:
    def save(world: Any) -> str:
        with open_checkpointer(world, tmp_path) as checkpointer:
            return save_toy(checkpointer, world, 1)

    folder = tmp_path / in_world(save)
    files = [folder / name for name in (*read_manifest(folder).files, MANIFEST)]
    require_flushed(events, files, folder / MANIFEST)
