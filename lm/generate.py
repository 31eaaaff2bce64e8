"""Command line for generating text from a checkpoint, which contains the model's structure and its tokenizer.

    python -m lm.generate CHECKPOINT --prompt TEXT [--max-new-tokens N] [--temperature T] [--top-k K]
                          [--top-p P] [--seed S] [--batch-size B] [--base DIRECTORY]

If TEXT is -, prompts are read from standard input, one per line, and continued in batches with the same results as
one by one. CHECKPOINT is a checkpoint directory, or a run directory for its newest checkpoint, written by any number
of ranks. It is loaded into one process, on a GPU if one is available. LoRA adapters are merged into their base, which
is read from where it was in training, or from DIRECTORY.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lm import sampling
from lm.checkpoint.manifest import read_manifest
from lm.checkpoint.resume import find_checkpoint
from lm.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_of
from lm.errors import ConfigError, command
from lm.hf import base
from model import ModelConfig, Transformer

STDIN = "-"


def load_model(folder: Path, device: torch.device, moved: Path | None = None) -> tuple[Transformer, Tokenizer]:
    """Return the model and the tokenizer of a checkpoint; see `base.load_checkpoint`.

    Raises:
        CheckpointError: it is incomplete or damaged.
        ConfigError: it has no tokenizer, or the base of its adapters is not found.
    """
    manifest = read_manifest(folder)
    if manifest.tokenizer is None:
        raise ConfigError(f"{folder}: has no tokenizer (dataset: synthetic), so it cannot generate text")
    with torch.device("meta"):
        model = Transformer(ModelConfig.model_validate(manifest.model))
    model.to_empty(device=device)
    base.load_checkpoint(folder, model, moved)
    return model, ByteTokenizer() if manifest.tokenizer == ByteTokenizer.identity else tokenizer_of(folder)


def continuations(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[str], args: argparse.Namespace, device: torch.device
) -> Iterator[str]:
    """Yield the text to print: a single prompt's in pieces as they are generated, otherwise one text per prompt.

    Raises:
        ConfigError: a prompt has no tokens.
    """
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not tokens:
            raise ConfigError(f"--prompt: {prompt!r} has no tokens in this tokenizer; use other text")
    options: dict[str, Any] = {"device": device, "seed": args.seed, "temperature": args.temperature}
    options |= {"top_k": args.top_k, "top_p": args.top_p}
    if args.prompt != STDIN:
        yield prompts[0]
        yield from tokenizer.stream(sampling.generate(model, ids[0], args.max_new_tokens, **options), after=ids[0])
        yield "\n"
        return
    for start in range(0, len(ids), args.batch_size):
        batch = ids[start : start + args.batch_size]
        steps = list(sampling.generate_batch(model, batch, args.max_new_tokens, **options))
        for i, tokens in enumerate(batch):
            drawn = [token for step in steps if (token := step[i]) is not None]
            yield f"{prompts[start + i]}{tokenizer.decode(drawn, after=tokens)}\n"


def read_prompts(prompt: str) -> list[str]:
    """Return the prompts: `prompt` itself, or the lines of standard input.

    Raises:
        ConfigError: a prompt is empty or not UTF-8.
    """
    if prompt != STDIN:
        lines = [prompt]
    else:
        try:
            text = sys.stdin.buffer.read().decode().replace("\r\n", "\n")
            lines = text.removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input: byte {error.start} is not UTF-8") from None
    for number, line in enumerate(lines, 1):
        if not line:
            where = f"line {number} of standard input" if prompt == STDIN else "--prompt"
            raise ConfigError(f"{where}: is empty; it needs at least one character")
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: lists every value out of range.
    """
    parser = argparse.ArgumentParser(prog="python -m lm.generate", description="Generate text from a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="checkpoint or run directory")
    parser.add_argument("--prompt", required=True, help="text to continue; - = standard input, one prompt per line")
    parser.add_argument("--batch-size", type=int, default=16, metavar="B", help="prompts per batch (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="tokens to generate (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 = greedy (%(default)s)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens (all)")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the fewest tokens of probability P (all)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="random seed (%(default)s)")
    parser.add_argument("--base", type=Path, metavar="DIRECTORY", help="a copy of the base of LoRA adapters")
    args = parser.parse_args(arguments)
    is_valid = {
        "--prompt: is not UTF-8": not any("\ud800" <= character <= "\udfff" for character in args.prompt),
        f"--max-new-tokens: {args.max_new_tokens} must be 0 or more": args.max_new_tokens >= 0,
        f"--temperature: {args.temperature:g} must be 0 or more": args.temperature >= 0,
        f"--top-k: {args.top_k} must be 1 or more": args.top_k is None or args.top_k >= 1,
        f"--top-p: {args.top_p or 0:g} must be above 0 and at most 1": args.top_p is None or 0 < args.top_p <= 1,
        f"--seed: {args.seed} must be from 0 to 2^63 - 1": 0 <= args.seed < 2**63,
        f"--batch-size: {args.batch_size} must be 1 or more": args.batch_size >= 1,
    }
    if not all(is_valid.values()):
        raise ConfigError(*(problem for problem, valid in is_valid.items() if not valid))
    return args


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    args = parse(arguments)
    prompts = read_prompts(args.prompt)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(find_checkpoint(args.checkpoint), device, args.base)
    try:
        for piece in continuations(model, tokenizer, prompts, args, device):
            print(piece, end="", flush=True)
    except BrokenPipeError:  # e.g. head closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
