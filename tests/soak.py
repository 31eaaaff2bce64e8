"""Interrupt training again and again, and compare it with an uninterrupted run.

    python -m tests.soak [COUNT] [--seed S] [--ranks N]

A small run with dropout and shuffled data is made once without interruption. The same run is then started in a new
directory, killed or stopped at a random moment and rerun with the same command until it is complete; and so on until
COUNT interruptions. After every start all losses so far must equal the uninterrupted ones bit for bit, and at the end
the checksums of the last checkpoint's files. Runs save synchronously and asynchronously in turn.

Imports take most of a small run's time, so nine of ten starts avoid them: this process imports the program once,
starts no thread, and forks a launcher, which forks the ranks. They run `lm.launch.run_local` and `fsdp.main` in
separate processes, and signals reach them as usual. The tenth start is `python -m lm.launch`.

Exit code 1 if a loss or a file differs, a start does not resume by itself, or a process is left running.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a process with threads cannot be forked

import psutil
import torch

import fsdp
from lm.launch.spawn import run_local
from tests.support import ROOT, TINY, checkpoints

STEPS = 30
RATE = 3
"""Steps between checkpoints."""
RUN = TINY | {
    "n_layers": 1,
    "dropout": 0.1,
    "lr": 1e-2,
    "total_batch_size": 4,
    "report_rate": 1,
    "validation_rate": 3,
    "validation_batches": 1,
    "checkpoint_rate": RATE,
    "amp_dtype": None,
    "max_steps": STEPS,
    "collective_timeout": 60,
}
EXACT = ("loss", "perplexity", "grad_norm", "lr", "batches", "tokens", "skipped_steps")
PLAIN = 10
"""Interval at which a start is a new interpreter."""
AIMED = 0.6
"""Share of interruptions that are aimed at a save."""
TO_ALL, TO_ONE, STOP, FREEZE = "SIGKILL to all", "SIGKILL to one rank", "SIGTERM", "SIGSTOP, then SIGKILL"
KINDS = {TO_ALL: 4, TO_ONE: 2, STOP: 1, FREEZE: 1}
"""Relative frequency of each kind."""
PROGRESS_TIMEOUT = 60
"""Seconds until a start must reach its next save or its end."""

Lines = dict[tuple[str, int], dict[str, Any]]


class SoakError(Exception):
    """The run did not behave as it should."""


class ForkedRank:
    """Replaces the launcher's `subprocess.Popen` with a fork, which has imported everything."""

    def __init__(
        self, command: list[str], env: Mapping[str, str], start_new_session: bool, preexec_fn: Callable[[], None] | None
    ) -> None:
        def rank() -> int:
            for signum in handled:
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
            if start_new_session:
                os.setsid()
            if preexec_fn:
                preexec_fn()
            os.environ.update(env)
            return fsdp.main(command)

        self.returncode: int | None = None
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)  # until the rank has reset its launcher's handlers
        self.pid = fork(rank)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def fork(action: Callable[[], int]) -> int:
    """Run `action` in a forked process, which exits with its result; return the process ID."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = action()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def warm_up() -> None:
    """Import what the program imports during its first step."""
    for name in ("torch._dynamo", "torch._inductor", "torch.onnx", "numpy.random", "numpy.fft"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork would lose all but one"


def spawn_plain(folder: Path, arguments: list[str], ranks: int, log: Path) -> int:
    command = [sys.executable, "-m", "lm.launch", "--nproc", str(ranks), str(ROOT / "fsdp.py"), *arguments]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=file, stderr=subprocess.STDOUT
        )
    process.returncode = 0  # psutil waits for it
    return process.pid


def spawn_forked(folder: Path, arguments: list[str], ranks: int, log: Path) -> int:
    def launcher() -> int:
        os.chdir(folder)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        subprocess.Popen = ForkedRank  # type: ignore[assignment,misc]
        return run_local(arguments, ranks)

    return fork(launcher)


@dataclass
class Job:
    """A launcher and its ranks that run in `folder`."""

    folder: Path
    log: Path
    launcher: psutil.Process
    ranks: list[psutil.Process] = field(default_factory=list)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def step(self) -> int:
        """Last step that this start reported; 0 before its first."""
        lines = [line for line in self.output().splitlines() if line.startswith("training") and "loss" in line]
        return int(lines[-1].split("step")[1].split("/")[0]) if lines else 0

    def resumed_from(self) -> int | None:
        """The step that this start resumed from; None before it is printed."""
        output = self.output()
        if "is complete" in output:
            return STEPS
        if "resumed from checkpoint" in output:
            return int(output.split("resumed from checkpoint")[1].splitlines()[0].split("step")[1])
        return 0 if self.step() else None

    def unfinished(self) -> set[Path]:
        """Checkpoint directories without a manifest: being written, or abandoned."""
        folder = self.folder / "runs" / "test" / "checkpoints"
        paths = folder.iterdir() if folder.is_dir() else ()
        return {p for p in paths if p.name[0] != "." and not (p / "manifest.json").exists() and p.exists()}

    def wait_until(self, condition: Callable[[], Any], every: float) -> bool:
        """Wait for `condition`; return False if the job ends first."""
        deadline = time.monotonic() + PROGRESS_TIMEOUT
        while not condition():
            if not alive(self.launcher):
                return False
            if time.monotonic() > deadline:
                raise SoakError(f"no progress within {PROGRESS_TIMEOUT} s")
            time.sleep(every)
        return True

    def finish(self) -> int:
        """Wait until all processes have ended; return the launcher's exit code."""
        code = self.launcher.wait(PROGRESS_TIMEOUT)
        deadline = time.monotonic() + 5
        while left := [process for process in self.ranks if alive(process)]:
            if time.monotonic() > deadline:
                raise SoakError(f"{len(left)} processes are still running")
            time.sleep(0.005)
        return int(code or 0)

    def kill(self) -> None:
        for process in (self.launcher, *self.ranks):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def started(folder: Path, ranks: int, plain: bool, *overrides: str) -> Iterator[Job]:
    """Start the run in `folder` as its user would; kill what is left of it at the end."""
    folder.mkdir(exist_ok=True)
    (folder / "test.yaml").write_text(json.dumps({"hyperparameters": RUN}))
    log = folder / "output"
    spawn = spawn_plain if plain else spawn_forked
    job = Job(folder, log, psutil.Process(spawn(folder, ["--config", "test.yaml", *overrides], ranks, log)))

    def all_started() -> bool:
        job.ranks = job.launcher.children()
        return len(job.ranks) == ranks and log.exists()

    try:
        job.wait_until(all_started, every=0.005)
        yield job
    finally:
        job.kill()


