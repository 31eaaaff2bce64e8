"""Interrupt training again and again, and compare it with an uninterrupted run.

    python -m tests.soak [COUNT] [--seed S] [--ranks N] [--storage URL]

A small run with dropout and shuffled data is made once without interruption. The same run is then
started in a new directory, killed or stopped at a random moment or inside of a random file
operation, and rerun with the same command until it is complete; and so on until COUNT
interruptions. After every start all losses so far must equal the uninterrupted ones bit for bit and
every checkpoint must be intact, and at the end the checksums of the last checkpoint's files must be
equal. Runs save synchronously and asynchronously in turn. With --storage, e.g. s3://bucket/soak,
the runs are in object storage, whose server and credentials the environment names, and about half
of the starts are on an empty machine.

Exit code 1 if a loss or a file differs, a start does not resume by itself, or a process is left
running.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from lm.checkpoint.contents import verify
from lm.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, read_manifest
from lm.checkpoint.object_storage import BucketCheckpoints
from lm.checkpoint.store import CheckpointStore, LocalCheckpoints
from lm.fileio import read_records
from lm.metrics.records import Report
from tests.support.hyperparameters import EXACT_RUN
from tests.support.runs import EXACT_METRICS, start_fsdp
from tests.sweep import operations, preload

STEPS = 30
RATE = 3
"""Steps between checkpoints."""
RUN = EXACT_RUN | {
    "n_layers": 1,
    "total_batch_size": 4,
    "validation_rate": 3,
    "checkpoint_rate": RATE,
    "max_steps": STEPS,
    "collective_timeout": 60,
}
AIMED = 0.6
"""Share of interruptions that are aimed at a save."""
STARTUP = 2
"""Seconds from a start to its first step, about."""
AT_OPERATION, OPERATIONS = "SIGKILL in a file operation", 0.3
"""An interruption inside of the n-th file operation of all ranks, and the share of these."""
TO_ALL, TO_ONE, STOP, FREEZE = (
    "SIGKILL to all",
    "SIGKILL to one rank",
    "SIGTERM",
    "SIGSTOP, then SIGKILL",
)
KINDS = {TO_ALL: 4, TO_ONE: 2, STOP: 1, FREEZE: 1}
"""Relative frequency of each kind."""
SHORT_LEASE = "from lm.storage import lease\nlease.LEASE_SECONDS = 2.0"
TIMEOUT = 60
"""Seconds until a start must reach its next save or its end."""

Lines = dict[tuple[str, int], dict[str, Any]]


class SoakError(Exception):
    """The run did not behave as it should."""


def lines(folder: Path) -> Lines:
    """The metrics in metrics.jsonl that must be exact, by group and step."""
    found: Lines = {}
    for report in read_records(folder / "runs" / "test" / "metrics.jsonl", Report):
        metrics = report.__pydantic_extra__
        exact = {key: metrics[key] for key in EXACT_METRICS if key in metrics}
        found[report.group, report.step] = exact
    return found


def last_step(folder: Path) -> int:
    return max((step for group, step in lines(folder) if group == "training"), default=0)


def place(folder: Path, storage: str | None) -> CheckpointStore:
    """Where the checkpoints of the run in `folder` are."""
    if storage:
        return BucketCheckpoints(f"{storage}/{folder.name}/test")
    return LocalCheckpoints(folder / "runs" / "test" / "checkpoints")


def checkpoints(folder: Path, storage: str | None) -> dict[int, Manifest]:
    """Verify the complete checkpoints of a run and return their manifests by step."""
    found = {}
    where = place(folder, storage)
    for entry in where.list_saved()[0]:
        with tempfile.TemporaryDirectory() as copy:
            location = where.locate(entry.name)
            path = location.path or location.download(Path(copy) / entry.name)
            manifest = read_manifest(path)
            verify(path, manifest)
            found[manifest.step] = manifest
    return found


def unfinished(folder: Path, storage: str | None) -> set[str]:
    """Checkpoints without a manifest: being written, or abandoned."""
    where = place(folder, storage)
    if isinstance(where, BucketCheckpoints):
        time.sleep(0.05)  # callers poll
        return {name for name, files in where.folders().items() if MANIFEST not in files}
    assert isinstance(where, LocalCheckpoints)
    return {
        path.name
        for path in where.path.glob("[!.]*")
        if not (path / MANIFEST).exists() and path.exists()
    }


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


class Job:
    """A launcher and its ranks that run in `folder`."""

    def __init__(
        self, folder: Path, ranks: int, storage: str | None, *overrides: str, **env: Any
    ) -> None:
        self.folder = folder
        self.storage = storage
        self.at_operation = env.get("FAULT_AT", "0") != "0"
        script = ""
        if storage:
            overrides = (*overrides, f"checkpoint_storage={storage}/{folder.name}")
            script = SHORT_LEASE
        self.launcher = start_fsdp(
            folder, *overrides, ranks=ranks, config=RUN, script=script, **env
        )
        process = psutil.Process(self.launcher.pid)
        self.ranks: list[psutil.Process] = [process] if ranks == 1 else []
        while len(self.ranks) < ranks and self.launcher.poll() is None:
            self.ranks = process.children()
            time.sleep(0.005)

    def wait_until(self, condition: Callable[[], Any]) -> bool:
        """Wait for `condition`; return False if the run ends first."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if self.launcher.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise SoakError(f"no progress within {TIMEOUT} s")
            time.sleep(0.002)
        return True

    def finish(self) -> int:
        """Wait until all processes have ended; return the launcher's exit code."""
        try:
            output, errors = self.launcher.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise SoakError(f"still running after {TIMEOUT} s") from None
        self.output = output + errors
        deadline = time.monotonic() + 5
        while left := sum(map(alive, self.ranks)):
            if time.monotonic() > deadline:
                raise SoakError(f"{left} ranks are still running")
            time.sleep(0.005)
        return self.launcher.returncode

    def kill(self) -> None:
        self.launcher.kill()
        for process in self.ranks:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def started(
    folder: Path, ranks: int, storage: str | None, *overrides: str, **env: str
) -> Iterator[Job]:
    """Start the run in `folder` as its user would; kill what is left of it at the end."""
    job = Job(folder, ranks, storage, *overrides, **env)
    try:
        yield job
    finally:
        job.kill()
        job.launcher.communicate()


