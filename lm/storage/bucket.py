"""Files in object storage, through obstore, which retries failed requests."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.errors import ConfigError, RunError, is_panic
from lm.fileio import MAX_JSON_BYTES
from lm.storage.folder import DRAFT, MANIFEST

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az")
RETRY_SECONDS = 120.0
"""How long a failing request is retried."""
PAUSE_SECONDS = 1.0
"""Before a request that obstore does not repeat is repeated."""
REQUEST_SECONDS = 30.0
"""Longest wait for an answer, or for more of one."""
MAX_TRANSFERS = 4
"""Files that a process transfers at the same time, each in parts."""
BLOCK_BYTES = 8 << 20
"""Written at a time while a file is downloaded."""

_REMEDIES = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (AZURE_STORAGE_SAS_KEY),"
    " or AZURE_USE_AZURE_CLI=true; connection strings are not read",
}
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}


def is_url(where: str | Path) -> bool:
    """Return whether `where` is a URL instead of a path."""
    return "://" in str(where)


class Bucket:
    """The files below `url`, by their paths relative to it.

    Methods raise ConfigError if access is denied or the bucket is missing, RunError if the server
    fails for too long.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._scheme, _, root = self.url.partition("://")
        if self._scheme not in SCHEMES or not re.fullmatch(r"[\w.-]+(/[\w.=+-]+)*", root):
            kinds = " or ".join(f"{known}://BUCKET/PREFIX" for known in SCHEMES)
            shown = f"{self._scheme}://..." if root else "this"  # without what may be a password
            raise ConfigError(
                f"{shown} is not of the form {kinds} with only letters, digits and . _ - = +"
            )
        self.retry_for(RETRY_SECONDS)

    def retry_for(self, seconds: float) -> None:
        """Retry failing requests from now on for `seconds`."""
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        self._retry_seconds = seconds
        options: dict[str, Any] = {
            "retry_config": {"retry_timeout": timedelta(seconds=seconds), "max_retries": 1000},
            "client_options": {
                "allow_http": True,  # of an endpoint that the user names
                "connect_timeout": timedelta(seconds=min(10.0, REQUEST_SECONDS)),
                "read_timeout": timedelta(seconds=REQUEST_SECONDS),
                "timeout": timedelta(days=1),  # of a file of any size
            },
        }
        bundle = os.environ.get("AWS_CA_BUNDLE")
        try:
            if bundle:
                options["client_options"]["root_certificate"] = Path(bundle).read_bytes()
            if self._scheme == "s3":  # obstore itself reads no profiles
                options["credential_provider"] = Boto3CredentialProvider()
            self._store: ObjectStore = from_url(self.url, **options)
        except (BotoCoreError, BaseError, ValueError, OSError) as error:
            raise self._denied(f"no credentials: {_describe(error)}") from None

    def _denied(self, reason: str) -> ConfigError:
        problem = f"{self.url}: access denied ({reason})"
        return ConfigError(f"{problem}; {_REMEDIES[self._scheme]}, and check their permissions")

    def __str__(self) -> str:
        return self.url

    def is_at(self, where: str) -> bool:
        """Return whether this is what is at the URL `where`."""
        return where == self.url

    def names(self) -> set[str]:
        """Return the names of the files and folders."""
        return {path.partition("/")[0] for path in self.sizes()}

    def folders(self, path: str) -> dict[str, set[str]]:
        """Return the names of the files of each folder in the folder `path`."""
        found: dict[str, set[str]] = {}
        for file in self.sizes(path):
            folder, _, name = file.partition("/")
            if not folder.startswith("."):
                found.setdefault(folder, set()).add(name)
        return found

    def sizes(self, path: str = "") -> dict[str, int]:
        """Return the sizes of the files under `path`, by their paths relative to it."""
        with self._errors("list"):
            found = self._store.list(path or None).collect()
        return {file["path"].removeprefix(f"{path}/"): file["size"] for file in found}

    def read(self, path: str, limit: int = MAX_JSON_BYTES) -> bytes:
        """Return the content of a file of at most `limit` bytes.

        Raises:
            FileNotFoundError: it does not exist.
            OSError: it is larger.
        """
        with self._errors("get"):
            found = self._store.get(path)
            size = found.meta["size"]
            if size <= limit:
                return bytes(found.bytes())
        raise OSError(errno.EFBIG, f"{size:,} bytes, but at most {limit:,} are read", path)

    def write(self, path: str, content: bytes) -> None:
        """Create or replace a file."""
        with self._errors("put"):
            self._store.put(path, content)

    def create(self, path: str, content: bytes) -> None:
        """Create a file; raise FileExistsError if it exists, maybe by a request of this call."""
        self._repeat("create", lambda: self._store.put(path, content, mode="create"))

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the files that exist of `paths`."""
        self._repeat("delete", lambda: self._store.delete(paths))

    def upload(self, names: Iterable[str], source: Path, target: str = "") -> None:
        """Upload the files `names` of the directory `source` to the prefix `target`."""

        def put(name: str) -> None:
            self._store.put(f"{target}{name}", source / name)

        self._transfer("put", put, names)

    def download(self, names: Iterable[str], target: Path) -> None:
        """Download the files `names` to the directory `target`.

        Raises:
            FileNotFoundError: one does not exist.
        """

        def get(name: str) -> None:
            with (target / name).open("wb") as file:
                for block in self._store.get(name).stream(min_chunk_size=BLOCK_BYTES):
                    file.write(block)

        self._transfer("get", get, names)

    def copy(self, paths: Iterable[str], target: str) -> None:
        """Copy files to the prefix `target`."""

        def copy(path: str) -> None:
            self._store.copy(path, f"{target}{path}")

        self._transfer("copy", copy, paths)

    def delete_folder(self, path: str) -> None:
        """Delete a folder; from the first moment on, it is a draft."""
        draft = f"{path}/{DRAFT}"
        self.write(draft, b"")
        files = {f"{path}/{name}" for name in self.sizes(path)} - {draft}
        manifest = files & {f"{path}/{MANIFEST}"}
        for paths in (manifest, files - manifest, {draft}):
            if paths:
                self.delete(list(paths))

    def move(self, names: Collection[str], aside: str) -> None:
        """Move files and folders to the folder `aside`."""
        paths = [path for path in self.sizes() if path.partition("/")[0] in names]
        if paths:
            self.copy(paths, f"{aside}/")
            self.delete(paths)

    def _transfer(self, action: str, transfer: Callable[[str], None], paths: Iterable[str]) -> None:
        with ThreadPoolExecutor(MAX_TRANSFERS) as pool, self._errors(action):
            list(pool.map(transfer, paths))

    def _repeat(self, action: str, request: Callable[[], object]) -> None:
        """Do what obstore does not repeat after a request that was not answered."""
        deadline = time.monotonic() + self._retry_seconds
        while True:
            try:
                with self._errors(action):
                    request()
            except RunError as error:
                if isinstance(error, ConfigError) or time.monotonic() >= deadline:
                    raise
            else:
                return
            time.sleep(PAUSE_SECONDS)

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        """Raise errors of ours instead of obstore's."""
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            yield
        except AlreadyExistsError as error:
            raise FileExistsError(_describe(error)) from None
        except (BaseError, OSError) as error:
            raise self._our_error(action, error) from None
        except BaseException as error:
            if not is_panic(error):
                raise
            problem = f"{self.url}: {action} failed ({_describe(error)})"
            remedy = f"set {_ENDPOINTS[self._scheme]} to a URL, e.g. https://HOST:PORT"
            raise ConfigError(f"{problem}; {remedy}") from None

    def _our_error(self, action: str, error: Exception) -> Exception:
        reason = _describe(error)
        status = re.search(r"status code: (\d+)", str(error))  # a listing says it in the text alone
        if "token request" in reason or (status and status[1] in ("401", "403")):
            return self._denied(reason)
        if status and status[1] == "404":
            if action == "get":
                return FileNotFoundError(reason)
            return ConfigError(f"{self.url}: {reason}; create the bucket, or use another URL")
        problem = f"{self.url}: {action} failed ({reason})"
        if isinstance(error, OSError):  # of a file on this machine
            return ConfigError(problem)
        duration = f"{self._retry_seconds:g} s"
        remedy = "check the network and the server"
        return RunError(f"{problem}, also when retried for {duration}; {remedy}")


def _describe(error: BaseException) -> str:
    """Return what an error says, in one line, without queries of URLs, which have signatures."""
    reason = str(error).partition("\n\nDebug source:")[0]
    reason = re.sub(r"\?\S+", "", reason)
    return " ".join(reason.split())[:500]
