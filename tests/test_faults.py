"""What goes wrong with processes is named, ends in time, and costs no more than it must."""

from __future__ import annotations

import itertools
import json
import math
import os
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
from tests.support import ROOT, TINY, checkpoints, reports, run, run_ranks, start

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
EXACT = ("loss", "grad_norm", "lr", "batches", "tokens", "skipped_steps")


class Disturbed:
    """A run of two ranks, to be disturbed; nothing of it is left in the end."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self.process = process
        self._launcher = psutil.Process(process.pid)
        self.family: list[psutil.Process] = []

    def ranks(self) -> dict[int, psutil.Process]:
        while self.process.poll() is None:
            self.family = self._launcher.children(recursive=True)
            with_rank = [p for p in self.family if "fsdp.py" in " ".join(p.cmdline()) or "script.py" in p.cmdline()]
            found = {int(p.environ().get("RANK", -1)): p for p in with_rank}
            if {0, 1} <= found.keys():
                return found
            time.sleep(0.05)
        raise AssertionError(f"ended without ranks:\n{self.finish()[2]}")

    def wait_for(self, word: str, *, errors: bool = False) -> list[str]:
        """Read the output, or the errors, up to the first line that begins with `word`."""
        stream = self.process.stderr if errors else self.process.stdout
        assert stream is not None
        read = []
        for line in stream:
            read.append(line)
            if line.startswith(word):
                return read
        raise AssertionError(f"ended without {word}:\n{''.join(read)}\n{self.finish()[2]}")

    def finish(self, timeout: float = 60) -> tuple[int, str, str]:
        """Exit code, the rest of the output, and the errors, once all is over."""
        output, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, output, errors

    def left(self) -> list[psutil.Process]:
        return [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


Start = Callable[..., subprocess.Popen[str]]


@contextmanager
def disturbed(folder: Path, *overrides: str, start: Start = start) -> Iterator[Disturbed]:
    job = Disturbed(folder, start(folder, *overrides, ranks=2, config=RUN))
    try:
        yield job
    finally:
        for process in job.left():
            process.kill()
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate()


def scripted(script: str) -> Start:
    """A way to start the program with a few lines before it, which know `rank`."""

    def begin(folder: Path, *overrides: str, ranks: int, config: dict[str, Any]) -> subprocess.Popen[str]:
        (folder / "test.yaml").write_text(json.dumps({"hyperparameters": config}))
        before = "import os, sys\nimport fsdp\nrank = int(os.environ['RANK'])\n"
        (folder / "script.py").write_text(f"{before}{script}\nsys.exit(fsdp.main())\n")
        command = [sys.executable, "-m", "lm.launch", "--nproc", str(ranks), "script.py", "--config", "test.yaml"]
        return popen([*command, *overrides], folder)

    return begin


def torchrun(*options: str) -> Start:
    def begin(folder: Path, *overrides: str, ranks: int, config: dict[str, Any]) -> subprocess.Popen[str]:
        (folder / "test.yaml").write_text(json.dumps({"hyperparameters": config}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return popen([*command, *options, str(ROOT / "fsdp.py"), "--config", "test.yaml", *overrides], folder)

    return begin


def popen(command: list[str], folder: Path) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def whole(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run, each of them verified."""
    found = checkpoints(folder)
    for path in found.values():
        verify(path, read_manifest(path))
    return found


def exact(folder: Path) -> dict[int, dict[str, Any]]:
    return {step: {key: line[key] for key in EXACT if key in line} for step, line in reports(folder).items()}


# ---- told to stop -------------------------------------------------------------------------------------


def test_running_out_of_memory_names_what_would_help(tmp_path: Path) -> None:
    done = run(tmp_path, "vocab_size=4000000000")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("rank 0: out of memory (")
    assert "smaller batch_size" in line
    assert "cpu_offload: true" in line


def test_a_second_signal_during_the_save_does_not_spoil_it(tmp_path: Path) -> None:
    with disturbed(tmp_path, "checkpoint_rate=1000") as job:
        job.wait_for("training")
        job.process.terminate()
        folder = tmp_path / "runs" / "test" / "checkpoints"
        while not any(folder.iterdir()) and job.process.poll() is None:
            time.sleep(0.0005)
        job.process.terminate()
        code, output, errors = job.finish()
    assert code == 0, errors
    (step,) = whole(tmp_path)
    assert f"stopped behind step {step} of 1000" in output


def test_sigusr2_to_one_rank_stops_all_behind_the_same_step(tmp_path: Path) -> None:
    with disturbed(tmp_path, "checkpoint_rate=1000") as job:
        job.wait_for("training")
        job.ranks()[1].send_signal(signal.SIGUSR2)
        code, _, errors = job.finish()
    assert code == 0, errors
    (step,) = whole(tmp_path)
    assert max(reports(tmp_path)) == step


