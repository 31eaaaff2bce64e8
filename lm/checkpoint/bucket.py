"""Files in object storage, through fsspec with s3fs, gcsfs or adlfs; retries failed requests."""

from __future__ import annotations

import errno
import logging
import re
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lm.errors import ConfigError, RunError
from lm.launch.requirements import requires

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
RETRY_SECONDS = 120.0
"""How long a failing request is retried."""
FIRST_PAUSE = 1.0
"""Seconds before the first retry; each further pause is twice as long."""
LONGEST_PAUSE = 15.0
"""Seconds between retries, at most."""
REQUEST_SECONDS = 30.0
"""Longest wait for a response."""
MIN_UPLOAD_RATE = 1 << 20
"""Bytes per second; a slower upload of a file counts as failed."""
MAX_TRANSFERS = 4
"""Files that a process transfers at the same time, each in parts."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": 10,
            "read_timeout": 30,
            "retries": {"total_max_attempts": 1},
        }
    },
    "gs": {"requests_timeout": 60},
}
_PERMANENT = (errno.EINVAL, errno.ENOSPC, errno.EDQUOT)
_DENIED = re.compile(r"\w*Credential|OSError: Forbidden")
"""start of errors of credentials, and of what gcsfs raises for 403"""


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
        scheme, _, root = self.url.partition("://")
        if scheme not in PACKAGES or not re.fullmatch(r"[\w.-]+(/[\w.=+-]+)*", root):
            kinds = " or ".join(f"{known}://BUCKET/PREFIX" for known in PACKAGES)
            shown = f"{scheme}://..." if root else "this"  # without what may be a password
            raise ConfigError(
                f"{shown} is not of the form {kinds} with only letters, digits and . _ - = +"
            )
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem

        # It logs tracebacks of what `_call` reports.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        try:
            files = fsspec.filesystem(scheme, use_listings_cache=False, **_OPTIONS.get(scheme, {}))
        except ImportError:
            raise ConfigError(f"{self.url}: {requires(PACKAGES[scheme])}") from None
        except Exception as error:
            raise self._denied(error) from None
        self._files = DirFileSystem(root, files)
        self.retry_seconds = RETRY_SECONDS

    def _denied(self, error: Exception) -> ConfigError:
        problem = f"{self.url}: access denied ({_first_line(error)})"
        remedy = "log in, or set this storage's credentials in the environment"
        return ConfigError(f"{problem}; {remedy}, and check their permissions")

    def sizes(self, path: str = "") -> dict[str, int]:
        """Return the sizes of the files under `path`, by their paths relative to it."""
        found = self._call("find", path, detail=True)
        return {name.removeprefix(f"{path}/"): info["size"] for name, info in found.items()}

    def read(self, path: str) -> bytes:
        """Return the content of a file; raise FileNotFoundError if it does not exist."""
        return self._call("cat_file", path)

    def write(self, path: str, content: bytes) -> None:
        """Create or replace a file."""
        self._call("pipe_file", path, content)

    def create(self, path: str, content: bytes) -> None:
        """Create a file; raise FileExistsError if it exists."""
        self._call("pipe_file", path, content, mode="create")

    def upload(self, names: Iterable[str], source: Path, target: str = "") -> None:
        """Upload the files `names` of the directory `source` to the prefix `target`."""
        self._transfer("put_file", [(str(source / name), f"{target}{name}") for name in names])

    def download(self, names: Iterable[str], target: Path) -> None:
        """Download the files `names` to the directory `target`.

        Raises:
            FileNotFoundError: one does not exist.
        """
        self._transfer("get_file", [(name, str(target / name)) for name in names])

    def copy(self, paths: Iterable[str], target: str) -> None:
        """Copy files to the prefix `target`."""
        self._transfer("cp_file", [(path, f"{target}{path}") for path in paths])

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the files that exist of `paths`."""
        self._call("rm", list(paths))

    def _transfer(self, method: str, pairs: Iterable[tuple[str, str]]) -> None:
        with ThreadPoolExecutor(MAX_TRANSFERS) as pool:
            list(pool.map(lambda pair: self._call(method, *pair), pairs))

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of fsspec's file system, and retry it while the server fails."""
        # Without a timeout, some requests wait forever for the response to "Expect: 100-continue".
        if method not in ("get_file", "cp_file"):  # how long these take is unknown
            size = Path(args[0]).stat().st_size if method == "put_file" else 0
            options["timeout"] = REQUEST_SECONDS + size / MIN_UPLOAD_RATE
        pause = FIRST_PAUSE
        deadline: float | None = None
        while True:
            try:
                return getattr(self._files, method)(*args, **options)
            except FileExistsError:
                raise
            except Exception as error:
                failure = error
            if _is_missing(failure) and method == "rm":
                return None
            self._refuse_permanent(method, failure)
            problem = f"{self.url}: {method} failed ({_first_line(failure)})"
            duration = f"{self.retry_seconds:g} s"
            now = time.monotonic()
            is_first_failure = deadline is None
            if deadline is None:
                deadline = now + self.retry_seconds
            if now + pause > deadline:
                remedy = "check the network and the server"
                raise RunError(f"{problem}, also when retried for {duration}; {remedy}")
            if is_first_failure:
                print(f"{problem}, retrying for {duration}", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _refuse_permanent(self, method: str, failure: Exception) -> None:
        """Raise the error to report if a retry cannot succeed."""
        reason = _first_line(failure)
        if _is_missing(failure):
            if method in ("cat_file", "get_file"):
                raise FileNotFoundError(reason)
            raise ConfigError(f"{self.url}: {reason}; create the bucket, or use another URL")
        is_denied = isinstance(failure, PermissionError) or _status(failure) in (401, 403)
        if is_denied or _DENIED.match(reason):
            raise self._denied(failure)
        if isinstance(failure, OSError) and failure.errno in _PERMANENT:
            raise ConfigError(f"{self.url}: {method} failed ({reason})")


def _status(error: Exception) -> object:
    """Return the status of the response, of Azure's or Google's errors."""
    return getattr(error, "status_code", None) or getattr(error, "code", None)


def _is_missing(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) or _status(error) == 404


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
