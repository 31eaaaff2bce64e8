"""What tests stand on: real ranks, and real runs of the real program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lm.data.tokenizer import train_tokenizer
from lm.launch.environment import Launch
from lm.launch.spawn import free_port
from lm.runtime.world import World, join_world

ROOT = Path(__file__).parent.parent

TINY: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "max_seq_len": 16}
"""Hyperparameters of a model small enough that a run takes as long as its imports."""


REQUEUED: dict[str, Any] = TINY | {
    "dropout": 0.1,
    "lr": 1e-2,
    "report_rate": 1,
    "validation_rate": 50,
    "validation_batches": 1,
    "checkpoint_rate": 1000,
    "amp_dtype": None,
}
"""A run that a scheduler stops and starts again: `max_steps` is left to say."""

EXACT = ("loss", "grad_norm", "lr", "batches", "tokens", "skipped_steps")
"""Training metrics that are the same to the last bit, however often a run was stopped."""


def _enter(
    rank: int, size: int, port: int, action: Callable[..., Any], arguments: tuple[Any, ...], results: Any
) -> None:
    torch.set_num_threads(1)
    launch = Launch(rank, size, rank, size, 0, "127.0.0.1", port)
    with join_world(launch, timeout=60) as world:
        results.put((rank, action(world, *arguments)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as fsdp.py ends: PyTorch aborts an interpreter that takes itself apart under one of its threads


def run_ranks(size: int, action: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `action(world, *arguments)` in `size` processes joined by gloo; return what each returned, by rank.

    `action` must be a module's own function, and its result picklable without tensors' shared memory.
    """
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with_args = (size, free_port(), action, arguments, results)
    processes = mp.spawn(_enter, with_args, nprocs=size, join=False)  # type: ignore[attr-defined]
    assert processes is not None
    received: dict[int, Any] = {}
    while len(received) < size:
        if not results.empty():
            rank, value = results.get()
            received[rank] = value
        elif processes.join(timeout=0.05):
            break
    while not processes.join():
        pass
    while not results.empty():
        rank, value = results.get()
        received[rank] = value
    return [received[rank] for rank in range(size)]


def in_world(action: Callable[[World], Any]) -> Any:
    """Run `action` in a world of this process alone."""
    with join_world(Launch(), timeout=60) as world:
        return action(world)


def start(
    folder: Path, *overrides: str, ranks: int = 1, config: Mapping[str, Any] | None = None, **env: str
) -> subprocess.Popen[str]:
    """Start `fsdp.py` in `folder` as a person would, `ranks` processes of it, and return at once.

    Args:
        config: hyperparameters of the experiment file (default: `TINY`), written to `folder/test.yaml`.
        env: variables to set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.yaml").write_text(json.dumps({"hyperparameters": dict(TINY if config is None else config)}))
    script = [str(ROOT / "fsdp.py"), "--config", "test.yaml", *overrides]
    command = [sys.executable, *(["-m", "lm.launch", "--nproc", str(ranks)] if ranks > 1 else []), *script]
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env
    return subprocess.Popen(
        command, cwd=folder, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(folder: Path, *overrides: str, timeout: float = 120, **how: Any) -> subprocess.CompletedProcess[str]:
    """`start`, waited for: exit code and both outputs."""
    process = start(folder, *overrides, **how)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        raise AssertionError(f"still running after {timeout} s\n{output}\n{errors}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def reports(folder: Path, group: str = "training", name: str = "test") -> dict[int, dict[str, Any]]:
    """The lines of a run's metrics.jsonl of one group, by step."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record for record in records if record["group"] == group}


def checkpoints(folder: Path, name: str = "test") -> dict[int, Path]:
    """A run's checkpoints, by step."""
    manifests = (folder / "runs" / name / "checkpoints").glob("*/manifest.json")
    return {json.loads(path.read_text())["step"]: path.parent for path in manifests}


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'cat' %}{{ raise_exception('no such role: cat') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_level_tokenizer(vocab_size: int = 300) -> bytes:
    """The `tokenizer.json` of a small GPT-2-like tokenizer: byte-level BPE that ends texts with <|endoftext|>."""
    return train_tokenizer(iter([_WORDS] * 3), vocab_size)


def llama_tokenizer() -> bytes:
    """The `tokenizer.json` of a small Llama-like tokenizer: BPE with spaces as letters, and a beginning, <s>."""
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator([_WORDS] * 3, trainer)
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return tokenizer.to_str().encode()


def llama2_tokenizer(*, newer: bool = False) -> bytes:
    """As `llama_tokenizer`, but without words, and with bytes for characters that it does not know, as Llama 2's.

    Args:
        newer: written as newer versions of `transformers` do: what makes letters of spaces is no normalizer there.
    """
    content = json.loads(llama_tokenizer())
    size = len(content["model"]["vocab"])
    content["model"]["vocab"] |= {f"<0x{byte:02X}>": size + byte for byte in range(256)}
    content["model"] |= {"byte_fallback": True, "fuse_unk": True}
    spaced = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    plain = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer = Tokenizer.from_str(json.dumps(content | {"pre_tokenizer": None}))
    if newer:
        metaspace = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
        tokenizer.pre_tokenizer = metaspace  # pyright: ignore[reportAttributeAccessIssue]
    else:
        tokenizer.normalizer = spaced  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(plain)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer.to_str().encode()


_WORDS = "To be, or not to be, that is the question: [user] hi [assistant] ho abcdefghijklmnopqrstuvwxyz0123456789"
