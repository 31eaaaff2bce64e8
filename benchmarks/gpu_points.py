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
from collections.abc import Callable, Generator, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsdp  # sets up the environment before torch is imported

# isort: split
import torch
import torch.nn.functional as F
from determined import core
from torch import Tensor
from torch._inductor import config as inductor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import model
from benchmarks import gpu
from benchmarks.common import ROOT, STEP, shares
from benchmarks.gpu import Row
from benchmarks.observer import StepObserver
from lm.checkpoint.store import ClusterCheckpoints
from lm.config import Hyperparameters
from lm.data.loader import derive_global_batch_size
from lm.determined.context import TorchDistributedContext
from lm.launch.launch import Launch
from lm.launch.spawn import die_with_parent, run_and_exit
from lm.metrics.device import peak_flops, peak_memory_gib
from lm.runtime.rendezvous import join_world
from lm.runtime.world import World
from lm.training import optim, parallelize, precision

WARMUP = 3
ROUNDS = 3
STEPS = 10
ROUND_SECONDS = 8.0
"""A round has fewer steps than `STEPS` if they take longer, but at least two."""
SAVES = 3
SAVE_RATE = 8
"""steps between saves: five while the checkpoint is written, and at least two after that"""
WRITE_SECONDS = 60.0
"""most time for a checkpoint"""
TEST_SECONDS = 120.0
"""most time for the GPU tests"""

RUN = {"max_steps": 10**6, "report_rate": 10**6, "checkpoint_rate": 10**6, "validation_batches": 1}
RUN |= {"async_checkpoint": False}  # no host copy of the state, except where saves are measured
TINY = {
    "model": None,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 3,
    "d_ff": 64,
    "vocab_size": 64,
    "max_seq_len": 64,
}
TINY |= {"n_kv_heads": 2, "batch_size": 1, "compile": False, "rope_scaling": None}

Settings = dict[str, Any]
"""Hyperparameters; and `inductor`, options of torch._inductor.config, and `loss_chunk`, for model.LOSS_CHUNK."""
Stages = Generator[None, None, Row]
"""Resumed at the start of every step; returns what it measured, and so ends the run."""


