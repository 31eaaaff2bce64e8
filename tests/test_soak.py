"""Training survives being killed at any moment, and nobody can tell from its losses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_twenty_disturbed_starts_lose_at_most_two_intervals_and_end_with_the_same_losses_and_weights() -> None:
    command = [sys.executable, "-m", "tests.soak", "20", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    count, survived, mismatches, most_lost = map(int, done.stdout.splitlines()[-2].split()[1:])
    assert (count, survived, mismatches) == (20, 20, 0)
    assert most_lost <= 6
