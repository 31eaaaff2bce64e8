"""What the tests of trials share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.master import Master


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    """A master without an experiment."""
    (tmp_path / "storage").mkdir()
    master = Master(tmp_path / "storage")
    yield master
    master.close()