@dataclass
class Interruption:
    kind: str
    in_save: bool  # for a kill only if the save was not completed
    last_step: int  # reported before
    seconds: float  # until all processes had ended


def interrupt(job: Job, draw: random.Random, length: float) -> Interruption | None:
    """Interrupt the run in a random way at a random moment and wait for its end; None if it ends before.

    Args:
        length: seconds from the first step of a run to its last.
    """
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    victim = draw.choice(job.ranks)
    known = job.unfinished()

    def saving() -> set[Path]:
        return job.unfinished() - known

    if draw.random() < AIMED:
        for _ in range(draw.randint(1, 2)):
            known |= saving()
            if not job.wait_until(saving, every=0.0005):
                return None
        time.sleep(draw.choice([0, draw.uniform(0, 0.02)]))
    elif draw.random() < 0.2:  # during startup
        time.sleep(draw.uniform(0, 1))
    else:
        if not job.wait_until(job.step, every=0.005):
            return None
        time.sleep(draw.uniform(0, 0.3 * length))
    if not alive(job.launcher) or not alive(victim):
        return None

    in_save = bool(saving())
    started_at = time.monotonic()
    if kind == STOP:
        job.launcher.terminate()
        code = job.finish()
        if code not in (0, 128 + signal.SIGTERM) or (code and job.step()):
            raise SoakError(f"SIGTERM ended the run with {code}")
    elif kind == TO_ONE:
        victim.kill()
        job.finish()
    else:
        if kind == FREEZE:
            victim.suspend()
            time.sleep(draw.uniform(0, 0.5))
        job.kill()
        job.finish()
    if kind != STOP:
        in_save = bool(saving())
    return Interruption(kind, in_save, job.step(), time.monotonic() - started_at)


def lines(folder: Path) -> Lines:
    """The metrics in metrics.jsonl that must be exact, by group and step."""
    path = folder / "runs" / "test" / "metrics.jsonl"
    found: Lines = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # cut short by a kill
            record = json.loads(line)
            found[record["group"], record["step"]] = {key: record[key] for key in EXACT if key in record}
    return found


def final_files(folder: Path) -> dict[str, Any]:
    """Sizes and checksums in the last checkpoint."""
    return json.loads((checkpoints(folder)[STEPS] / "manifest.json").read_text())["files"]


