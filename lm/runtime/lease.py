"""A lease, which one run at a time holds, in storage without locks.

It is the file lease/NNNNNN; the highest number counts.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel

from lm.errors import RunError, make_printable
from lm.fileio import open_regular, parse_json, read_bytes, replace_durably, write_durably
from lm.launch.machine import describe_this_process

LEASE_SECONDS = 60.0
"""After this time without a renewal, the holder of a lease counts as dead."""
MAX_BYTES = 4096
"""Of a lease; ours have some 200."""


class InUseError(RunError):
    """Another process uses what this one needs for itself."""

    holder = ""


def in_use_error(where: Path | str, holder: str) -> InUseError:
    """Return the error that another run is at `where`; `holder` may be empty."""
    if not holder:
        holder = "another process"
    advice = "wait until it ends, stop it, or choose another run_name"
    error = InUseError(f"{where}: in use by {holder}; {advice}")
    error.holder = holder
    return error


class LeaseStorage(Protocol):
    """What a lease needs of its storage, e.g. of a `Bucket`; paths are relative to `url`."""

    url: str

    def sizes(self, path: str = "") -> Mapping[str, int]:
        """Return the sizes of the files under `path`, by their paths relative to it."""
        ...

    def read(self, path: str) -> bytes:
        """Return the content of a file; raise FileNotFoundError if it does not exist."""
        ...

    def write(self, path: str, content: bytes) -> None:
        """Create or replace a file."""
        ...

    def create(self, path: str, content: bytes) -> None:
        """Create a file; raise FileExistsError if it exists."""
        ...

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the files that exist of `paths`."""
        ...


class DirectoryStorage:
    """A directory as the storage of a lease."""

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self._path = path

    def sizes(self, path: str = "") -> Mapping[str, int]:
        found: dict[str, int] = {}
        with suppress(FileNotFoundError):
            for file in (self._path / path).iterdir():
                found[file.name] = file.lstat().st_size
        return found

    def read(self, path: str) -> bytes:
        content = read_bytes(self._path / path, MAX_BYTES)
        if not content:  # `create` has not written it yet
            return json.dumps({"holder": "another process"}).encode()
        return content

    def write(self, path: str, content: bytes) -> None:
        replace_durably(self._path / path, content)

    def create(self, path: str, content: bytes) -> None:
        (self._path / path).parent.mkdir(parents=True, exist_ok=True)
        with open(self._path / path, "xb", opener=open_regular) as file:
            file.write(content)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            (self._path / path).unlink(missing_ok=True)


class Entry(BaseModel, frozen=True):
    """What was last written of a lease; a released one has no holder."""

    number: int = 0
    holder: str = ""
    token: str = ""
    time: float = 0.0


def _last_entry(storage: LeaseStorage) -> Entry:
    sizes = storage.sizes("lease")
    numbers = [int(name) for name in sizes if name.isdecimal()]
    last = Entry(number=max(numbers, default=0))
    name = f"{last.number:06}"
    if sizes.get(name, 0) > MAX_BYTES:
        return last
    # It may be replaced meanwhile, or not be a lease.
    with suppress(FileNotFoundError, ValueError, TypeError):
        fields = parse_json(storage.read(f"lease/{name}"))
        return Entry.model_validate({**fields, "number": last.number})
    return last


def is_held(storage: LeaseStorage) -> bool:
    """Return whether the lease of `storage` was renewed within `LEASE_SECONDS`, by its clock."""
    last = _last_entry(storage)
    return bool(last.holder) and time.time() - last.time < LEASE_SECONDS


class Lease:
    """The lease of `storage`, held by this process and renewed until `release`.

    A lease is replaced if it is not renewed for `LEASE_SECONDS`, or if an earlier process on this
    machine held it, whose token is in `token_file`: only one process can create the lease with the
    next number.

    Args:
        token_file: a file that only one process at a time uses; None = there is none.

    Raises:
        InUseError: another run holds it.
    """

    def __init__(self, storage: LeaseStorage, token_file: Path | None) -> None:
        self._storage = storage
        self._holder = describe_this_process()
        self._token = uuid.uuid4().hex
        self._released = threading.Event()
        former = None
        if token_file is not None and token_file.is_file():
            former = read_bytes(token_file, MAX_BYTES).decode(errors="replace")
        last = self._wait_for_holder(former)
        if token_file is not None:
            write_durably(token_file, self._token.encode())
        self._path = f"lease/{last.number + 1:06}"
        with suppress(FileExistsError):
            storage.create(self._path, self._content())
        self.require()
        self._delete_older()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewing.start()

    def _wait_for_holder(self, former: str | None) -> Entry:
        first = _last_entry(self._storage)
        if not first.holder or first.token == former:
            return first
        last_run = f"{self._storage.url}: the last run was {make_printable(first.holder)}"
        wait = f"waiting up to {LEASE_SECONDS:g} s to see whether it still runs"
        print(f"{last_run}; {wait}", file=sys.stderr, flush=True)
        last = first
        deadline = time.monotonic() + LEASE_SECONDS
        while last.holder and last.token != former and time.monotonic() < deadline:
            if last != first:
                raise in_use_error(self._storage.url, last.holder)
            time.sleep(LEASE_SECONDS / 60)
            last = _last_entry(self._storage)
        return last

    def _content(self) -> bytes:
        fields = {"holder": self._holder, "token": self._token, "time": time.time()}
        return json.dumps(fields).encode()

    def _delete_older(self) -> None:
        paths = [f"lease/{name}" for name in self._storage.sizes("lease")]
        older = [path for path in paths if path < self._path]
        if older:
            self._storage.delete(older)

    def _renew(self) -> None:
        while not self._released.wait(LEASE_SECONDS / 6):
            with suppress(RunError, OSError):  # the next one may succeed, and `require` checks
                self._storage.write(self._path, self._content())

    def require(self) -> None:
        """Raise RunError unless this process still holds the lease."""
        last = _last_entry(self._storage)
        if last.token != self._token:
            raise in_use_error(self._storage.url, last.holder)

    @property
    def is_released(self) -> bool:
        return self._released.is_set()

    def release(self) -> None:
        """Let another run start at once."""
        self._released.set()
        self._renewing.join()  # it must not replace what follows
        self._holder = ""
        self._storage.write(self._path, self._content())
