"""What `lm.plan` prints: what a step of a run needs, and whether that fits."""

from __future__ import annotations

import argparse
import math
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from lm.config import reading
from lm.config.combinations import check_combinations
from lm.config.draft import Draft
from lm.config.hyperparameters import Hyperparameters
from lm.data.config import derive_global_batch_size
from lm.data.tokenizer.files import MODEL_CONFIG
from lm.errors import ConfigError
from lm.fileio import describe_invalid
from lm.flops import count_flops_per_token
from lm.hf import weights
from lm.launch.machine import host_memory
from lm.memory import USABLE, Ranks, count_micro_steps
from lm.metrics.device import GIB
from lm.plan import fit
from lm.plan.gpus import GPUS_PER_NODE
from lm.training import parallelize
from lm.training.precision import choose_dtype
from lm.transformers_config import Kernels
from lm.units import format_bytes, format_count, format_parameters

MAX_GPUS = 1024
_GPU_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, MAX_GPUS)
"""that are tried"""


def load_hyperparameters(args: argparse.Namespace) -> Hyperparameters:
    """Read the experiment file."""
    return reading.load_hyperparameters(args.config, args.overrides, _read_start)


def change_settings(
    hp: Hyperparameters, n_gpus: int, settings: Mapping[str, Any]
) -> Hyperparameters:
    """Return `hp` with other settings; raise ConfigError if they do not fit to it."""
    values = hp.to_flat() | hp.model.model_dump(mode="json") | dict(settings)
    try:
        changed = Hyperparameters.from_flat(values)
    except ValidationError as error:
        raise ConfigError(describe_invalid(error)) from None
    check_combinations(changed, Draft())
    return round_up_batch(changed, changed.parallel.dp_size(n_gpus))


def _read_start(init_from: str, _kernels: Kernels | None) -> Mapping[str, Any]:
    """Return the hyperparameters of the model `init_from`; if it is not here, say what suffices."""
    remedy = "init_from: a plan needs a directory with its config.json"
    if Path(init_from).exists():
        its_keys = _read_keys(init_from)
        if not its_keys:
            problem = "has no config.json, and no checkpoint that can be read"
            raise ConfigError(f"init_from: {init_from}: {problem}", remedy)
        return its_keys
    try:
        if weights.is_model(init_from):  # perhaps in the Hub's cache
            directory = weights.find_source(init_from, [MODEL_CONFIG])
            return _read_keys(str(directory))
        problems: Sequence[str] = [f"init_from: {init_from} does not exist"]
    except ConfigError as error:
        problems = error.problems
    raise ConfigError(*problems, remedy)


def _read_keys(directory: str) -> Mapping[str, Any]:
    """Return the hyperparameters of the model in `directory`, which may have no tokenizer."""
    its_keys = weights.model_defaults(directory, needs_weights=False)
    if its_keys.get("tokenizer") is None:
        its_keys.pop("tokenizer", None)
    return its_keys


def advise_gpus(hp: Hyperparameters, ranks: Ranks) -> str | None:
    """Return a line on the smallest number of GPUs, above that of `ranks`, on which a step fits.

    Up to 8, and then as complete nodes, as far as `total_batch_size` has a micro-batch for each;
    None = none of them is enough.
    """
    largest = MAX_GPUS
    if hp.data.total_batch_size is not None:
        n_groups = hp.data.total_batch_size // hp.data.batch_size
        largest = min(largest, n_groups * hp.parallel.context_parallel)
    group = math.lcm(hp.parallel.shard_group_size or 1, hp.parallel.context_parallel)
    counts = [n for n in _GPU_COUNTS if ranks.size < n <= largest and n % group == 0]

    def fits(n_gpus: int) -> bool:
        per_node = min(n_gpus, GPUS_PER_NODE)
        more = replace(ranks, size=n_gpus, per_node=per_node)
        return fit.measure(round_up_batch(hp, hp.parallel.dp_size(n_gpus)), more).fits

    index = bisect_left(counts, True, key=fits)
    if index == len(counts):
        return None
    nodes = format_count(math.ceil(counts[index] / GPUS_PER_NODE), "node")
    return f"without other settings, it fits on {counts[index]} GPUs in {nodes}"


