"""Fail the n-th file operation of a run, of `lm.prepare` and of an export, then rerun each.

    python -m tests.sweep [run|resume|run-in-bucket|resume-in-bucket|tokenize|prepare|replace|export
    ...] [--count N] [--seed S] [--fault kill|ENOSPC|...]

Runs have their checkpoints on a disk, or in a bucket of a local server, with a working copy on a
disk. N operations of each are chosen at random (default: all), and a fault for each. A killed
process leaves every complete checkpoint or dataset intact. An error ends the command with at most
three lines on stderr and exit code 1 or 2, or does not matter: then the result is complete. The
same command again ends with the files of one that nothing disturbed.

Exit code 1 after anything else, or more than 30 s.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from matplotlib.figure import Figure

from lm.errors import command
from tests.support.forked import PRELOADED
from tests.support.servers import serving_s3, use_s3

FAULTS = {"kill": "kill"} | {
    name: str(getattr(errno, name)) for name in ("ENOSPC", "EIO", "EROFS", "EMFILE")
}
SOURCE = Path(__file__).parent / "faults.c"
TIMEOUT = 30


def preload(folder: Path) -> dict[str, str]:
    """Compile the library that fails operations below `folder`; return the variables to load it."""
    library, counter = folder / "faults.so", folder / "counter"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl"], check=True)
    counter.write_bytes(bytes(8192))
    return {"LD_PRELOAD": str(library), "FAULT_COUNTER": str(counter)}


def operations(counter: Path) -> int:
    """Return the number of operations so far."""
    return struct.unpack("<q", counter.read_bytes()[:8])[0]


def failed_operation(counter: Path) -> str:
    """Return the name and the path of the operation that failed."""
    return counter.read_bytes()[8:].rstrip(b"\0").decode()


def save_empty_picture(_: Any, path: Any, **__: Any) -> None:
    """Write a picture as Matplotlib does, but without drawing it, which is half of a run's time."""
    path.write_bytes(b"drawn")


# ---- what is disturbed: a command, run in a folder, and its result


class Scenario(NamedTuple):
    prepare: Callable[[], int]
    command: Callable[[], int]
    result: Callable[[Path], Any]
    intact: Callable[[Path], bool]
    """whether what was complete before is still complete"""
    in_bucket: bool = False
    """whether what is in the bucket below the folder's name belongs to it, too"""


def train(*overrides: str) -> int:
    import fsdp

    return fsdp.main(["--config", "test.yaml", *overrides])


def write_config() -> int:
    from tests.support.hyperparameters import EXACT_RUN

    run = EXACT_RUN | {
        "n_layers": 1,
        "checkpoint_rate": 1,
        "keep_checkpoints": 1,
        "validation_rate": 1,
    }
    Path("test.yaml").write_text(json.dumps({"hyperparameters": run}))
    return 0


def trained(folder: Path) -> Any:
    from lm.checkpoint.manifest import read_manifest
    from tests.support.runs import checkpoints_by_step, read_exact_metrics

    last = read_manifest(checkpoints_by_step(folder)[max(checkpoints_by_step(folder))])
    return (
        last.step,
        last.files,
        read_exact_metrics(folder),
        read_exact_metrics(folder, "validation"),
    )


def verified(folder: Path) -> bool:
    """Whether there is an intact checkpoint."""
    from lm.checkpoint.contents import verify
    from lm.checkpoint.manifest import CheckpointError, read_manifest
    from tests.support.runs import checkpoints_by_step

    for path in checkpoints_by_step(folder).values():
        with suppress(CheckpointError):
            verify(path, read_manifest(path))
            return True
    return False


def train_in_bucket(*overrides: str) -> int:
    from lm.storage import lease

    lease.LEASE_SECONDS = 2.0  # for which the run after a killed one waits
    return train(f"checkpoint_storage=s3://bucket/{Path.cwd().name}", *overrides)


def bucket() -> Any:
    import boto3

    return boto3.resource("s3").Bucket("bucket")  # pyright: ignore[reportAttributeAccessIssue]


def copy_in_bucket(source: str, target: str) -> None:
    """Replace all below `target` by what is below `source`."""
    objects = bucket().objects
    objects.filter(Prefix=f"{target}/").delete()
    for entry in objects.filter(Prefix=f"{source}/"):
        key = target + entry.key.removeprefix(source)
        bucket().Object(key).copy_from(CopySource={"Bucket": "bucket", "Key": entry.key})


