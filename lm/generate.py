"""Command line for generating text from a checkpoint, which contains the model's structure and its tokenizer.

    python -m lm.generate CHECKPOINT --prompt TEXT [--samples N] [--batch-size B]
    python -m lm.generate CHECKPOINT --chat [--system TEXT]

Both accept [--max-new-tokens N] [--temperature T] [--top-k K] [--top-p P] [--seed S] [--stop TEXT]
[--base DIRECTORY].

If --prompt is -, prompts are read from standard input, one per line, and continued in batches with
the same results as one by one. --chat answers each line of standard input with the tokenizer's chat
template: Ctrl-C ends an answer, the end of the input ends the chat. A text ends at the tokenizer's
`stop_ids` or before the TEXT of --stop. CHECKPOINT is the directory or URL of a checkpoint, written
by any number of ranks, or of a run, which means its newest. It is loaded into one process, on a GPU
if one is available. LoRA adapters are merged into their base, which is read from where it was in
training, or from DIRECTORY.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lm import sampling
from lm.checkpoint.manifest import model_of, read_manifest
from lm.checkpoint.resume import find_checkpoint
from lm.data.tokenizer import Tokenizer, saved_tokenizer
from lm.errors import ConfigError, command, escape_control
from lm.hf import base
from model import Transformer

STDIN = "-"
MAX_NEW_TOKENS = 200


def load_model(
    directory: Path, device: torch.device, base_dir: Path | None = None
) -> tuple[Transformer, Tokenizer]:
    """Return the model and the tokenizer of a checkpoint; see `base.load_model`.

    Raises:
        CheckpointError: it is incomplete or damaged.
        ConfigError: it has no tokenizer, or the base of its adapters is not found.
    """
    manifest = read_manifest(directory)
    if manifest.tokenizer is None:
        raise ConfigError(
            f"{directory}: has no tokenizer: trained on random tokens, or on ids of an unknown tokenizer"
        )
    tokenizer = saved_tokenizer(
        manifest.tokenizer, directory, manifest.files, manifest.hyperparameters
    )
    if tokenizer.vocab_size > (size := model_of(directory, manifest).vocab_size):
        problem = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {size}"
        raise ConfigError(f"{directory}: {problem}; use another checkpoint")
    return base.load_model(directory, device, base_dir), tokenizer


def generate_texts(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    max_new_tokens: int,
    args: argparse.Namespace,
) -> Iterator[Iterator[str]]:
    """Yield for each of `prompts` the pieces of its text while they are generated, all prompts in one batch."""
    options: dict[str, Any] = {key: getattr(args, key) for key in ("temperature", "top_k", "top_p")}
    options |= {"device": next(model.parameters()).device, "stop_ids": tokenizer.stop_ids}
    steps = sampling.generate_batch(model, prompts, max_new_tokens, seeds=seeds, **options)
    for i, branch in enumerate(itertools.tee(steps, len(prompts))):
        yield until(tokenizer.stream(_sequence(branch, i), after=prompts[i]), args.stop)


def _sequence(steps: Iterator[list[int | None]], i: int) -> Iterator[int]:
    return (token for step in steps if (token := step[i]) is not None)


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield the text of `pieces` before the first of `stops`; what can be the start of one waits for the next piece."""
    pending = ""
    for piece in pieces:
        pending += piece
        if found := [at for stop in stops if (at := pending.find(stop)) >= 0]:
            yield pending[: min(found)]
            return
        n_held = max(
            (n for stop in stops for n in range(1, len(stop)) if pending.endswith(stop[:n])),
            default=0,
        )
        yield pending[: len(pending) - n_held]
        pending = pending[len(pending) - n_held :]
    yield pending


def continuations(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[str], args: argparse.Namespace
) -> Iterator[str]:
    """Yield the text to print, `args.samples` continuations of each prompt.

    Raises:
        ConfigError: a prompt has no tokens.
    """
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not tokens:
            raise ConfigError(
                f"--prompt: {prompt!r} has no tokens in this tokenizer; use other text"
            )
    n = MAX_NEW_TOKENS if args.max_new_tokens is None else args.max_new_tokens
    samples = [
        (i, seed)
        for i in range(len(prompts))
        for seed in range(args.seed, args.seed + args.samples)
    ]
    for start in range(0, len(samples), args.batch_size):
        batch = samples[start : start + args.batch_size]
        seeds = [seed for _, seed in batch]
        texts = generate_texts(model, tokenizer, [ids[i] for i, _ in batch], seeds, n, args)
        for (i, _), text in zip(batch, texts, strict=True):
            yield prompts[i]
            yield from text
            yield "\n"


