"""Command: generate text from a checkpoint, which holds the model and its tokenizer.

    python -m lm.generate CHECKPOINT --prompt TEXT
    python -m lm.generate CHECKPOINT --chat [--prompt TEXT]

Both accept [--max-new-tokens N] [--temperature T] [--top-k K] [--top-p P] [--seed S]
[--base DIRECTORY] [--dtype DTYPE].

If --prompt is -, the prompt is standard input, line breaks included. --chat answers the prompt, or
each line of standard input, with the tokenizer's chat template: Ctrl-C ends an answer, the end of
the input ends the chat. A text ends at the tokenizer's end of text or at a token of
generation_config.json, an answer also at the template's end of turn. CHECKPOINT is the directory or
URL of a checkpoint, written by any number of ranks, or of a run, which means its newest, or a
Hugging Face model, as a directory or OWNER/MODEL. It is loaded into one process, on a GPU if one is
available. LoRA adapters are next to their base, as in training, which is read from where it was
then, or from DIRECTORY.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from lm.command_line import location_argument, number
from lm.data.tokenizer.loading import Tokenizer
from lm.errors import ConfigError, Parser, command, escape_control
from lm.fileio import choose_compiler_cache
from lm.hf.arguments import add_loading_arguments
from lm.launch.launch import is_thread_count_set
from lm.launch.machine import usable_cores

if TYPE_CHECKING:
    from lm.any_model import AnyModel

STDIN = "-"
MAX_NEW_TOKENS = 200


def generate_text(
    model: AnyModel,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    seed: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
    args: argparse.Namespace,
) -> Iterator[str]:
    """Yield the pieces of a text that continues `prompt` while they are generated."""
    from lm import sampling

    tokens = sampling.generate(
        model,
        prompt,
        max_new_tokens,
        device=next(model.parameters()).device,
        seed=seed,
        settings=sampling.Sampling(args.temperature, args.top_k, args.top_p),
        stop_ids=stop_ids,
    )
    return tokenizer.stream(tokens, after=prompt)


def continue_prompt(
    model: AnyModel, tokenizer: Tokenizer, prompt: str, args: argparse.Namespace
) -> None:
    """Print `prompt` and its continuation.

    Raises:
        ConfigError: the prompt has no tokens, or more than the model's context.
    """
    prompt_ids = tokenizer.encode(prompt)
    context = model.config.max_seq_len
    if not prompt_ids:
        raise ConfigError(f"--prompt: {prompt!r} has no tokens in this tokenizer; use other text")
    if len(prompt_ids) > context:
        problem = f"--prompt: {len(prompt_ids):,} tokens exceed max_seq_len {context:,}"
        raise ConfigError(f"{problem}; use a shorter text")
    max_new_tokens = args.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = MAX_NEW_TOKENS
    pieces = generate_text(
        model, tokenizer, prompt_ids, args.seed, max_new_tokens, tokenizer.stop_ids, args
    )
    print_text(prompt)
    for piece in pieces:
        print_text(piece)
    print_text("\n")


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
    history: list[dict[str, str]] = []  # messages of the user and the assistant in turns
    lines = read_lines() if args.prompt in (None, STDIN) else [args.prompt]
    for n, line in enumerate(lines):
        history.append({"role": "user", "content": line})
        prompt = _encode_chat(tokenizer, history)
        while len(prompt) > longest_prompt and len(history) > 1:
            del history[:2]
            prompt = _encode_chat(tokenizer, history)
        if len(prompt) > longest_prompt:
            problem = f"{len(prompt)} tokens of at most {longest_prompt} (max_seq_len {context})"
            if args.prompt not in (None, STDIN):
                raise ConfigError(f"--prompt: too long: {problem}; use a shorter text")
            print(f"too long: {problem}", file=sys.stderr)
            history.clear()
            continue

        max_new_tokens = context - len(prompt)
        if args.max_new_tokens is not None:
            max_new_tokens = min(max_new_tokens, args.max_new_tokens)
        pieces = generate_text(
            model, tokenizer, prompt, args.seed + n, max_new_tokens, tokenizer.chat_stop_ids, args
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


def _encode_chat(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the token ids of `messages` and of the start of an answer."""
    rendered = tokenizer.render(messages, add_generation_prompt=True)
    return tokenizer.encode_piece(rendered.text).tolist()


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


def read_prompt(prompt: str) -> str:
    """Return the prompt: `prompt` itself, or standard input.

    Raises:
        ConfigError: the input is empty or not UTF-8.
    """
    if prompt != STDIN:
        return prompt
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input: byte {error.start} is not UTF-8") from None
    if not text:
        raise ConfigError("standard input: is empty; it needs at least one character")
    return text


def parse_generate_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: the prompt is missing, empty or not UTF-8.
    """
    parser = Parser(prog="python -m lm.generate", description="Generate text from a checkpoint.")
    add = parser.add_argument
    checkpoint_help = "a checkpoint, a run or a Hugging Face model"
    add("checkpoint", type=location_argument, metavar="CHECKPOINT", help=checkpoint_help)
    add("--prompt", help="text to continue; - = standard input")
    add("--chat", action="store_true", help="answer the prompt, or each line of standard input")
    length_help = f"tokens to generate at most ({MAX_NEW_TOKENS}; chat: up to max_seq_len)"
    add("--max-new-tokens", type=number(int, 0), metavar="N", help=length_help)
    temperature_help = "0 = greedy (%(default)s)"
    add("--temperature", type=number(float, 0), default=0.8, metavar="T", help=temperature_help)
    add(
        "--top-k",
        type=number(int, 1),
        metavar="K",
        help="sample from the K most likely tokens (all)",
    )
    top_p_help = "sample from the fewest tokens of probability P (all)"
    add("--top-p", type=number(float, 1e-6, 1), metavar="P", help=top_p_help)
    seed_help = "random seed; S + n for answer n of a chat, from 0 (%(default)s)"
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="S", help=seed_help)
    add_loading_arguments(parser)
    args = parser.parse_args(arguments)

    if args.prompt is None and not args.chat:
        problem = "is missing; write a text to continue, or --chat to ask for answers"
        raise ConfigError(f"--prompt: {problem}")
    if args.prompt == "":
        raise ConfigError("--prompt: is empty; it needs at least one character")
    if not is_utf8(args.prompt or ""):
        raise ConfigError("--prompt: is not UTF-8")
    return args


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    args = parse_generate_arguments(arguments)
    prompt = ""
    if not args.chat:
        prompt = read_prompt(args.prompt)
    choose_compiler_cache()

    import torch  # takes seconds, which a wrong command line does not wait for

    from lm.hf.base import open_model
    from lm.runtime.failures import explaining_out_of_memory

    if not is_thread_count_set():
        torch.set_num_threads(usable_cores())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    less = "use --dtype bfloat16, or a smaller --max-new-tokens"
    with explaining_out_of_memory(0, remedy=less):
        model, tokenizer = open_model(args.checkpoint, device, args.dtype, args.base)
        # `sampling.generate` only turns gradients off, as it also runs between training steps.
        with torch.inference_mode():
            if args.chat:
                chat(model, tokenizer, args)
            else:
                continue_prompt(model, tokenizer, prompt, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
