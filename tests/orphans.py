"""Kill runs at random moments of their start, and wait until nothing holds their output.

    python -m tests.orphans [COUNT] [--seed S]

A run that streams its data with 8 workers is started alone, by `lm.launch` and by torchrun in turn,
with a pipe, as `| tee` is. It is killed, or asked to stop, and nothing of it may be left: the pipe
ends within `LIMIT` seconds. Exit code 1 if it does not.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.hyperparameters import TINY
from tests.support.runs import start_fsdp

WORKERS = 8
LONGEST_START = 12
"""seconds, about"""
LIMIT = 300
LAUNCHERS = {
    "alone": (1, None),
    "lm.launch": (2, ("-m", "lm.launch", "--nproc", "2")),
    "torchrun": (2, ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")),
}
"""ranks, and Python's arguments that start them"""


def end_one(folder: Path, launcher: str, signum: signal.Signals, seconds: float) -> bool:
    """Send `signum` to a run `seconds` after its start. Return whether nothing is left."""
    lines = "".join(f'{{"text": "some words {i}"}}\n' for i in range(400))
    (folder / "a.jsonl").write_text(lines)
    data = {"dataset": "hf", "train_data": "a.jsonl", "val_data": "a.jsonl", "vocab_size": 264}
    n_ranks, arguments = LAUNCHERS[launcher]
    workers = f"data_workers={WORKERS // n_ranks}"
    process = start_fsdp(
        folder,
        workers,
        "max_steps=1000000",
        config=TINY | data,
        launcher=arguments or None,
        fork=False,
    )
    time.sleep(seconds)
    process.send_signal(signum)
    try:
        process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return False
    return True


def main() -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(description="Kill runs at random moments of their start.")
    parser.add_argument("count", nargs="?", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    n_left = 0
    for number in range(args.count):
        launcher = list(LAUNCHERS)[number % len(LAUNCHERS)]
        signum = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
        seconds = rng.uniform(0, LONGEST_START)
        with tempfile.TemporaryDirectory() as folder:
            nothing_left = end_one(Path(folder), launcher, signum, seconds)
        result = "nothing left" if nothing_left else "LEFT"
        print(f"{number}  {launcher}  {signum.name} after {seconds:.2f} s: {result}", flush=True)
        n_left += not nothing_left
    print(f"{args.count} ends, {n_left} left something")
    return int(n_left > 0)


if __name__ == "__main__":
    sys.exit(main())
