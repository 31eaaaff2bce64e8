"""The files of a run or a checkpoint: in a directory, or in a bucket with the same methods."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from lm.errors import RunError
from lm.fileio import MAX_JSON_BYTES, read_bytes, replace_durably, sync_directory
from lm.storage.bucket import Bucket, is_url
from lm.storage.folder import discard


class Directory:
    """The files below `path`, by their paths relative to it. Methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def is_at(self, where: str) -> bool:
        """Return whether this is what is at the path or URL `where`."""
        return Path(where).resolve() == self.path.resolve()

    def names(self) -> set[str]:
        """Return the names of the files and of the folders that are not empty."""
        names: set[str] = set()
        for path in self.path.iterdir():
            is_empty = False
            with suppress(PermissionError):  # another user's folder
                is_empty = path.is_dir() and not any(path.iterdir())
            if not is_empty:
                names.add(path.name)
        return names

    def folders(self, path: str) -> dict[str, set[str]]:
        """Return the names of the files of each folder in the folder `path`, if there is one.

        Raises:
            RunError: it is a symbolic link.
        """
        directory = self.path / path
        if directory.is_symlink():
            raise RunError(f"{directory}: is a symbolic link, which is not followed")
        found: dict[str, set[str]] = {}
        for folder in directory.glob("[!.]*/"):
            with suppress(FileNotFoundError):  # it is being deleted
                found[folder.name] = {path.name for path in folder.iterdir()}
        return found

    def sizes(self, path: str = "") -> dict[str, int]:
        """Return the sizes of the regular files in the folder `path`, by name."""
        with os.scandir(self.path / path) as entries:
            files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            return {file.name: file.stat(follow_symlinks=False).st_size for file in files}

    def read(self, path: str, limit: int = MAX_JSON_BYTES) -> bytes:
        """Return the content of a regular file of at most `limit` bytes."""
        return read_bytes(self.path / path, limit)

    def write(self, path: str, content: bytes) -> None:
        """Create or replace a file, durably, and its folder if there is none."""
        file = self.path / path
        file.parent.mkdir(mode=0o775, exist_ok=True)
        replace_durably(file, content)
        sync_directory(file.parent)

    def delete_folder(self, path: str) -> None:
        """Delete a folder: from the first moment on, it is not complete."""
        discard(self.path / path)

    def move(self, names: Collection[str], aside: str) -> None:
        """Move files and folders to the folder `aside`; of folders, new ones stay."""
        target = self.path / aside
        target.mkdir(mode=0o775, exist_ok=True)
        for name in names:
            path = self.path / name
            is_folder = path.is_dir()
            path.rename(target / name)
            if is_folder:
                path.mkdir(mode=0o775)


Place = Directory | Bucket


def place_at(where: Path | str) -> Place:
    """Return the directory or the bucket at a path or URL."""
    if is_url(where):
        return Bucket(str(where))
    return Directory(Path(where))
