"""Command: text from a checkpoint, which says by itself what the model and its tokenizer are.

    python -m lm.generate CHECKPOINT --prompt TEXT [--max-new-tokens N] [--temperature T] [--top-k K]
                          [--top-p P] [--seed S]

CHECKPOINT is a checkpoint's folder, or a run's folder for its newest one. Whatever number of ranks wrote it,
it is read into this one process, on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lm import checkpoint, sampling
from lm.data.text import ByteTokenizer
from lm.errors import ConfigError, RunError
from lm.manifest import read_manifest, whole_checkpoints
from model import ModelConfig, Transformer


def find(where: Path) -> Path:
    """The checkpoint that `where` means: itself, or the newest one of a run's folder.

    Raises:
        ConfigError: there is no such folder, or no checkpoint in the run yet.
        CheckpointError: the run has checkpoints, but none is whole.
    """
    if not where.is_dir():
        raise ConfigError(f"{where}: no such folder; give a checkpoint's or a run's")
    checkpoints = where / "checkpoints"
    if not checkpoints.is_dir():
        return where
    whole = whole_checkpoints(checkpoints, lambda line: print(line, file=sys.stderr))
    if not whole:
        raise ConfigError(f"{where}: no checkpoint yet")
    return whole[0]


def load_model(folder: Path, device: torch.device) -> tuple[Transformer, ByteTokenizer]:
    """The model and the tokenizer of a checkpoint, ready to generate.

    Raises:
        CheckpointError: it is not whole.
        ConfigError: it was trained on tokens that stand for no text.
    """
    manifest = read_manifest(folder)
    if manifest.tokenizer is None:
        raise ConfigError(f"{folder}: its run had no tokenizer (dataset: synthetic), so its tokens are no text")
    with torch.device("meta"):
        model = Transformer(ModelConfig.model_validate(manifest.model))
    model.to_empty(device=device)
    checkpoint.load_weights(folder, model)
    return model, ByteTokenizer()


def stream(
    model: Transformer, tokenizer: ByteTokenizer, args: argparse.Namespace, device: torch.device
) -> Iterator[str]:
    """The generated text, piece by piece as it comes."""
    drawn = sampling.generate(
        model,
        tokenizer.encode(args.prompt),
        args.max_new_tokens,
        device=device,
        seed=args.seed,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
    )
    return tokenizer.stream(drawn)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: listing every value out of range.
    """
    parser = argparse.ArgumentParser(prog="python -m lm.generate", description="Generate text from a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint's or a run's folder")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="tokens to draw (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 = likeliest (%(default)s)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (all)")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest of probability P (all)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (%(default)s)")
    args = parser.parse_args(arguments)
    problems = []
    if not args.prompt:
        problems.append("--prompt: is empty; at least one character is needed")
    try:
        args.prompt.encode()
    except UnicodeEncodeError:
        problems.append("--prompt: is not UTF-8")
    if args.max_new_tokens < 0:
        problems.append(f"--max-new-tokens: {args.max_new_tokens} is less than 0")
    if not args.temperature >= 0:
        problems.append(f"--temperature: {args.temperature:g} is not 0 or more")
    if args.top_k is not None and args.top_k < 1:
        problems.append(f"--top-k: {args.top_k} is less than 1")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        problems.append(f"--top-p: {args.top_p:g} is not above 0 and at most 1")
    if not 0 <= args.seed < 2**63:
        problems.append(f"--seed: {args.seed} is not from 0 to 2^63 - 1")
    if problems:
        raise ConfigError(*problems)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        args = parse(arguments)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model, tokenizer = load_model(find(args.checkpoint), device)
        print(args.prompt, end="", flush=True)
        for piece in stream(model, tokenizer, args, device):
            print(piece, end="", flush=True)
        print()
        return 0
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader, e.g. head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