def differences(reference: Path, folder: Path, complete: bool) -> list[str]:
    expected, found = lines(reference), lines(folder)
    # A stopped run also validates after its last step.
    problems = [
        f"{group} step {step}: {line} instead of {expected[group, step]}"
        for (group, step), line in found.items()
        if (group, step) in expected and line != expected[group, step]
    ]
    if complete:
        problems += [f"{group} step {step}: missing" for group, step in expected if (group, step) not in found]
        if final_files(folder) != final_files(reference):
            problems.append("the last checkpoint's files differ")
    return problems


@dataclass
class Tally:
    count: int = 0
    survived: int = 0
    mismatches: int = 0
    most_lost: int = 0  # steps


class Soak:
    """Interrupts runs under `root` at random."""

    def __init__(self, root: Path, seed: int, ranks: int) -> None:
        self.root = root
        self.ranks = ranks
        self.draw = random.Random(seed)
        self.made = 0
        self.starts = 0
        self.tallies: defaultdict[tuple[str, bool, bool], Tally] = defaultdict(Tally)
        """By kind, whether during a save, and whether saves are asynchronous."""
        self.slowest = 0.0
        """Seconds from a rank's death to the end of its run."""
        self.reference = root / "reference"
        with started(self.reference, ranks, False) as job:
            job.wait_until(job.step, every=0.005)
            started_at = time.monotonic()
            if job.finish():
                raise SoakError(job.output())
        self.length = time.monotonic() - started_at

    def run(self, number: int, count: int) -> list[str]:
        """Interrupt one run until it is complete, or `count` interruptions are made; return the problems."""
        folder = self.root / f"run-{number}"
        is_async = bool(number % 2)
        unresolved: list[Interruption] = []
        problems: list[str] = []
        complete = False
        while not complete and not problems:
            plain = self.starts % PLAIN == PLAIN - 1
            self.starts += 1
            new = None
            with started(folder, self.ranks, plain, f"async_checkpoint={str(is_async).lower()}") as job:
                try:
                    if self.made < count:
                        new = interrupt(job, self.draw, self.length)
                    if new is None:
                        complete = True
                        if code := job.finish():
                            problems = [f"ended with {code}:", job.output()]
                except (SoakError, psutil.TimeoutExpired) as error:
                    problems = [f"{error}:", job.output()]
            differ = [] if problems else differences(self.reference, folder, complete)
            origin = job.resumed_from()
            if origin is not None or problems or differ:
                for old in unresolved:
                    tally = self.tallies[old.kind, old.in_save, is_async]
                    tally.survived += not problems
                    tally.mismatches += bool(differ)
                    tally.most_lost = max(tally.most_lost, old.last_step - (origin or 0))
                unresolved = []
            problems += differ
            if new:
                self.made += 1
                self.tallies[new.kind, new.in_save, is_async].count += 1
                unresolved.append(new)
                if new.kind == TO_ONE:
                    self.slowest = max(self.slowest, new.seconds)
        if not problems:
            shutil.rmtree(folder)
        return problems

    def table(self) -> str:
        rows = [f"{'interruption':<22} {'moment':<13} {'saves':<6}  count  survived  mismatches  most steps lost"]
        for (kind, in_save, is_async), tally in sorted(self.tallies.items()):
            moment, saves = "during a save" if in_save else "random", "async" if is_async else "sync"
            rows.append(
                f"{kind:<22} {moment:<13} {saves:<6} {tally.count:>6} {tally.survived:>9} {tally.mismatches:>11}"
                f" {tally.most_lost:>16}"
            )
        every = self.tallies.values()
        rows.append(
            f"{'all':<43} {self.made:>6} {sum(t.survived for t in every):>9} {sum(t.mismatches for t in every):>11}"
            f" {max((t.most_lost for t in every), default=0):>16}"
        )
        rows.append(
            f"{STEPS} steps, a checkpoint every {RATE}; {self.starts} starts; from the death of one rank to the end of"
            f" the run {self.slowest:.1f} s at most"
        )
        return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Interrupt training, compare the losses.")
    parser.add_argument("count", nargs="?", type=int, default=500, help="interruptions (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    warm_up()
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(root, args.seed, args.ranks)
    failed = False
    number = 0
    while soak.made < args.count:
        if problems := soak.run(number, args.count):
            failed = True
            print(f"{root}/run-{number}:", *problems[:20], sep="\n", flush=True)
        number += 1
        if sys.stderr.isatty():
            print(f"\r{soak.made}/{args.count}", end="\r", file=sys.stderr, flush=True)
    print(soak.table())
    if not failed:
        shutil.rmtree(root)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
