"""Command line of the Hugging Face export.

    python -m lm.hf export RUN OUT [--dtype float32|bfloat16|float16] [--base DIRECTORY | --adapter]
    python -m lm.hf inspect MODEL

RUN is the directory or URL of a checkpoint or run. LoRA adapters are merged into their base, which
is read from where it was in training, or from DIRECTORY; with --adapter they are written alone, in
PEFT's format. MODEL is what `init_from` accepts: a directory of Hugging Face or of PEFT, or a name
on the Hub.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lm.checkpoint.headers import TensorSlice
from lm.data.hub_cache import find_directory
from lm.errors import command
from lm.fileio import home_path
from lm.hf import adapters, weights
from lm.hf.export import export_model
from lm.units import format_bytes, format_parameters


def describe_model(source: str) -> str:
    """Return what the model `source` is, in lines; raise ConfigError if it cannot be read."""
    if adapters.is_adapter(source):
        return _describe_adapters(source)
    weights.model_defaults(source)  # checks the tokenizer, too
    if not Path(source).is_dir():
        return _describe_on_hub(source)
    model = weights.open_model(Path(source))
    slices: set[TensorSlice] = set()  # each once, though GPT-2's query, key and value share one
    for tensor in model.sources.values():
        slices.update(tensor.slices)
    n_bytes = sum(math.prod(piece.shape) * piece.dtype.itemsize for piece in slices)
    dtypes = {piece.dtype.name for piece in slices}
    n_parameters = f"{format_parameters(model.config.n_parameters)} parameters"
    size = f"{format_bytes(n_bytes)} in {', '.join(sorted(dtypes))}"
    summary = f"{model.family.class_name}, {n_parameters}, {size}"
    lines = [f"{source}: {summary}", f"can be read: init_from: {source}"]
    if model.unused:
        lines.append(weights.describe_unused(source, model.unused))
    return "\n".join(lines)


def _describe_on_hub(source: str) -> str:
    _, family, config = weights.read_structure(source)
    summary = f"{family.class_name}, {format_parameters(config.n_parameters)} parameters"
    weights_line = "its weights are downloaded, and their tensors checked, where they are loaded"
    return f"{source}: {summary}\ncan be read: init_from: {source}\n{weights_line}"


def _describe_adapters(source: str) -> str:
    adapters.model_defaults(source)  # checks the tokenizer, too
    config = adapters.open_adapters(Path(source)).config
    layers = ", ".join(config.lora_targets or ())
    summary = f"LoRA adapters of rank {config.lora_rank} of {adapters.base_of(source)}: {layers}"
    return f"{source}: {summary}\ncan be read: init_from: {source}"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.hf", description="Export to, and inspect, Hugging Face models."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    export = commands.add_parser("export", help="convert a checkpoint to a Hugging Face model")
    add = export.add_argument
    add(
        "checkpoint",
        type=find_directory,
        metavar="RUN",
        help="directory or URL of a checkpoint or run",
    )
    add("out", type=home_path, metavar="OUT", help="directory to create")
    dtypes = weights.WEIGHT_DTYPES
    add("--dtype", choices=dtypes, default="float32", help="of the weights (%(default)s)")
    add_lora = export.add_mutually_exclusive_group().add_argument
    add_lora(
        "--base", type=home_path, metavar="DIRECTORY", help="a copy of the base of LoRA adapters"
    )
    add_lora("--adapter", action="store_true", help="write LoRA adapters alone, in PEFT's format")

    inspect_help = "print what a Hugging Face model is and whether init_from can read it"
    inspect = commands.add_parser("inspect", help=inspect_help)
    source_help = "a directory, or OWNER/MODEL[@REVISION] on the Hub"
    inspect.add_argument("source", type=find_directory, metavar="MODEL", help=source_help)

    args = parser.parse_args(arguments)
    if args.command == "inspect":
        print(describe_model(args.source))
        return 0
    started = time.monotonic()
    n_bytes = export_model(args.checkpoint, args.out, args.dtype, args.base, args.adapter)
    seconds = time.monotonic() - started
    print(f"{args.out}: {format_bytes(n_bytes)} in {args.dtype} in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
