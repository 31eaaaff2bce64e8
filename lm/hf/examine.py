"""What of a class of transformers can be trained exactly here: asked of the class itself.

A small random model of the class (lm/hf/small_config.py) computes in float32, on one core, in less
than a second, each question by the class's own forward and as a run would:

    hidden_states            logits are the product of the last hidden states and the output matrix
    determinism              the same tokens give the same logits
    causality                a later token changes no earlier logit
    padding                  rows that are padded at the end are as each alone, with gradients
    packing                  documents in one row are as each alone, told apart by one of PackedBy,
                             with model.py's attention or else with that of the class
    gradients                every parameter gets a gradient, or is named
    bfloat16                 logits and gradients, computed as a run does, are not much farther from
                             those of float32 than what the class itself computes in bfloat16,
                             for one of two sets of tokens
    full_recomputation       layers recomputed in backward give the same gradients, with dropout,
    selective_recomputation  also if products and attention are kept
    context_parallel         rows whose tokens are divided are as complete ones, with gradients
    cache                    tokens read one by one give the logits of complete sequences
    lora                     adapters that are merged compute what they did,
    nf4                      also on quantized weights that are dequantized
    experts                  experts in NF4 compute what those of the class, dequantized, do
    float8                   linear layers in float8 are not much farther from float32 than its
                             rounding lets them be
    compilation              layers traced by the compiler give the same gradients

Without determinism, causality, padding, or gradients a model is refused. What else does not hold is
turned off.

What depends on kernels is asked again, of two rows, where a run computes with others than these: on
a GPU, or with those that `attn_implementation` names, in its dtype. In 16 bits no answer is exact:
what is computed may be a few times as far from float32 as what the class itself computes, for one
of two sets of tokens.

What a class does otherwise for longer sequences is asked, too: every integer of a config that acts
on positions, such as the length beyond which rotary frequencies change, is less than the longest
document, and more than others. If a class needs a larger one to be exact, rows must not be longer
than that.
Results are kept in the user's cache, by config, versions and code; those of kernels next to them.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, TypeAdapter
from torch import Tensor, nn

from lm import transformers_attention
from lm.any_model import convert_weights
from lm.attention import SequencePart
from lm.context import ContextGroup, exchange_rows, gather_rows
from lm.errors import ConfigError, RunError, error_prefix
from lm.examined import Attention, Examined, LongestRow, PackedBy
from lm.hf.class_weights import load_class
from lm.hf.saved_model import build_saved_model, find_names
from lm.hf.sizes import Sizes, measure_sizes
from lm.hf.small_config import (
    POSITIONS_OF,
    VOCABULARY,
    KeyPath,
    possible_lengths,
    small_configs,
    with_dropout,
    with_value,
)
from lm.launch.console import warn
from lm.launch.launch import Launch
from lm.launch.requirements import requires
from lm.program import describe_packages, describe_program
from lm.runtime.rendezvous import choose_device
from lm.storage.cache import cached, remembered
from lm.training import four_bits, lora, parallelize
from lm.training.float8 import convert_to_float8, find_layers
from lm.training.lora import LoraConfig
from lm.training.precision import best_dtype, choose_dtype
from lm.training.roles import is_selector
from lm.transformers_config import Kernels, TransformersConfig, without_numbers
from lm.transformers_linear import HAS_FLA
from lm.transformers_model import (
    TransformersModel,
    build_network,
    language_model_of,
    one_line,
    parameters_on_meta,
    quiet,
    read_config,
    text_config,
)
from model import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TOLERANCE = 1e-4
"""of the largest value: what float32 sums in another order stay below"""
_FARTHER = 4
"""times as far from float32 as the class itself: one token with another expert is a factor of 2"""
_FARTHER_IN_FLOAT8 = 32
"""times as far as the class in bfloat16, whose rounding is 16 times as fine"""
FROM_FLOAT32 = "from float32: "
_NOISE = 1e-2
"""of the largest gradient: smaller ones may be sums of larger terms that cancel"""
_DOCUMENTS = (20, 9, 13)
"""tokens; more than windows and convolutions have"""
_LONG = 16
"""tokens, less than the longest document and more than the others: what lengths are cut to"""
_SEED = 7
_OTHER_TOKENS = 10
"""added to the seed of tokens, of which rounding may have given one another expert"""
_MASKS: Mapping[str, str] = {"documents": "", "class": ", with masks of all pairs"}
_NO_ADAPTERS = LoraConfig.model_validate({})

Question = Literal[
    "hidden_states",
    "determinism",
    "causality",
    "padding",
    "packing",
    "gradients",
    "bfloat16",
    "full_recomputation",
    "selective_recomputation",
    "context_parallel",
    "cache",
    "lora",
    "nf4",
    "experts",
    "float8",
    "compilation",
]
_QUESTIONS: Set[Question] = set(get_args(Question))
_NEEDED: Mapping[Question, str] = {
    "determinism": "its forward pass is random without dropout, too",
    "causality": "a later token changes earlier logits",
    "padding": "padding after a row changes what it computes",
    "gradients": "parameters get no gradient",
}
"""Without which a class is refused -> why."""
_OF_LENGTHS: Set[Question] = {"determinism", "causality", "padding", "packing", "gradients"}
"""What may hold of rows up to a length only."""
_OF_KERNELS: Set[Question] = {
    "causality",
    "padding",
    "packing",
    "full_recomputation",
    "selective_recomputation",
    "context_parallel",
    "cache",
    "compilation",
}
"""What is asked of the kernels of other packages."""
_PACKAGES = ("torch", "transformers")
_OTHER_PACKAGES = (
    "torchao",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flash-linear-attention",
    "fla-core",
    "causal-conv1d",
    "mamba-ssm",
    "kernels",
)
"""What answers depend on if it is installed."""


class Finding(BaseModel, frozen=True):
    """The answer to a question."""

    holds: bool
    detail: str = ""
    """what was found, at least if it does not hold"""
    is_computed: bool = True
    """False = an exception is the answer; if it holds, that of exact answers counts instead"""


class Limit(BaseModel, frozen=True):
    """A length in a config that rows must not exceed."""

    path: KeyPath
    is_exclusive: bool
    """whether rows must be shorter than it, too"""

    def __str__(self) -> str:
        return ".".join(self.path)


class Examination(BaseModel, frozen=True):
    """The answers for a class."""

    class_name: str
    asked: dict[str, Any]
    """config of the small model"""
    findings: dict[Question, Finding]
    """up to one without which the class is refused"""
    packed_by: PackedBy
    """how documents are told apart, if packing holds"""
    attention: str
    """see `Examined`"""
    device: str = "cpu"
    """on which what depends on kernels was asked, too"""
    untrained: list[str]
    """parameters that get no gradient, as `without_numbers` names them"""
    limits: list[Limit] = []
    """of rows for which the findings hold"""
    seconds: float
    """of a core"""

    def examined(self, values: Mapping[str, Any]) -> Examined:
        """Return what a run of a model with the complete config `values` depends on."""
        holds: dict[str, Any] = {}
        details: dict[str, str] = {}
        for question, finding in self.findings.items():
            if question in Examined.model_fields:
                holds[question] = finding.holds
            if not finding.holds:
                details[question] = finding.detail
        return Examined(
            longest_row=min(self._longest_rows(values), key=lambda row: row.n_tokens, default=None),
            packed_by=self.packed_by,
            attention=self.attention,
            untrained=self.untrained,
            class_name=self.class_name,
            versions=describe_packages(_PACKAGES),
            details=details,
            **holds,
        )

    def _longest_rows(self, values: Mapping[str, Any]) -> Iterator[LongestRow]:
        for limit in self.limits:
            length: Any = values
            for key in limit.path:
                length = length[key]
            n_tokens = length - 1 if limit.is_exclusive else length
            yield LongestRow(n_tokens=n_tokens, key=str(limit), value=length)

    def refusals(self) -> list[str]:
        """Return why the class cannot be trained exactly; [] if it can."""
        computed = self.class_name
        if self.device != "cpu":
            computed += f" on {self.device}"
        if self.attention not in get_args(Attention):
            computed = f"attn_implementation: {self.attention}: {computed}"
        reasons: list[str] = []
        for question, problem in _NEEDED.items():
            finding = self.findings.get(question)
            if finding is not None and not finding.holds:
                if not finding.is_computed:
                    problem = "cannot be computed"
                reasons.append(f"{computed}: {problem} ({finding.detail})")
        return reasons

    def warn_of_exceptions(self) -> None:
        """Print what could not be asked of the kernels of a run."""
        for question, finding in self.findings.items():
            if finding.holds and not finding.is_computed:
                warn(f"{question}: cannot be asked on {self.device} ({finding.detail})")

    def describe(self) -> list[str]:
        """Return a line for each question."""
        lines = [f"{self.class_name}, examined in {self.seconds:.1f} s of a core"]
        for question, finding in self.findings.items():
            answer = "holds, " if finding.holds else "does not hold: "
            lines.append(f"  {question:<23}  {answer}{finding.detail}".rstrip(", "))
        if self.limits:
            lines.append(f"  rows up to the length:   {', '.join(map(str, self.limits))}")
        if self.untrained:
            lines.append(f"  no gradient:             {', '.join(self.untrained)}")
        return lines


_CPU = torch.device("cpu")


class _Way(NamedTuple):
    """How a class is called; see `Examined`."""

    attention: str
    packed_by: PackedBy


@dataclass(frozen=True)
class Computation:
    """How the models that are asked compute."""

    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    attention: str | None = None
    """its `attn_implementation`; None = that of this project"""

    @classmethod
    def of_run(cls, kernels: Kernels | None) -> Computation | None:
        """Return how a run computes with `kernels`; None = no run, or as for exact answers.

        Raises:
            ConfigError: they are code of the Hub, or not those of others.
        """
        if kernels is None or (kernels.attention is None and not torch.cuda.is_available()):
            return None
        name = kernels.attention
        if name is not None and "/" in name:
            problem = f"attn_implementation: {name}: code of the Hub is never run"
            raise ConfigError(f"{problem}; use kernels of an installed package, or null")
        if name in (*get_args(Attention), transformers_attention.NAME):
            problem = f"attn_implementation: {name}: transformers has no kernels of this name"
            raise ConfigError(f"{problem}; use null for attention of this project")
        device = choose_device(Launch.from_env(os.environ))
        if device.type == "cuda":
            torch.cuda.set_device(device)
            parallelize.set_cublas_workspace()  # for runs that are deterministic
        dtype = choose_dtype(kernels.amp_dtype, best_dtype(device))
        return cls(device, dtype or torch.float32, name)

    def ways(self, exact: _Way) -> list[_Way]:
        """Return how a class may be called, in the order in which it is tried.

        Args:
            exact: how it is called for exact answers.
        """
        if self.attention is not None:
            return [_Way(self.attention, packed_by) for packed_by in get_args(PackedBy)]
        if exact.packed_by == "seq_idx" and HAS_FLA and self.device.type == "cuda":
            return [exact._replace(packed_by="cu_seq_lens"), exact]
        return [exact]

    def facts(self) -> Mapping[str, str | None]:
        """Return what answers depend on."""
        device = self.device.type
        if device == "cuda":
            device = torch.cuda.get_device_name(self.device)
        return {"device": device, "dtype": str(self.dtype), "attention": self.attention}


_EXACT = Computation()
_IN_BFLOAT16 = Computation(dtype=torch.bfloat16)
_WAYS: Sequence[_Way] = [
    _Way(attention, packed_by)
    for attention in get_args(Attention)
    for packed_by in get_args(PackedBy)[:-1]  # the last one is for kernels of others
]
"""that are tried for exact answers"""


def examine(values: Mapping[str, Any], of_run: Computation | None = None) -> Examination:
    """Return the answers for the class of the complete config `values`, from the cache if possible.

    Models of a class that differ in sizes have the same small one, and so the same answers.

    Args:
        of_run: what is asked, too; None = exact answers suffice.

    Raises:
        ConfigError: no small model of it can be built, or it fails; or transformers has no such
            kernels for it.
    """
    model_type = values.get("model_type")
    program = describe_program(__name__, [*_PACKAGES, *_OTHER_PACKAGES])
    if of_run is not None and of_run.attention is not None:
        with error_prefix(f"attn_implementation: {of_run.attention}"):
            build_network(read_config(values), attention=of_run.attention)
    problems: list[str] = []
    for config in small_configs(values, _derived_sizes(values)):
        facts: dict[str, Any] = {"program": program, "examination": config}
        answers = _remember_answers(facts, partial(_examine, config))
        if isinstance(answers, Examination) and of_run is not None and not answers.refusals():
            facts["kernels"] = of_run.facts()
            answers = _remember_answers(facts, partial(_examine_kernels, answers, of_run))
        if isinstance(answers, Examination):
            answers.warn_of_exceptions()
            return answers
        problems.append(answers)
    problem = f"no small model of it computes: {problems[0]}"
    raise ConfigError(f"{model_type}: cannot be examined, {problem}")


def examine_whole(raw: Mapping[str, Any]) -> Finding:
    """Return whether a model gives the logits of its language model, which is what is trained.

    A model of several parts, e.g. with vision, computes its logits itself: of the same hidden
    states, but maybe without what its language model multiplies them by, such as a `logit_scale`.
    It is asked with tokens alone, and needs the weights of its language model alone.

    Args:
        raw: the content of a config.json.
    """
    config = read_config(raw)
    if language_model_of(config).model_type == config.model_type:
        return Finding(holds=True)
    facts = {"program": describe_program(__name__, [*_PACKAGES, *_OTHER_PACKAGES]), "whole": raw}
    answer = remembered(facts, lambda: _compare_whole(raw).model_dump_json())
    return Finding.model_validate_json(answer)


def _compare_whole(raw: Mapping[str, Any]) -> Finding:
    values = text_config(raw)
    problem = ""
    for small_config in small_configs(values, _derived_sizes(values)):
        small = _build_small(small_config)
        if not isinstance(small, str):
            return _attempt(partial(_compare_logits_of_whole, raw, small))
        problem = problem or small
    return Finding(holds=False, detail=problem)


@torch.no_grad()
def _compare_logits_of_whole(raw: Mapping[str, Any], small: _Small) -> Finding:
    """Compare the logits of a small language model with those of a whole model that has it."""
    config = read_config(raw)
    _replace_part(config, config.get_text_config(decoder=True), read_config(small.config))
    with parameters_on_meta(), torch.device("cpu"), quiet():
        whole = build_saved_model(config, small.network)
    weights = small.network.state_dict()
    its_weights: dict[str, Tensor] = {}
    for name, parameter in whole.named_parameters():  # of which most have no memory, if not read
        its_weights[name] = torch.empty_like(parameter, device="cpu")
    for name, its_name in find_names(whole, small.network).items():
        its_weights[name] = weights[its_name]
    whole.load_state_dict(its_weights, strict=False, assign=True)
    tokens = _tokens(_DOCUMENTS[0])
    return _compare(_logits(whole.eval(), tokens), _logits(small.network.eval(), tokens), "logits")


def _replace_part(config: PreTrainedConfig, part: Any, other: PreTrainedConfig) -> None:
    """Replace a part of a config, which may be in another part."""
    for name in config.sub_configs:
        found = getattr(config, name, None)
        if found is part:
            setattr(config, name, other)
        elif found is not None:
            _replace_part(found, part, other)


_RESULT = "examination.json"
_ANSWERS = TypeAdapter[Examination | str](Examination | str)
"""What `examination.json` has: a string says why a small model does not compute."""


def _remember_answers(
    facts: Mapping[str, Any], ask: Callable[[], Examination | str]
) -> Examination | str:
    """Return what `ask` does, from the cache if possible."""

    def write(directory: Path) -> None:
        (directory / _RESULT).write_bytes(_ANSWERS.dump_json(ask(), indent=1))

    return _ANSWERS.validate_json((cached(facts, write) / _RESULT).read_bytes())


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Compute on one core and with gradients, whoever asks, and leave the random state as it is."""
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


