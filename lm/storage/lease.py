"""A lease, which one run at a time holds, in object storage.

It is the file lease/NNNNNN; the highest number counts.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from lm.errors import RunError, make_printable
from lm.fileio import parse_json, read_bytes, write_durably
from lm.launch.machine import describe_this_process
from lm.storage.bucket import Bucket
from lm.storage.lock import in_use_error

LEASE_SECONDS = 60.0
"""After this time without a renewal, the holder of a lease counts as dead."""
MAX_BYTES = 4096
"""Of a lease; ours have some 200."""


class Entry(BaseModel, frozen=True):
    """What was last written of a lease; a released one has no holder."""

    number: int = 0
    holder: str = ""
    token: str = ""
    time: float = 0.0


def _last_entry(bucket: Bucket) -> Entry:
    sizes = bucket.sizes("lease")
    numbers = [int(name) for name in sizes if name.isdecimal()]
    last = Entry(number=max(numbers, default=0))
    with suppress(OSError, ValueError, TypeError):  # it may be deleted meanwhile, or be no lease
        fields = parse_json(bucket.read(f"lease/{last.number:06}", MAX_BYTES))
        return Entry.model_validate({**fields, "number": last.number})
    return last


class Lease:
    """The lease of `bucket`, held by this process and renewed until `release`.

    A lease is replaced if it is not renewed for `LEASE_SECONDS`, or if an earlier process on this
    machine held it, whose token is in `token_file`: only one process can create the lease with the
    next number.

    Args:
        token_file: a file that only one process at a time uses.

    Raises:
        InUseError: another run holds it.
    """

    def __init__(self, bucket: Bucket, token_file: Path) -> None:
        self._bucket = bucket
        self._holder = describe_this_process()
        self._token = uuid.uuid4().hex
        self._released = threading.Event()
        former = None
        if token_file.is_file():
            former = read_bytes(token_file, MAX_BYTES).decode(errors="replace")
        last = self._wait_for_holder(former)
        write_durably(token_file, self._token.encode())
        self._path = f"lease/{last.number + 1:06}"
        with suppress(FileExistsError):
            bucket.create(self._path, self._content())
        self.require()
        self._delete_older()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewing.start()

    def _wait_for_holder(self, former: str | None) -> Entry:
        first = _last_entry(self._bucket)
        if not first.holder or first.token == former:
            return first
        last_run = f"{self._bucket.url}: the last run was {make_printable(first.holder)}"
        wait = f"waiting up to {LEASE_SECONDS:g} s to see whether it still runs"
        print(f"{last_run}; {wait}", file=sys.stderr, flush=True)
        last = first
        deadline = time.monotonic() + LEASE_SECONDS
        while last.holder and last.token != former and time.monotonic() < deadline:
            if last != first:
                raise in_use_error(self._bucket.url, last.holder)
            time.sleep(LEASE_SECONDS / 60)
            last = _last_entry(self._bucket)
        return last

    def _content(self) -> bytes:
        fields = {"holder": self._holder, "token": self._token, "time": time.time()}
        return json.dumps(fields).encode()

    def _delete_older(self) -> None:
        paths = [f"lease/{name}" for name in self._bucket.sizes("lease")]
        older = [path for path in paths if path < self._path]
        if older:
            self._bucket.delete(older)

    def _renew(self) -> None:
        while not self._released.wait(LEASE_SECONDS / 6):
            with suppress(RunError, OSError):  # the next one may succeed, and `require` checks
                self._bucket.write(self._path, self._content())

    def require(self) -> None:
        """Raise RunError unless this process still holds the lease."""
        last = _last_entry(self._bucket)
        if last.token != self._token:
            raise in_use_error(self._bucket.url, last.holder)

    @property
    def is_released(self) -> bool:
        return self._released.is_set()

    def release(self) -> None:
        """Let another run start at once."""
        self._released.set()
        self._renewing.join()  # it must not replace what follows
        self._holder = ""
        self._bucket.write(self._path, self._content())
