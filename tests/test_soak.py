"""Training that is killed at any moment and rerun ends with the losses and weights of an uninterrupted run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_twenty_interruptions_lose_at_most_two_intervals_and_change_no_loss_and_no_weight() -> None:
    command = [sys.executable, "-m", "tests.soak", "20", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    count, survived, mismatches, most_lost = map(int, done.stdout.splitlines()[-2].split()[1:])
    assert (count, survived, mismatches) == (20, 20, 0)
    assert most_lost <= 6