@_on_one_core()
def _examine(config: dict[str, Any]) -> Examination | str:
    """Return the exact answers for the small model of `config`, or why it does not compute."""
    warn(f"examining {config.get('model_type')}: what can be trained exactly with this class")
    started = time.process_time()
    small = _build_small(config)
    if isinstance(small, str):
        return small
    crossed = _cut_lengths(small)
    asked = crossed.small
    answers = _ask(asked)
    limits: list[Limit] = []
    if answers.holding() != _OF_LENGTHS:
        within, limits = _find_limits(small, crossed.paths, answers.holding())
        if limits:
            asked = within
            answers = _ask(asked)
    return Examination(
        class_name=type(small.network).__name__,
        asked=asked.config,
        findings=answers.findings,
        packed_by=answers.way.packed_by,
        attention=answers.way.attention,
        untrained=answers.untrained,
        limits=limits + crossed.tables,
        seconds=round(time.process_time() - started, 2),
    )


@_on_one_core()
def _examine_kernels(exact: Examination, of_run: Computation) -> Examination | str:
    """Return the answers, of which those that depend on kernels are of what a run computes.

    Kernels that a key names have to do all that is asked. Of ours, what does not hold exactly is
    not asked, and where an exception is the answer, the exact one counts: a run in which it is
    raised, too, ends in step 1, and one of other sizes than the small model may do without.
    """
    warn(f"examining {exact.asked.get('model_type')}: what holds with the kernels of this run")
    started = time.process_time()
    small = _build_small(exact.asked)
    if isinstance(small, str):
        return small
    questions = _OF_KERNELS
    known: Set[Question] = set()
    if of_run.attention is None:
        known = {name for name, finding in exact.findings.items() if finding.holds}
        questions = _OF_KERNELS & known
    ways = of_run.ways(_Way(exact.attention, exact.packed_by))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # its rounding hides nothing
        answers = _ask(small, questions, of_run, ways, known)
    changes = {
        "findings": exact.findings | answers.findings,
        "packed_by": answers.way.packed_by,
        "attention": answers.way.attention,
        "device": of_run.device.type,
        "seconds": round(exact.seconds + time.process_time() - started, 2),
    }
    return exact.model_copy(update=changes)


