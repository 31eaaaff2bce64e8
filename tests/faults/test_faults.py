"""After signals, killed or hung ranks, inf or NaN, a run names the cause and ends, or continues."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from lm.checkpoint.contents import verify
from lm.checkpoint.manifest import read_manifest
from lm.launch.spawn import reserve_port
from lm.runtime.stop_signals import REPEAT_SECONDS
from tests.soak import soak
from tests.support import PATIENCE, REPOSITORY
from tests.support.forked import start_python
from tests.support.hyperparameters import EXACT_RUN
from tests.support.runs import (
    checkpoints_by_step,
    read_exact_metrics,
    read_reports,
    run_fsdp,
    start_fsdp,
)

RUN = EXACT_RUN | {"total_batch_size": 4, "checkpoint_rate": 2, "max_steps": 1000}


class Job:
    """A run of two ranks; the test disturbs it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._descendants: list[psutil.Process] = []

    def ranks(self) -> dict[int, psutil.Process]:
        """Wait until the launcher has started both ranks; return their processes."""
        while self.process.poll() is None:
            self._descendants = psutil.Process(self.process.pid).children()
            if len(self._descendants) == 2:
                return dict(enumerate(sorted(self._descendants, key=lambda rank: rank.pid)))
            time.sleep(0.05)
        raise AssertionError(f"ended before its ranks started:\n{self.finish()[1]}")

    def wait_for(self, text: str, *, stderr: bool = False) -> list[str]:
        """Return the lines of stdout or stderr up to the first one that starts with `text`."""
        stream = self.process.stderr if stderr else self.process.stdout
        assert stream is not None
        lines = []
        for line in stream:
            lines.append(line)
            if line.startswith(text):
                return lines
        raise AssertionError(f"ended before {text!r}:\n{''.join(lines)}\n{self.finish()[1]}")

    def finish(self) -> tuple[int, str]:
        """Wait for the end of the run; return the exit code and the rest of stderr.

        No process is left.
        """
        _, stderr = self.process.communicate(timeout=PATIENCE)
        assert not self.remaining()
        return self.process.returncode, stderr

    def remaining(self) -> list[psutil.Process]:
        return [
            p for p in self._descendants if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        ]


@contextmanager
def started(folder: Path, *overrides: str, **how: Any) -> Iterator[Job]:
    job = Job(start_fsdp(folder, *overrides, ranks=2, config=RUN, **how))
    try:
        yield job
    finally:
        for process in job.remaining():
            process.kill()
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate()


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def require_saved_where_stopped(folder: Path) -> None:
    """One checkpoint, of the last reported step or of the next: a stop prevents its report."""
    (step,) = verified(folder)
    assert step - max(read_reports(folder)) in (0, 1)


