"""Command: generate text from a checkpoint, which holds the model and its tokenizer.

    python -m lm.generate CHECKPOINT --prompt TEXT [--samples N] [--batch-size B]
    python -m lm.generate CHECKPOINT --chat [--prompt TEXT] [--system TEXT]

Both accept [--max-new-tokens N] [--temperature T] [--top-k K] [--top-p P] [--min-p P]
[--repetition-penalty R] [--seed S] [--stop TEXT] [--base DIRECTORY] [--dtype DTYPE].

If --prompt is -, prompts are read from standard input, one per line, and continued in batches with
the same results as one by one. --chat answers the prompt, or each line of standard input, with the
tokenizer's chat template: Ctrl-C ends an answer, the end of the input ends the chat. A text ends at
the tokenizer's end of text, at a token of generation_config.json or before the TEXT of --stop, an
answer also at the template's end of turn. CHECKPOINT is the directory or URL of a checkpoint,
written by any number of ranks, or of a run, which means its newest, or a Hugging Face model, as a
directory or OWNER/MODEL. It is loaded into one process, on a GPU if one is available. LoRA adapters
are merged into their base, which is read from where it was in training, or from DIRECTORY.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lm.data.tokenizer.loading import Tokenizer
from lm.errors import ConfigError, command, error_prefix, escape_control
from lm.hf.arguments import add_loading_arguments
from lm.launch.launch import is_thread_count_set
from lm.launch.machine import usable_cores

if TYPE_CHECKING:
    from lm.transformers_model import AnyModel

STDIN = "-"
MAX_NEW_TOKENS = 200


def generate_texts(
    model: AnyModel,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    args: argparse.Namespace,
) -> Iterator[Iterator[str]]:
    """Yield for each of `prompts`, one batch, the pieces of its text while they are generated."""
    from lm import sampling

    settings = sampling.Sampling(
        repetition_penalty=args.repetition_penalty,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
    )
    steps = sampling.generate_batch(
        model,
        prompts,
        max_new_tokens,
        device=next(model.parameters()).device,
        seeds=seeds,
        settings=settings,
        stop_ids=stop_ids,
    )
    # The steps of the batch are read once per prompt, each time for its own tokens.
    copies = itertools.tee(steps, len(prompts))
    for i, prompt in enumerate(prompts):
        tokens = _select_sequence(copies[i], i)
        pieces = tokenizer.stream(tokens, after=prompt)
        yield end_before_stop(pieces, args.stop)


def _select_sequence(steps: Iterator[list[int | None]], i: int) -> Iterator[int]:
    """Yield the tokens of sequence `i` of a batch."""
    for tokens in steps:
        token = tokens[i]
        if token is not None:
            yield token


def end_before_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield the text of `pieces` before the first of `stops`.

    What can be the start of a stop is held back until the next piece.
    """
    pending = ""
    for piece in pieces:
        pending += piece
        found = [pending.index(stop) for stop in stops if stop in pending]
        if found:
            yield pending[: min(found)]
            return
        n_held = max((_count_started(pending, stop) for stop in stops), default=0)
        n_ready = len(pending) - n_held
        yield pending[:n_ready]
        pending = pending[n_ready:]
    yield pending