@pytest.mark.parametrize("seconds", [0.5, 2.5])
def test_a_run_that_is_told_to_stop_as_it_starts_ends_without_a_traceback(seconds: float, tmp_path: Path) -> None:
    with disturbed(tmp_path) as job:
        job.ranks()
        time.sleep(seconds)
        job.process.terminate()
        code, _, errors = job.finish()
        assert code in (0, 128 + signal.SIGTERM)
        assert "Traceback" not in errors
        assert not job.left()


def test_a_run_that_is_told_to_stop_during_a_long_validation_saves_and_ends_with_0(tmp_path: Path) -> None:
    with disturbed(tmp_path, "total_batch_size=40", "validation_batches=10") as job:
        job.wait_for("training")  # behind it, each rank validates with 200 samples
        job.process.terminate()
        before = job.wait_for("validation")
        code, _, errors = job.finish()
    assert code == 0, errors
    assert len(before) == 1
    assert list(whole(tmp_path)) == [2]


# ---- killed, stopped, hung ----------------------------------------------------------------------------


def seconds_to_end(job: Disturbed) -> tuple[int, str, float]:
    """Wait for the end of `job`, which leaves no process: its exit code, what it said, and how long that took."""
    began = time.monotonic()
    code, _, errors = job.finish()
    seconds = time.monotonic() - began
    assert not job.left()
    print(f"{seconds:.2f} s")
    return code, errors, seconds


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_all_is_over_within_two_seconds(victim: int, tmp_path: Path) -> None:
    with disturbed(tmp_path) as job:
        job.wait_for("checkpoint")
        ranks = job.ranks()
        ranks[victim].kill()
        said = job.wait_for(f"rank {victim} was killed by SIGKILL; stopping the others", errors=True)
        assert not psutil.wait_procs([ranks[1 - victim]], timeout=2)[1]
        code, _, errors = job.finish()
        assert not job.left()
    assert code == 128 + signal.SIGKILL
    assert "Traceback" not in "".join(said) + errors
    assert whole(tmp_path)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_within_the_timeout_and_five_seconds(victim: int, tmp_path: Path) -> None:
    timeout = 3
    with disturbed(tmp_path, f"collective_timeout={timeout}") as job:
        job.wait_for("checkpoint")
        job.ranks()[victim].suspend()
        code, errors, seconds = seconds_to_end(job)
    assert seconds < timeout + 5
    assert code == 1
    assert f"waited {timeout} s (collective_timeout) for another: rank {victim} does not answer" in errors
    assert "Traceback" not in errors
    assert whole(tmp_path)


@pytest.mark.parametrize(
    ("hang", "named"),
    [
        ("time.sleep(1000)", "rank 1 did not come, behind step 3"),
        ("ctypes.PyDLL(None).sleep(1000)", "rank 1 does not answer"),  # keeps the interpreter to itself
    ],
)
def test_a_rank_that_hangs_is_named_and_prints_where(hang: str, named: str, tmp_path: Path) -> None:
    script = f"""
import ctypes, time
from lm.data.loader import Loader

training = Loader.training

def goes_no_further(self, start):
    for step, batch in enumerate(training(self, start), start):
        if rank == 1 and step == 3:
            {hang}
        yield batch

Loader.training = goes_no_further
"""
    timeout = 3
    with disturbed(tmp_path, f"collective_timeout={timeout}", start=scripted(script)) as job:
        job.wait_for("validation  step    3")
        job.ranks()
        code, errors, seconds = seconds_to_end(job)
    assert seconds < timeout + 5
    assert code == 1
    assert named in errors
    assert "in goes_no_further" in errors


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (
            [(7, 9, True, False), (7, 5, False, False)],
            "rank 1 does not answer",
        ),
        ([(7, 9, True, False), (6, 9, False, False)], "rank 1 did not come, behind step 6"),
        ([(7, 9, True, False), (7, 5, False, True)], "rank 1 did not come, behind step 7"),
        ([(7, 9, True, False), (7, 9, True, False)], "all ranks wait for one another"),
    ],
)
def test_who_is_silent_is_to_blame_or_else_who_waits_for_none(now: list[tuple[Any, ...]], verdict: str) -> None:
    before = [watchdog.Heartbeat(7, 5, True, False), watchdog.Heartbeat(7, 5, False, False)]
    assert watchdog.find_straggler(before, [watchdog.Heartbeat(*post) for post in now]).startswith(verdict)


