"""Helpers of several tests: ranks, runs of fsdp.py, and small tokenizers."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from determined import core

from lm import config
from lm.data.tokenizer import train_tokenizer
from lm.determined.context import TorchDistributedContext
from lm.launch.launch import Launch
from lm.launch.spawn import free_port
from lm.runtime.rendezvous import join_world
from lm.runtime.run_dir import RunDir
from lm.runtime.world import World
from model import ModelConfig, Transformer
from tests.forked import METHOD, READ_AT_START, Forked

ROOT = Path(__file__).parent.parent

TINY: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 64,
    "max_seq_len": 16,
}
"""Hyperparameters of a model so small that a run takes hardly longer than its imports."""

LLAMA_STYLE: dict[str, Any] = {
    "norm": "rmsnorm",
    "positions": "rope",
    "ffn": "swiglu",
    "bias": "none",
    "n_kv_heads": 2,
}
"""Hyperparameters of Llama's architecture, at any size."""

EXACT_RUN: dict[str, Any] = TINY | {
    "dropout": 0.1,
    "lr": 1e-2,
    "report_rate": 1,
    "validation_batches": 1,
    "amp_dtype": None,
}
"""Hyperparameters of a run whose every step is compared bit for bit, without `max_steps` and `checkpoint_rate`."""

REQUEUED: dict[str, Any] = EXACT_RUN | {
    "max_steps": 12,
    "validation_rate": 50,
    "checkpoint_rate": 1000,
}
"""Hyperparameters of a run that a scheduler stops and requeues."""

EXACT = ("loss", "perplexity", "bits_per_byte", "grad_norm", "lr", "skipped_steps")
"""Metrics that are bit-identical however often a run is stopped and resumed."""


KEYS = frozenset(config.Hyperparameters.model_fields)


def named_keys(error: Exception) -> set[str]:
    """The hyperparameters that the text of `error` names."""
    return set(re.findall(r"\w+", str(error))) & KEYS