@dataclass(frozen=True)
class _Small:
    """A small random model of a class."""

    config: dict[str, Any]
    network: PreTrainedModel
    """as transformers builds it"""

    @cached_property
    def sizes(self) -> Sizes:
        return measure_sizes(self.network)

    @cached_property
    def hidden_states(self) -> Finding:
        return _attempt(partial(_ask_hidden_states, self.network))


def _build_small(config: dict[str, Any]) -> _Small | str:
    """Return a random model, or why it does not compute."""
    try:
        network = build_network(read_config(config), on_meta=False)
        _randomize(network)
        network.train()
        with torch.enable_grad():  # whoever asks first
            _logits(network, _tokens(_DOCUMENTS[0])).sum().backward()
        network.zero_grad()
    except Exception as error:  # a config that the class refuses, in any way
        return one_line(error)
    return _Small(config, network)


class _Crossed(NamedTuple):
    """A small model whose lengths are cut, and where they are in its config."""

    small: _Small
    paths: list[KeyPath]
    tables: list[Limit]
    """lengths beyond which it computes nothing, e.g. rows of a table of positions"""


def _cut_lengths(small: _Small) -> _Crossed:
    """Cut each length in a config: with it cut, the class computes, with the same parameters."""
    shapes = _shapes(small)
    paths: list[KeyPath] = []
    tables: list[Limit] = []
    for path in possible_lengths(small.config, _LONG):
        cut = _build_small(with_value(small.config, path, _LONG))
        if isinstance(cut, str):
            if path[-1] in POSITIONS_OF:
                tables.append(Limit(path=path, is_exclusive=False))
        elif _shapes(cut) == shapes:
            small = cut
            paths.append(path)
    return _Crossed(small, paths, tables)