class Interruption(NamedTuple):
    kind: str
    moment: str  # "during a save" only if the save was not completed
    lost: int  # steps


def interrupt(job: Job, draw: random.Random, length: float) -> Interruption | None:
    """Interrupt the run in a random way at a random moment; None if it ends before.

    Args:
        length: seconds from the first step of a run to its last.
    """
    known = unfinished(job.folder, job.storage)

    def saving() -> set[str]:
        return unfinished(job.folder, job.storage) - known

    if job.at_operation:
        kind = AT_OPERATION
    else:
        kind = disturb(job, draw, length, saving, known)
    if kind is None:
        return None
    code = job.finish()
    if kind == AT_OPERATION and code == 0:
        return None
    saved = max(checkpoints(job.folder, job.storage), default=0)
    lost = max(0, last_step(job.folder) - saved)  # a stop saves a step before it is reported
    stopped_before_first_step = code == 128 + signal.SIGTERM
    if kind == STOP and (code or lost) and not stopped_before_first_step:
        raise SoakError(f"SIGTERM ended the run with {code} and lost {lost} steps:\n{job.output}")
    if kind == AT_OPERATION and code not in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise SoakError(f"a killed rank ended the run with {code}:\n{job.output}")
    moment = "during a save" if saving() else "random"
    return Interruption(kind, moment, lost)


def disturb(
    job: Job, draw: random.Random, length: float, saving: Callable[[], set[str]], known: set[str]
) -> str | None:
    """Send signals of a random kind at a random moment; return the kind, or None after the end."""
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    if draw.random() < AIMED:
        for _ in range(draw.randint(1, 2)):
            known.update(saving())
            if not job.wait_until(saving):
                return None
        time.sleep(draw.choice([0, draw.uniform(0, 0.02)]))
    elif draw.random() < 0.2:
        time.sleep(draw.uniform(0, STARTUP))
    else:
        before = last_step(job.folder)
        if not job.wait_until(lambda: last_step(job.folder) != before):
            return None
        time.sleep(draw.uniform(0, 0.3 * length))
    victim = draw.choice(job.ranks)
    if job.launcher.poll() is not None or not alive(victim):
        return None
    if kind == STOP:
        job.launcher.terminate()
    elif kind == TO_ONE:
        victim.kill()
    else:
        if kind == FREEZE:
            victim.suspend()
            time.sleep(draw.uniform(0, 0.5))
        job.kill()
    return kind


