"""Files in object storage, through fsspec with s3fs, gcsfs or adlfs; failed requests are retried."""

from __future__ import annotations

import errno
import logging
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lm.errors import ConfigError, RunError

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
RETRY_SECONDS = 120.0
"""How long a failing request is retried."""
REQUEST_SECONDS = 30.0
"""Longest wait for a response."""
MIN_UPLOAD_RATE = 1 << 20
"""Bytes per second; a slower upload of a file counts as failed."""
MAX_TRANSFERS = 4
"""Files that a process transfers at the same time, each in parts."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 1}}},
    "gs": {"requests_timeout": 60},
}
_PERMANENT = (errno.EINVAL, errno.ENOSPC, errno.EDQUOT)
_DENIED = re.compile(r"\w*Credential|OSError: Forbidden")
"""start of errors of credentials, and of what gcsfs raises for 403"""


class Bucket:
    """The files below `url`, by their paths relative to it.

    Methods raise ConfigError if access is denied or the bucket is missing, RunError if the server fails for too long.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme, _, root = self.url.partition("://")
        if scheme not in PACKAGES or not re.fullmatch(r"[\w.-]+(/[\w.=+-]+)*", root):
            kinds = " or ".join(f"{known}://BUCKET/PREFIX" for known in PACKAGES)
            shown = f"{scheme}://..." if root else "this"  # without what may be a password
            raise ConfigError(f"{shown} is not of the form {kinds} with only letters, digits and . _ - = +")
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem

        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of what `call` reports
        try:
            files = fsspec.filesystem(scheme, use_listings_cache=False, **_OPTIONS.get(scheme, {}))
        except ImportError:
            raise ConfigError(f"{self.url}: requires a package: pip install {PACKAGES[scheme]}") from None
        except Exception as error:
            raise self._denied(error) from None
        self._files = DirFileSystem(root, files)
        self.retry_seconds = RETRY_SECONDS

    def _denied(self, error: Exception) -> ConfigError:
        advice = "log in, or set this storage's credentials in the environment, and check their permissions"
        return ConfigError(f"{self.url}: access denied ({_first_line(error)}); {advice}")

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of fsspec's file system, and retry it while the server fails.

        Raises:
            FileNotFoundError: only from `cat_file` and `get_file`.
            FileExistsError: only with `mode="create"`.
        """
        deadline, pause = None, 1.0  # of the retries
        # Without a timeout, some requests wait forever for the response to "Expect: 100-continue".
        if method not in ("get_file", "cp_file"):  # how long these take is unknown
            size = Path(args[0]).stat().st_size if method == "put_file" else 0
            options["timeout"] = REQUEST_SECONDS + size / MIN_UPLOAD_RATE
        while True:
            try:
                return getattr(self._files, method)(*args, **options)
            except FileExistsError:
                raise
            except Exception as error:
                reason = _first_line(error)
                status = getattr(error, "status_code", None) or getattr(error, "code", None)  # of Azure, of Google
                if isinstance(error, FileNotFoundError) or status == 404:
                    if method == "rm":
                        return None
                    if method in ("cat_file", "get_file"):
                        raise FileNotFoundError(reason) from None
                    raise ConfigError(f"{self.url}: {reason}; create the bucket, or use another URL") from None
                if isinstance(error, PermissionError) or status in (401, 403) or _DENIED.match(reason):
                    raise self._denied(error) from None
                if getattr(error, "errno", None) in _PERMANENT:
                    raise ConfigError(f"{self.url}: {method} failed ({reason})") from None
                deadline = deadline or time.monotonic() + self.retry_seconds
                if time.monotonic() + pause > deadline:
                    problem = f"{method} failed for {self.retry_seconds:g} s ({reason})"
                    raise RunError(f"{self.url}: {problem}; check the network and the server") from None
                if pause == 1:
                    line = f"{self.url}: {method} failed ({reason}), retrying for {self.retry_seconds:g} s"
                    print(line, file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, 15)

    def transfer(self, method: str, pairs: Iterable[tuple[str, str]]) -> None:
        """Call `method` with each of `pairs`, several at the same time."""
        with ThreadPoolExecutor(MAX_TRANSFERS) as pool:
            list(pool.map(lambda pair: self.call(method, *pair), pairs))

    def sizes(self, path: str = "") -> dict[str, int]:
        """Return the sizes of the files under `path`, by their paths relative to it."""
        found = self.call("find", path, detail=True)
        return {name.removeprefix(f"{path}/"): info["size"] for name, info in found.items()}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