@torch.no_grad()
def _shapes(small: _Small) -> dict[str, torch.Size]:
    """Return those of the parameters and of logits."""
    shapes = {name: parameter.shape for name, parameter in small.network.named_parameters()}
    return shapes | {"logits": _logits(small.network, _tokens(_DOCUMENTS[0])).shape}


class _Within(NamedTuple):
    """A small model that is asked about rows up to the lengths `limits` of its config."""

    small: _Small
    limits: list[Limit]


def _find_limits(small: _Small, paths: Sequence[KeyPath], crossed: Set[Question]) -> _Within:
    """Find the lengths that rows must not exceed, as more is right of a class within them.

    Args:
        small: with its own lengths, which are above those of all rows.
        paths: of the lengths.
        crossed: what holds if all of them are cut.
    """
    right = _ask(small, _OF_LENGTHS).holding()
    if right <= crossed:
        return _Within(small, [])
    limits: list[KeyPath] = []
    for path in paths:
        cut = _build_small(with_value(small.config, path, _LONG))
        if isinstance(cut, str):
            continue
        if right <= _ask(cut, _OF_LENGTHS).holding():
            small = cut
        else:
            limits.append(path)
    longest_row = sum(_DOCUMENTS) if "packing" in right else max(_DOCUMENTS)
    for is_exclusive in (False, True):
        config = small.config
        for path in limits:
            config = with_value(config, path, longest_row + is_exclusive)
        within = _build_small(config)
        if not isinstance(within, str) and right <= _ask(within, _OF_LENGTHS).holding():
            small = within
            break
    return _Within(small, [Limit(path=path, is_exclusive=is_exclusive) for path in limits])