def compare(reference: Path, folder: Path, storage: str | None, complete: bool) -> None:
    """Raise `SoakError` if a loss or the last checkpoint of `folder` differs from `reference`'s."""
    expected = lines(reference)
    found = lines(folder)
    both = expected.keys() & found.keys()
    differing = sorted(key for key in both if expected[key] != found[key])
    if complete:  # a stopped run also validates after its last step
        differing += sorted(expected.keys() - found.keys())
        last = checkpoints(reference, storage)[STEPS]
        if last.files != checkpoints(folder, storage)[STEPS].files:
            raise SoakError("the last checkpoint's files differ")
    if differing:
        raise SoakError(f"missing or different: {differing[:20]}")


def soak(
    root: Path,
    count: int,
    seed: int,
    ranks: int,
    storage: str | None = None,
    *,
    in_operations: bool = True,
) -> dict[tuple[str, str, str], list[int]]:
    """Interrupt runs `count` times; return the steps lost by kind, moment and way of saving.

    Args:
        in_operations: whether some runs are killed in a file operation, which needs a library that
            is loaded when their interpreters start.
    """
    draw = random.Random(seed)
    reference = root / "reference"
    faults = preload(root) | {"FAULT_WITH": "kill"} if in_operations else {}
    env = faults | {"FAULT_BELOW": f"{reference}/runs/", "FAULT_AT": "0"}
    with started(reference, ranks, storage, **env) as job:
        job.wait_until(lambda: last_step(reference))
        started_at = time.monotonic()
        if job.finish():
            raise SoakError(job.output)
    length = time.monotonic() - started_at
    n_operations = operations(Path(faults["FAULT_COUNTER"])) if faults else 0
    made = 0
    number = 0
    lost: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    while made < count:
        folder = root / f"run-{number}"
        saves = ("sync", "async")[number % 2]
        override = f"async_checkpoint={str(saves == 'async').lower()}"
        complete = False
        while not complete:
            if storage and draw.random() < 0.5:
                shutil.rmtree(folder, ignore_errors=True)
            env = {}
            if faults and made < count and draw.random() < OPERATIONS:
                Path(faults["FAULT_COUNTER"]).write_bytes(bytes(8192))
                at = str(draw.randint(1, n_operations))
                env = faults | {"FAULT_AT": at, "FAULT_BELOW": f"{folder}/runs/"}
            with started(folder, ranks, storage, override, **env) as job:
                found = None
                if made < count:
                    found = interrupt(job, draw, length)
                if found:
                    made += 1
                    lost[found.kind, found.moment, saves].append(found.lost)
                elif job.finish():
                    raise SoakError(job.output)
            complete = found is None
            compare(reference, folder, storage, complete)
            if sys.stderr.isatty():
                print(f"\r{made}/{count}", end="\r", file=sys.stderr, flush=True)
        shutil.rmtree(folder)
        number += 1
    return lost


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="Interrupt training, compare the losses."
    )
    parser.add_argument(
        "count", nargs="?", type=int, default=500, help="interruptions (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--storage", metavar="URL", help="object storage for the checkpoints (none: on disk)"
    )
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        lost = soak(root, args.count, args.seed, args.ranks, args.storage)
    except (SoakError, CheckpointError) as error:
        print(f"{root}: {error}")
        return 1
    shutil.rmtree(root)
    print(f"{'interruption':<27} {'moment':<13} {'saves':<6} {'count':>6} {'most steps lost':>16}")
    for (kind, moment, saves), steps in sorted(lost.items()):
        print(f"{kind:<27} {moment:<13} {saves:<6} {len(steps):>6} {max(steps):>16}")
    every = [step for steps in lost.values() for step in steps]
    print(f"{'all':<48} {len(every):>6} {max(every, default=0):>16}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