def _enter(
    rank: int,
    size: int,
    nodes: int,
    port: int,
    action: Callable[..., Any],
    arguments: tuple[Any, ...],
    results: Path,
    env: Mapping[str, str],
) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    per_node = size // nodes
    launch = Launch(rank, size, rank % per_node, per_node, rank // per_node, "127.0.0.1", port)
    with join_world(launch, timeout=60) as world:
        (results / str(rank)).write_bytes(pickle.dumps(action(world, *arguments)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # as fsdp.py: PyTorch aborts if the interpreter shuts down while one of its threads runs


def run_ranks(size: int, action: Callable[..., Any], *arguments: Any, nodes: int = 1) -> list[Any]:
    """Run `action(world, *arguments)` on `size` ranks with gloo; return the results by rank.

    `action` is a function at the top level of a module; its result is picklable and holds no
    tensors.
    """
    with tempfile.TemporaryDirectory() as folder:
        how = (size, nodes, free_port(), action, arguments, Path(folder), dict(os.environ))
        mp.start_processes(_enter, how, nprocs=size, start_method=METHOD)  # type: ignore[attr-defined]
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]


def in_world(action: Callable[[World], Any]) -> Any:
    """Run `action(world)` in this process as the only rank."""
    with join_world(Launch(), timeout=60) as world:
        return action(world)


def execute(
    world: World,
    hyperparameters: Mapping[str, Any],
    on_step_start: Callable[[int], None] = lambda _: None,
) -> Path:
    """Call `fsdp.execute` off the cluster on the ranks of `world`; return the run's directory."""
    import fsdp  # changes signals and garbage collection: not in the processes of all tests

    hp = config.read({"hyperparameters": hyperparameters}, [], "test")
    run_dir = RunDir(hp.run_name or "test")
    distributed = TorchDistributedContext(world.launch, world.control, world.saver, world.node)
    with core.init(
        distributed=distributed, checkpoint_storage=str(run_dir.checkpoints.absolute())
    ) as context:
        store = fsdp.open_store(world, context, None, run_dir)
        fsdp.execute(fsdp.Run(hp, world, context, store, None, run_dir, on_step_start))
    return run_dir.path


def start(
    folder: Path,
    *overrides: str,
    ranks: int = 1,
    config: Mapping[str, Any] | None = None,
    launcher: Sequence[str] | None = None,
    script: str = "",
    **env: str,
) -> subprocess.Popen[str]:
    """Start `fsdp.py` in `folder` on `ranks` ranks, in forked processes if `launcher` and `env` allow it.

    Args:
        config: hyperparameters (default: `TINY`), written to `folder/test.yaml`.
        launcher: Python's arguments that start the ranks (default: those of `lm.launch`, if `ranks`
            > 1).
        script: Python lines that every rank runs before; they can use `rank`.
        env: environment variables to set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.yaml").write_text(
        json.dumps({"hyperparameters": dict(TINY if config is None else config)})
    )
    popen = subprocess.Popen[str] if launcher or env.keys() & READ_AT_START else Forked
    if launcher is None:
        launcher = ["-m", "lm.launch", "--nproc", str(ranks)] if ranks > 1 else []
    program = str(scripted(folder, script) if script else ROOT / "fsdp.py")
    variables = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env
    return popen(
        [sys.executable, *launcher, program, "--config", "test.yaml", *overrides],
        cwd=folder,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def scripted(folder: Path, script: str) -> Path:
    """Write a program that runs `fsdp.py` after the Python lines `script`, which can use `rank`."""
    path = folder / "script.py"
    before = "import os, sys\nimport fsdp\nrank = int(os.environ.get('RANK', 0))\n"
    path.write_text(f"{before}{script}\nfsdp.run_and_exit(fsdp.main)\n")
    return path


def run(
    folder: Path, *overrides: str, code: int | None = None, timeout: float = 120, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run `fsdp.py` as `start` does, to the exit code `code` if it is given; return exit code, stdout and stderr."""
    process = start(folder, *overrides, **how)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        raise AssertionError(f"still running after {timeout} s\n{output}\n{errors}") from None
    assert code in (None, process.returncode), errors
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def wait_until(
    condition: Callable[[], Any], explain: Callable[[], str] = str, seconds: float = 300
) -> None:
    """Wait until `condition()` is true; after `seconds`, fail with `explain()`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


def reports(folder: Path, group: str = "training", name: str = "test") -> dict[int, dict[str, Any]]:
    """Return the lines of one group in metrics.jsonl of a run, by step."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record for record in records if record["group"] == group}


def exact(folder: Path, group: str = "training") -> dict[int, dict[str, Any]]:
    """Return the metrics `EXACT` of a run, by step."""
    return {
        step: {key: line[key] for key in EXACT if key in line}
        for step, line in reports(folder, group).items()
    }


def checkpoints(folder: Path, name: str = "test") -> dict[int, Path]:
    """Return the checkpoint directories of a run by step, in the order of the steps."""
    manifests = (folder / "runs" / name / "checkpoints").glob("[!.]*/manifest.json")
    by_step = {json.loads(path.read_text())["step"]: path.parent for path in manifests}
    return dict(sorted(by_step.items()))


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace the header of a safetensors file by `change(header)`."""
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    text = json.dumps(change(json.loads(content[8:end]))).encode()
    text += b" " * (-len(text) % 8)  # tensors stay aligned
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'cat' %}{{ raise_exception('no such role: cat') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def unit_sizes(config: ModelConfig) -> list[int]:
    """Return the number of parameters of each block, of the embedding and of the head."""
    with torch.device("meta"):
        model = Transformer(config)
    return [
        sum(p.numel() for p in unit.parameters())
        for unit in (*model.blocks, model.embedding, model.head)
    ]


def byte_level_tokenizer(vocab_size: int = 300) -> bytes:
    """Return the `tokenizer.json` of a small GPT-2-like tokenizer: byte-level BPE with <|endoftext|> after texts."""
    return train_tokenizer(iter([_WORDS] * 3), vocab_size)


def llama_tokenizer() -> bytes:
    """Return the `tokenizer.json` of a small Llama-like tokenizer: BPE with Metaspace and a BOS token, <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator([_WORDS] * 3, trainer)
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    return tokenizer.to_str().encode()


def llama2_tokenizer(*, newer: bool = False) -> bytes:
    """Return `llama_tokenizer` without word splitting and with byte fallback, as Llama 2's.

    Args:
        newer: in the format of newer versions of `transformers`: Metaspace pre-tokenizer instead of
            a normalizer.
    """
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    content = json.loads(llama_tokenizer())
    size = len(content["model"]["vocab"])
    content["model"]["vocab"] |= {f"<0x{byte:02X}>": size + byte for byte in range(256)}
    content["model"] |= {"byte_fallback": True, "fuse_unk": True}
    spaced = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    plain = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer = Tokenizer.from_str(json.dumps(content | {"pre_tokenizer": None}))
    if newer:
        metaspace = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
        tokenizer.pre_tokenizer = metaspace  # pyright: ignore[reportAttributeAccessIssue]
    else:
        tokenizer.normalizer = spaced  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(plain)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer.to_str().encode()


_WORDS = "To be, or not to be, that is the question: [user] hi [assistant] ho abcdefghijklmnopqrstuvwxyz0123456789"