def chat(model: Transformer, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Answer each line of standard input. The oldest messages are dropped to leave room for the answer.

    Raises:
        ConfigError: there is no chat template, it rejects the messages, or a line is not UTF-8.
    """
    context = model.config.max_seq_len
    room = min(context // 2, args.max_new_tokens or context)
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    history: list[dict[str, str]] = []

    def encode() -> list[int]:
        text, _ = tokenizer.render([*first, *history], add_generation_prompt=True)
        return tokenizer.encode_with_ends([text], add_special_tokens=False)[0][0].tolist()

    tokenizer.render(
        [*first, {"role": "user", "content": "?"}], add_generation_prompt=True
    )  # raises before any input
    while (line := read_line()) is not None:
        history.append({"role": "user", "content": line})
        while len(ids := encode()) > context - room and len(history) > 1:
            del history[:2]
        if len(ids) > context - room:
            print(
                f"too long: {len(ids)} tokens of at most {context - room} (max_seq_len {context})",
                file=sys.stderr,
            )
            history.clear()
            continue
        n = (
            context - len(ids)
            if args.max_new_tokens is None
            else min(args.max_new_tokens, context - len(ids))
        )
        answer = ""
        try:
            for piece in next(generate_texts(model, tokenizer, [ids], [args.seed], n, args)):
                answer += piece
                show(piece)
        except KeyboardInterrupt:
            pass
        show("\n")
        history.append({"role": "assistant", "content": answer})


def read_line() -> str | None:
    """Return the next line of standard input that is not empty, or None at its end or after Ctrl-C."""
    try:
        while not (line := input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")):
            pass
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError:
        raise ConfigError("standard input: is not UTF-8") from None
    if not is_utf8(line):
        raise ConfigError("standard input: is not UTF-8")
    return line


def show(text: str) -> None:
    """Print `text` at once, on a terminal with its control characters escaped."""
    print(escape_control(text) if sys.stdout.isatty() else text, end="", flush=True)


def is_utf8(text: str) -> bool:
    """Return whether `text`, from the command line or a terminal, was valid UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def read_prompts(prompt: str) -> list[str]:
    """Return the prompts: `prompt` itself, or the lines of standard input that are not empty.

    Raises:
        ConfigError: there is none, or the input is not UTF-8.
    """
    if prompt != STDIN:
        prompts = [prompt] if prompt else []
    else:
        try:
            text = sys.stdin.buffer.read().decode().replace("\r\n", "\n")
            prompts = [line for line in text.split("\n") if line]
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input: byte {error.start} is not UTF-8") from None
    if not prompts:
        where = "standard input" if prompt == STDIN else "--prompt"
        raise ConfigError(f"{where}: is empty; it needs at least one character")
    return prompts


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: lists every value out of range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lm.generate", description="Generate text from a checkpoint."
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="directory or URL of a checkpoint or run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text to continue; - = standard input, one prompt per line")
    what.add_argument("--chat", action="store_true", help="answer each line of standard input")
    add("--system", metavar="TEXT", help="system message of the chat (none)")
    add(
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="continuations of each prompt (%(default)s)",
    )
    add(
        "--batch-size",
        type=int,
        default=16,
        metavar="B",
        help="continuations per batch (%(default)s)",
    )
    length = f"tokens to generate at most ({MAX_NEW_TOKENS}; chat: up to max_seq_len)"
    add("--max-new-tokens", type=int, metavar="N", help=length)
    add("--temperature", type=float, default=0.8, metavar="T", help="0 = greedy (%(default)s)")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens (all)")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the fewest tokens of probability P (all)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="random seed; S + n for the n-th sample (%(default)s)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before TEXT; can be repeated",
    )
    add("--base", type=Path, metavar="DIRECTORY", help="a copy of the base of LoRA adapters")
    args = parser.parse_args(arguments)
    is_valid = {
        "--prompt: is not UTF-8": is_utf8(args.prompt or ""),
        "--system: is not UTF-8": is_utf8(args.system or ""),
        "--system: requires --chat": args.system is None or args.chat,
        f"--samples: {args.samples} must be 1 or more": args.samples >= 1,
        "--samples: requires --prompt": args.samples == 1 or not args.chat,
        "--stop: is empty; it needs at least one character": all(args.stop),
        f"--max-new-tokens: {args.max_new_tokens} must be 0 or more": (args.max_new_tokens or 0)
        >= 0,
        f"--temperature: {args.temperature:g} must be 0 or more": args.temperature >= 0,
        f"--top-k: {args.top_k} must be 1 or more": args.top_k is None or args.top_k >= 1,
        f"--top-p: {args.top_p or 0:g} must be above 0 and at most 1": args.top_p is None
        or 0 < args.top_p <= 1,
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
    prompts = [] if args.chat else read_prompts(args.prompt)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(find_checkpoint(args.checkpoint), device, args.base)
    if args.chat:
        chat(model, tokenizer, args)
    for piece in continuations(model, tokenizer, prompts, args):
        show(piece)
    return 0


if __name__ == "__main__":
    sys.exit(main())
