"""Signals, killed and hung ranks, and inf or NaN in a run: it ends in time and names the cause, or continues."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lm import config, optim, parallelize
from lm.checkpoint.manifest import read_manifest, verify
from lm.metrics import accumulator
from lm.runtime import watchdog
from lm.runtime.world import World
from model import Transformer
from tests.conftest import Message
from tests.support import ROOT, TINY, checkpoints, exact, reports, run, run_ranks, start

RUN = TINY | {
    "dropout": 0.1,
    "lr": 1e-2,
    "total_batch_size": 4,
    "report_rate": 1,
    "validation_batches": 1,
    "checkpoint_rate": 2,
    "amp_dtype": None,
    "max_steps": 1000,
}


class Job:
    """A run of two ranks; the test disturbs it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._descendants: list[psutil.Process] = []

    def ranks(self) -> dict[int, psutil.Process]:
        """Wait until both ranks have started; return their processes."""
        while self.process.poll() is None:
            self._descendants = psutil.Process(self.process.pid).children(recursive=True)
            python = [p for p in self._descendants if {"script.py", str(ROOT / "fsdp.py")} & {*p.cmdline()}]
            found = {int(p.environ().get("RANK", -1)): p for p in python}
            if {0, 1} <= found.keys():
                return found
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

    def finish(self, timeout: float = 60) -> tuple[int, str]:
        """Wait for the end of the run, which leaves no process; return the exit code and the rest of stderr."""
        _, stderr = self.process.communicate(timeout=timeout)
        assert not self.remaining()
        return self.process.returncode, stderr

    def remaining(self) -> list[psutil.Process]:
        return [p for p in self._descendants if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


Start = Callable[..., subprocess.Popen[str]]


@contextmanager
def started(folder: Path, *overrides: str, start: Start = start) -> Iterator[Job]:
    job = Job(start(folder, *overrides, ranks=2, config=RUN))
    try:
        yield job
    finally:
        for process in job.remaining():
            process.kill()
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate()


def scripted(script: str) -> Start:
    """Start fsdp.py after the Python lines `script`, which can use `rank`."""

    def start_script(folder: Path, *overrides: str, ranks: int, config: dict[str, Any]) -> subprocess.Popen[str]:
        (folder / "test.yaml").write_text(json.dumps({"hyperparameters": config}))
        before = "import os, sys\nimport fsdp\nrank = int(os.environ['RANK'])\n"
        (folder / "script.py").write_text(f"{before}{script}\nsys.exit(fsdp.main())\n")
        command = [sys.executable, "-m", "lm.launch", "--nproc", str(ranks), "script.py", "--config", "test.yaml"]
        return popen([*command, *overrides], folder)

    return start_script


def torchrun(*options: str) -> Start:
    def start_torchrun(folder: Path, *overrides: str, ranks: int, config: dict[str, Any]) -> subprocess.Popen[str]:
        (folder / "test.yaml").write_text(json.dumps({"hyperparameters": config}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return popen([*command, *options, str(ROOT / "fsdp.py"), "--config", "test.yaml", *overrides], folder)

    return start_torchrun


def popen(command: list[str], folder: Path) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def verified(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, after verifying each."""
    found = checkpoints(folder)
    for path in found.values():
        verify(path, read_manifest(path))
    return found


# ---- signals --------------------------------------------------------------------------------------------


def test_a_second_signal_during_the_save_does_not_damage_the_checkpoint(tmp_path: Path) -> None:
    with started(tmp_path, "checkpoint_rate=1000") as job:
        job.wait_for("training")
        job.process.terminate()
        folder = tmp_path / "runs" / "test" / "checkpoints"
        while not any(folder.iterdir()) and job.process.poll() is None:
            time.sleep(0.0005)
        job.process.terminate()
        code, stderr = job.finish()
    assert code == 0, stderr
    assert list(verified(tmp_path)) == [max(reports(tmp_path))]


def test_sigusr2_to_one_rank_stops_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    with started(tmp_path, "checkpoint_rate=1000") as job:
        job.wait_for("training")
        job.ranks()[1].send_signal(signal.SIGUSR2)
        code, stderr = job.finish()
    assert code == 0, stderr
    assert list(verified(tmp_path)) == [max(reports(tmp_path))]


@pytest.mark.parametrize("seconds", [0.5, 2.5])
def test_a_signal_during_startup_ends_the_run_without_a_traceback(seconds: float, tmp_path: Path) -> None:
    with started(tmp_path) as job:
        job.ranks()
        time.sleep(seconds)
        job.process.terminate()
        code, stderr = job.finish()
    assert code in (0, 128 + signal.SIGTERM)
    assert "Traceback" not in stderr


def test_a_signal_during_a_long_validation_ends_the_run_after_it_with_a_checkpoint(tmp_path: Path) -> None:
    with started(tmp_path, "total_batch_size=40", "validation_batches=10") as job:
        job.wait_for("training")  # then each rank validates on 200 samples
        job.process.terminate()
        assert len(job.wait_for("validation")) == 1
        code, stderr = job.finish()
    assert code == 0, stderr
    assert list(verified(tmp_path)) == [2]


# ---- killed, stopped and hung ranks -----------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_ends_the_run_within_two_seconds(
    victim: int, tmp_path: Path, message: Message
) -> None:
    with started(tmp_path) as job:
        job.wait_for("checkpoint")
        ranks = job.ranks()
        ranks[victim].kill()
        lines = job.wait_for(f"rank {victim} was killed by SIGKILL", stderr=True)
        assert not psutil.wait_procs([ranks[1 - victim]], timeout=2)[1]
        code, stderr = job.finish()
    assert code == 128 + signal.SIGKILL
    assert "Traceback" not in "".join(lines) + stderr
    message(lines[-1])
    assert verified(tmp_path)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_within_the_timeout_and_five_seconds(
    victim: int, tmp_path: Path, message: Message
) -> None:
    with started(tmp_path, "collective_timeout=3") as job:
        job.wait_for("checkpoint")
        job.ranks()[victim].suspend()
        suspended = time.monotonic()
        code, stderr = job.finish()
    assert time.monotonic() - suspended < 3 + 5
    assert code == 1
    (line,) = [line for line in stderr.splitlines() if line.startswith(f"rank {1 - victim} ")]
    assert f"rank {victim}" in line
    assert "Traceback" not in stderr
    message(line, mask=r" \(last completed step \d+\)")
    assert verified(tmp_path)


@pytest.mark.parametrize("hang", ["time.sleep(1000)", "ctypes.PyDLL(None).sleep(1000)"], ids=["sleep", "hold the GIL"])
def test_a_hung_rank_is_named_and_prints_its_stack(hang: str, tmp_path: Path, message: Message) -> None:
    script = f"""
import ctypes, time
from lm.data.loader import Loader

training = Loader.training

def hanging_loader(self, start):
    for step, batch in enumerate(training(self, start), start):
        if rank == 1 and step == 3:
            {hang}
        yield batch

Loader.training = hanging_loader
"""
    with started(tmp_path, "collective_timeout=3", start=scripted(script)) as job:
        job.wait_for("validation  step    3")
        job.ranks()
        hung = time.monotonic()
        code, stderr = job.finish()
    assert time.monotonic() - hung < 3 + 5
    assert code == 1
    assert "in hanging_loader" in stderr
    line = next(line for line in stderr.splitlines() if line.startswith("rank 0 "))
    message(line, mask=r" \(last completed step \d+\)")


@pytest.mark.parametrize(
    ("now", "ranks"),
    [
        ([(7, 9, True, False), (7, 5, False, False)], "rank 1"),
        ([(7, 9, True, False), (6, 9, False, False)], "rank 1"),
        ([(7, 9, True, False), (7, 5, False, True)], "rank 1"),
        ([(7, 5, True, False), (7, 5, False, False)], "[0, 1]"),
        ([(7, 9, True, False), (7, 9, True, False)], "every rank"),
    ],
)
def test_the_straggler_is_a_rank_without_heartbeats_or_else_one_outside_of_collectives(
    now: list[tuple[Any, ...]], ranks: str, message: Message
) -> None:
    before = [watchdog.Heartbeat(7, 5, True, False), watchdog.Heartbeat(7, 5, False, False)]
    straggler = watchdog.find_straggler(before, [watchdog.Heartbeat(*values) for values in now])
    assert ranks in straggler
    message(straggler)


def test_out_of_memory_names_hyperparameters_that_reduce_memory(tmp_path: Path, message: Message) -> None:
    done = run(tmp_path, "vocab_size=4000000000")
    assert done.returncode == 1
    message(done.stderr, mask=r"\(.*(?=\); reduce)")


def test_a_second_run_in_the_same_directory_is_refused_and_names_the_first(tmp_path: Path) -> None:
    first = start(tmp_path, config=RUN)
    try:
        assert first.stdout is not None
        first.stdout.readline()
        second = run(tmp_path, config=RUN)
        assert second.returncode == 1
        assert f"process {first.pid} on " in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        first.terminate()
        _, stderr = first.communicate(timeout=60)
    assert first.returncode == 0, stderr


# ---- inf and NaN --------------------------------------------------------------------------------------


def train_three_steps(world: World, how: str) -> dict[str, Any]:
    """Make the loss or the gradient of rank 1 non-finite in the second step; return what changed in each step."""
    hp = config.read({"hyperparameters": RUN | {"grad_clip": 1.0}}, [], "test")
    with torch.device("meta"):
        model = Transformer(hp)
    mesh = world.device_mesh(parallelize.mesh_dims(hp, world.size, world.size))
    model = parallelize.parallelize(model, hp, mesh, None, 1)
    optimizer = optim.Optimizer(hp, model.named_parameters())
    meter = accumulator.MetricsAccumulator(world.device, world, 1.0, None)
    tokens = torch.randint(64, (1, 17), generator=torch.Generator().manual_seed(world.rank))

    def state() -> dict[str, torch.Tensor]:
        live = dict(model.named_parameters()) | optimizer.state_dict()
        local = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in live.items()}  # type: ignore[operator]
        return {name: tensor.detach().clone() for name, tensor in local.items()}

    states = [state()]
    norms = []
    for step in range(3):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        if step == 1 and world.rank == 1:
            if how == "loss":
                loss = loss * math.nan
            else:
                loss.register_hook(lambda gradient: gradient * math.inf)
        loss.backward()
        norm, skipped = optimizer.clip_grad_norm(torch.ones(()))
        optimizer.step(1e-2)
        optimizer.zero_grad()
        meter.add(loss.detach(), 32, 32, norm, skipped)
        norms.append(norm.item())
        states.append(state())
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(states)]
    finite = all(tensor.isfinite().all() for tensor in states[-1].values())
    return {"same": same, "finite": finite, "norms": norms, "metrics": meter.report()[0]}


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_nan_or_inf_on_one_rank_makes_all_ranks_skip_the_step_without_changing_a_bit(how: str) -> None:
    for rank in run_ranks(2, train_three_steps, how):
        assert rank["same"] == [False, True, False]
        assert rank["finite"]
        assert [math.isfinite(norm) for norm in rank["norms"]] == [True, False, True]
        assert rank["metrics"]["skipped_steps"] == 1
        assert all(math.isfinite(value) for value in rank["metrics"].values())


def test_a_run_with_a_skipped_step_reports_finite_numbers_and_continues(tmp_path: Path) -> None:
    script = """
from model import Transformer

forward = Transformer.forward
calls = 0

def forward_nan(self, *micro):
    global calls
    calls += self.training
    return forward(self, *micro) * (float("nan") if rank == 1 and self.training and calls in (5, 6) else 1)

Transformer.forward = forward_nan
"""
    with started(tmp_path, "max_steps=6", start=scripted(script)) as job:
        code, stderr = job.finish()
    assert code == 0, stderr
    text = (tmp_path / "runs" / "test" / "metrics.jsonl").read_text()
    assert not any(word in text for word in ("NaN", "Infinity"))
    found = reports(tmp_path)
    assert {step: line["skipped_steps"] for step, line in found.items()} == {1: 0, 2: 0, 3: 1, 4: 0, 5: 0, 6: 0}
    assert [step for step, line in found.items() if "loss" not in line] == [3]
    validations = reports(tmp_path, "validation")
    assert validations[3]["loss"] == validations[2]["loss"] != validations[4]["loss"]


# ---- under torchrun -----------------------------------------------------------------------------------


def test_torchrun_forwards_sigterm_and_the_run_saves_a_complete_checkpoint(tmp_path: Path) -> None:
    with started(tmp_path, "checkpoint_rate=1000", start=torchrun()) as job:
        job.wait_for("training")
        job.ranks()
        job.process.terminate()
        job.finish()
    assert list(verified(tmp_path)) == [max(reports(tmp_path))]


def test_a_killed_rank_ends_torchrun(tmp_path: Path) -> None:
    with started(tmp_path, start=torchrun()) as job:
        job.wait_for("checkpoint")
        job.ranks()[1].kill()
        code, stderr = job.finish()
    assert code == 1
    assert re.search(r"^rank 0 \(last completed step \d+\): .* rank 1 \(", stderr, re.MULTILINE)
    assert verified(tmp_path)


def test_a_run_that_torchrun_restarts_ends_with_the_same_losses(tmp_path: Path) -> None:
    uninterrupted = run(tmp_path / "uninterrupted", "max_steps=8", ranks=2, config=RUN)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    (tmp_path / "killed").mkdir()
    with started(tmp_path / "killed", "max_steps=8", start=torchrun("--max-restarts", "1")) as job:
        job.wait_for("checkpoint")
        job.ranks()[0].kill()
        job.wait_for("resumed")
        code, stderr = job.finish()
    assert code == 0, stderr
    assert exact(tmp_path / "killed") == exact(tmp_path / "uninterrupted")
    assert 8 in verified(tmp_path / "killed")
