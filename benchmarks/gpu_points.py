"""The process that measures the points of `benchmarks.gpu`.

python -m benchmarks.gpu_points OUT '{"pairs": false, "tiny": false, "names": []}'
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lm.launch.startup import setup_environment

setup_environment()  # before torch is imported

# ruff: noqa: E402
import torch
import torch.nn.functional as F
from determined import core
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import fsdp
import model
from benchmarks import gpu, gpu_pairs
from benchmarks.common import REPOSITORY, STEP, compute_shares, summarize_clocks
from benchmarks.gpu import Row
from benchmarks.gpu_pairs import (
    EIGHT_B,
    EIGHT_B_SLICE,
    FLOAT8,
    ONE_B,
    SMALL_MOMENTS,
    Pair,
    Settings,
)
from benchmarks.observer import StepObserver
from lm.checkpoint.cluster import ClusterCheckpoints
from lm.config.hyperparameters import Hyperparameters
from lm.data.config import derive_global_batch_size
from lm.determined.context import TorchDistributedContext
from lm.launch.launch import Launch
from lm.launch.process import die_with_parent, run_and_exit
from lm.metrics.device import GIB, allocation_retries, peak_flops, peak_memory_gib
from lm.runtime.rendezvous import join_world
from lm.runtime.world import World
from lm.training import float8, optim, parallelize, precision

WARMUP = 3
ROUNDS = 3
STEPS = 10
ROUND_SECONDS = 8.0
"""A round has fewer steps than `STEPS` if they take longer, but at least two."""
SAVES = 3
SAVE_RATE = 8
"""steps between saves"""
N_STEPS_WHILE_WRITING = 5
"""steps after a save before it is waited for; those between them and the next are plain steps"""
WRITE_SECONDS = 60.0
"""most time for a checkpoint"""
TEST_SECONDS = 120.0
"""most time for the GPU tests"""

RUN = {
    "max_steps": 10**6,
    "report_rate": 10**6,
    "checkpoint_rate": 10**6,
    "validation_batches": 1,
    "async_checkpoint": False,  # no host copy of the state, except where saves are measured
}
TINY = {
    "model": None,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 3,
    "d_ff": 64,
    "vocab_size": 64,
    "max_seq_len": 64,
    "n_kv_heads": 2,
    "batch_size": 1,
    "compile": False,
    "rope_scaling": None,
}

Stages = Generator[None, None, Row]
"""Resumed at the start of every step; returns what it measured, and so ends the run."""


class Bench:
    """What the points share: the only rank, its device, and sizes."""

    def __init__(self, world: World, out: Path, tiny: bool) -> None:
        self.world = world
        self.device = world.device
        self.tiny = tiny
        self._log = out.with_suffix(".log")
        self._out = out
        self._tests: subprocess.Popen[bytes] | None = None
        self._tests_start = 0.0

    def now(self) -> float:
        """Return the time in seconds, once the device has completed its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def make_hyperparameters(self, settings: Settings) -> Hyperparameters:
        values = RUN | settings
        values.pop("without", None)
        if self.tiny:
            values |= TINY
            if "total_batch_size" in values:
                values["total_batch_size"] = 2
        return Hyperparameters.from_flat(values)

    # ---- runs ------------------------------------------------------------------------------------

    def train(self, settings: Settings, stages: Callable[[Hyperparameters, Path], Stages]) -> Row:
        """Run `fsdp.execute` until a generator ends; return what it returns.

        Args:
            stages: makes the generator, from hyperparameters and the directory of checkpoints.
        """
        world = self.world
        hp = self.make_hyperparameters(settings)
        distributed = TorchDistributedContext(world.launch, world.saver, world.node)
        with (
            tempfile.TemporaryDirectory() as directory,
            _without(settings.get("without", ())),
            core.init(distributed=distributed, checkpoint_storage=directory) as context,
        ):
            steps = stages(hp, Path(directory))
            try:
                store = ClusterCheckpoints(context.checkpoint, None, writes_in_place=True)
                job = fsdp.Job(hp, None, None)
                observer = StepObserver(world, lambda _: next(steps))
                fsdp.execute(job, world, context, store, observer)
            except StopIteration as end:
                return end.value
        raise AssertionError("the run ended before it was measured")

    def measure_speed(self, settings: Settings) -> Row:
        """Measure the step of a run, and profile one."""
        return self.train(settings, self._speed)

    def _rounds(
        self,
        hp: Hyperparameters,
        _directory: Path,
        warmup: int = WARMUP,
        rounds: int = ROUNDS,
        most_steps: int = STEPS,
    ) -> Stages:
        start = self.now()
        yield
        first_step = self.now() - start
        for _ in range(warmup - 1):
            start = self.now()
            yield
        step = self.now() - start
        self.finish_tests()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        retries_before = allocation_retries(self.device)
        n_steps = 1
        if not self.tiny:
            n_steps = min(most_steps, max(2, int(ROUND_SECONDS / step)))
        seconds: list[float] = []
        with self.sampling_clocks() as clocks:
            for _ in range(rounds):
                start = self.now()
                for _ in range(n_steps):
                    yield
                seconds.append((self.now() - start) / n_steps)
        tokens = derive_global_batch_size(hp.data, 1) * hp.model.max_seq_len
        flops = tokens * hp.own_model.flops_per_token(hp.model.max_seq_len)
        peak_rate = peak_flops(self.device, precision.compute_dtype(hp.precision, self.device))
        mfu: float | None = None
        if peak_rate is not None:
            mfu = flops / statistics.median(seconds) / peak_rate
        reserved: float | None = None
        if self.device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved() / GIB
        return {
            "step_seconds": seconds,
            "n_steps": n_steps,
            "first_step": first_step,
            "tokens": tokens,
            "mfu": mfu,
            "clocks": summarize_clocks(clocks),
            "peak_gib": peak_memory_gib(self.device),
            "reserved_gib": reserved,
            "allocation_retries": allocation_retries(self.device) - retries_before,
        }

    def _speed(self, hp: Hyperparameters, directory: Path, **rounds: int) -> Stages:
        found = yield from self._rounds(hp, directory, **rounds)
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            yield  # the first profiled step pays for the start of the profiler
            start = self.now()
            with torch.profiler.record_function(STEP):
                yield
                self.now()
            step = self.now() - start
        # The shares are of these seconds, which can be more than those of other steps.
        return found | {"profiled_seconds": step, "shares": self._shares(profiler, step)}

    def _shares(self, profiler: profile, seconds: float) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "trace.json")
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
            return compute_shares(events, seconds)

    def measure_saves(self, settings: Settings) -> Row:
        """Measure steps with a save, after it, and without one, and a copy of as many bytes.

        The copy is to pinned memory.
        """
        saving = {"checkpoint_rate": SAVE_RATE, "keep_checkpoints": 1, "async_checkpoint": True}
        found = self.train(settings | saving, self._saves)
        return found | {"copy_seconds": self._copy_seconds(found["bytes"])}

    def _saves(self, _hp: Hyperparameters, directory: Path) -> Stages:
        seconds: list[float] = []  # of all steps
        write_seconds: list[float] = []
        written: set[Path] = set()
        n_bytes = 0
        n_steps = SAVE_RATE * (SAVES + 1) - 1
        while len(seconds) < n_steps:
            n_saves, n_after = divmod(len(seconds), SAVE_RATE)
            if n_saves and n_after == N_STEPS_WHILE_WRITING:
                wait_start = self.now()
                manifest = self._await_checkpoint(directory, written)
                written.add(manifest)
                files = manifest.parent.glob("*.safetensors")
                n_bytes = sum(path.stat().st_size for path in files)
                since_save = sum(seconds[-n_after:])
                write_seconds.append(since_save + self.now() - wait_start)
            start = self.now()
            yield
            seconds.append(self.now() - start)

        plain: list[float] = []
        stalls: list[float] = []
        steps_after: list[list[float]] = []
        for start_step in range(0, n_steps, SAVE_RATE):
            period = seconds[start_step : start_step + SAVE_RATE]  # its last step saves
            plain += period[N_STEPS_WHILE_WRITING : SAVE_RATE - 1]
            if len(period) == SAVE_RATE:
                stalls.append(period[-1])
            if start_step > 0:
                steps_after.append(period[:N_STEPS_WHILE_WRITING])
        plain_step = statistics.median(plain)
        return {
            "plain_step": plain_step,
            "stall_seconds": [stall - plain_step for stall in stalls],
            "steps_after": steps_after,
            "write_seconds": write_seconds,
            "bytes": n_bytes,
        }

    def _await_checkpoint(self, directory: Path, written: set[Path]) -> Path:
        """Wait for a checkpoint that is not `written`, and return its manifest."""
        deadline = time.perf_counter() + WRITE_SECONDS
        while time.perf_counter() < deadline:
            for manifest in directory.glob("*/manifest.json"):
                if manifest not in written:
                    return manifest
            time.sleep(0.01)
        advice = "choose TMPDIR on a faster disk"
        raise TimeoutError(f"a checkpoint took {WRITE_SECONDS:g} s: {advice}")

    def _copy_seconds(self, n_bytes: int) -> float:
        part = min(n_bytes, 2**30)
        source = torch.ones(part, dtype=torch.uint8, device=self.device)
        target = torch.ones(part, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        start = self.now()
        for n_copied in range(0, n_bytes, part):
            n = min(part, n_bytes - n_copied)
            target[:n].copy_(source[:n], non_blocking=True)
        return self.now() - start

    def measure_bare_step(self, settings: Settings, point: str) -> Row:
        """Measure forward, backward and optimizer on one batch, and what the loop adds to them.

        Args:
            point: name of the one that measured the loop.
        """
        hp = self.make_hyperparameters(settings)
        loop = gpu.read_rows(self._out)[point]
        mesh = self.world.device_mesh(parallelize.mesh_shape(hp.parallel, 1, 1))
        dtype = precision.compute_dtype(hp.precision, self.device)
        transformer = fsdp.build_model(hp, mesh, dtype)
        parallelize.initialize_parameters(transformer, 0)
        optimizer = optim.Optimizer(hp.optim, transformer, compute_dtype=dtype)
        n_micro_steps = derive_global_batch_size(hp.data, 1) // hp.data.batch_size
        shape = (hp.data.batch_size, hp.model.max_seq_len)
        inputs, targets = torch.randint(hp.model.vocab_size, (2, *shape), device=self.device)
        n_tokens = n_micro_steps * targets.numel()
        scale = precision.LossScaler(dtype, self.device).scale

        def step() -> None:
            for micro_step in range(n_micro_steps):
                is_last = micro_step == n_micro_steps - 1
                parallelize.start_micro_step(transformer, hp.parallel, is_last)
                loss_sum = transformer(inputs, targets)
                (loss_sum / n_tokens).backward()
            norm, nonfinite = optimizer.measure_gradients(scale)
            divisor = optimizer.clipping_divisor(norm, scale)
            optimizer.step(hp.optim.lr, divisor, nonfinite)
            optimizer.zero_grad()

        self.time_calls(step, WARMUP, 0)
        seconds = [self.time_calls(step, loop["n_steps"], 0) for _ in range(ROUNDS)]
        ratio = statistics.median(loop["step_seconds"]) / statistics.median(seconds)
        return {
            "bare_step_seconds": seconds,
            "loop_step_seconds": loop["step_seconds"],
            "loop_adds": ratio - 1,
        }

    def measure_pair(self, pair: Pair) -> Row:
        """Measure A, B, C if the pair has it, and A again; and compare with what is predicted."""
        measured: dict[str, Row] = {}
        if not pair.arms:
            measured = self._time_added_products()
        for name, settings in pair.arms.items():
            stages = self._rounds if name == "A" else self._speed
            measured[name] = self._measure_arm(settings, stages)
        if pair.arms:
            again = self._measure_arm(pair.arms["A"], self._rounds)
            measured["A"]["step_seconds"] += again["step_seconds"]
        for row in measured.values():
            seconds = row["step_seconds"]
            row["step"] = statistics.median(seconds) if seconds else None
        found = gpu_pairs.find_numbers(pair, measured)
        return {
            "predicted": dict(pair.predicted),
            "refuted_above": dict(pair.refuted_above),
            "found": found,
            "verdict": gpu_pairs.verdict(found, pair.refuted_above),
            "measured": measured,
        }

    def _measure_arm(self, settings: Settings, stages: Callable[..., Stages]) -> Row:
        found = self.train(settings, partial(stages, warmup=2, rounds=4, most_steps=1))
        self.release()
        return found

    def _time_added_products(self) -> dict[str, Row]:
        """Return the seconds of A, B and C of `gpu_pairs.PRODUCTS`."""
        n_rows, n_out, n_in = 4096, 14336, 4096  # of a feed-forward layer of 8B
        if self.tiny:
            n_rows = n_out = n_in = 32
        gradient = self._random(n_rows, n_out)
        x = self._random(n_rows, n_in)
        total = torch.zeros(n_out, n_in, device=self.device)
        kernels = {
            "A": lambda: torch.mm(gradient.T, x),
            "B": lambda: total.add_(torch.mm(gradient.T, x)),
            "C": lambda: torch.addmm(total, gradient.T, x, out_dtype=torch.float32, out=total),
        }
        measured: dict[str, Row] = {}
        for name, kernel in kernels.items():
            try:
                measured[name] = {"step_seconds": [self._time_rounds(kernel)]}
            except RuntimeError as error:  # a CPU has no C
                print(error, file=sys.stderr)
                measured[name] = {"step_seconds": []}
        return measured

    # ---- kernels ---------------------------------------------------------------------------------

    def time_calls(self, action: Callable[[], object], repeats: int, warmup: int = WARMUP) -> float:
        """Return the mean seconds of `action` over `repeats` calls after `warmup` ones."""
        for _ in range(warmup):
            action()
        start = self.now()
        for _ in range(repeats):
            action()
        return (self.now() - start) / repeats

    def _time_rounds(self, action: Callable[[], object]) -> float:
        """Return the median seconds of three rounds, each of about 0.1 s."""
        repeats = max(1, min(100, int(0.1 / self.time_calls(action, 1))))
        return statistics.median(self.time_calls(action, repeats, 0) for _ in range(ROUNDS))

    def _tflops(self, flops: float, action: Callable[[], object]) -> float | None:
        """Return the TFLOP/s of `action`, or None if the device does not support it."""
        try:
            return flops / self._time_rounds(action) / 1e12
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return None

    def measure_attention(self) -> Row:
        """Measure forward and backward of causal attention (TFLOP/s) by head size and kernel."""
        batch, length = 4, 4096
        if self.tiny:
            batch, length = 1, 16
        n_heads, n_kv_heads = 32, 8
        found: Row = {}
        for size in (64, 128):
            q = self._random(batch, n_heads, length, size).requires_grad_()
            k = self._random(batch, n_kv_heads, length, size).requires_grad_()
            v = self._random(batch, n_kv_heads, length, size).requires_grad_()

            def step(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                torch.autograd.grad(y, (q, k, v), q.detach())

            # Two products forward and five backward, of 2 FLOPs per pair of positions and channel;
            # causal attention computes half of the pairs.
            flops = (2 + 5) * batch * n_heads * length**2 * size
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                name = backend.name.lower().removesuffix("_attention")
                with sdpa_kernel(backend):
                    found[f"{name} {size}"] = self._tflops(flops, step)
        return found

    def measure_products(self) -> Row:
        """Measure matrix products of the models' shapes (TFLOP/s), in bfloat16 and float8.

        In float8 the scales are per tensor.
        """
        n_rows = 8192
        layers = {
            "1B attention": (2048, 2048),
            "1B feed-forward": (2048, 8192),
            "1B head": (2048, 128256),
            "8B attention": (4096, 4096),
            "8B feed-forward": (4096, 14336),
            "8B head": (4096, 128256),
            "8192": (8192, 8192),
        }
        if self.tiny:
            n_rows = 16
            layers = {"tiny": (32, 32)}
        found: Row = {}
        one = torch.ones((), device=self.device)
        for name, (n_in, n_out) in layers.items():
            x = self._random(n_rows, n_in)
            weight = self._random(n_out, n_in)
            bfloat16 = partial(torch.mm, x, weight.t())
            float8 = partial(
                torch._scaled_mm,
                x.to(torch.float8_e4m3fn),
                weight.to(torch.float8_e4m3fn).t(),
                one,
                one,
                out_dtype=torch.bfloat16,
            )
            flops = 2 * n_rows * n_in * n_out
            found[f"{name} bfloat16"] = self._tflops(flops, bfloat16)
            found[f"{name} float8"] = self._tflops(flops, float8)
        return found

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def measure_bandwidth(self) -> Row:
        """Measure copies on the device and to and from pinned host memory, and AdamW (GB/s)."""
        n = 2**28
        if self.tiny:
            n = 2**10
        parameter = torch.nn.Parameter(torch.ones(n, device=self.device))
        parameter.grad = torch.ones_like(parameter)
        host = torch.ones(n, pin_memory=self.device.type == "cuda")
        adamw = torch.optim.AdamW([parameter], fused=True)

        values = parameter.data
        copy = partial(values.copy_, parameter.grad, non_blocking=True)
        to_host = partial(host.copy_, values, non_blocking=True)
        from_host = partial(values.copy_, host, non_blocking=True)
        return {
            "adamw": self._gigabytes_per_second(7 * 4 * n, adamw.step),  # reads 4 values, writes 3
            "copy": self._gigabytes_per_second(2 * 4 * n, copy),
            "to_host": self._gigabytes_per_second(4 * n, to_host),
            "from_host": self._gigabytes_per_second(4 * n, from_host),
        }

    def _gigabytes_per_second(self, n_bytes: int, action: Callable[[], object]) -> float:
        return n_bytes / self._time_rounds(action) / 1e9

    # ---- the machine and its tests ---------------------------------------------------------------

    def describe_machine(self) -> Row:
        """Return versions and the card."""
        found: Row = {"python": platform.python_version(), "torch": torch.__version__}
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["torchao"] = metadata.version("torchao")
        if self.device.type == "cuda":
            card = torch.cuda.get_device_properties(0)
            found["gpu"] = card.name
            found["gib"] = card.total_memory / 2**30
            found["processors"] = card.multi_processor_count
            found["cuda"] = torch.version.cuda
            found["cudnn"] = torch.backends.cudnn.version()
        found["state"] = self.read_clocks(
            "driver_version,power.limit,clocks.max.sm,ecc.mode.current,"
        )
        return found

    def read_clocks(self, more: str = "") -> str:
        """Return clock, power, temperature and what slows the card; "" without nvidia-smi."""
        if shutil.which("nvidia-smi") is None:
            return ""
        command = _query_clocks(more)
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    @contextlib.contextmanager
    def sampling_clocks(self) -> Iterator[list[str]]:
        """Append to the list, at the end, what `read_clocks` returns, sampled ten times a second.

        In another process, as the card is not idle meanwhile.
        """
        samples: list[str] = []
        if shutil.which("nvidia-smi") is None:
            yield samples
            return
        with subprocess.Popen(
            [*_query_clocks(), "--loop-ms=100"],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        ) as process:
            try:
                yield samples
            finally:
                process.terminate()
                samples += process.communicate()[0].splitlines()

    def start_tests(self) -> None:
        """Start the quick GPU tests, which end while the first point compiles."""
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu_quick"]
        command += ["-p", "no:cacheprovider", "-W", "default", "tests/test_gpu.py"]
        env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        self._tests_start = time.perf_counter()
        with self._log.with_suffix(".tests.log").open("w") as log:
            self._tests = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=env,
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def finish_tests(self) -> None:
        """Wait for the GPU tests and write their result."""
        if self._tests is None:
            return
        tests = self._tests
        self._tests = None
        try:
            tests.wait(max(0.0, self._tests_start + TEST_SECONDS - time.perf_counter()))
        except subprocess.TimeoutExpired:
            tests.kill()
        exit_code = tests.wait()
        lines = self._log.with_suffix(".tests.log").read_text().splitlines()
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        row: Row = {
            "point": "tests",
            "seconds": time.perf_counter() - self._tests_start,
            "exit_code": exit_code,
            "said": [*failures, *lines[-1:]],
        }
        gpu.append_row(self._out, row)

    def release(self) -> None:
        """Free what the last run left."""
        torch._dynamo.reset()
        gc.unfreeze()
        gc.enable()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _add_rounded_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return `total + a @ b` in float32, of which `a @ b` is rounded to 16 bits; None = 0."""
    product = a @ b
    return product.float() if total is None else total.add_(product)


CHANGES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "in place": (parallelize, "reduce_in_place_on_one_rank", lambda *_: None),
    "gather": (float8, "gathers_in_float8", lambda *_: False),
    "head in float32": (model, "add_product", _add_rounded_product),
}
"""What a run does, by name: a function, and one that does without."""


@contextlib.contextmanager
def _without(changes: Sequence[str]) -> Iterator[None]:
    """Turn `changes` off, to measure what they bring."""
    with contextlib.ExitStack() as patches:
        for name in changes:
            patches.enter_context(patch.object(*CHANGES[name]))
        yield


def _query_clocks(more: str = "") -> list[str]:
    keys = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
    return ["nvidia-smi", f"--query-gpu={more}{keys}", "--format=csv,noheader,nounits", "--id=0"]


# ---- points --------------------------------------------------------------------------------------

SMALL_CARD = 100 * 2**30
"""Bytes; below, 1B has half the batch, and the slice of 8B half the layers and batch."""


def list_points(bench: Bench) -> dict[str, Callable[[], Row]]:
    """Return what to measure by name, most valuable first."""
    one, part = choose_sizes(bench)
    layers = f"8B, {part['n_layers']} layers"
    selective = EIGHT_B | {
        "sharding": "full-shard",
        "batch_size": 2,
        "activation_checkpointing": "selective",
    }
    return {
        "machine": bench.describe_machine,
        "1B": partial(bench.measure_speed, one),
        "1B saves": partial(bench.measure_saves, one),
        "1B bare": partial(bench.measure_bare_step, one, "1B"),
        "1B tensorwise": partial(bench.measure_speed, one | FLOAT8),
        layers: partial(bench.measure_speed, part),
        f"{layers}, tensorwise": partial(bench.measure_speed, part | FLOAT8),
        "8B": partial(bench.measure_speed, EIGHT_B),
        "8B, bfloat16 moments": partial(bench.measure_speed, SMALL_MOMENTS),
        "8B selective": partial(bench.measure_speed, selective),
        "attention TFLOP/s": bench.measure_attention,
        "matrix products TFLOP/s": bench.measure_products,
        "GB/s": bench.measure_bandwidth,
    }


def list_pairs(bench: Bench) -> dict[str, Callable[[], Row]]:
    """Return the pairs of settings to compare by name."""
    pairs = gpu_pairs.list_pairs(*choose_sizes(bench))
    return {name: partial(bench.measure_pair, pair) for name, pair in pairs.items()}


def choose_sizes(bench: Bench) -> tuple[Settings, Settings]:
    """Return the 1B model and the slice of the 8B model that fit the card.

    Both have 32,768 tokens per step.
    """
    if bench.device.type == "cuda":
        card = torch.cuda.get_device_properties(0)
        if card.total_memory < SMALL_CARD:
            return ONE_B | {"batch_size": 4}, EIGHT_B_SLICE | {"n_layers": 8, "batch_size": 2}
    return ONE_B, EIGHT_B_SLICE


def main() -> int:
    out = Path(sys.argv[1])
    options = json.loads(sys.argv[2])
    with join_world(Launch(), timeout=600) as world:
        bench = Bench(world, out, options["tiny"])
        if options["pairs"]:
            points = list_pairs(bench)
            default_names = list(points)
        else:
            points = list_points(bench)
            default_names = [*points, "tests"]
        names = options["names"] or default_names
        unknown = set(names) - {*points, "tests"}
        if unknown:
            choices = ", ".join([*points, "tests"])
            sys.exit(f"no such points: {', '.join(unknown)}; choose from {choices}")
        rows = gpu.read_rows(out)
        measured = {name for name, row in rows.items() if "started" not in row}
        pending = set(names) - measured
        if "tests" in pending:
            bench.start_tests()
        for name, measure in points.items():
            if name not in pending:
                continue
            gpu.append_row(out, {"point": name, "started": time.time()})
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    row = measure()
            except Exception as error:
                traceback.print_exc()
                row = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
            # Fails if an error left the device unusable; then another process measures the rest.
            bench.now()
            bench.release()
            gpu.append_row(out, {"point": name, **row})
        bench.finish_tests()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
