"""Training that is killed at any moment and rerun ends with the losses and weights of an uninterrupted run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.slow
def test_twenty_interruptions_lose_at_most_two_intervals_and_change_no_loss_and_no_weight() -> None:
    command = [sys.executable, "-m", "tests.soak", "20", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    count, most_lost = map(int, done.stdout.splitlines()[-1].split()[1:])
    assert count == 20
    assert most_lost <= 6
