"""Command line of the Hugging Face export.

    python -m lm.hf export RUN OUT [--dtype float32|bfloat16|float16] [--base DIRECTORY | --adapter]
    python -m lm.hf inspect MODEL

RUN is the directory or URL of a checkpoint or run. LoRA adapters are merged into their base, which
is read from where it was in training, or from DIRECTORY; with --adapter they are written alone, in
PEFT's format. MODEL is what `init_from` accepts: a Hugging Face directory, or a name on the Hub.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lm.errors import command
from lm.hf import weights
from lm.hf.export import export_model


def inspect(source: str) -> str:
    """Return what the model `source` is, in two lines; raise ConfigError if it cannot be read."""
    model = weights.open_model(weights.find_source(source))
    weights.model_defaults(source)  # checks the tokenizer, too
    slices = {piece for source in model.sources.values() for piece in source.slices}
    size = sum(math.prod(piece.shape) * piece.dtype.itemsize for piece in slices)
    dtypes = ", ".join(sorted({str(piece.dtype).removeprefix("torch.") for piece in slices}))
    parameters = f"{model.config.n_parameters / 1e6:,.1f}M parameters"
    summary = f"{model.family.class_name}, {parameters}, {size / 1e9:,.2f} GB in {dtypes}"
    return f"{source}: {summary}\ncan be read: init_from: {source}"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.hf", description="Export to, and inspect, Hugging Face models."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="convert a checkpoint to a Hugging Face model")
    export.add_argument("checkpoint", metavar="RUN", help="directory or URL of a checkpoint or run")
    export.add_argument("out", type=Path, metavar="OUT", help="directory to create")
    export.add_argument(
        "--dtype", choices=weights.DTYPES, default="float32", help="of the weights (%(default)s)"
    )
    lora = export.add_mutually_exclusive_group()
    lora.add_argument(
        "--base", type=Path, metavar="DIRECTORY", help="a copy of the base of LoRA adapters"
    )
    lora.add_argument(
        "--adapter", action="store_true", help="write LoRA adapters alone, in PEFT's format"
    )
    look = commands.add_parser(
        "inspect", help="print what a Hugging Face model is and whether init_from can read it"
    )
    look.add_argument(
        "source", metavar="MODEL", help="a directory, or OWNER/MODEL[@REVISION] on the Hub"
    )
    args = parser.parse_args(arguments)
    started = time.monotonic()
    if args.command == "inspect":
        print(inspect(args.source))
    else:
        size = export_model(args.checkpoint, args.out, args.dtype, args.base, args.adapter)
        print(
            f"{args.out}: {size / 1e9:,.2f} GB in {args.dtype} in {time.monotonic() - started:.0f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