def _derived_sizes(values: Mapping[str, Any]) -> set[str]:
    """Return the keys of the sizes that the class of the config sets if they are missing."""
    fields = dataclasses.fields(type(read_config(values)))
    defaults = {field.name: field.default for field in fields}
    derived: set[str] = set()
    for key, value in values.items():
        is_no_field = key not in defaults and key != "model_type"
        is_set_by_class = defaults.get(key, 0) is None and isinstance(value, int)
        if is_no_field or is_set_by_class:
            derived.add(key)
    return derived


@torch.no_grad()
def _randomize(network: nn.Module) -> None:
    """Draw weights with which every part of the model changes its logits."""
    generator = torch.Generator().manual_seed(_SEED)
    for parameter in network.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter += 0.1 * noise
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            module.weight *= module.weight.shape[-1] ** 0.5


def _tokens(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED + seed)
    return torch.randint(2, VOCABULARY - 2, (1, length), generator=generator)


def _logits(network: nn.Module, tokens: Tensor) -> Tensor:
    """Return logits `(B, T, V)` as the class computes them."""
    return network(input_ids=tokens).logits


def _compare(found: Tensor, expected: Tensor, what: str, least_scale: float = 1e-3) -> Finding:
    """Return whether two tensors are equal up to rounding.

    Args:
        least_scale: that of values whose rounding the smaller ones have.
    """
    scale = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    if difference <= TOLERANCE * max(scale, least_scale):  # not if NaN
        return Finding(holds=True)
    return Finding(holds=False, detail=f"{what} differ by {difference:.2g} of up to {scale:.2g}")


Gradients = Mapping[str, Tensor]


def _compare_gradients(found: Gradients, expected: Gradients) -> Finding:
    """Return whether gradients are equal up to rounding.

    Some are 0 but for the rounding of what they sum, as those of the biases of keys.
    """
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name in expected.keys() | found.keys():
        gradient = found.get(name, torch.zeros(()))
        right = expected.get(name, torch.zeros(()))
        what = f"gradients of {without_numbers(name)}"
        finding = _compare(gradient, right, what, least_scale=_NOISE * largest)
        if not finding.holds:
            return finding
    return Finding(holds=True)