def downloaded(folder: Path) -> Path:
    """Return a copy of what the run of `folder` has in the bucket, as on a disk."""
    copy = folder.with_suffix(".bucket")
    shutil.rmtree(copy, ignore_errors=True)
    for entry in bucket().objects.filter(Prefix=f"{folder.name}/"):
        path = copy / "runs" / entry.key.removeprefix(f"{folder.name}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(entry.get()["Body"].read())
    return copy


def write_records() -> int:
    for name, n_records in (("old.jsonl", 20), ("new.jsonl", 100)):
        Path(name).write_text('{"text": "to be or not"}\n' * n_records)
    Path("in.txt").write_text("to be or not" * 100)
    Path("large").write_bytes(bytes(16 << 20))
    return 0


def tokenize(*names: str) -> int:
    """Open the data of runs, which are kept in the cache if that can be written."""
    from lm.data import tokenized
    from lm.data.tokenized import RecordOptions, TextOptions
    from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
    from lm.storage.cache import describe_files

    def run() -> int:
        opened = tokenized.tokenize([Path("in.txt")], ByteTokenizer(), TextOptions("text"))
        for name in names:
            opened += tokenized.tokenize([Path(name)], ByteTokenizer(), RecordOptions())
        describe_files([Path("large")])
        read = [tokens[:].tolist() for tokens in opened]
        Path.cwd().with_suffix(".tokens").write_text(json.dumps(read))  # which no fault disturbs
        return 0

    os.environ["XDG_CACHE_HOME"] = str(Path("cache").absolute())
    return command(run)()


def tokens_read(folder: Path) -> Any:
    return json.loads(folder.with_suffix(".tokens").read_text())


def has_entries(folder: Path) -> bool:
    """Whether the entries of `tokenize("old.jsonl")` are complete."""
    of_records = 5
    of_text = 4
    files = (folder / "cache" / "lm" / "tokens").glob("[!.]*/*")
    return len(list(files)) >= of_records + of_text


def prepare(*options: str) -> int:
    from lm.prepare import main

    os.sched_setaffinity(
        0, {min(os.sched_getaffinity(0))}
    )  # one thread, so one order of operations
    return main(["in.txt", "--tokenizer", "bytes", "--out", "out", *options])


def write_text(*lines: str) -> int:
    Path("in.txt").write_text("\n".join(lines) * 50)
    return 0


def export() -> int:
    from lm.hf.__main__ import main

    return main(["export", "checkpoint", "out"])


def make_checkpoint() -> int:
    from tests.support.checkpoints import write_checkpoint

    return not write_checkpoint(Path("checkpoint"))


def files(folder: Path) -> dict[str, bytes]:
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    return {name: content for name, content in found.items() if Path(name).name != "lock"}


def dataset(folder: Path) -> bool:
    from lm.errors import ConfigError
    from lm.storage.folder import read_manifest

    with suppress(ConfigError):
        return bool(read_manifest(folder / "out").files)
    return not (folder / "out").exists()


SPLIT = ("--validation-fraction", "0.3")
SCENARIOS = {
    "run": Scenario(
        write_config,
        lambda: train("max_steps=3", "async_checkpoint=false"),
        trained,
        lambda _: True,
    ),
    "resume": Scenario(
        lambda: write_config() or train("max_steps=1"),
        lambda: train("max_steps=3"),
        trained,
        verified,
    ),
    "run-in-bucket": Scenario(
        write_config,
        lambda: train_in_bucket("max_steps=3", "async_checkpoint=false"),
        lambda folder: trained(downloaded(folder)),
        lambda _: True,
        in_bucket=True,
    ),
    "resume-in-bucket": Scenario(
        lambda: write_config() or train_in_bucket("max_steps=1"),
        lambda: train_in_bucket("max_steps=3"),
        lambda folder: trained(downloaded(folder)),
        lambda folder: verified(downloaded(folder)),
        in_bucket=True,
    ),
    "tokenize": Scenario(
        lambda: write_records() or tokenize("old.jsonl"),
        lambda: tokenize("old.jsonl", "new.jsonl"),
        tokens_read,
        has_entries,
    ),
    "prepare": Scenario(
        lambda: write_text("To be", "or not"), lambda: prepare(*SPLIT), files, dataset
    ),
    "replace": Scenario(
        lambda: write_text("old") or prepare() or write_text("new", "text"),
        lambda: prepare("--overwrite", *SPLIT),
        files,
        dataset,
    ),
    "export": Scenario(make_checkpoint, export, files, lambda _: True),
}


# ---- one case


class Outcome(NamedTuple):
    code: int
    """minus the signal that killed it"""
    stderr: str
    timed_out: bool


def call(folder: Path, action: Callable[[], int], **variables: str) -> Outcome:
    """Run `action` in `folder` in a forked process, which need not import PyTorch again."""
    from lm.launch.process import run_and_exit

    output = folder.with_suffix(".stdout")
    errors = folder.with_suffix(".stderr")
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(folder)
        os.environ.update(variables)
        for number, path in ((1, output), (2, errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        run_and_exit(action)
    deadline = time.monotonic() + TIMEOUT
    timed_out = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
        if time.monotonic() > deadline and not timed_out:
            os.killpg(pid, signal.SIGKILL)
            timed_out = True
    return Outcome(os.waitstatus_to_exitcode(status), errors.read_text(), timed_out)


def problem(scenario: Scenario, expected: Any, folder: Path, fault: str, outcome: Outcome) -> str:
    """Return what is wrong after a fault, or "", and run the command again."""
    codes = [0, 1, 2]
    if fault == "kill":
        codes.append(-signal.SIGKILL)
    if outcome.code not in codes:
        return f"exit code {outcome.code}"
    if outcome.timed_out:
        return "a timeout"
    if "Traceback" in outcome.stderr:
        return "a traceback"
    if outcome.code > 0 and not 1 <= outcome.stderr.count("\n") <= 3:
        return "not one to three lines on stderr"
    if not scenario.intact(folder):
        return "the last complete result was lost"
    if outcome.code == 0 and scenario.result(folder) != expected:
        return "exit code 0, but another result"
    again = call(folder, scenario.command)
    was_complete = (
        outcome.code <= 0 and "already exists" in again.stderr
    )  # nothing failed, or a kill
    if again.code and not was_complete:
        return f"the rerun ended with {again.code}: {again.stderr}"
    if scenario.result(folder) != expected:
        return "the rerun has another result"
    return ""


def sweep(
    name: str, root: Path, faults: Sequence[str], count: int | None, draw: random.Random
) -> Counter[str]:
    """Disturb a scenario; return the outcomes."""
    scenario = SCENARIOS[name]
    outcomes = Counter[str]()
    base = root / f"{name}-base"
    folder = root / name
    counter = root / "counter"
    variables = {"FAULT_BELOW": f"{folder}/", "FAULT_COUNTER": str(counter)}
    base.mkdir()
    assert call(base, scenario.prepare).code == 0, base.with_suffix(".stderr").read_text()

    def disturb(at: str, fault: str) -> Outcome:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        if scenario.in_bucket:
            copy_in_bucket(base.name, folder.name)
        counter.write_bytes(bytes(8192))
        return call(folder, scenario.command, FAULT_AT=at, FAULT_WITH=FAULTS[fault], **variables)

    outcome = disturb("0", faults[0])
    assert outcome.code == 0, outcome.stderr
    expected = scenario.result(folder)
    total = operations(counter)
    for fault in faults:
        moments = []
        for n in range(1, total + 1):
            moments.append(f"{n}")
            if fault != "kill":
                moments.append(f"{n}+")  # this operation and all after it
        n_chosen = len(moments) if count is None else min(count, len(moments))
        for at in draw.sample(moments, n_chosen):
            outcome = disturb(at, fault)
            what = failed_operation(counter).replace(f"{folder}/", "")
            found = problem(scenario, expected, folder, fault, outcome)
            result = f"exit code {outcome.code}"
            if found:
                result = "failed"
                print(f"{name}, {fault} at {at} of {total} ({what}): {found}", flush=True)
                print(outcome.stderr, flush=True)
            outcomes[f"{fault}: {result}"] += 1
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sweep", description="Fail file operations."
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument(
        "--count", type=int, metavar="N", help="operations of each scenario and fault (all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(%(default)s)")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="default: each")
    args = parser.parse_args(arguments)
    if "LD_PRELOAD" not in os.environ:
        with tempfile.TemporaryDirectory() as root:
            command = [sys.executable, "-m", "tests.sweep", *sys.argv[1:]]
            return subprocess.call(
                command, env=os.environ | preload(Path(root)) | {"OMP_NUM_THREADS": "1"}
            )
    for module in ("fsdp", *PRELOADED):  # once, for all children
        importlib.import_module(module)
    setattr(Figure, "savefig", save_empty_picture)  # noqa: B010 - it takes fewer arguments
    root = Path(os.environ["FAULT_COUNTER"]).parent
    draw = random.Random(args.seed)
    failed = False
    names = args.scenarios or list(SCENARIOS)
    with ExitStack() as stack:
        if any(SCENARIOS[name].in_bucket for name in names):
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            use_s3(patch, stack.enter_context(serving_s3()), "")
        for name in names:
            outcomes = sweep(name, root, args.fault or list(FAULTS), args.count, draw)
            failed |= any("failed" in what for what in outcomes)
            counts = [f"{number} {what}" for what, number in sorted(outcomes.items())]
            print(f"{name}: {', '.join(counts)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
