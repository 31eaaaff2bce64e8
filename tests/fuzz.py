"""Load checkpoints that a stranger changed at random, with matching checksums.

    python -m tests.fuzz [COUNT] [--seed S]

A value of the manifest, of a header or of the tokenizer is replaced, or bytes of the weights. Each
checkpoint must be refused with a RunError, or generate text from the weights that the safetensors
library, if it accepts the file, reads.

Exit code 1 after anything else, more than 10 s, or more than 1 GB.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lm import sampling
from lm.checkpoint.manifest import MANIFEST
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import ConfigError, RunError
from lm.hf.base import load_model
from tests.support.checkpoints import WEIGHTS_FILE, forge_manifest, rewrite_header, write_checkpoint

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2,
    7,
    64,
    2**31,
    2**63,
    10**30,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
]
VALUES += [
    "",
    "x",
    "\x1b[2J",
    "../x",
    "é" * 5000,
    [],
    [1],
    [[]] * 1000,
    {},
    {"a": 1},
    {"type": "Replace"},
]


def change(draw: random.Random, tree: Any) -> Any:
    """Return a copy of the JSON value `tree` with one value replaced, removed, or added."""
    changed = copy.deepcopy(tree)
    nodes = [changed]
    for node in nodes:
        children = (
            node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        )
        nodes += [child for child in children if isinstance(child, dict | list) and child][:20]
    node = draw.choice(nodes)
    key: Any = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
    match draw.randrange(5):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[draw.choice(["x", "\x1b[2J", *node])] = draw.choice(VALUES)
        case 2 if isinstance(node[key], int):
            node[key] += draw.choice([-1, 1, 2**20])
        case _:
            node[key] = draw.choice(VALUES)
    return changed


def change_header(draw: random.Random, header: dict[str, Any]) -> dict[str, Any]:
    if draw.random() >= 0.3:
        return change(draw, header)
    metadata = header["__metadata__"]
    metadata["DCP_SHARDING_INFO"] = json.dumps(
        change(draw, json.loads(metadata["DCP_SHARDING_INFO"]))
    )
    return header


def mutate(draw: random.Random, folder: Path) -> str:
    """Change the checkpoint in `folder`, with matching checksums; return what was changed."""
    what = draw.choice(["manifest", "header", "tokenizer", "weights"])
    fields = json.loads((folder / MANIFEST).read_text())
    if what == "manifest":
        changed = change(draw, fields)
        forge_manifest(
            folder, **{key: value for key, value in changed.items() if key != "checksum"}
        )
        return what
    if what == "tokenizer":
        text = json.dumps(change(draw, json.loads((folder / TOKENIZER_JSON).read_text()))).encode()
        (folder / TOKENIZER_JSON).write_bytes(text)
        forge_manifest(folder)
        with suppress(ConfigError):  # it is not one any more
            forge_manifest(folder, tokenizer=load_tokenizer(str(folder)).identity)
        return what
    if what == "header":
        rewrite_header(folder / WEIGHTS_FILE, partial(change_header, draw))
    else:
        content = (folder / WEIGHTS_FILE).read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        at, n_bytes = draw.randrange(end, len(content) - 8), draw.randint(1, 8)
        (folder / WEIGHTS_FILE).write_bytes(
            content[:at] + draw.randbytes(n_bytes) + content[at + n_bytes :]
        )
    forge_manifest(folder)
    return what


def use(folder: Path) -> None:
    """Generate text from the checkpoint in `folder`; compare its weights with another reader's."""
    model, tokenizer = load_model(folder, torch.device("cpu"))
    prompt = tokenizer.encode("To be, or not") or [0]
    tokenizer.decode(sampling.generate(model, prompt, 2, seed=0, device=torch.device("cpu")))
    try:
        other = load_file(folder / WEIGHTS_FILE)
    except SafetensorError:  # metadata that only it checks
        return
    if not all(parameter.equal(other[name]) for name, parameter in model.named_parameters()):
        raise AssertionError("other weights than in the file")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Load changed checkpoints."
    )
    parser.add_argument(
        "count", type=int, nargs="?", default=500, metavar="COUNT", help="(%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(%(default)s)")
    args = parser.parse_args(arguments)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        original, folder = write_checkpoint(Path(name) / "original"), Path(name) / "changed"
        use(original)
        memory, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0
        for seed in range(args.seed, args.seed + args.count):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(original, folder)
            what, started = mutate(random.Random(seed), folder), time.monotonic()
            signal.alarm(30)
            try:
                use(folder)
                outcomes[f"{what} used"] += 1
            except RunError:
                outcomes[f"{what} refused"] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcomes["failed"] += 1
                print(
                    f"seed {seed}, {what}: {type(error).__name__}: {str(error)[:200]}", flush=True
                )
            slowest = max(slowest, time.monotonic() - started)
        signal.alarm(0)
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) >> 10
    print(", ".join(f"{number} {what}" for what, number in sorted(outcomes.items())))
    print(f"slowest {slowest:.1f} s, {memory} MiB")
    return int(outcomes["failed"] > 0 or slowest > 10 or memory > 950)


if __name__ == "__main__":
    sys.exit(main())