def _gradients(network: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the parameters that get one."""
    network.zero_grad()
    loss.backward()
    gradients: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone().cpu()
    return gradients


def _distance(found: Gradients, expected: Gradients) -> float:
    """Return the norm of the difference of all tensors together, relative to those expected."""
    difference = 0.0
    scale = 0.0
    for name, right in expected.items():
        tensor = found.get(name, torch.zeros(()))
        difference += (tensor - right).norm().item() ** 2
        scale += right.norm().item() ** 2
    return math.sqrt(difference / scale)


def _attempt(question: Callable[[], Finding]) -> Finding:
    """Return the answer to a question; an exception is one, too."""
    try:
        return question()
    except torch.OutOfMemoryError as error:  # which would be kept as an answer
        raise RunError(f"no memory on the GPU to examine a class: {one_line(error)}") from None
    except Exception as error:
        return Finding(holds=False, detail=one_line(error), is_computed=False)


class _Answers(NamedTuple):
    """How the class is called, what gets no gradient, and all else; see `Examination`."""

    findings: dict[Question, Finding]
    way: _Way
    untrained: list[str]

    def holding(self) -> Set[Question]:
        """Return what holds of `_OF_LENGTHS`."""
        return {
            question
            for question in _OF_LENGTHS & self.findings.keys()
            if self.findings[question].holds
        }


def _ask(
    small: _Small,
    questions: Set[Question] = _QUESTIONS,
    how: Computation = _EXACT,
    ways: Sequence[_Way] = _WAYS,
    known: Set[Question] = frozenset(),
) -> _Answers:
    """Return the answers up to the one that refuses the class; see `_Answers`.

    Args:
        ways: that are tried, in their order.
        known: what holds, if it cannot be computed.
    """
    n_rows = 1
    if how != _EXACT:
        n_rows = 2  # some kernels keep documents apart in a single row alone
    exams = [_Exam(small, how, ways, n_rows)]
    if how.dtype != torch.float32:
        exams.append(_Exam(small, how, ways, n_rows, _OTHER_TOKENS))
    findings: dict[Question, Finding] = {}
    for question in get_args(Question):
        if question not in questions:
            continue
        finding = _first_that_holds(_attempt(getattr(exam, question)) for exam in exams)
        if not finding.is_computed and question in known:
            finding = finding.model_copy(update={"holds": True})
        findings[question] = finding
        if question in _NEEDED and not finding.holds:
            break
    way = next((exam.way for exam in exams if exam.packing().holds), exams[0].way)
    return _Answers(findings, way, exams[0].untrained)


def _first_that_holds(answers: Iterable[Finding]) -> Finding:
    """Return the first answer that holds, or else the last one, of those computed if any is."""
    chosen = Finding(holds=False, is_computed=False)
    for answer in answers:
        if answer.holds:
            return answer
        if answer.is_computed or not chosen.is_computed:
            chosen = answer
    return chosen


@torch.no_grad()
def _ask_hidden_states(network: Any) -> Finding:
    if network.base_model is network:
        return Finding(holds=False, detail="the class has no part without its head")
    head = network.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return Finding(holds=False, detail="the head is no matrix without a bias")
    tokens = _tokens(_DOCUMENTS[0])
    states = network.base_model(input_ids=tokens).last_hidden_state
    return _compare(F.linear(states, head.weight), _logits(network, tokens), "logits")


class _Batch(NamedTuple):
    """All documents, as the model of a run is called with them, and where they are."""

    tokens: Tensor
    targets: Tensor
    document_ids: Tensor | None
    places: Tensor
    """of all tokens of the documents, one after the other, among the flattened `tokens`"""
    part: SequencePart | None = None

    def to(self, device: torch.device) -> _Batch:
        """Return the batch on `device`."""
        document_ids = self.document_ids
        if document_ids is not None:
            document_ids = document_ids.to(device)
        part = self.part
        if part is not None:
            part = part._replace(indices=part.indices.to(device))
        tokens = self.tokens.to(device)
        return _Batch(tokens, self.targets.to(device), document_ids, self.places.to(device), part)


class _Learned(NamedTuple):
    """What a network computes of all documents."""

    logits: Tensor
    """`(N, V)`"""
    gradients: Gradients
    """of the sum of the losses"""


@torch.no_grad()
def _logits_of_batch(model: TransformersModel, batch: _Batch) -> Tensor:
    """Return the logits of the documents as a run computes them, `(N, V)`."""
    batch = batch.to(next(model.parameters()).device)
    logits = model(batch.tokens, document_ids=batch.document_ids, part=batch.part)
    return logits.flatten(0, 1)[batch.places].float().cpu()


def _train_on_batch(model: TransformersModel, batch: _Batch) -> Gradients:
    """Return the gradients of the loss as a run computes it."""
    batch = batch.to(next(model.parameters()).device)
    loss = model(batch.tokens, batch.targets, batch.document_ids, part=batch.part)
    return _gradients(model.network, loss)


class _Exam:
    """The questions about a class, as a run would use it."""

    def __init__(
        self,
        small: _Small,
        how: Computation,
        ways: Sequence[_Way],
        n_rows: int = 1,
        seed: int = 0,
    ) -> None:
        self.small = small
        self.how = how
        self.ways = ways
        self.n_rows = n_rows
        self.lengths = _DOCUMENTS * n_rows
        self.documents = [_tokens(length, seed + i) for i, length in enumerate(self.lengths)]

    def build(
        self,
        adapters: LoraConfig = _NO_ADAPTERS,
        *,
        way: _Way | None = None,
        values: dict[str, Any] | None = None,
        experts: bool = False,
    ) -> TransformersModel:
        """Return the model of a run with the weights of the small one, and empty adapters.

        Args:
            way: None = the one that is right.
            values: of the config; None = of the small one.
            experts: whether experts are computed by this package.
        """
        way = way or self.way
        examined = Examined(
            hidden_states=self.small.hidden_states.holds,
            packing=True,
            packed_by=way.packed_by,
            attention=way.attention,
            cache=True,
            full_recomputation=True,
            selective_recomputation=True,
            lora=True,
            nf4=True,
            experts=experts,
            untrained=self.untrained,
        )
        config = TransformersConfig(
            transformers_config=values or self.small.config,
            examined=examined,
            vocab_size=VOCABULARY,
            max_seq_len=128,
            **self.small.sizes._asdict(),
        )
        with torch.device("meta"):
            model = lora.add_adapters(TransformersModel(config), adapters, None)
        model.to_empty(device=self.how.device)
        tensors = model.network.state_dict()
        for name, tensor in self.small.network.state_dict().items():
            if tensors[name].shape == tensor.shape:
                tensors[name].copy_(tensor)
            else:
                tensors[name].copy_(four_bits.quantize_nf4(tensor))
        if self.how.dtype != torch.float32:
            convert_weights(model, self.how.dtype)  # FSDP gathers them so
        return model.train()

    @cached_property
    def untrained(self) -> list[str]:
        names: dict[str, None] = {}
        for name, parameter in self.small.network.named_parameters():
            if parameter.requires_grad and name not in self.alone.gradients:
                names[without_numbers(name)] = None
        return list(names)

    @cached_property
    def model(self) -> TransformersModel:
        return self.build()

    @cached_property
    def alone(self) -> _Learned:
        """What the class computes of each document alone."""
        return self._learn(self.small.network)

    def _learn(self, network: nn.Module) -> _Learned:
        """Return what a network of the class computes of each document alone."""
        with torch.enable_grad():  # whoever asks first
            logits = [_logits(network, document)[0].float() for document in self.documents]
            loss = torch.zeros(())
            for document, its_logits in zip(self.documents, logits, strict=True):
                loss = loss + F.cross_entropy(its_logits[:-1], document[0, 1:], reduction="sum")
            return _Learned(torch.cat(logits).detach(), _gradients(network, loss))

    @cached_property
    def padded(self) -> _Batch:
        """Each document in a row."""
        shape = (len(self.lengths), max(self.lengths))
        is_token = torch.arange(shape[1]) < torch.tensor(self.lengths)[:, None]
        tokens = torch.zeros(shape, dtype=torch.int64)
        tokens[is_token] = self.packed.tokens.flatten()
        targets = torch.full_like(tokens, IGNORE_INDEX)
        targets[is_token] = self.packed.targets.flatten()
        return _Batch(tokens, targets, None, is_token.flatten().nonzero()[:, 0])

    @cached_property
    def packed(self) -> _Batch:
        """All documents, several in a row."""
        tokens = torch.cat(self.documents, dim=1)[0]
        lengths = torch.tensor(self.lengths)
        document_ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        targets = tokens.roll(-1)
        targets[lengths.cumsum(0) - 1] = IGNORE_INDEX
        shape = (self.n_rows, -1)
        return _Batch(
            tokens=tokens.view(shape),
            targets=targets.view(shape),
            document_ids=document_ids.view(shape),
            places=torch.arange(len(tokens)),
        )

    @property
    def divided(self) -> _Batch:
        """The rows of `batch` divided among two ranks, for which rows stand here."""
        batch = self.batch
        document_ids = batch.document_ids
        if document_ids is None:
            document_ids = torch.zeros_like(batch.tokens)
        n_rows, length = batch.tokens.shape
        n_padding = -length % 4

        def twice(x: Tensor, padding: int) -> Tensor:
            return F.pad(x, (0, n_padding), value=padding).repeat(2, 1)

        own = [ContextGroup(rank, 2, "").own_indices(length + n_padding) for rank in range(2)]
        indices = torch.from_numpy(np.stack(own)).repeat_interleave(n_rows, dim=0)
        part = SequencePart(indices, partial(gather_rows, size=2), exchange_rows, is_first=True)
        before = torch.arange(batch.tokens.numel()).view_as(batch.tokens)
        now = part.take(twice(before, -1)).flatten().argsort()[n_rows * n_padding :]
        return _Batch(
            tokens=part.take(twice(batch.tokens, 0)),
            targets=part.take(twice(batch.targets, IGNORE_INDEX)),
            document_ids=twice(document_ids, -1),
            places=now[batch.places],
            part=part,
        )

    @property
    def batch(self) -> _Batch:
        """What a run trains on: packed rows if they are right, else padded ones."""
        if self.packing().holds:
            return self.packed
        return self.padded

    def hidden_states(self) -> Finding:
        return self.small.hidden_states

    def determinism(self) -> Finding:
        with torch.no_grad():
            again = _logits(self.small.network, self.documents[0])
        return _compare(again[0], self.alone.logits[: _DOCUMENTS[0]], "logits of the same tokens")

    def causality(self) -> Finding:
        document = self.documents[0]
        changed = document.clone()
        changed[:, 15:] = _tokens(document.shape[1] - 15, seed=9)
        batch = _Batch(changed, changed, None, torch.arange(15))
        logits = _logits_of_batch(self.model, batch)
        return self._compare_logits(logits, self.alone.logits[:15], "logits of earlier tokens")

    def padding(self) -> Finding:
        return self._compare_batch(self.model, self.padded)

    def packing(self) -> Finding:
        return self._packings[self.way]

    @cached_property
    def way(self) -> _Way:
        """The first way that is right; if none is for packed rows, the first for padded ones."""
        for way, finding in self._packings.items():
            if finding.holds:
                return way
        ways = [way for way in self.ways if way.packed_by == "position_ids"] or self.ways[-1:]
        for way in ways[:-1]:
            if self._attempt_batch(way, self.padded).holds:
                return way
        return ways[-1]

    @cached_property
    def _packings(self) -> dict[_Way, Finding]:
        """What was found of each way that was tried: all up to one that is right."""
        tried: dict[_Way, Finding] = {}
        for way in self.ways:
            finding = self._attempt_batch(way, self.packed)
            if finding.holds:
                masks = _MASKS.get(way.attention, f", with {way.attention}")
                finding = Finding(holds=True, detail=f"by {way.packed_by}{masks}")
            tried[way] = finding
            if finding.holds:
                break
        return tried

    def _attempt_batch(self, way: _Way, batch: _Batch) -> Finding:
        with torch.enable_grad():  # whoever asks first
            return _attempt(lambda: self._compare_batch(self.build(way=way), batch))

    def _compare_batch(
        self, model: TransformersModel, batch: _Batch, farthest: float = _FARTHER
    ) -> Finding:
        """Return whether `model` computes the documents of a batch as each alone."""
        logits = _logits_of_batch(model, batch)
        if self.how.dtype != torch.float32:
            found = _Learned(logits, _train_on_batch(model, batch))
            return self._bound(self._distances(found), farthest)
        finding = _compare(logits, self.alone.logits, "logits")
        if not finding.holds:
            return finding
        return _compare_gradients(_train_on_batch(model, batch), self.alone.gradients)

    def _compare_logits(self, found: Tensor, expected: Tensor, what: str = "logits") -> Finding:
        if self.how.dtype == torch.float32:
            return _compare(found, expected, what)
        return self._bound({"logits": _distance({"": found}, {"": expected})})

    def _compare_gradients(self, found: Gradients, expected: Gradients) -> Finding:
        if self.how.dtype == torch.float32:
            return _compare_gradients(found, expected)
        return self._bound({"gradients": _distance(found, expected)})

    def _bound(self, ours: Mapping[str, float], farthest: float = _FARTHER) -> Finding:
        """Return whether distances are not much more than those of what the class computes."""
        theirs = self._distances_of_class
        shown = [f"{what} {ours[what]:.2g} (class {theirs[what]:.2g})" for what in ours]
        return Finding(
            holds=all(ours[what] <= farthest * theirs[what] for what in ours),  # not if NaN
            detail=f"{FROM_FLOAT32}{', '.join(shown)}",
        )

    def gradients(self) -> Finding:
        unexpected = [name for name in self.untrained if not is_selector(name)]
        return Finding(holds=not unexpected, detail=", ".join(unexpected))

    def bfloat16(self) -> Finding:
        return self._ask_rounded(in_float8=False)

    def float8(self) -> Finding:
        if find_spec("torchao") is None:
            return Finding(holds=False, detail=requires("torchao -c constraints.txt"))
        if not find_layers(self.model, "tensorwise", on_gpu=False):
            return Finding(holds=False, detail="no linear layer of its blocks can be converted")
        return self._ask_rounded(in_float8=True)

    @cached_property
    def _in_bfloat16(self) -> list[_Exam]:
        build = partial(_Exam, self.small, _IN_BFLOAT16, [self.way])
        return [build(), build(seed=_OTHER_TOKENS)]

    def _ask_rounded(self, *, in_float8: bool) -> Finding:
        is_packed = self.packing().holds
        return _first_that_holds(
            exam._compare_rounded(is_packed, in_float8) for exam in self._in_bfloat16
        )

    def _compare_rounded(self, is_packed: bool, in_float8: bool) -> Finding:
        model = self.build(way=self.ways[0])
        farthest = _FARTHER
        if in_float8:
            convert_to_float8(model, "tensorwise", on_gpu=False, shards=None)
            farthest = _FARTHER_IN_FLOAT8
        return self._compare_batch(model, self.packed if is_packed else self.padded, farthest)

    @cached_property
    def _distances_of_class(self) -> Mapping[str, float]:
        """How far what the class itself computes in 16 bits is from float32."""
        network = self.small.network
        config = copy.deepcopy(network.config)
        loaded = load_class(type(network), config, network.state_dict(), self.how.dtype)
        return self._distances(self._learn(loaded.model))

    def _distances(self, found: _Learned) -> dict[str, float]:
        return {
            "logits": _distance({"": found.logits}, {"": self.alone.logits}),
            "gradients": _distance(found.gradients, self.alone.gradients),
        }

    def full_recomputation(self) -> Finding:
        return self._compare_recomputed("full")

    def selective_recomputation(self) -> Finding:
        return self._compare_recomputed("selective")

    def context_parallel(self) -> Finding:
        return self._compare_batch(self.model, self.divided)

    def _compare_recomputed(self, mode: Literal["selective", "full"]) -> Finding:
        model = self._build_random()
        parallelize.apply_activation_checkpointing(model, mode)
        return self._compare_gradients(self._random_gradients(model), self._gradients_unchanged)

    @cached_property
    def _gradients_unchanged(self) -> Gradients:
        return self._random_gradients(self._build_random())

    def _build_random(self) -> TransformersModel:
        return self.build(values=with_dropout(self.small.config))

    def _random_gradients(self, model: TransformersModel) -> Gradients:
        """Return the gradients of a batch with the same dropout in each call."""
        torch.manual_seed(_SEED)
        return _train_on_batch(model, self.batch)

    def compilation(self) -> Finding:
        model = self.build()
        # What a graph is compiled to, and for which device, is not the class's.
        trace = partial(torch.compile, fullgraph=True, backend="eager")
        parallelize.compile_blocks(model, trace)
        try:
            with quiet():  # the compiler warns of what it does itself
                gradients = _train_on_batch(model, self.batch)
                return self._compare_gradients(gradients, self.alone.gradients)
        finally:
            torch.compiler.reset()

    def cache(self) -> Finding:
        model = self.model.eval()
        tokens = torch.cat([_tokens(5, seed=3), _tokens(5, seed=4)]).to(self.how.device)
        cache = model.new_cache(32)
        rest = tokens
        logits: list[Tensor] = []
        with torch.no_grad():
            for _ in range(20):
                logits.append(model(rest, cache=cache))
                rest = logits[-1].argmax(dim=-1, keepdim=True)
                tokens = torch.cat([tokens, rest], dim=1)
            complete = model(tokens)[:, 4:-1]
        model.train()
        return self._compare_logits(torch.stack(logits, dim=1), complete)

    def lora(self) -> Finding:
        return self._compare_merged({"lora_rank": 4})

    def nf4(self) -> Finding:
        return self._compare_merged({"lora_rank": 4, "base_dtype": "nf4"})

    def experts(self) -> Finding:
        if not self.model.config.experts:
            return Finding(holds=True)
        return self._compare_merged({"lora_rank": 4, "base_dtype": "nf4"}, experts=True)

    def _compare_merged(self, values: Mapping[str, Any], *, experts: bool = False) -> Finding:
        """Return whether adapters on a base, quantized or not, compute what one matrix does.

        Args:
            experts: see `build`.
        """
        config = LoraConfig.model_validate(values)
        adapted = self.build(config, experts=experts)
        merged = self.build()
        generator = torch.Generator().manual_seed(_SEED)
        adapters = lora.Adapters(config, adapted.config)
        if not adapters:
            return Finding(holds=False, detail="its layers have no linear layers")
        with torch.no_grad():
            for name, adapter in lora.trained_parameters(adapted).items():
                adapters[name] = 0.1 * torch.randn(adapter.shape, generator=generator)
                adapter.copy_(adapters[name])
            for name, weight in merged.named_parameters():
                adapters.merge(name, weight)
            document = self.documents[0]
            return _compare(adapted(document), merged(document), "logits")