def test_a_second_run_in_the_same_folder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    first = start(tmp_path, config=RUN)
    try:
        assert first.stdout is not None
        first.stdout.readline()
        second = run(tmp_path, config=RUN)
        assert second.returncode == 1
        assert f"runs/test: held by process {first.pid} on " in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        first.terminate()
        _, errors = first.communicate(timeout=60)
    assert first.returncode == 0, errors


# ---- inf and NaN --------------------------------------------------------------------------------------


def spoil(world: World, how: str) -> dict[str, Any]:
    """A good step, one that rank 1 spoils, and another good one; what happened to the state and the metrics."""
    hp = config.read({"hyperparameters": RUN | {"grad_clip": 1.0}}, [], "test")
    with torch.device("meta"):
        model = Transformer(hp)
    shape = parallelize.mesh_shape(hp, world.size, world.size)
    model = parallelize.parallelize(model, hp, world.mesh(*shape), None, 1)
    optimizer = optim.Optimizer(hp, model.named_parameters())
    scale = torch.ones(())
    meter = accumulator.MetricsAccumulator(world.device, world.all_gather_object, 1.0, None)
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
        norm, skipped = optimizer.step(1e-2, scale)
        meter.add(loss.detach(), 32, 32, norm, skipped)
        norms.append(norm.item())
        states.append(state())
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(states)]
    finite = all(tensor.isfinite().all() for tensor in states[-1].values())
    return {"same": same, "finite": finite, "norms": norms, "metrics": meter.report()[0]}


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_nan_or_inf_on_one_rank_makes_all_skip_the_step_and_changes_not_a_bit(how: str) -> None:
    for rank in run_ranks(2, spoil, how):
        assert rank["same"] == [False, True, False]
        assert rank["finite"]
        assert [math.isfinite(norm) for norm in rank["norms"]] == [True, False, True]
        assert rank["metrics"]["skipped_steps"] == 1
        assert all(math.isfinite(value) for value in rank["metrics"].values())


def test_a_run_with_skipped_steps_reports_numbers_only_and_goes_on(tmp_path: Path) -> None:
    script = """
from model import Transformer

forward = Transformer.forward
calls = 0

def spoiled(self, *micro):
    global calls
    calls += self.training
    return forward(self, *micro) * (float("nan") if rank == 1 and self.training and calls in (5, 6) else 1)

Transformer.forward = spoiled
"""
    with disturbed(tmp_path, "max_steps=6", start=scripted(script)) as job:
        code, _, errors = job.finish()
    assert code == 0, errors
    text = (tmp_path / "runs" / "test" / "metrics.jsonl").read_text()
    assert not any(word in text for word in ("NaN", "Infinity"))
    found = reports(tmp_path)
    assert {step: line["skipped_steps"] for step, line in found.items()} == {1: 0, 2: 0, 3: 1, 4: 0, 5: 0, 6: 0}
    assert [step for step, line in found.items() if "loss" not in line] == [3]
    validations = reports(tmp_path, "validation")
    assert validations[3]["loss"] == validations[2]["loss"] != validations[4]["loss"]


# ---- under torchrun -----------------------------------------------------------------------------------


def test_torchrun_passes_sigterm_on_and_a_whole_checkpoint_is_left(tmp_path: Path) -> None:
    with disturbed(tmp_path, "checkpoint_rate=1000", start=torchrun()) as job:
        job.wait_for("training")
        job.ranks()
        job.process.terminate()
        _, output, errors = job.finish()
        assert not job.left()
    (step,) = whole(tmp_path)
    assert f"stopped behind step {step} of 1000" in output, errors


def test_a_killed_rank_ends_torchrun(tmp_path: Path) -> None:
    with disturbed(tmp_path, start=torchrun()) as job:
        job.wait_for("checkpoint")
        job.ranks()[1].kill()
        code, _, errors = job.finish()
        assert not job.left()
    assert code == 1
    assert "rank 1 does not answer" in errors
    assert whole(tmp_path)


def test_torchrun_starts_a_broken_run_again_and_it_ends_with_the_same_losses(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", "max_steps=8", ranks=2, config=RUN)
    assert straight.returncode == 0, straight.stderr
    (tmp_path / "broken").mkdir()
    with disturbed(tmp_path / "broken", "max_steps=8", start=torchrun("--max-restarts", "1")) as job:
        job.wait_for("checkpoint")
        job.ranks()[0].kill()
        code, output, errors = job.finish()
    assert code == 0, errors
    assert "going on from checkpoint" in output
    assert exact(tmp_path / "broken") == exact(tmp_path / "straight")
    assert 8 in whole(tmp_path / "broken")