def verified(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, after verifying each."""
    found = checkpoints_by_step(folder)
    for path in found.values():
        verify(path, read_manifest(path))
    return found


# ---- signals


@pytest.mark.slow
def test_sigterm_during_the_save_keeps_the_checkpoint(tmp_path: Path) -> None:
    with started(tmp_path, "checkpoint_rate=1000") as job:
        job.wait_for("training")
        job.process.terminate()
        folder = tmp_path / "runs" / "test" / "checkpoints"
        while not any(folder.iterdir()) and job.process.poll() is None:
            time.sleep(0.0005)
        job.process.terminate()
        code, stderr = job.finish()
    assert code == 0, stderr
    require_saved_where_stopped(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_saves_and_a_second_one_quits(times: int, tmp_path: Path) -> None:
    reading, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 120))
    long_step = {"total_batch_size": 20_000} if times == 2 else {}
    (tmp_path / "test.yaml").write_text(json.dumps({"hyperparameters": RUN | long_step}))
    command = [str(REPOSITORY / "fsdp.py"), "--config", "test.yaml"]
    process = start_python(command, os.environ, cwd=tmp_path, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while (b"training" if times == 1 else b"/1000") not in shown:
        shown += os.read(reading, 1 << 16)
    process.send_signal(signal.SIGINT)
    while b"Ctrl-C again" not in shown:
        shown += os.read(reading, 1 << 16)
    if times == 2:
        time.sleep(REPEAT_SECONDS)  # a signal before that may be of the same key
        process.send_signal(signal.SIGINT)
    with suppress(OSError):  # EIO: the process has ended
        while block := os.read(reading, 1 << 16):
            shown += block
    process.wait()
    assert process.returncode == (0 if times == 1 else 128 + signal.SIGINT)
    assert bool(verified(tmp_path)) == (times == 1)


@pytest.mark.slow
@pytest.mark.parametrize("status", ["importing PyTorch", "training"])
def test_ctrl_c_under_make_saves_and_prints_no_error(status: str, tmp_path: Path) -> None:
    for name in ("Makefile", "fsdp.py", "model.py", "lm"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)  # make installs nothing
    (tmp_path / "test.yaml").write_text(json.dumps({"hyperparameters": RUN}))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvp("make", ["make", "train", "CONFIG=test.yaml", "NPROC=1", "ARGS=max_steps=100000"])
    shown = b""
    while status.encode() not in shown:
        shown += os.read(terminal, 1 << 16)
    os.write(terminal, b"\x03")
    with suppress(OSError):  # EIO: the processes have ended
        while block := os.read(terminal, 1 << 16):
            shown += block
    _, ended = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended) == -signal.SIGINT  # 130 in a shell
    assert b"***" not in shown
    assert (b"stopped after" in shown) == (status == "training")
    assert bool(verified(tmp_path)) == (status == "training")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), ("-m", "lm.launch", "--nproc", "2")], ids=["", "launch"])
def test_closed_terminal_saves(launcher: tuple[str, ...], tmp_path: Path) -> None:
    reading, terminal = os.openpty()
    (tmp_path / "test.yaml").write_text(json.dumps({"hyperparameters": RUN}))
    command = [*launcher, str(REPOSITORY / "fsdp.py"), "--config", "test.yaml"]
    process = start_python(
        [*command, "checkpoint_rate=1000", "max_steps=100000"],
        os.environ | {"PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0),  # as a login shell has it
    )
    os.close(terminal)
    try:
        shown = b""
        while b"training" not in shown:
            shown += os.read(reading, 1 << 16)
        os.close(reading)  # the kernel sends SIGHUP, and no output can be written
        assert process.wait(timeout=PATIENCE) == 0
    finally:
        process.kill()
    require_saved_where_stopped(tmp_path)


@pytest.mark.slow
def test_sigterm_during_startup_prints_no_traceback(tmp_path: Path) -> None:
    with started(tmp_path, fork=False) as job:
        job.ranks()
        time.sleep(1.5)  # they import PyTorch
        job.process.terminate()
        code, stderr = job.finish()
    assert code in (0, 128 + signal.SIGTERM)
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_sigterm_during_validation_saves_at_once(tmp_path: Path) -> None:
    with started(
        tmp_path, "total_batch_size=40", "validation_batches=1000", "checkpoint_rate=1000"
    ) as job:
        job.wait_for("training")  # then the ranks validate for many minutes
        job.process.terminate()
        code, stderr = job.finish()
    assert code == 0, stderr
    (step,) = verified(tmp_path)
    assert step == 1
    assert not read_reports(tmp_path, "validation")


# ---- killed, stopped and hung ranks


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killed_rank_ends_the_run_at_once(victim: int, tmp_path: Path) -> None:
    with started(tmp_path) as job:
        job.wait_for("checkpoint")
        ranks = job.ranks()
        ranks[victim].kill()
        lines = job.wait_for(f"rank {victim} was killed by SIGKILL", stderr=True)
        assert not psutil.wait_procs([ranks[1 - victim]], timeout=PATIENCE)[1]
        code, stderr = job.finish()
    assert code == 128 + signal.SIGKILL
    assert "Traceback" not in "".join(lines) + stderr
    assert verified(tmp_path)


HANGING_LOADER = """
import ctypes, threading, time
import torch
import torch.distributed as dist
from lm.data.loader import Loader

training = Loader.training

def hang():
    {hang}

def hanging_loader(self, start):
    for step, batch in enumerate(training(self, start), start):
        if rank == 1 and step == 3:
            {call}
        elif step == 3:
            {other}
        yield batch

Loader.training = hanging_loader
"""


@pytest.mark.slow
def test_stopped_rank_is_named_after_collective_timeout(tmp_path: Path) -> None:
    stop = "collective_timeout=8"
    hang = "while not os.path.exists('suspended'): time.sleep(0.01)"
    script = HANGING_LOADER.format(hang=hang, call="print('late'); hang()", other="pass")
    jobs: list[Job] = []
    with ExitStack() as stack:  # they wait for the timeout at the same time
        # Rank 1 asks the store of rank 0 whether others wait for it, and gets no answer.
        late = stack.enter_context(started(tmp_path / "late", stop, script=script))
        late.wait_for("late")
        late.ranks()[0].suspend()
        (tmp_path / "late" / "suspended").touch()
        for victim in (0, 1):
            job = stack.enter_context(started(tmp_path / str(victim), stop))
            job.wait_for("checkpoint")
            job.ranks()[victim].suspend()
            jobs.append(job)
        for victim, job in enumerate(jobs):
            code, stderr = job.finish()
            assert code == 1
            (line, *_) = re.findall(rf"^rank {1 - victim} .*", stderr, re.MULTILINE)
            expected = rf"timed out after 8 s .*waiting for rank {victim}\b.*does not respond"
            assert re.search(expected, line)
            assert "Traceback" not in stderr
            assert verified(tmp_path / str(victim))
        _, stderr = late.finish()
    assert re.search(
        r"^rank 1 .*timed out .*waiting for rank 0\b.*not respond", stderr, re.MULTILINE
    )
    assert "Traceback" not in stderr
    assert "stacks" not in stderr


HANG_IN_A_THREAD = (
    "thread = threading.Thread(target=hang, name='loader'); thread.start(); thread.join()"
)
WAIT_AS_NCCL = "dist.all_reduce(torch.ones(2), group=group, async_op=True)"
WAIT_AS_NCCL += "; threading.Timer(30, os.abort).start(); ctypes.CDLL(None).sleep(1000)"
"""The timeout of its group is longer, the main thread waits in C without Python's lock and without
an exception, and PyTorch aborts the process in the end."""
JOIN_GROUP = """
import datetime
join_world = fsdp.join_world

def join_world_and_group(*args):
    global group
    world = join_world(*args)
    group = dist.new_group(timeout=datetime.timedelta(seconds=100))
    return world

fsdp.join_world = join_world_and_group
"""


@pytest.mark.slow
def test_hung_rank_is_named_and_prints_its_stacks(tmp_path: Path) -> None:
    hang = "time.sleep(1000)"
    hang_with_gil = "ctypes.PyDLL(None).sleep(1000)"
    in_thread = HANGING_LOADER.format(hang=hang, call=HANG_IN_A_THREAD, other=WAIT_AS_NCCL)
    hangs = {
        HANGING_LOADER.format(hang=hang, call="hang()", other="pass"): "did not join",
        HANGING_LOADER.format(hang=hang_with_gil, call="hang()", other="pass"): "does not respond",
        in_thread + JOIN_GROUP: "did not join",
    }
    jobs: list[Job] = []
    with ExitStack() as stack:  # they wait for the timeout at the same time
        for number, script in enumerate(hangs):
            job = started(tmp_path / str(number), "collective_timeout=8", script=script)
            jobs.append(stack.enter_context(job))
            jobs[-1].wait_for("validation  step    3")
            jobs[-1].ranks()
        for job, part in zip(jobs, hangs.values(), strict=True):
            code, stderr = job.finish()
            assert code == 1
            assert "in hang\n" in stderr
            expected = rf"^rank 0 .*timed out after 8 s .*waiting for rank 1\b.*{part}"
            assert re.search(expected, stderr, re.MULTILINE), stderr


@contextmanager
def started_alone(folder: Path, **how: Any) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that no launcher ends."""
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(reserve_port())
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in ("0", "1"):
            how |= env | {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(start_fsdp(folder, "collective_timeout=8", config=RUN, **how))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_late_rank_names_itself(tmp_path: Path) -> None:
    hang = "while not os.path.exists('rank 0 has ended'): time.sleep(0.01)"
    script = HANGING_LOADER.format(hang=hang, call="hang()", other="pass")
    with started_alone(tmp_path, script=script) as ranks:
        ranks[0].communicate(timeout=PATIENCE)
        (tmp_path / "rank 0 has ended").touch()
        _, stderr = ranks[1].communicate(timeout=PATIENCE)
        assert ranks[1].returncode == 1
    assert "in hang\n" in stderr
    assert re.search(r"^rank 1 .*: other ranks waited for it longer than 8 s", stderr, re.MULTILINE)


@pytest.mark.slow
def test_out_of_memory_names_keys_that_reduce_memory(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (5 << 30, 5 << 30))"
    done = run_fsdp(tmp_path, "vocab_size=16777216", "d_model=8", script=limit, code=1)
    assert re.search(r"; parameters, moments and gradients take .* GiB per rank", done.stderr)
    assert re.match(
        r"rank 0: out of memory .*reduce memory with .*batch_size.*cpu_offload", done.stderr
    )


RANK_0_IS_LATE = """
import time
from lm.errors import ConfigError, RunError
from lm.runtime.world import World

end, sleep = os._exit, time.sleep
leave, wait_for_rank0 = World.__exit__, World.wait_for_rank0

def fail(*_):
    raise {kind}("found by all")

def tell_rank0(*arguments):
    open("rank 1 waits", "w").close()
    return {wait}(*arguments)

def wait_for_rank1(*arguments):
    while not os.path.exists("rank 1 waits"):
        sleep(0.01)
    return {late}(*arguments)

def end_visibly(code):
    os.write(2, b"rank 1 ends\\n")
    end(code)

fsdp.{failing} = fail
if rank == 0:
    {where_late} = wait_for_rank1
else:
    os._exit = end_visibly
    {where_wait} = tell_rank0
"""
IN_THE_WORLD = {"failing": "preflight", "late": "leave", "where_late": "World.__exit__"}
IN_THE_WORLD |= {"wait": "wait_for_rank0", "where_wait": "World.wait_for_rank0"}
IN_THE_START = {"failing": "read_job", "late": "fail", "where_late": "fsdp.read_job"}
IN_THE_START |= {"wait": "sleep", "where_wait": "time.sleep"}


@pytest.mark.parametrize("where", [IN_THE_WORLD, IN_THE_START], ids=["world", "start"])
@pytest.mark.parametrize(
    ("launcher", "kind", "code"),
    [
        (None, "ConfigError", 2),
        pytest.param(TORCHRUN, "ConfigError", 1, marks=pytest.mark.slow),
        pytest.param(
            ("-m", "lm.launch.torchrun", *TORCHRUN[2:]), "ConfigError", 2, marks=pytest.mark.slow
        ),
    ],
)
def test_error_of_all_ranks_is_printed_before_a_rank_ends(
    launcher: Any, kind: str, code: int, where: dict[str, str], tmp_path: Path
) -> None:
    """A launcher then stops the others: rank 0, which prints it, would be too late."""
    script = RANK_0_IS_LATE.format(kind=kind, **where)
    done = run_fsdp(tmp_path, ranks=2, script=script, launcher=launcher, code=code)
    assert done.stderr.startswith("found by all\n")


def test_error_of_the_start_that_one_rank_finds_is_printed(tmp_path: Path) -> None:
    script = """
import time
from lm.errors import ConfigError
from lm.launch import console

def read_job(*_):
    if rank == 0:
        time.sleep(1000)
    raise ConfigError("found by rank 1")

fsdp.read_job, console.SECONDS_TO_PRINT = read_job, 0
"""
    done = run_fsdp(tmp_path, ranks=2, script=script, code=2)
    assert done.stderr == "found by rank 1\n"


# ---- inf and NaN


SKIPPED = {
    "loss": "lambda loss: loss * float('nan')",
    "gradient": (
        "lambda loss: loss.register_hook(lambda gradient: gradient * float('inf')) and loss"
    ),
}
"""What makes the loss or the gradient of a micro-step non-finite."""


@pytest.mark.parametrize("how", [pytest.param("loss", marks=pytest.mark.slow), "gradient"])
def test_skip_nonfinite_skips_the_step_on_all_ranks(how: str, tmp_path: Path) -> None:
    script = f"""
from model import Transformer

forward = Transformer.forward
break_step = {SKIPPED[how]}
calls = 0

def forward_step(self, *micro_batch, **options):
    global calls
    calls += self.training
    loss = forward(self, *micro_batch, **options)
    return break_step(loss) if rank == 1 and self.training and calls in (5, 6) else loss

Transformer.forward = forward_step
"""
    every_step = ("checkpoint_rate=1", "keep_checkpoints=6", "async_checkpoint=false")
    with started(tmp_path, "max_steps=6", *every_step, script=script) as job:
        code, stderr = job.finish()
    assert code == 0, stderr
    text = (tmp_path / "runs" / "test" / "metrics.jsonl").read_text()
    assert not any(word in text for word in ("NaN", "Infinity"))
    found = read_reports(tmp_path)
    assert {step: line["skipped_steps"] for step, line in found.items()} == {
        1: 0,
        2: 0,
        3: 1,
        4: 0,
        5: 0,
        6: 0,
    }
    assert [step for step, line in found.items() if "loss" not in line] == [3]
    tensors = {
        step: read_manifest(path).files for step, path in verified(tmp_path).items()
    }  # with checksums
    assert tensors[2] == tensors[3] != tensors[4]


# ---- under torchrun


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_torchrun_forwards_signals_and_the_run_saves(
    signum: signal.Signals, tmp_path: Path
) -> None:
    with started(tmp_path, "checkpoint_rate=1000", launcher=TORCHRUN) as job:
        job.wait_for("training")
        job.ranks()
        job.process.send_signal(signum)
        job.finish()
    require_saved_where_stopped(tmp_path)


@pytest.mark.slow
def test_torchrun_ends_after_a_killed_rank(tmp_path: Path) -> None:
    with started(tmp_path, launcher=TORCHRUN) as job:
        job.wait_for("checkpoint")
        job.ranks()[1].kill()
        code, stderr = job.finish()
    assert code == 1
    assert re.search(r"^rank 0 \(last completed step \d+\): .* rank 1 \(", stderr, re.MULTILINE)
    assert verified(tmp_path)


@pytest.mark.slow
def test_torchrun_killed_makes_its_ranks_save(tmp_path: Path) -> None:
    with started(tmp_path, "checkpoint_rate=1000", launcher=TORCHRUN) as job:
        job.wait_for("training")
        ranks = list(job.ranks().values())
        job.process.kill()
        assert not psutil.wait_procs(ranks, timeout=PATIENCE)[1]
        job.finish()
    require_saved_where_stopped(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["torchrun", "rank"])
def test_nothing_is_left_of_what_is_killed_while_its_children_start(
    what: str, tmp_path: Path
) -> None:
    launcher = TORCHRUN if what == "torchrun" else None
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 400)
    data = {"dataset": "hf", "train_data": "a.jsonl", "val_data": "a.jsonl", "vocab_size": 264}
    process = start_fsdp(
        tmp_path, "data_workers=2", config=RUN | data, launcher=launcher, fork=what == "rank"
    )
    rank = psutil.Process(process.pid)
    children = []
    while len(children) < 2:
        children = rank.children()
        time.sleep(0.001)
    process.kill()
    # The children have inherited the pipes, which end with the last one.
    process.communicate(timeout=PATIENCE)


@pytest.mark.slow
def test_torchrun_restart_gives_the_same_losses(tmp_path: Path) -> None:
    call = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.kill(os.getpid(), 9)"
    script = HANGING_LOADER.format(hang="pass", call=call, other="pass")
    how: dict[str, Any] = {"config": RUN, "code": 0}
    run_fsdp(tmp_path / "uninterrupted", "max_steps=8", ranks=2, **how)
    how |= {"launcher": (*TORCHRUN, "--max-restarts", "1"), "script": script}
    # Rank 1 is killed in step 4, when the checkpoint of step 2 is complete.
    done = run_fsdp(tmp_path / "killed", "max_steps=8", "async_checkpoint=false", **how)
    assert "resumed" in done.stdout
    assert read_exact_metrics(tmp_path / "killed") == read_exact_metrics(tmp_path / "uninterrupted")
    assert 8 in verified(tmp_path / "killed")


# ---- random interruptions


@pytest.mark.slow
def test_soak_of_six_interruptions(tmp_path: Path) -> None:
    """With this seed, each kind of signal. test_untrusted.py kills runs in file operations."""
    found = soak(tmp_path, 6, seed=30, ranks=2, in_operations=False)
    lost = [steps for each in found.values() for steps in each]
    assert len(lost) == 6
    assert max(lost) <= 6
