"""The order and the environment of all tests."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# The models are too small for more threads, and the cores belong to many ranks.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from tests.support import REPOSITORY

with suppress(ImportError):  # where only the tests of GPUs are run, which need no Hypothesis
    import hypothesis

    # Its bounds on the time of an example and of drawing it are of an idle machine.
    hypothesis.settings.register_profile(
        "no_clock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("no_clock")

# A shell's background job ignores SIGINT, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup they would ignore SIGHUP. A handler does so in this process only.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.hookimpl(tryfirst=True)  # before -k and -m deselect tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with many slow tests first, so that no worker is left with one at the end."""
    n_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    n_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (-n_slow[item.path], -n_tests[item.path]))


@pytest.fixture(scope="session", autouse=True)
def _shared_cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of a session and of what modules share, in which all workers find entries."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    directory /= "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A new cache for each test, as none knows what another has patched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / uuid.uuid4().hex))


@pytest.fixture
def shared_cache(
    cache: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    _shared_cache_directory: Path,
) -> None:
    """One cache for all tests that patch nothing cached: a class is examined once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(_shared_cache_directory))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of a server that imitates S3."""
    pytest.importorskip("moto.server", reason="needs moto[s3]")
    from tests.support.servers import serving_s3

    with serving_s3() as address:
        yield address


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """URL below which nothing is stored yet."""
    from tests.support.servers import use_s3

    return use_s3(monkeypatch, s3_server, tmp_path.name)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For LD_PRELOAD: a file system that lacks what environment variables name."""
    path = tmp_path_factory.mktemp("library") / "file_system.so"
    source = REPOSITORY / "tests" / "support" / "file_system.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source, "-ldl"], check=True)
    return str(path)