def _count_started(text: str, stop: str) -> int:
    """Return how many of the first characters of `stop`, but not all, are the end of `text`."""
    for n in range(len(stop) - 1, 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


class Continuation(NamedTuple):
    """A text to generate."""

    prompt: str
    prompt_ids: list[int]
    seed: int


def generate_continuations(
    model: AnyModel, tokenizer: Tokenizer, prompts: Sequence[str], args: argparse.Namespace
) -> Iterator[str]:
    """Yield the text to print, `args.samples` continuations of each prompt.

    Raises:
        ConfigError: a prompt has no tokens.
    """
    continuations: list[Continuation] = []
    for prompt in prompts:
        prompt_ids = tokenizer.encode(prompt)
        if not prompt_ids:
            raise ConfigError(
                f"--prompt: {prompt!r} has no tokens in this tokenizer; use other text"
            )
        seeds = range(args.seed, args.seed + args.samples)
        continuations += [Continuation(prompt, prompt_ids, seed) for seed in seeds]

    max_new_tokens = args.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = MAX_NEW_TOKENS
    for start in range(0, len(continuations), args.batch_size):
        batch = continuations[start : start + args.batch_size]
        ids = [continuation.prompt_ids for continuation in batch]
        seeds = [continuation.seed for continuation in batch]
        texts = generate_texts(
            model, tokenizer, ids, seeds, max_new_tokens, tokenizer.stop_ids, args
        )
        for continuation, text in zip(batch, texts, strict=True):
            yield continuation.prompt
            yield from text
            yield "\n"


def chat(model: AnyModel, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Answer the prompt, or each line of standard input.

    The oldest messages are dropped to leave room for an answer.

    Raises:
        ConfigError: there is no chat template, it rejects the messages, or a line is not UTF-8.
    """
    context = model.config.max_seq_len
    n_reserved = context // 2  # for the answer
    if args.max_new_tokens:
        n_reserved = min(n_reserved, args.max_new_tokens)
    longest_prompt = context - n_reserved

    _encode_chat(tokenizer, [{"role": "user", "content": "?"}])  # raises before any input
    system: list[dict[str, str]] = []
    if args.system is not None:
        with error_prefix("--system"):
            _require_system_role(tokenizer)
        system.append({"role": "system", "content": args.system})

    history: list[dict[str, str]] = []  # messages of the user and the assistant in turns
    lines = read_lines() if args.prompt in (None, STDIN) else [args.prompt]
    for n, line in enumerate(lines):
        history.append({"role": "user", "content": line})
        prompt = _encode_chat(tokenizer, [*system, *history])
        while len(prompt) > longest_prompt and len(history) > 1:
            del history[:2]
            prompt = _encode_chat(tokenizer, [*system, *history])
        if len(prompt) > longest_prompt:
            problem = f"{len(prompt)} tokens of at most {longest_prompt} (max_seq_len {context})"
            print(f"too long: {problem}", file=sys.stderr)
            history.clear()
            continue

        max_new_tokens = context - len(prompt)
        if args.max_new_tokens is not None:
            max_new_tokens = min(max_new_tokens, args.max_new_tokens)
        (pieces,) = generate_texts(
            model,
            tokenizer,
            [prompt],
            [args.seed + n],
            max_new_tokens,
            tokenizer.chat_stop_ids,
            args,
        )
        answer = ""
        try:
            for piece in pieces:
                answer += piece
                print_text(piece)
        except KeyboardInterrupt:
            pass  # ends the answer
        print_text("\n")
        history.append({"role": "assistant", "content": answer})


def _require_system_role(tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the chat template does not write messages of the role system."""
    marker = "x0q7"
    messages = [{"role": "system", "content": marker}, {"role": "user", "content": "?"}]
    text, _ = tokenizer.render(messages, add_generation_prompt=True)
    if marker not in text:
        problem = f"{tokenizer.find_template().name} leaves out messages of the role system"
        raise ConfigError(f"{problem}; leave --system out, and write its text in the first line")


def _encode_chat(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the token ids of `messages` and of the start of an answer."""
    text, _ = tokenizer.render(messages, add_generation_prompt=True)
    ((ids, _),) = tokenizer.encode_with_ends([text], add_special_tokens=False)
    return ids.tolist()


def read_lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty, until its end or Ctrl-C.

    Raises:
        ConfigError: a line is not UTF-8.
    """
    shown = ""
    if sys.stdin.isatty() and sys.stdout.isatty():
        shown = "> "
    while True:
        try:
            line = input(shown)
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeDecodeError:
            raise ConfigError("standard input: is not UTF-8") from None
        if not is_utf8(line):
            raise ConfigError("standard input: is not UTF-8")
        if line:
            yield line


def print_text(text: str) -> None:
    """Print `text` at once, on a terminal with its control characters escaped."""
    if sys.stdout.isatty():
        text = escape_control(text)
    print(text, end="", flush=True)


def is_utf8(text: str) -> bool:
    """Return whether `text`, from the command line or a terminal, was valid UTF-8."""
    # Python decodes an invalid byte to a surrogate.
    return not any("\ud800" <= character <= "\udfff" for character in text)


def read_prompts(prompt: str) -> list[str]:
    """Return the prompts: `prompt` itself, or the lines of standard input that are not empty.

    Raises:
        ConfigError: there is none, or the input is not UTF-8.
    """
    if prompt != STDIN:
        return [prompt]
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input: byte {error.start} is not UTF-8") from None
    lines = text.replace("\r\n", "\n").split("\n")
    prompts = [line for line in lines if line]
    if not prompts:
        raise ConfigError("standard input: is empty; it needs at least one character")
    return prompts


def parse_generate_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: lists every value out of range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lm.generate", description="Generate text from a checkpoint."
    )
    add = parser.add_argument
    checkpoint_help = "a checkpoint, a run or a Hugging Face model"
    add("checkpoint", metavar="CHECKPOINT", help=checkpoint_help)
    add("--prompt", help="text to continue; - = standard input, one prompt per line")
    add("--chat", action="store_true", help="answer the prompt, or each line of standard input")
    add("--system", metavar="TEXT", help="system message of the chat (none)")
    samples_help = "continuations of each prompt (%(default)s)"
    add("--samples", type=int, default=1, metavar="N", help=samples_help)
    batch_help = "continuations per batch (%(default)s)"
    add("--batch-size", type=int, default=16, metavar="B", help=batch_help)
    length_help = f"tokens to generate at most ({MAX_NEW_TOKENS}; chat: up to max_seq_len)"
    add("--max-new-tokens", type=int, metavar="N", help=length_help)
    add("--temperature", type=float, default=0.8, metavar="T", help="0 = greedy (%(default)s)")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens (all)")
    top_p_help = "sample from the fewest tokens of probability P (all)"
    add("--top-p", type=float, metavar="P", help=top_p_help)
    min_p_help = "sample from tokens at least P times as likely as the most likely one (all)"
    add("--min-p", type=float, metavar="P", help=min_p_help)
    penalty_help = (
        "divide the logits of tokens that occurred, the prompt's too, by R (1: no change)"
    )
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help=penalty_help)
    seed_help = "random seed; S + n for the n-th sample or answer (%(default)s)"
    add("--seed", type=int, default=0, metavar="S", help=seed_help)
    stop_help = "end before TEXT; can be repeated"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop_help)
    add_loading_arguments(parser)
    args = parser.parse_args(arguments)

    problems: list[str] = []
    if args.prompt is None and not args.chat:
        problems.append(
            "--prompt: is missing; write a text to continue, or --chat to ask for answers"
        )
    if args.prompt == "":
        problems.append("--prompt: is empty; it needs at least one character")
    if not is_utf8(args.prompt or ""):
        problems.append("--prompt: is not UTF-8")
    if not is_utf8(args.system or ""):
        problems.append("--system: is not UTF-8")
    if args.system is not None and not args.chat:
        problems.append("--system: requires --chat")
    if args.samples < 1:
        problems.append(f"--samples: {args.samples} must be 1 or more")
    if args.samples != 1 and args.chat:
        problems.append("--samples: is not for --chat")
    if not all(args.stop):
        problems.append("--stop: is empty; it needs at least one character")
    if args.max_new_tokens is not None and args.max_new_tokens < 0:
        problems.append(f"--max-new-tokens: {args.max_new_tokens} must be 0 or more")
    if not args.temperature >= 0:  # or NaN
        problems.append(f"--temperature: {args.temperature:g} must be 0 or more")
    if args.top_k is not None and args.top_k < 1:
        problems.append(f"--top-k: {args.top_k} must be 1 or more")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        problems.append(f"--top-p: {args.top_p:g} must be above 0 and at most 1")
    if args.min_p is not None and not 0 <= args.min_p <= 1:
        problems.append(f"--min-p: {args.min_p:g} must be from 0 to 1")
    if not 0.01 <= args.repetition_penalty <= 100:  # beyond, logits could overflow
        penalty = f"--repetition-penalty: {args.repetition_penalty:g}"
        problems.append(f"{penalty} must be from 0.01 to 100; 1 changes nothing")
    if not 0 <= args.seed < 2**63:
        problems.append(f"--seed: {args.seed} must be from 0 to 2^63 - 1")
    if args.batch_size < 1:
        problems.append(f"--batch-size: {args.batch_size} must be 1 or more")
    if problems:
        raise ConfigError(*problems)
    return args


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    args = parse_generate_arguments(arguments)
    prompts: list[str] = []
    if not args.chat:
        prompts = read_prompts(args.prompt)

    import torch  # takes seconds, which a wrong command line does not wait for

    from lm.hf.base import open_model
    from lm.runtime.failures import explaining_out_of_memory

    if not is_thread_count_set():
        torch.set_num_threads(usable_cores())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    less = "use --dtype bfloat16, or a smaller --batch-size or --max-new-tokens"
    with explaining_out_of_memory(0, remedy=less):
        model, tokenizer = open_model(
            args.checkpoint, device, args.dtype, args.base, args.unquantized
        )
        # `generate_batch` itself only needs no gradients, as it also runs between training steps.
        with torch.inference_mode():
            if args.chat:
                chat(model, tokenizer, args)
                return 0
            for piece in generate_continuations(model, tokenizer, prompts, args):
                print_text(piece)
    return 0


if __name__ == "__main__":
    sys.exit(main())