class Bench:
    """What the points share: the only rank, its device, and sizes."""

    def __init__(self, world: World, out: Path, tiny: bool) -> None:
        self.world, self.device, self.tiny = world, world.device, tiny
        self._log = out.with_suffix(".log")
        self._out = out
        self._tests: subprocess.Popen[bytes] | None = None
        self._tests_start = 0.0

    def now(self) -> float:
        """Return the time in seconds, once the device has completed its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def hyperparameters(self, settings: Settings) -> Hyperparameters:
        keys = {
            key: value for key, value in settings.items() if key not in ("inductor", "loss_chunk")
        }
        if self.tiny:
            keys |= TINY | ({"total_batch_size": 2} if "total_batch_size" in keys else {})
        return Hyperparameters.model_validate(RUN | keys)

    # ---- runs
    # ----------------------------------------------------------------------------------------------

    def train(self, settings: Settings, stages: Callable[[Hyperparameters, Path], Stages]) -> Row:
        """Run `fsdp.execute` until the generator that `stages` returns for its checkpoints' directory ends."""
        world, hp = self.world, self.hyperparameters(settings)
        distributed = TorchDistributedContext(world.launch, world.saver, world.node)
        with (
            tempfile.TemporaryDirectory() as directory,
            _patches(settings, self.device),
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

    def speed(self, settings: Settings) -> Row:
        """Measure the step of a run, and profile one."""
        return self.train(settings, self._speed)

    def _rounds(self, _hp: Hyperparameters, _directory: Path) -> Stages:
        start = self.now()
        yield
        first_step = self.now() - start
        for _ in range(WARMUP - 1):
            start = self.now()
            yield
        step = self.now() - start
        self.finish_tests()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        n_steps = 1 if self.tiny else max(2, min(STEPS, int(ROUND_SECONDS / step)))
        seconds = []
        for _ in range(ROUNDS):
            start = self.now()
            for _ in range(n_steps):
                yield
            seconds.append((self.now() - start) / n_steps)
        found = {
            "step_seconds": seconds,
            "n_steps": n_steps,
            "first_step": first_step,
            "clocks": self.clocks(),
        }
        return found | {"peak_gib": peak_memory_gib(self.device)}

    def _speed(self, hp: Hyperparameters, directory: Path) -> Stages:
        found = yield from self._rounds(hp, directory)
        # The first profiled step pays for the start of the profiler.
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if self.device.type == "cuda" else []),
        ]
        with profile(activities=activities) as profiler:
            yield
            start = self.now()
            with torch.profiler.record_function(STEP):
                yield
                self.now()
            step = self.now() - start
        tokens = derive_global_batch_size(hp, 1) * hp.max_seq_len
        peak = peak_flops(self.device, precision.compute_dtype(hp, self.device))
        flops = (
            tokens * hp.flops_per_token(hp.max_seq_len) / statistics.median(found["step_seconds"])
        )
        return found | {
            "tokens": tokens,
            "mfu": peak and flops / peak,
            "shares": self._shares(profiler, step),
        }

    def _shares(self, profiler: profile, seconds: float) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "trace.json")
            profiler.export_chrome_trace(str(path))
            return shares(json.loads(path.read_text())["traceEvents"], seconds)

    def saves(self, settings: Settings) -> Row:
        """Measure steps with a save, after it, and without one, and a copy of as many bytes to pinned memory."""
        saving = {"checkpoint_rate": SAVE_RATE, "keep_checkpoints": 1, "async_checkpoint": True}
        found = self.train(settings | saving, self._saves)
        return found | {"copy_seconds": self._copy_seconds(found["bytes"])}

    def _saves(self, _hp: Hyperparameters, directory: Path) -> Stages:
        seconds: list[float] = []
        written: set[Path] = set()
        write_seconds, n_bytes = [], 0
        while len(seconds) < SAVE_RATE * (SAVES + 1) - 1:
            n_saves, n_after = divmod(len(seconds), SAVE_RATE)
            if n_saves and n_after == 5:
                wait_start = self.now()
                while not (new := set(directory.glob("*/manifest.json")) - written):
                    if time.perf_counter() > wait_start + WRITE_SECONDS:
                        raise TimeoutError(
                            f"a checkpoint took {WRITE_SECONDS:g} s: choose TMPDIR on a faster disk"
                        )
                    time.sleep(0.01)
                written |= new
                n_bytes = sum(
                    path.stat().st_size for path in new.pop().parent.glob("*.safetensors")
                )
                write_seconds.append(sum(seconds[-n_after:]) + self.now() - wait_start)
            start = self.now()
            yield
            seconds.append(self.now() - start)
        plain = statistics.median(s for i, s in enumerate(seconds) if i % SAVE_RATE in (5, 6))
        saved = seconds[SAVE_RATE - 1 :: SAVE_RATE]
        return {
            "plain_step": plain,
            "stall_seconds": [s - plain for s in saved],
            "steps_after": [
                seconds[i * SAVE_RATE : i * SAVE_RATE + 5] for i in range(1, SAVES + 1)
            ],
            "write_seconds": write_seconds,
            "bytes": n_bytes,
        }

    def _copy_seconds(self, n_bytes: int) -> float:
        size = min(n_bytes, 2**30)
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.ones(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        start = self.now()
        for done in range(0, n_bytes, size):
            n = min(size, n_bytes - done)
            target[:n].copy_(source[:n], non_blocking=True)
        return self.now() - start

    def bare_step(self, settings: Settings, point: str) -> Row:
        """Measure forward, backward and optimizer on one batch, and what the loop adds, whose speed is `point`'s."""
        hp, loop = self.hyperparameters(settings), gpu.read(self._out)[point]
        with torch.device("meta"):
            transformer = model.Transformer(hp)
        mesh = self.world.device_mesh(parallelize.mesh_shape(hp, 1, 1))
        dtype = precision.compute_dtype(hp, self.device)
        transformer = parallelize.parallelize(transformer, hp, mesh, dtype, 0, hp.float8)
        optimizer = optim.Optimizer(hp, transformer.named_parameters())
        micro_steps = derive_global_batch_size(hp, 1) // hp.batch_size
        tokens = torch.randint(
            hp.vocab_size, (2, hp.batch_size, hp.max_seq_len), device=self.device
        )
        scale = precision.LossScaler(dtype, self.device).scale

        def step() -> None:
            for micro in range(micro_steps):
                parallelize.start_micro_step(transformer, hp, micro == micro_steps - 1)
                (transformer(*tokens) / (tokens[0].numel() * micro_steps)).backward()
            optimizer.clip_grad_norm(scale)
            optimizer.step(hp.lr)
            optimizer.zero_grad()

        seconds = [
            self.seconds(step, loop["n_steps"], WARMUP if turn == 0 else 0)
            for turn in range(ROUNDS)
        ]
        added = statistics.median(loop["step_seconds"]) / statistics.median(seconds) - 1
        return {
            "bare_step_seconds": seconds,
            "loop_step_seconds": loop["step_seconds"],
            "loop_adds": added,
        }

    def pair(self, a: Settings, b: Settings) -> Row:
        """Measure A and B in turns. `ratio` is B's step time over A's."""
        seconds: dict[str, list[float]] = {"a": [], "b": []}
        memory = {}
        for _ in range(2):
            for name, settings in (("a", a), ("b", b)):
                found = self.train(settings, self._rounds)
                self.release()
                seconds[name] += found["step_seconds"]
                memory[f"{name}_gib"] = found["peak_gib"]
        ratio = statistics.median(seconds["b"]) / statistics.median(seconds["a"])
        return {
            "ratio": ratio,
            **{f"{name}_seconds": values for name, values in seconds.items()},
            **memory,
        }

    # ---- kernels
    # -------------------------------------------------------------------------------------------

    def seconds(self, action: Callable[[], object], repeats: int, warmup: int = WARMUP) -> float:
        """Return the mean time of `action` over `repeats` calls after `warmup` ones."""
        for _ in range(warmup):
            action()
        start = self.now()
        for _ in range(repeats):
            action()
        return (self.now() - start) / repeats

    def _fastest(self, action: Callable[[], object]) -> float:
        """Return the median of three rounds, each of about 0.1 s."""
        repeats = max(1, min(100, int(0.1 / self.seconds(action, 1))))
        return statistics.median(self.seconds(action, repeats, 0) for _ in range(ROUNDS))

    def _tflops(self, flops: float, action: Callable[[], object]) -> float | None:
        """Return the TFLOP/s of `action`, or None if the device does not support it."""
        try:
            return flops / self._fastest(action) / 1e12
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return None

    def attention(self) -> Row:
        """Measure forward and backward of causal attention (TFLOP/s) by head size and kernel."""
        batch, length = (1, 16) if self.tiny else (4, 4096)
        found: Row = {}
        for size in (64, 128):
            q, k, v = (
                torch.randn(
                    batch,
                    heads,
                    length,
                    size,
                    dtype=torch.bfloat16,
                    device=self.device,
                    requires_grad=True,
                )
                for heads in (32, 8, 8)
            )

            def step(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                torch.autograd.grad(y, (q, k, v), q.detach())

            flops = (
                7 * batch * 32 * length**2 * size
            )  # two products forward and five backward, half of each
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                with sdpa_kernel(backend):
                    found[f"{backend.name.lower().removesuffix('_attention')} {size}"] = (
                        self._tflops(flops, step)
                    )
        return found

    def products(self) -> Row:
        """Measure matrix products of the models' shapes (TFLOP/s), in bfloat16 and in float8 with scales per tensor."""
        rows = 16 if self.tiny else 8192
        shapes = {
            "1B attention": (2048, 2048),
            "1B feed-forward": (2048, 8192),
            "1B head": (2048, 128256),
        }
        shapes |= {
            "8B attention": (4096, 4096),
            "8B feed-forward": (4096, 14336),
            "8B head": (4096, 128256),
        }
        found: Row = {}
        for name, (k, n) in (
            {"tiny": (32, 32)} if self.tiny else shapes | {"8192": (8192, 8192)}
        ).items():
            a, b = (
                torch.randn(size, k, device=self.device, dtype=torch.bfloat16) for size in (rows, n)
            )
            one, eights = (
                torch.ones((), device=self.device),
                [x.to(torch.float8_e4m3fn) for x in (a, b)],
            )
            eight = partial(
                torch._scaled_mm, eights[0], eights[1].t(), one, one, out_dtype=torch.bfloat16
            )
            for kind, product in (("bfloat16", partial(torch.mm, a, b.t())), ("float8", eight)):
                found[f"{name} {kind}"] = self._tflops(2 * rows * k * n, product)
        return found

    def bandwidth(self) -> Row:
        """Measure a copy on the device, AdamW's kernel, and copies to and from pinned host memory (GB/s)."""
        n = 2**10 if self.tiny else 2**28
        p = torch.nn.Parameter(torch.ones(n, device=self.device))
        p.grad = torch.ones_like(p)
        adamw = torch.optim.AdamW([p], fused=True)
        host = torch.ones(n, pin_memory=self.device.type == "cuda")
        copies = {
            "copy": (p.data, p.grad, 8),
            "to_host": (host, p.data, 4),
            "from_host": (p.data, host, 4),
        }
        found = {
            "adamw": 28 * n / self._fastest(adamw.step) / 1e9
        }  # reads 4 float32 values and writes 3
        for name, (target, source, n_bytes) in copies.items():
            copy = partial(target.copy_, source, non_blocking=True)
            found[name] = n_bytes * n / self._fastest(copy) / 1e9
        return found

    # ---- the machine and its tests
    # -------------------------------------------------------------------------

    def machine(self) -> Row:
        """Return versions and the card."""
        found: Row = {"python": platform.python_version(), "torch": torch.__version__}
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["torchao"] = metadata.version("torchao")
        if self.device.type == "cuda":
            card = torch.cuda.get_device_properties(0)
            found |= {
                "gpu": card.name,
                "gib": card.total_memory / 2**30,
                "processors": card.multi_processor_count,
            }
            found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        return found | {
            "state": self.clocks("driver_version,power.limit,clocks.max.sm,ecc.mode.current,")
        }

    def clocks(self, more: str = "") -> str:
        """Return clock, power and temperature, and what slows the card down, or "" without nvidia-smi."""
        if shutil.which("nvidia-smi") is None:
            return ""
        query = (
            f"--query-gpu={more}clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
        )
        command = ["nvidia-smi", query, "--format=csv,noheader", "--id=0"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    def start_tests(self) -> None:
        """Start the quick GPU tests, which end while the first point compiles."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu_quick",
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
        ]
        command.append("tests/test_gpu.py")
        env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        self._tests_start = time.perf_counter()
        with self._log.with_suffix(".tests.log").open("w") as log:
            self._tests = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=log, preexec_fn=die_with_parent
            )

    def finish_tests(self) -> None:
        """Wait for the GPU tests and write their result."""
        if self._tests is None:
            return
        tests, self._tests = self._tests, None
        try:
            tests.wait(max(0.0, self._tests_start + TEST_SECONDS - time.perf_counter()))
        except subprocess.TimeoutExpired:
            tests.kill()
        lines = self._log.with_suffix(".tests.log").read_text().splitlines()
        said = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        row = {
            "point": "tests",
            "seconds": time.perf_counter() - self._tests_start,
            "exit_code": tests.wait(),
        }
        gpu.write(self._out, row | {"said": [*said, *lines[-1:]]})

    def release(self) -> None:
        """Free what the last run left."""
        torch._dynamo.reset()
        gc.unfreeze()
        gc.enable()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def _patches(settings: Settings, device: torch.device) -> Iterator[None]:
    chunk = settings.get("loss_chunk", model.LOSS_CHUNK[device.type])
    with (
        patch.dict(model.LOSS_CHUNK, {device.type: chunk}),
        inductor.patch(settings.get("inductor", {})),
    ):
        yield


# ---- points
# ------------------------------------------------------------------------------------------------

LLAMA = {"max_seq_len": 4096, "amp_dtype": "bfloat16", "sharding": "grad-shard"}
ONE_B: Settings = LLAMA | {"model": "llama3.2-1b", "batch_size": 8}
EIGHT_B: Settings = LLAMA | {"model": "llama3-8b", "batch_size": 1}
SMALL_CARD = 100 * 2**30
"""Bytes; below, the 1B model accumulates and the slice of the 8B model has half the layers."""


def points(bench: Bench) -> dict[str, Callable[[], Row]]:
    """Return what to measure by name, most valuable first."""
    one, part = sizes(bench)
    layers = f"8B, {part['n_layers']} layers"
    full = EIGHT_B | {"sharding": "full-shard"}
    tensorwise, moments = {"float8": "tensorwise"}, {"optim_dtype": "bfloat16", "beta2": 0.95}
    return {
        "machine": bench.machine,
        "1B": partial(bench.speed, one),
        "1B saves": partial(bench.saves, one),
        "1B bare": partial(bench.bare_step, one, "1B"),
        "1B tensorwise": partial(bench.speed, one | tensorwise),
        layers: partial(bench.speed, part),
        f"{layers}, tensorwise": partial(bench.speed, part | tensorwise),
        "8B": partial(bench.speed, full),
        "8B, bfloat16 moments": partial(bench.speed, EIGHT_B | moments | {"total_batch_size": 8}),
        "8B selective": partial(
            bench.speed, full | {"batch_size": 2, "activation_checkpointing": "selective"}
        ),
        "attention TFLOP/s": bench.attention,
        "matrix products TFLOP/s": bench.products,
        "GB/s": bench.bandwidth,
    }


def pairs(bench: Bench) -> dict[str, Callable[[], Row]]:
    """Return the pairs of settings to compare by name; A is the model's, B changes it."""
    one, part = sizes(bench)
    tuned, recomputed = (
        {"inductor": {"coordinate_descent_tuning": True}},
        {"activation_checkpointing": "full"},
    )
    tensorwise, rowwise = ({"float8": recipe} for recipe in ("tensorwise", "rowwise"))
    changes = {
        "1B full-shard": (one, {"sharding": "full-shard"}),
        "1B loss chunk 2**29": (one, {"loss_chunk": 2**29}),
        "1B selective": (one, {"activation_checkpointing": "selective"}),
        "1B rowwise over tensorwise": (one | tensorwise, rowwise),
        "1B coordinate-descent tuning": (one, tuned),
        "8B slice full-shard": (part, {"sharding": "full-shard"}),
        "8B slice bfloat16 moments": (part | {"beta2": 0.95}, {"optim_dtype": "bfloat16"}),
        "8B slice selective": (part, {"activation_checkpointing": "selective"}),
        "8B slice rowwise over tensorwise": (part | tensorwise, rowwise),
        "1B not compiled": (one, {"compile": False}),
        "1B activation_offload": (one | {"batch_size": 2}, {"activation_offload": True}),
        "8B slice recomputed, activation_offload": (
            part | recomputed,
            {"activation_offload": True},
        ),
        "1B max-autotune": (one, {"inductor": {"max_autotune": True}}),
    }
    return {name: partial(bench.pair, a, a | change) for name, (a, change) in changes.items()}


def sizes(bench: Bench) -> tuple[Settings, Settings]:
    """Return the 1B model and the slice of the 8B model that fit the card, at 32,768 tokens per step."""
    small = (
        bench.device.type == "cuda"
        and torch.cuda.get_device_properties(0).total_memory < SMALL_CARD
    )
    one = ONE_B | {"batch_size": 4 if small else 8, "total_batch_size": 8}
    return one, EIGHT_B | {"n_layers": 8 if small else 16, "total_batch_size": 8}


def main() -> int:
    out, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    with join_world(Launch(), timeout=600) as world:
        bench = Bench(world, out, options["tiny"])
        todo = (pairs if options["pairs"] else points)(bench)
        chosen = options["names"] or [*todo, *([] if options["pairs"] else ["tests"])]
        if unknown := set(chosen) - {*todo, "tests"}:
            sys.exit(
                f"no such points: {', '.join(unknown)}; choose from {', '.join([*todo, 'tests'])}"
            )
        pending = set(chosen) - {
            name for name, row in gpu.read(out).items() if "started" not in row
        }
        if "tests" in pending:
            bench.start_tests()
        for name in (name for name in todo if name in pending):
            gpu.write(out, {"point": name, "started": time.time()})
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    row = todo[name]()
            except Exception as error:
                traceback.print_exc()
                row = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
            bench.now()  # fails if an error left the device unusable; then another process measures the rest
            bench.release()
            gpu.write(out, {"point": name, **row})
        bench.finish_tests()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