def describe_ranks(args: argparse.Namespace, hp: Hyperparameters) -> Ranks:
    """Return the ranks of a plan. Host memory is unknown unless given or this machine's."""
    host_bytes = math.inf
    if args.host_memory is not None:
        host_bytes = args.host_memory * GIB
    elif torch.cuda.is_available():
        host_bytes = host_memory().total
    return Ranks(
        dtype=choose_dtype(hp.precision.amp_dtype, torch.bfloat16),
        device_type="cuda",
        size=args.gpus,
        per_node=args.gpus // args.nodes,
        memory=round(args.memory * GIB),
        host_memory=host_bytes,
    )


def round_up_batch(hp: Hyperparameters, dp_size: int) -> Hyperparameters:
    """Return `hp` with `total_batch_size` rounded up to what the data-parallel ranks can share."""
    if hp.data.total_batch_size is None:
        return hp
    per_micro_step = hp.data.batch_size * dp_size
    total = math.ceil(hp.data.total_batch_size / per_micro_step) * per_micro_step
    return hp.replace(total_batch_size=total)


def describe_run(hp: Hyperparameters, ranks: Ranks) -> list[str]:
    """Return lines on the model, how it is sharded, and what a step is."""
    trained = ""
    if hp.lora.lora_rank is not None:
        trained = f" ({format_parameters(hp.n_trained_parameters)} trained)"
    mesh = parallelize.mesh_shape(hp.parallel, ranks.size, ranks.per_node)
    gpus = format_count(ranks.size, "GPU")
    nodes = format_count(ranks.size // ranks.per_node, "node")
    replicas = format_count(mesh.replicate, "replica")
    global_batch_size = derive_global_batch_size(hp.data, hp.parallel.dp_size(ranks.size))
    micro_steps = format_count(count_micro_steps(hp, ranks.size), "micro-step")
    sequences = format_count(hp.data.batch_size, "sequence")
    tokens = global_batch_size * hp.model.max_seq_len
    step = f"{tokens:,} tokens in all"
    unit = "GPU"
    if hp.parallel.context_parallel > 1:
        unit = f"group of {hp.parallel.context_parallel}"
    flops = count_flops_per_token(hp.lora, hp.model)
    if flops is not None:
        step += f", {flops * tokens / ranks.size / 1e12:,.1f} TFLOP on each"
    return [
        f"{hp.size_of_model}{trained} on {gpus} in {nodes}",
        f"{hp.parallel.sharding}: {replicas} of the model, in {format_count(mesh.shard, 'shard')}",
        f"a step: {micro_steps} of {sequences} of {hp.model.max_seq_len:,} tokens on each {unit},"
        f" {step}",
    ]


class Plan(NamedTuple):
    """What the command prints, and whether the step fits."""

    text: str
    fits: bool


def describe_plan(args: argparse.Namespace) -> Plan:
    """Return the plan of the step that the command line asks for.

    Raises:
        ConfigError: the experiment file is wrong, or no such run can be planned.
    """
    given = load_hyperparameters(args)
    ranks = describe_ranks(args, given)
    dp_size = given.parallel.dp_size(ranks.size)
    hp = round_up_batch(given, dp_size)
    lines: list[str] = []
    total = given.data.total_batch_size
    if hp.data.total_batch_size != total:
        of = f"batch_size {hp.data.batch_size} x {format_count(dp_size, 'data-parallel rank')}"
        problem = f"{total} is not a multiple of {of}, and a run would be refused"
        lines.append(f"total_batch_size: {problem}; planned with {hp.data.total_batch_size}\n")
    lines += [*describe_run(hp, ranks), ""]
    if sys.stderr.isatty():
        print("taking steps on fake tensors", file=sys.stderr)
    need = fit.measure(hp, ranks)
    largest = fit.find_largest_batch_size(hp, need)
    lines += [*need.describe(), ""]
    usable = f"{USABLE:.0%} of the memory of one {args.card}, {format_bytes(USABLE * ranks.memory)}"
    if need.fits:
        lines.append(f"fits into {usable}; CUDA, NCCL and fragmentation take the rest")
    else:
        lines.append(f"does not fit into {usable}")
        proposals = fit.propose(need, partial(change_settings, given, ranks.size))
        lines += [proposal.describe() for proposal in proposals]
        more_gpus = advise_gpus(given, ranks)
        if more_gpus is not None:
            lines.append(more_gpus)
    faster = fit.advise_batch_size(hp, need)
    if faster is not None:
        lines.append(faster)
    limit = " or more" if largest == fit.LARGEST_BATCH_SIZE else ""
    lines.append(f"largest batch_size that fits without accumulation: {largest:,}{limit}")
    return Plan("\n".join(lines), need.fits)
