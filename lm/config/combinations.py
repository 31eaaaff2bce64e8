"""Keys that are valid, and do not fit together: the reason and the remedy of each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from lm.config.draft import Draft
from lm.config.hyperparameters import PARTS, Hyperparameters
from lm.errors import ConfigError
from lm.fields import need_of
from lm.model_config import ModelConfig
from lm.training import config as training
from lm.training.config import TransferConfig
from lm.transformers_config import find_random_rates, reason_against_bfloat16


def check_combinations(hp: Hyperparameters, draft: Draft) -> None:
    """Raise ConfigError for keys that do not fit together."""
    problems = [
        *_find_unread(hp),
        *_find_problems_of_float8(hp),
        *_find_problems_of_combinations(hp),
        *_find_problems_of_context(hp),
        *_find_problems_of_fields(hp),
        *_find_problems_of_pairs(hp),
        *_find_problems_of_adapters(hp),
        *_find_problems_of_model(hp),
        *_find_problems_of_experts(hp),
    ]
    if problems:
        raise ConfigError(*(f"{draft.label(key, text)}: {text}" for key, text in problems))


def _find_unread(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield the keys that are set though no part reads them, with the reason and the remedy."""
    for name in PARTS:
        config = getattr(hp, name)
        for key, info in type(config).model_fields.items():
            need = need_of(info)
            if need is None or getattr(config, key) == info.default:
                continue
            value = getattr(config, need.key)
            if not need.is_met_by(value):
                found = "" if not need.values else f", not {value}"
                yield key, f"needs {need}{found}; set it, or remove {key}"


def _find_problems_of_float8(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield `float8` if there are no kernels for as many tokens as a micro-batch can have."""
    if hp.precision.float8 is None:
        return
    multiple = training.FLOAT8_MULTIPLE
    batch_size = hp.data.batch_size
    lengths = hp.data.row_lengths(hp.model.max_seq_len)
    own_lengths = [hp.parallel.own_length(length) for length in lengths]
    for length, own_length in zip(lengths, own_lengths, strict=True):
        n_tokens = batch_size * own_length
        if n_tokens % multiple:
            tokens = "batch_size x max_seq_len"
            if not hp.data.packing:
                tokens = f"with packing: false, batch_size x rows of {length} tokens"
            if hp.parallel.context_parallel > 1:
                tokens += " / context_parallel"
            step = math.lcm(*(multiple // math.gcd(each, multiple) for each in own_lengths))
            remedy = f"use batch_size={step * math.ceil(batch_size / step)}, or remove float8"
            yield "float8", f"{tokens} is {n_tokens}, not a multiple of {multiple}; {remedy}"
            return


def _find_problems_of_combinations(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield keys of different parts that do not fit together, with the reason and the remedy."""
    if hp.optim.optimizer == "muon" and hp.parallel.cpu_offload:
        problem = "muon does not update parameters in host memory (cpu_offload: true)"
        yield "optimizer", f"{problem}; use adamw, or more ranks"
    if hp.run.num_tokens == 0:
        for key, value in {"sample_rate": hp.metrics.sample_rate, "prompt": hp.run.prompt}.items():
            if value is not None:
                yield key, f"needs num_tokens above 0, the tokens of a sample; or remove {key}"
    if hp.checkpoint.init_from is None:
        return
    for key in TransferConfig.model_fields:
        if getattr(hp.transfer, key) is not None:
            problem = "scales rates together with initial weights, but init_from loads others"
            remedy = "to train from scratch remove init_from, to fine-tune remove"
            yield key, f"{problem}; {remedy} {key}"


def _find_problems_of_context(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield `context_parallel` if the tokens of a sequence cannot be divided, with the reason."""
    n_ranks = hp.parallel.context_parallel
    if n_ranks == 1:
        return
    key = "context_parallel"
    if hp.model.max_seq_len < 2 * n_ranks:
        problem = f"{n_ranks} ranks divide a sequence into {2 * n_ranks} pieces"
        yield key, f"{problem}, but max_seq_len is {hp.model.max_seq_len}; use fewer ranks"
    if not hp.model.examined.context_parallel:
        problem = f"{hp.model.name} computes parts of sequences otherwise"
        yield key, f"{problem}; use 1"


def _find_problems_of_fields(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield `fields` if it names what is not read, with the reason and the remedy."""
    fields = hp.data.fields
    if fields is None:
        return
    if hp.data.dataset == "hf" and fields.keys() != {"text"}:
        yield "fields", "dataset: hf streams texts; name text alone, or use dataset: jsonl"
    if hp.objective.of_pairs and "chosen" not in fields:
        problem = "objective: dpo compares two replies"
        yield "fields", f"{problem}; name chosen and rejected, and the prompt or what the user says"
    if not hp.objective.of_pairs and "chosen" in fields:
        yield "fields", "preferences are learned with objective: dpo; set it, or name no chosen"


def _find_problems_of_pairs(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield keys that do not fit to `objective: dpo`, with the reason and the remedy."""
    if not hp.objective.of_pairs:
        return
    if hp.data.dataset != "jsonl":
        problem = f"dpo reads pairs of replies, and dataset is {hp.data.dataset}"
        yield "objective", f"{problem}; set dataset: jsonl, or remove objective"
    if hp.checkpoint.init_from is None:
        problem = "dpo prefers replies relative to the weights that it starts with"
        yield "objective", f"{problem}; set init_from to the fine-tuned model"
    if hp.data.loss_on != "all":
        yield "loss_on", "dpo learns from the replies of pairs only; remove loss_on"
    rates = {"lora_dropout": hp.lora.lora_dropout, "dropout": hp.model.dropout}
    for key, value in rates.items():
        if value > 0:
            problem = f"{value} would make the model differ from its reference (objective: dpo)"
            yield key, f"{problem}; use 0"


def _find_problems_of_adapters(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield keys of other parts that do not fit to adapters, with the reason and the remedy."""
    rank = hp.lora.lora_rank
    if rank is None:
        return
    yield from training.adapter_problems(hp.lora, hp.model)
    if hp.optim.optimizer == "muon":
        yield "optimizer", f"muon does not train adapters (lora_rank: {rank}); use adamw"
    if hp.checkpoint.init_from is None:
        problem = f"adapters of rank {rank} need weights to adapt"
        yield "lora_rank", f"{problem}; set init_from, or remove lora_rank"
    if hp.precision.float8:
        problem = f"{hp.precision.float8} does not support adapters (lora_rank: {rank})"
        yield "float8", f"{problem}; use float8: null"


def _find_problems_of_model(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield keys that ask what does not hold of a model, with the reason and the remedy."""
    if isinstance(hp.model, ModelConfig) and hp.parallel.attn_implementation is not None:
        problem = "is for models of transformers, which init_from names"
        yield "attn_implementation", f"{problem}; remove it"
    kind = hp.model.name
    examined = hp.model.examined
    if not hp.data.attend_across_documents and not examined.packing:
        problem = f"false, but {kind} does not keep documents of one sequence apart"
        yield "attend_across_documents", f"{problem}; remove attend_across_documents"
    if hp.precision.amp_dtype == "bfloat16" and not examined.bfloat16:
        yield "amp_dtype", f"bfloat16: {reason_against_bfloat16(hp.model)}; use amp_dtype: null"
    for key, rate in find_random_rates(hp.model.structure()):
        if "layerdrop" in key:
            problem = f"{key} {rate:g} in its config.json leaves out whole layers at random"
            reason = "which no rank can do alone, as all gather the weights of a layer together"
            yield "init_from", f"{problem}, {reason}; set it to 0 in a copy of the model"
    longest = examined.longest_row
    if longest is not None and hp.model.max_seq_len > longest.n_tokens:
        problem = f"{hp.model.max_seq_len} exceeds {longest.key}: {longest.value} of config.json"
        reason = f"beyond which {kind} computes nothing, or a text by the length of its row"
        yield "max_seq_len", f"{problem}, {reason}; use at most {longest.n_tokens}"
    mode = hp.parallel.activation_checkpointing
    holds = {
        "none": True,
        "full": examined.full_recomputation,
        "selective": examined.selective_recomputation,
    }
    if not holds[mode]:
        problem = f"{mode}: {kind} cannot recompute its layers so"
        others = [other for other in ("full", "none") if other != mode and holds[other]]
        yield "activation_checkpointing", f"{problem}; use {others[0]}"
    found = defaultdict(lambda: "examined by an earlier version", examined.details)
    if hp.lora.lora_rank is not None and not examined.lora:
        problem = f"adapters of {kind} do not compute what they do merged ({found['lora']})"
        yield "lora_rank", f"{problem}; remove lora_rank"
    if hp.lora.base_dtype == "nf4" and not examined.nf4:
        problem = f"quantized layers of {kind} do not compute what their weights do"
        yield "base_dtype", f"nf4: {problem} ({found['nf4']}); remove base_dtype"
    if hp.parallel.compile is True and not examined.compilation:
        yield "compile", f"true, but layers of {kind} are no graphs to compile; remove compile"
    if hp.precision.float8 is not None and not examined.float8:
        problem = f"{hp.precision.float8} does not compute {kind} ({found['float8']})"
        yield "float8", f"{problem}; remove float8"
    if hp.objective.of_pairs and not examined.packing:
        problem = f"needs pairs in one sequence, which {kind} does not keep apart"
        yield "objective", f"dpo: {problem}; remove objective"
    if hp.optim.optimizer == "muon" and not hp.model.linear_layers:
        yield "optimizer", f"muon is for linear layers of blocks, and {kind} has none; use adamw"


def _find_problems_of_experts(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield keys that do not fit to a mixture of experts of model.py, with the reason."""
    if hp.model.n_experts is None:
        return
    mixture = f"a mixture (n_experts: {hp.model.n_experts})"
    if hp.precision.float8:
        yield "float8", f"{mixture} has no products of groups of rows in float8; remove float8"
    for key in TransferConfig.model_fields:
        if getattr(hp.transfer, key) is not None:
            problem = f"how the rates of {mixture} scale with its size is not derived"
            yield key, f"{problem}; remove {key}"
    exported = "python -m lm.hf export, and set init_from to the directory"
    if hp.lora.lora_rank is not None:
        problem = f"{mixture} is pretrained without adapters; to fine-tune it, export it with"
        yield "lora_rank", f"{problem} {exported}"
    if hp.objective.of_pairs:
        problem = f"{mixture} is pretrained on text; to prefer replies, export it with"
        yield "objective", f"{problem} {exported}"
